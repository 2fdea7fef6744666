"""Gemma 3n: single tokens, chunks and rewinds give the same logits on the CPU; a plan has one device."""

from dataclasses import replace

import numpy as np
import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer.planning.model_plan import plan_model
from edgeinfer_kernels.blocks.gemma3n.gaussian_feed_forward import GaussianFeedForwardSpec
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.sizes.model_sizes import PER_LAYER
from tests.edgeinfer.conftest import ZooFile
from tests.model_zoo import ZOO
from tests.random_gemma import gemma3n_layers
from tests.random_models import VOCABULARY

IDS = np.random.default_rng(4).integers(3, VOCABULARY, 60).tolist()


@pytest.mark.slow
def test_chunks_rewinds_and_drafts_give_the_logits_of_single_tokens(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("gemma3n"), device="cpu", threads=2, draft=None, kv="f32") as model:
        engine = model.engine
        assert isinstance(engine, NativeEngine)
        single = np.stack([engine.append([token]) for token in IDS])
        engine.rewind(0)
        np.testing.assert_allclose(engine.append_all(IDS), single, atol=1e-4)
        engine.rewind(7)
        np.testing.assert_allclose(engine.append_all(IDS[7:]), single[7:], atol=1e-4)
        plain = model.generate(IDS, max_tokens=12, temperature=0.0).ids
    with edgeinfer.load(zoo_file("gemma3n"), device="cpu", threads=2, draft="lookup", kv="f32") as model:
        assert model.generate(IDS, max_tokens=12, temperature=0.0).ids == plain


def test_a_plan_is_for_a_gpu_that_holds_all_or_for_the_cpu(zoo_file: ZooFile) -> None:
    path = zoo_file("gemma3n")
    whole = plan_model(path, device="h200", draft=None).plan
    table = next(item.bytes for item in whole.items if item.item == PER_LAYER)

    def devices(missing: int) -> tuple[set[str], str]:
        """Of the layers, and of the per-layer embeddings."""
        planned = plan_model(path, device="h200", draft=None, vram=whole.bytes_on("gpu") - missing)
        assert planned.warnings == ()
        items = {item.item: item.device for item in planned.plan.items}
        return {place for item, place in items.items() if item.startswith("layer")}, items[PER_LAYER]

    assert devices(0) == ({"gpu"}, "gpu")
    assert devices(1) == devices(table) == ({"gpu"}, "disk")
    assert devices(table + 1) == ({"cpu"}, "disk")


def test_files_without_keys_have_the_published_sizes() -> None:
    specs = []
    for has_keys in (True, False):
        model = replace(ZOO["gemma3n"], layers=25, hybrid=gemma3n_layers(has_keys))
        specs.append(config_from_metadata(model.metadata(), VOCABULARY).specification())
    assert specs[0] == specs[1]
    assert len(specs[0].specs(GaussianFeedForwardSpec)) == 10


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("altup.active_idx", 1, "1, wanted 0, the first stream"),
        ("altup.num_inputs", 1, "1, wanted a whole number from 2 to 16"),
        ("activation_sparsity_scale", np.zeros(3, np.float32), "a number for each of 22 layers"),
    ],
)
def test_unsupported_values_are_refused(key: str, value: object, message: str) -> None:
    metadata = replace(ZOO["gemma3n"], extra={key: value}).metadata()
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_metadata(metadata, VOCABULARY)


def test_gates_are_as_far_apart_as_hidden_rows(zoo_file: ZooFile) -> None:
    # Per-layer inputs are wider than the hidden rows of the feed-forward.
    with edgeinfer.load(zoo_file("gemma3n"), device="cpu", threads=1, draft=None) as model:
        engine = model.engine
        assert isinstance(engine, NativeEngine)
        assert isinstance(engine.backend, CpuBackend)
        rows = engine.backend.decoder.workspace.rows
        assert rows("gate")[1] == rows("hidden")[1] == 4 * 256
