"""The header of a shape: that of a file with random weights, with the bytes of published files."""

from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.benchmarking.random_files import write_random_file
from edgeinfer.model_config.weights import read_config
from edgeinfer.planning.model_plan import sizes_of
from edgeinfer.registry.entries import RegistryEntry, read_registry
from edgeinfer.registry.registry_listing import parameter_count
from edgeinfer.shapes.encoder_layers import EncoderLayers
from edgeinfer.shapes.headers import shape_header
from edgeinfer.shapes.hybrid_layers import Mamba2Layers, MambaLayers, ParallelMamba2Layers
from edgeinfer.shapes.known_shapes import SHAPES, find_shape
from edgeinfer.shapes.shape import Shape
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.description import describe_machine
from edgeinfer_offload.planner.plan_types import PlannedItem, PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from edgeinfer_quant_formats import FormatError, GGUFFile

ENTRIES = {name: entry for name, entry in read_registry().items() if entry.shape}
PUBLISHED = {name: entry for name, entry in ENTRIES.items() if entry.size_bytes}
SMALL = Shape("small", 2, 256, 512, 4, 2, 600, 128)
WINDOWED = replace(
    SMALL, architecture="gemma3", tied=True, qk_norm=True, post_norms=True, layers=6,
    keys=(("attention.sliding_window", 64),),
)  # fmt: skip
WRITTEN = {
    "llama": SMALL,
    "gemma3": WINDOWED,
    "phi3": replace(SMALL, architecture="phi3", fused=True),
    "olmo2": replace(SMALL, architecture="olmo2", row_norms=True, post_norms=True, pre_norms=False),
    "gpt-oss": replace(
        SMALL, architecture="gpt-oss", experts=4, experts_per_token=2, all_biases=True,
        feed_forward_norm="post_attention_norm", keys=(("attention.sliding_window", 64),),
    ),
    "granitehybrid": replace(
        SMALL, architecture="granitehybrid", experts=4, experts_per_token=2, shared_expert=256,
        shared_gate=False, recurrent=Mamba2Layers("M*", 4, 64, 64, 1, kv_heads=2, is_followed=True),
    ),
    "falcon-h1": replace(
        SMALL, architecture="falcon-h1", recurrent=ParallelMamba2Layers("MM", 4, 64, 64, 1),
    ),
    "jamba": replace(
        SMALL, architecture="jamba", recurrent=MambaLayers((1,), 512, 16, 16, 2),
    ),
    "nemotron_h": replace(
        SMALL, architecture="nemotron_h", layers=3, gated=False, feed_forward_norm="",
        recurrent=Mamba2Layers("M*E", 4, 64, 64, 1, kv_heads=2, feed_forward=512),
    ),
    "nomic-bert": replace(
        SMALL, architecture="nomic-bert", fused=True, kv_heads=4, tied=True, pre_norms=False, output_norm="",
        encoder=EncoderLayers(types=2),
    ),
}  # fmt: skip


def plan_on(machine: str, sizes: ModelSizes) -> tuple[PlannedItem, ...]:
    return plan_memory(sizes, describe_machine(machine), PlanOptions(128)).items


def tolerance(entry: RegistryEntry) -> float:
    """Share of a published file that isn't counted: metadata; of some files, more bits for some tensors."""
    more_bits = (entry.repository or "").startswith(("unsloth/", "LiquidAI/"))
    return 0.045 if more_bits else 0.02


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_bytes_of_a_shape_are_those_of_the_published_file(name: str) -> None:
    entry = PUBLISHED[name]
    for quant, published in entry.size_bytes.items():
        computed = shape_header(find_shape(entry.shape), quant.removeprefix("UD-")).nbytes
        assert (1 - tolerance(entry)) * published < computed < 1.001 * published


@pytest.mark.parametrize("name", ENTRIES)
def test_a_shape_has_the_parameters_of_its_entry(name: str) -> None:
    entry = ENTRIES[name]
    # Rounded counts; those of Gemma 3 and 4 include encoders of images and sound.
    assert find_shape(entry.shape).parameters == pytest.approx(parameter_count(entry.parameters), rel=0.1)


@pytest.mark.default_cases(12)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_supported_model(name: str) -> None:
    header = shape_header(SHAPES[name], "Q4_K_M")
    config = read_config(header)
    sizes = sizes_of(header)
    assert len(sizes.layers) == SHAPES[name].layers == len(config.shapes)
    # Vectors, positions and classifiers aren't counted, keys that are also values are counted twice.
    assert 0.9 * header.nbytes < sizes.nbytes <= 1.005 * header.nbytes
    tables = [matrix for matrix in (sizes.embedding, sizes.per_layer) if matrix is not None]
    assert sizes.nbytes == sum(matrix.nbytes for matrix in (*sizes.matrices(), *tables))
    assert sizes.formats == {matrix.format for matrix in sizes.matrices()}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_header_has_the_sizes_of_the_written_file(name: str, tmp_path: Path) -> None:
    shape = WRITTEN[name]
    write_random_file(tmp_path / "small.gguf", shape, "Q8_0")
    header = shape_header(shape, "Q8_0")
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        assert {info.name: info.shape for info in file.tensors.values()} == {
            info.name: info.shape for info in header.tensors.values()
        }
        assert file.nbytes == header.nbytes
        for machine in ("rtx 4060 laptop", "cpu:"):
            plans = [plan_on(machine, sizes_of(each)) for each in (file, header)]
            assert plans[0] == plans[1] != ()


def test_a_header_has_no_bytes() -> None:
    with shape_header(SMALL, "Q4_0") as header:
        assert header.tensors["output_norm.weight"].shape == (256,)
        for read in (header.raw, header.decode, header.release):
            with pytest.raises(
                FormatError, match=r"^small-Q4_0\.gguf: output_norm\.weight: only the header is "
            ):
                read("output_norm.weight")
        header.check_size()


def test_a_format_that_the_quantizer_does_not_write_is_the_format_of_all_layers() -> None:
    header = shape_header(replace(SMALL, name="whole-blocks", feed_forward=512), "NVFP4")
    formats = {tensor.name: tensor.format.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    layers = {kind for name, kind in formats.items() if name.startswith("blk.")}
    assert layers == {"NVFP4"}
    assert formats["output.weight"] == "Q6_K"
