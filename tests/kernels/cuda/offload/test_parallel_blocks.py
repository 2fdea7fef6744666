"""Blocks of a layer that share their input: a feed-forward in parallel with attention, on all backends."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.decoder import BlockIndex, LayerSpec, LayerWeights, ResidualWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_kernels.stages import Shard, part_of_decoder
from tests.kernels.cuda.decoders import CONTEXT, Decoder, opened, read, worst
from tests.kernels.cuda.offload.test_split_backend import TOLERANCE, read_split
from tests.kernels.cuda.split_decoders import split_decoder
from tests.kernels.split_layers import LayerSplit
from tests.model_zoo import ZOO

MODEL = replace(ZOO["llama"], feed_forward=160, formats=("Q8_0", "F16"), layers=2)
"""Formats whose inputs differ: the shared rows are stored in both."""


def in_parallel(decoder: Decoder) -> Decoder:
    """The same blocks, a layer's attention in parallel with its feed-forward, which is the first."""
    layers, weights = [], []
    for layer, w in zip(decoder.specification.layers, decoder.weights.layers, strict=True):
        attention, feed_forward = layer.blocks
        layers.append(LayerSpec((feed_forward, replace(attention, norm_name="", shares_input=True))))
        weights.append(LayerWeights((w.blocks[1], ResidualWeights(w.blocks[0].block))))
    specification = replace(decoder.specification, layers=tuple(layers))
    return Decoder(specification, replace(decoder.weights, layers=tuple(weights)))


def test_the_reference_adds_both_results_for_the_same_input(tmp_path: Path) -> None:
    with opened(replace(MODEL, formats=("F32",)), tmp_path, (0,)) as decoder:
        ids, both = decoder.ids(9), in_parallel(decoder)

        def changes(tested: Decoder, *positions: int) -> Any:
            state = DecoderState.allocate(tested.specification, CONTEXT, "f32")
            backend = ReferenceBackend(tested.specification, tested.weights, state, np.float64)
            x = backend.embed(ids)
            before = x.copy()
            for position in positions:
                backend.run_block(BlockIndex(0, position), x, 0)
            return x - before

        feed_forward = changes(both, 0)
        residual = decoder.weights.layers[0].blocks
        same_norm = LayerWeights((replace(residual[0], norm=residual[1].norm), residual[1]))
        one = Decoder(decoder.specification, replace(decoder.weights, layers=(same_norm,)))
        np.testing.assert_allclose(changes(both, 0, 1), feed_forward + changes(one, 0), atol=1e-12)


def test_a_prompt_and_steps_on_the_cpu_equal_the_reference(kernels: Kernels, tmp_path: Path) -> None:
    with opened(MODEL, tmp_path) as decoder:
        both, ids = in_parallel(decoder), decoder.ids(15)
        state = DecoderState.allocate(both.specification, CONTEXT, "f32")
        backend = CpuBackend(both.specification, both.weights, state, kernels, CpuOptions(16, 2))
        result = read_split(backend, ids, (10, 1, 3, 1))  # type: ignore[arg-type]
        backend.close()
        assert worst(result, both.reference_logits(ids)) < TOLERANCE


def test_a_prompt_and_steps_on_a_gpu_equal_the_reference(device: str, tmp_path: Path) -> None:
    with opened(MODEL, tmp_path) as decoder:
        both, ids = in_parallel(decoder), decoder.ids(14)
        backend = both.backend(device)
        result = read(backend, ids, (11, 1, 2))
        backend.close()
        assert worst(result, both.reference_logits(ids)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("stream_min_tokens", [None, 6])
def test_a_divided_feed_forward_is_the_first_of_parallel_blocks(
    device: str, kernels: Kernels, tmp_path: Path, stream_min_tokens: int | None
) -> None:
    with opened(MODEL, tmp_path) as decoder:
        both, ids = in_parallel(decoder), decoder.ids(14)
        splits = [LayerSplit(True, neurons=64), LayerSplit(True)]
        with split_decoder(both, device, splits, kernels, stream_min_tokens) as backend:
            result = read_split(backend, ids, (10, 1, 3))
        assert worst(result, both.reference_logits(ids)) < TOLERANCE


def test_a_feed_forward_on_another_device_leaves_its_norm_to_the_block_that_reads_it(tmp_path: Path) -> None:
    with opened(MODEL, tmp_path) as decoder:
        shards = {1: Shard(1, undivided=True)}
        for tested, keeps_norm in ((decoder, False), (in_parallel(decoder), True)):
            _, part = part_of_decoder(tested.specification, tested.weights, shards)
            (feed_forward,) = (w for w in part.layers[0].blocks if isinstance(w.block, FeedForwardWeights))
            assert feed_forward.block.ffn_up.rows == 0
            assert (feed_forward.norm is not None) == keeps_norm


def test_a_block_without_a_block_before_it_and_a_divisible_one_share_no_input(tmp_path: Path) -> None:
    with opened(MODEL, tmp_path) as decoder:
        attention, feed_forward = decoder.specification.layers[0].blocks
    for blocks in (
        (replace(attention, norm_name="", shares_input=True), feed_forward),
        (attention, replace(feed_forward, norm_name="", shares_input=True)),
    ):
        with pytest.raises(ValueError, match="can't share the input"):
            LayerSpec(blocks)


@pytest.mark.parametrize(("norm_name", "shares_norm"), [("", True), ("attn_norm", False)])
def test_parallel_blocks_have_one_norm_or_their_own(
    norm_name: str, shares_norm: bool, tmp_path: Path
) -> None:
    with opened(MODEL, tmp_path) as decoder:
        attention, feed_forward = decoder.specification.layers[0].blocks
    layer = LayerSpec((feed_forward, replace(attention, norm_name=norm_name, shares_input=True)))
    assert layer.has_shared_norm(0) == shares_norm
    assert layer.blocks[1].has_own_norm != shares_norm
    assert list(layer.parallel(0)) == [0, 1]
