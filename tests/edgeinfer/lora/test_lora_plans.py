"""Plans of models with LoRA adapters: their bytes and devices."""

from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.planning.model_plan import plan_model
from tests.edgeinfer.lora.random_adapters import write_adapter

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


def test_adapters_without_gpu_kernels_keep_the_model_on_the_cpu(tmp_path: Path) -> None:
    plan = plan_model("tiny", device=GPU, lora=adapter(tmp_path, "attn_q.", "token_embd")).plan
    assert plan.device == "cpu"
    assert plan.limit_reason is not None
    assert "the LoRA adapter of token_embd.weight runs on the CPU only" in plan.limit_reason


def test_a_model_with_adapters_is_not_split(tmp_path: Path) -> None:
    plan = plan_model("tiny", device=GPU, vram="620MiB", lora=adapter(tmp_path, "attn_q.")).plan
    assert plan.device == "cpu"
    assert plan.limit_reason is not None
    assert "a model with LoRA adapters isn't split between GPU and CPU" in plan.limit_reason


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_adapters_with_the_scale_0_take_no_memory(tmp_path: Path, scale: float) -> None:
    plan = plan_model("tiny", device="cpu", threads=1, lora=(adapter(tmp_path, "attn_q."), scale)).plan
    assert any(item.item == "LoRA adapters" for item in plan.items) == bool(scale)
