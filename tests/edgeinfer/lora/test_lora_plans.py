"""Plans of models with LoRA adapters: their bytes and devices."""

from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.planning.device_plan import plan_devices
from edgeinfer.planning.model_plan import plan_model
from edgeinfer_kernels.lora.sizes import LoraSizes
from tests.edgeinfer.loading.test_device_plan import request
from tests.edgeinfer.lora.random_adapters import write_adapter
from tests.offload.model_shapes import GIB, laptop

GPU = "rtx 4060 laptop, 32GiB ram"
TINY = Path(edgeinfer.__file__).parent / "builtin" / "edgeinfer-tiny-30m-Q4_K_M.gguf"


def adapter(folder: Path, *names: str) -> Path:
    return write_adapter(TINY, folder / "a.gguf", rank=8, names=names)


def test_a_whole_model_on_a_gpu_has_its_adapters_there(tmp_path: Path) -> None:
    plan = plan_model("tiny", device=GPU, lora=adapter(tmp_path, "attn_q.", "ffn_down")).plan
    placed = {(item.item, item.device) for item in plan.items}
    assert plan.device == "gpu"
    assert ("LoRA adapters", "gpu") in placed
    assert ("LoRA adapters", "cpu") not in placed


def test_a_split_model_has_its_adapters_on_both_devices_and_streams_nothing() -> None:
    lora = LoraSizes.of({"blk.0.attn_q.weight": ((8, 4096), (4096, 8))})
    plan = plan_devices(request(vram=3 * GIB, lora=lora), laptop()).memory
    assert plan.device is None
    assert {item.device for item in plan.items if item.item == "LoRA adapters"} == {"cpu", "gpu"}
    assert plan.prediction.stream_min_tokens is None


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_inp.weight", "token_embd.weight"])
def test_adapters_of_routers_and_of_the_embedding_are_on_a_gpu(name: str) -> None:
    plan = plan_devices(request(lora=LoraSizes.of({name: ((8, 64), (16, 8))})), laptop()).memory
    assert plan.device == "gpu"


@pytest.mark.parametrize("name", ["blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"])
def test_adapters_without_gpu_kernels_keep_the_model_on_the_cpu(name: str) -> None:
    plan = plan_devices(request(lora=LoraSizes.of({name: ((8, 64), (16, 8))})), laptop()).memory
    assert plan.device == "cpu"
    assert plan.limit_reason is not None
    assert f"the LoRA adapter of {name} runs on the CPU only" in plan.limit_reason


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_adapters_with_the_scale_0_take_no_memory(tmp_path: Path, scale: float) -> None:
    plan = plan_model("tiny", device="cpu", threads=1, lora=(adapter(tmp_path, "attn_q."), scale)).plan
    assert any(item.item == "LoRA adapters" for item in plan.items) == bool(scale)
