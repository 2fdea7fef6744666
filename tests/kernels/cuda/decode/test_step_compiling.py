"""Step kernels are compiled before they are needed: each once, and none again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = """
import json
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 75, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
))

from harness.empty_decoders import empty_decoder
from edgeinfer.shapes.shape import Shape
from edgeinfer_kernels.cuda.tuning import step_compiling
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.cuda.decode.workspace import Workspace

arena, shape = Arena(), Shape("tiny", 2, 64, 64, 2, 2, 64, 64, head_dim=32)
model = DeviceModel(*empty_decoder(shape, "Q8_0"), arena, 64)
launches = StepLaunches(model, Workspace(model, arena), usual_tuning(75), dependent=False)
step, heard, compiled = DecodeStep(launches), [], []
triton.knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["fn"].name)
step_compiling.SILENT_SECONDS = 0.0


def interrupted(done, kernels):
    raise KeyboardInterrupt


step_compiling.COMPILERS = 1
try:
    step_compiling.compile_steps(step, (1,), interrupted)
except KeyboardInterrupt:
    heard.append(f"interrupted with {len(compiled)}")
step_compiling.COMPILERS = None
step_compiling.compile_steps(step, (1,), lambda *counts: heard.append(counts))
once = sorted(compiled)
step_compiling.compile_steps(step, (1, 1))
print(json.dumps({"heard": heard, "once": once, "again": len(compiled) - len(once)}))
"""


def test_steps_are_compiled_kernel_by_kernel_and_once(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    parts = [ROOT, *(ROOT / name for name in ("benchmarks", "kernels", "offload", "quant_formats", "tui"))]
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, parts)), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    kinds = {"embed", "rows", "decode_attention", "residual", "gated", "head"}
    assert set(reported["once"]) == {f"{kind}_kernel" for kind in kinds}
    assert reported["heard"][0] == "interrupted with 2"  # one of which had started
    kernels = len(reported["heard"][1:])
    assert reported["heard"][1:] == [[done, kernels] for done in range(1, kernels + 1)]
    assert reported["again"] == 0
