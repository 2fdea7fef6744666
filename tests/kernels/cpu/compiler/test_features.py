"""Which instruction sets are offered, and that tiles are only where the operating system grants them."""

import platform

import pytest

from edgeinfer_kernels.cpu.compiler import features
from edgeinfer_kernels.cpu.compiler.features import INSTRUCTION_SETS, detect


@pytest.fixture
def processor_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = frozenset(flag for isa in INSTRUCTION_SETS for flag in isa.features)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(features, "processor_flags", lambda: flags)


@pytest.mark.usefixtures("processor_with_everything")
@pytest.mark.parametrize(("granted", "best"), [(True, "amx"), (False, "avx512-vnni")])
def test_tiles_are_chosen_only_when_the_operating_system_grants_them(
    monkeypatch: pytest.MonkeyPatch, granted: bool, best: str
) -> None:
    monkeypatch.setattr(features, "tiles_granted", lambda: granted)
    assert detect().best.name == best


def test_tiles_are_not_asked_for_where_the_processor_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected() -> bool:
        raise AssertionError("asked for tiles")

    monkeypatch.setattr(features, "processor_flags", lambda: frozenset({"sse2", "neon"}))
    monkeypatch.setattr(features, "tiles_granted", unexpected)
    assert not any(isa.tiles for isa in detect().available)


def test_other_systems_than_linux_on_x86_grant_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not features.tiles_granted.__wrapped__()
