"""The registry as a list: what runs well on a machine comes first, unknown facts stay unknown."""

from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.planning.fit import Fit
from edgeinfer.registry.entries import RegistryEntry, read_registry
from edgeinfer.registry.model_file import ModelFile
from edgeinfer.registry.registry_listing import ListedEntry, listed_registry, parameter_count
from edgeinfer_offload.machine.description import describe_machine
from tests.model_zoo import ZOO

LAPTOP = describe_machine("rtx 4060 laptop, 32GiB ram, 80GB/s ram")
NAMES = ("qwen3-0.6b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "llama-3.3-70b", "gpt-oss-20b", "tiny")
ENTRIES = read_registry()
FEW = {name: ENTRIES[name] for name in NAMES}


def listed_entry(released: str = "2025-01", parameters: str = "8B", **more: object) -> ListedEntry:
    entry = RegistryEntry("one", "one.gguf", released=released, parameters=parameters)
    fit = Fit(True, 1, 20.0, placement="gpu")
    return replace(ListedEntry(entry, "Q4_K_M", 1, False, fit), **more)  # type: ignore[arg-type]


def test_the_order_is_tier_then_newest_then_largest() -> None:
    slow, none = Fit(True, 1, 14.9, placement="cpu"), Fit(False, None)
    texts = Fit(True, 1, placement="gpu", prefill_tokens_per_second=9000.0)
    rows = [
        listed_entry("2026-04"),
        listed_entry("2025-04", "14B"),
        listed_entry("2025-04", "8B"),
        listed_entry("2025-04", "600M"),
        listed_entry("2024-12"),
        listed_entry(""),
        listed_entry("2026-05", fit=slow),
        listed_entry("2026-05", fit=texts, is_encoder=True),
        listed_entry("2026-05", fit=None),
        listed_entry("2026-05", fit=none),
    ]
    assert sorted([*rows[5:], *rows[:5]], key=lambda one: one.order) == rows
    assert [one.tier for one in rows] == [0] * 6 + [1, 2, 3, 4]
    assert rows[7].speed == 9000.0
    assert rows[8].speed is None
    decoder = replace(rows[0], entry=ENTRIES["qwen3-embedding-0.6b"], fit=texts)
    assert (decoder.tier, decoder.speed) == (2, 9000.0)


@pytest.mark.parametrize(
    ("text", "count"),
    [("30.5B, 3.3B active", 30.5e9), ("135M", 135e6), ("1T", 1e12), ("", 0.0), ("big", 0.0)],
)
def test_parameters_are_read_from_their_text(text: str, count: float) -> None:
    assert parameter_count(text) == count


@pytest.mark.slow
def test_the_list_says_where_each_model_runs() -> None:
    listed = {one.entry.name: one for one in listed_registry(FEW, [], LAPTOP)}
    placements = {name: one.fit.placement if one.fit else "-" for name, one in listed.items()}
    assert placements == {
        "qwen3-0.6b": "gpu",
        "qwen3-8b": "gpu",
        "qwen3-32b": "split",
        "qwen3-30b-a3b": "split",
        "gpt-oss-20b": "split",
        "llama-3.3-70b": None,
        "tiny": "-",
    }
    fast, slow = listed["qwen3-30b-a3b"], listed["qwen3-32b"]
    assert (fast.tier, slow.tier, listed["llama-3.3-70b"].tier) == (0, 1, 4)
    on_cpu = {one.entry.name: one for one in listed_registry(FEW, [], describe_machine("cpu: 8GiB ram"))}
    assert {one.fit.placement for one in on_cpu.values() if one.fit} == {"cpu", None}


def test_the_speed_of_texts_is_unknown_where_matmuls_were_not_measured() -> None:
    name = "nomic-embed-text-v1.5"
    machine = describe_machine("cpu: 8GiB ram")
    unmeasured = replace(machine, processor=replace(machine.processor, operations_per_second=float("inf")))
    for each, is_known in ((machine, True), (unmeasured, False)):
        (one,) = listed_registry({name: ENTRIES[name]}, [], each)
        assert (one.speed is not None, one.tier) == (is_known, 2)


@pytest.mark.slow
def test_sizes_are_published_computed_or_unknown() -> None:
    listed = {one.entry.name: one for one in listed_registry(FEW, [], LAPTOP)}
    assert (listed["qwen3-8b"].size_bytes, listed["qwen3-8b"].is_computed) == (5_027_783_488, False)
    assert listed["qwen3-32b"].is_computed
    assert listed["qwen3-32b"].size_bytes == pytest.approx(19.76e9, rel=0.01)
    unknown = replace(ENTRIES["qwen3-32b"], shape="")
    (one,) = listed_registry({"qwen3-32b": unknown}, [], LAPTOP)
    assert (one.size_bytes, one.fit, one.speed, one.tier) == (None, None, None, 3)


def test_a_model_on_this_disk_is_listed_with_its_file(tmp_path: Path) -> None:
    path = ZOO["llama"].write(tmp_path / "Qwen3-8B-Q6_K.gguf")
    (one,) = listed_registry(
        {"qwen3-8b": ENTRIES["qwen3-8b"]}, [ModelFile("qwen3-8b:Q6_K", path, "models folder")], LAPTOP
    )
    assert one.here is not None
    assert (one.quant, one.size_bytes, one.is_computed) == ("Q6_K", path.stat().st_size, False)
    assert one.fit is not None
    assert one.fit.fits
