"""The kernels of blocks compile for a GPU: the interpreter accepts more than the compiler."""

import re
from collections.abc import Sequence

import pytest

from tests.kernels.without_interpreter import output_without_interpreter


def compiled(module: str, capability: int) -> list[tuple[int, int]]:
    """(bytes of shared memory, bytes of spilled registers) of each kernel that a module here compiles."""
    printed = output_without_interpreter("-m", f"tests.kernels.cuda.{module}", str(capability))
    found = [re.findall(rf"{name}_bytes=(\d+)", printed) for name in ("shared", "spilled")]
    return [(int(shared), int(spilled)) for shared, spilled in zip(*found, strict=True)]


def targets(cases: Sequence[tuple[int, ...]], *default: int) -> list[object]:
    """Parameters that begin with a capability. `default`: those that need no `--attack-share 1`. 90 has other
    matrix instructions than the others, 75 and 120 have the least shared memory.
    """
    every = pytest.mark.every_case
    return [pytest.param(*case, marks=() if case[0] in default else every) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), targets([(75, 64), (90, 227), (120, 99)], 75))
def test_recurrent_kernels_compile_for_gpus_and_fit_their_shared_memory(
    capability: int, shared_kib: int
) -> None:
    kernels = compiled("compile_recurrent_kernels", capability)
    assert len(kernels) >= 34
    assert max(shared for shared, _ in kernels) <= shared_kib << 10


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), targets([(80, 163), (90, 227), (120, 99)], 90, 120))
def test_latent_kernels_compile_for_gpus_and_fit_their_shared_memory(
    capability: int, shared_kib: int
) -> None:
    kernels = compiled("compile_latent_kernels", capability)
    assert len(kernels) >= 30
    assert max(shared for shared, _ in kernels) <= shared_kib << 10
    assert max(spilled for _, spilled in kernels) < 256


@pytest.mark.slow
def test_kernels_of_gemma_4_compile_for_a_gpu_and_fit_its_shared_memory() -> None:
    kernels = compiled("decode.compile_gemma_kernels", 90)
    assert len(kernels) >= 50
    assert max(shared for shared, _ in kernels) <= 227 << 10
    assert max(spilled for _, spilled in kernels) < 1500


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), targets([(80, 163), (90, 227), (120, 99)], 120))
def test_kernels_of_mimo_and_bitnet_compile_for_gpus(capability: int, shared_kib: int) -> None:
    """A step of 8 tokens has 128 queries for each key head."""
    kernels = compiled("decode.compile_mimo_bitnet_kernels", capability)
    assert len(kernels) == 22
    assert max(shared for shared, _ in kernels) <= shared_kib << 10
    assert sorted(spilled for _, spilled in kernels)[-2] < 256
    assert max(spilled for _, spilled in kernels) < 500


@pytest.mark.slow
@pytest.mark.parametrize("capability", targets([(75,), (80,), (90,), (120,)], 75))
def test_kernels_of_gemma_3n_compile_for_gpus(capability: int) -> None:
    kernels = compiled("decode.compile_gemma3n_kernels", capability)
    assert len(kernels) >= 19
    assert max(shared for shared, _ in kernels) <= 4 << 10
    assert max(spilled for _, spilled in kernels) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "shared_kib", "spilled_bytes"), targets([(75, 64, 0), (80, 163, 72), (120, 99, 32)], 75)
)
def test_kernels_of_ring_caches_compile_for_gpus(
    capability: int, shared_kib: int, spilled_bytes: int
) -> None:
    """They spill no more than with caches of all positions, whose bytes are given here."""
    kernels = compiled("cache.compile_ring_kernels", capability)
    assert len(kernels) == 12
    assert max(shared for shared, _ in kernels) <= shared_kib << 10
    assert max(spilled for _, spilled in kernels) <= spilled_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), targets([(80, 163), (90, 227), (120, 99)], 120))
def test_kernels_of_texts_compile_for_gpus(capability: int, shared_kib: int) -> None:
    kernels = compiled("prefill.compile_text_kernels", capability)
    assert len(kernels) == 12
    assert max(shared for shared, _ in kernels) <= shared_kib << 10
    assert max(spilled for _, spilled in kernels) < 256


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), targets([(80, 163), (90, 227), (120, 99)], 120))
def test_kernels_of_caches_with_recent_positions_compile_for_gpus(capability: int, shared_kib: int) -> None:
    kernels = compiled("cache.compile_recent_kernels", capability)
    assert len(kernels) == 28
    assert max(shared for shared, _ in kernels) <= shared_kib << 10
    assert max(spilled for _, spilled in kernels) < 256


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), targets([(80, 163), (90, 227), (120, 99)], 120))
def test_kernels_of_a_cache_with_pages_compile_for_gpus(capability: int, shared_kib: int) -> None:
    kernels = compiled("decode.compile_batch_kernels", capability)
    assert len(kernels) == 50
    assert max(shared for shared, _ in kernels) <= shared_kib << 10
    assert max(spilled for _, spilled in kernels) < 256


@pytest.mark.slow
@pytest.mark.parametrize("capability", targets([(80,), (90,), (120,)], 90))
def test_kernels_on_tensor_cores_compile_for_gpus_and_need_no_shared_memory_for_operands(
    capability: int,
) -> None:
    """It holds the sums of the warps: 32 rows and 16 columns of four warps, or 16 rows of eight."""
    kernels = compiled("decode.compile_tensor_kernels", capability)
    assert len(kernels) == 20
    assert max(shared for shared, _ in kernels) <= 8 << 10
    assert max(spilled for _, spilled in kernels) <= 16


@pytest.mark.slow
@pytest.mark.parametrize("capability", targets([(80,), (90,)], 80))
def test_kernels_with_adapters_compile_for_gpus(capability: int) -> None:
    kernels = compiled("decode.compile_lora_kernels", capability)
    assert len(kernels) >= 20
    assert max(shared for shared, _ in kernels) <= 8 << 10
    assert max(spilled for _, spilled in kernels) < 400


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), targets([(90, 227), (120, 99)], 120))
def test_kernels_of_types_without_a_mix_compile_for_gpus(capability: int, shared_kib: int) -> None:
    kernels = compiled("decode.compile_type_kernels", capability)
    assert len(kernels) == 47
    assert max(shared for shared, _ in kernels) <= shared_kib << 10
    assert max(spilled for _, spilled in kernels) <= 16


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), targets([(80, 163), (90, 227), (120, 99)], 80))
def test_kernels_of_gathered_neurons_compile_for_gpus(capability: int, shared_kib: int) -> None:
    kernels = compiled("sparse.compile_gathered_kernels", capability)
    assert len(kernels) == 25
    assert max(shared for shared, _ in kernels) <= shared_kib << 10
    assert max(spilled for _, spilled in kernels) < 64


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), targets([(80, 163), (90, 227), (120, 99)], 90))
def test_kernels_of_draft_heads_compile_for_gpus(capability: int, shared_kib: int) -> None:
    kernels = compiled("draft.compile_draft_kernels", capability)
    assert len(kernels) == 47
    assert max(shared for shared, _ in kernels) <= shared_kib << 10
    assert max(spilled for _, spilled in kernels) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), [(80, 163), (90, 227), (120, 99)])
def test_kernels_that_keep_the_path_of_a_tree_compile_for_gpus(capability: int, shared_kib: int) -> None:
    kernels = compiled("trees.compile_tree_kernels", capability)
    assert len(kernels) == 15
    assert max(shared for shared, _ in kernels) <= shared_kib << 10
    assert max(spilled for _, spilled in kernels) == 0


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_the_kernel_of_sums_over_ranks_compiles_for_gpus(capability: int) -> None:
    kernels = compiled("devices.compile_peer_kernels", capability)
    assert len(kernels) == 18
    assert max(shared for shared, _ in kernels) <= 48 << 10
    assert max(spilled for _, spilled in kernels) == 0
