"""Models loaded for several sequences: their bytes are planned, and the sequences are held at once."""

import asyncio
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import OutOfMemoryError, SettingError
from edgeinfer_kernels.caches.layer_cache import LayerCache
from tests.edgeinfer.conftest import ZooFile
from tests.random_models import VOCABULARY

MODELS = {"pages": ("llama", 300), "rings": ("gemma3", 900), "states": ("lfm2", 300)}


def engine_of(model: Model) -> NativeEngine:
    assert isinstance(model.engine, NativeEngine)
    return model.engine


@pytest.mark.parametrize("kv", ["f16", pytest.param("q4_0+f16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MODELS)
def test_the_plan_counts_the_bytes_of_all_sequences(zoo_file: ZooFile, kind: str, kv: str) -> None:
    name, context = MODELS[kind]
    with edgeinfer.load(zoo_file(name), device="cpu", threads=1, context=context, kv=kv) as one:
        assert one.plan is not None
        single = one.plan.cache_bytes
        assert (one.parallel, single) == (1, engine_of(one).cache.nbytes)
        assert "requests at once" not in one.plan.explain()
    with edgeinfer.load(zoo_file(name), device="cpu", threads=1, context=context, parallel=3, kv=kv) as model:
        engine, plan = engine_of(model), model.plan
        assert plan is not None
        assert (model.parallel, len(engine.others)) == (3, 0 if kind == "pages" else 2)
        allocated = sum(each.cache.nbytes for each in (engine, *engine.others))
        assert plan.cache_bytes == 3 * single == allocated
        assert plan.to_dict()["parallel"] == 3
        assert "parallel: 3 requests at once, " in plan.explain()


@pytest.mark.parametrize("kind", MODELS)
def test_alternating_chats_keep_their_caches(zoo_file: ZooFile, kind: str) -> None:
    name, context = MODELS[kind]
    with edgeinfer.load(zoo_file(name), device="cpu", threads=1, context=context, parallel=2) as model:
        rng = np.random.default_rng(1)
        texts = [rng.integers(3, VOCABULARY, 120).tolist() for _ in range(2)]
        for turn in range(6):
            text = texts[turn % 2]
            completion = model.generate(text, max_tokens=12, temperature=0.0)
            text += [*completion.ids, 5, 6]
            if turn > 1:
                assert completion.speed.cached_tokens > len(completion.prompt_ids) - 14 - 17


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("kv", ["f16", pytest.param("q4_0+f16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MODELS)
def test_asynchronous_streams_together_equal_those_alone(zoo_file: ZooFile, kind: str, kv: str) -> None:
    name, context = MODELS[kind]
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 5, "top_k": 40},
        {"seed": 6, "logprobs": 1},
    ]
    prompts = [np.random.default_rng(seed).integers(3, VOCABULARY, 50).tolist() for seed in range(3)]
    with edgeinfer.load(zoo_file(name), device="cpu", threads=1, context=context, kv=kv) as model:
        alone = [
            model.generate(prompt, max_tokens=30, **options).ids
            for prompt, options in zip(prompts, settings, strict=True)
        ]
    with edgeinfer.load(zoo_file(name), device="cpu", threads=1, context=context, parallel=3, kv=kv) as model:

        async def all_at_once() -> list[list[int]]:
            requested = [
                model.generate_async(prompt, max_tokens=30, **options)
                for prompt, options in zip(prompts, settings, strict=True)
            ]
            return [completion.ids for completion in await asyncio.gather(*requested)]

        assert asyncio.run(all_at_once()) == alone


def test_sequences_that_do_not_fit_are_refused_or_fewer(zoo_file: ZooFile) -> None:
    path, context = zoo_file("llama"), 4000
    one = (
        3 * LayerCache.positions_for(context) * 2 * 2 * 16 * 2
    )  # layers, keys and values, heads of 16 in f16
    with edgeinfer.load(path, device="cpu", threads=1, context=context) as model:
        assert model.plan is not None
        assert model.plan.cache_bytes == one
        all_bytes = model.plan.bytes_on("cpu")
    room = all_bytes + one + one // 2
    with pytest.raises(OutOfMemoryError, match="hold fewer sequences"):
        edgeinfer.load(path, device="cpu", threads=1, context=context, ram=room, parallel=3)
    with edgeinfer.load(path, device="cpu", threads=1, context=context, ram=room, parallel=0) as model:
        assert model.parallel == 2
    with edgeinfer.load(path, device="cpu", threads=1, context=context, parallel=0) as model:
        assert model.parallel == 4
    with pytest.raises(SettingError, match="parallel"):
        edgeinfer.load(path, parallel=65)
