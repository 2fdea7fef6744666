"""Time of decode steps on a GPU with other tile configs, each of one kernel at a time.

python benchmarks/gpu/tile_configs.py --shapes qwen3-4b --types Q4_0 --tokens 4 --kernels gated,down \\
    --configs 16/4/1/1,16/4/1/8/1/128,t16/2/2
A config is blocks of a row, warps, adjacent blocks of a thread, unrolled tiles, programs that share rows, and
registers; after a t, of tensor cores: rows, warps, adjacent blocks, unrolled, registers.
"""

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from edgeinfer.benchmarking.speed_runs import BenchedModel
from edgeinfer.benchmarking.tables import NOTHING, markdown
from edgeinfer.errors import SettingError
from edgeinfer.loading.loading import load
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.tuning.step_shapes import (
    MIN_TENSOR_TOKENS,
    RowKernel,
    Shape,
    TensorShape,
    Tuning,
)
from edgeinfer_kernels.cuda.tuning.step_timer import StepTimer
from edgeinfer_kernels.cuda.tuning.tuner import RejectedCandidateError
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from harness import cuda_runs, suites

HEAD = ("tokens", "kernel", "config", "us of a step", "change")
CONTEXT = 1024
KERNELS: tuple[RowKernel, ...] = get_args(RowKernel)


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = cuda_runs.parser(__doc__ or "")
    parser.add_argument("--tokens", default="4", help="of a step, with commas (%(default)s)")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="with commas (%(default)s)")
    parser.add_argument("--configs", default="16/4/1/1,32/4/1/1", help="with commas (%(default)s)")
    options = parser.parse_args()
    suite = cuda_runs.suite(options)
    widths = suites.whole_numbers("--tokens", options.tokens, 1)
    kernels = _kernels(options.kernels)
    configs = [_config(text) for text in suites.words(options.configs)]
    if not widths or max(widths) > MAX_TOKENS:
        raise SettingError(f"--tokens: saw {options.tokens!r}, wanted numbers up to {MAX_TOKENS}")
    if any(isinstance(config, TensorShape) for config in configs) and min(widths) < MIN_TENSOR_TOKENS:
        raise SettingError(f"--configs: steps of fewer than {MIN_TENSOR_TOKENS} tokens use no tensor cores")
    if not torch.cuda.is_available():
        if options.smoke:
            print("no GPU here: nothing to time", file=sys.stderr)
            return
        raise SettingError("no CUDA GPU here; only the CUDA backend has these kernels")
    sections = [(model.name, _table(model, widths, kernels, configs)) for model in suite.benched_models()]
    cuda_runs.publish("Tile configs of a decode step", cuda_runs.gpu_name(), suite, sections, options.out)


def _kernels(text: str) -> list[RowKernel]:
    names = suites.words(text)
    for name in names:
        if name not in KERNELS:
            raise SettingError(f"--kernels: saw {name!r}, wanted {', '.join(KERNELS)}")
    return [kernel for kernel in KERNELS if kernel in names]


def _config(text: str) -> Shape | TensorShape:
    kind: type[Shape | TensorShape] = TensorShape if text.startswith("t") else Shape
    try:
        return kind(*map(int, text.removeprefix("t").split("/")))
    except (TypeError, ValueError):
        raise SettingError(f"--configs: saw {text!r}, wanted numbers such as 16/4/1/1 or t16/2/2") from None


def _table(
    model: BenchedModel,
    widths: Sequence[int],
    kernels: Sequence[RowKernel],
    configs: Sequence[Shape | TensorShape],
) -> str:
    rows = list[list[str]]()
    with load(model.path, context=CONTEXT, device="cuda", draft="lookup") as loaded:
        engine: Any = loaded.engine
        step: DecodeStep = engine.backend.step
        for tokens, kernel in product(widths, kernels):
            rows += _rows(step, tokens, kernel, configs)
    return markdown(HEAD, rows, left=(1, 2))


def _rows(
    step: DecodeStep, tokens: int, kernel: RowKernel, configs: Sequence[Shape | TensorShape]
) -> list[list[str]]:
    """A row for each config, and before and after them one of the step's own."""
    tunings = [_changed(step.tuning, tokens, kernel, config) for config in configs]
    timer, rows = StepTimer(step), list[list[str]]()
    timer.compile([step.tuning, *tunings], tokens)
    usual = timer(step.tuning, tokens)
    rows.append(_row(tokens, kernel, NOTHING, usual, usual))
    for config, tuning in zip(configs, tunings, strict=True):
        name = ("t" if isinstance(config, TensorShape) else "") + "/".join(map(str, vars(config).values()))
        try:
            rows.append(_row(tokens, kernel, name, timer(tuning, tokens), usual))
        except RejectedCandidateError as error:
            rows.append([str(tokens), kernel, name, NOTHING, str(error).splitlines()[0]])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return [*rows, _row(tokens, kernel, NOTHING, timer(step.tuning, tokens), usual)]


def _changed(usual: Tuning, tokens: int, kernel: RowKernel, config: Shape | TensorShape) -> Tuning:
    if isinstance(config, TensorShape):
        return usual.with_tensor_shape(tokens, kernel, config)
    # Tensor cores of the other kernels stay.
    without = usual.with_tensor_shape(tokens, kernel, TensorShape())
    return without.with_row_shape(tokens, kernel, config)


def _row(tokens: int, kernel: RowKernel, config: str, seconds: float, usual: float) -> list[str]:
    return [str(tokens), kernel, config, f"{seconds * 1e6:.0f}", f"{(seconds - usual) * 1e6:+.0f}"]


if __name__ == "__main__":
    suites.main(main)
