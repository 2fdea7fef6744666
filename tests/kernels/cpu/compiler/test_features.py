"""Available instruction sets; AMX only if the operating system permits it."""

import platform

import pytest

from edgeinfer_kernels.cpu.compiler import features
from edgeinfer_kernels.cpu.compiler.features import INSTRUCTION_SETS, detect
from edgeinfer_kernels.system.processor import tiles_granted


@pytest.fixture
def processor_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = frozenset(flag for isa in INSTRUCTION_SETS for flag in isa.features)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(features, "processor_flags", lambda: flags)


@pytest.mark.usefixtures("processor_with_everything")
@pytest.mark.parametrize(("permitted", "best"), [(True, "amx"), (False, "avx512-vnni")])
def test_amx_is_selected_only_if_the_operating_system_permits_it(
    monkeypatch: pytest.MonkeyPatch, permitted: bool, best: str
) -> None:
    monkeypatch.setattr(features, "tiles_granted", lambda: permitted)
    assert detect().best.name == best


def test_amx_is_not_requested_without_processor_support(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected() -> bool:
        raise AssertionError("asked for tiles")

    monkeypatch.setattr(features, "processor_flags", lambda: frozenset({"sse2", "neon"}))
    monkeypatch.setattr(features, "tiles_granted", unexpected)
    assert not any(isa.tiles for isa in detect().available)


def test_amx_is_off_except_on_linux_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not tiles_granted.__wrapped__()
