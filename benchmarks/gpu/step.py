"""Time that each kernel adds to a decode step on a GPU, bytes it reads, and share of the GPU's bandwidth.

python benchmarks/gpu/step.py --shapes llama-3-8b --types Q4_0,Q4_K_M --depths 512
python benchmarks/gpu/step.py --shapes llama-3-8b --types Q4_0 --widths 1,8,16

Steps of several tokens are those that verify a draft.
"""

import sys
from collections import Counter
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from edgeinfer.benchmarking.measuring import SEED
from edgeinfer.benchmarking.speed_runs import BenchedModel
from edgeinfer.benchmarking.tables import NOTHING, markdown
from edgeinfer.benchmarking.workloads import random_ids
from edgeinfer.errors import SettingError
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.planning.model_plan import model_sizes
from edgeinfer_kernels.cuda.tuning.gpu_speed import gpu_speed
from edgeinfer_kernels.cuda.tuning.step_profile import kernel_runs, step_shares
from edgeinfer_kernels.sizes.cuda_matrices import matrix_bytes
from harness import cuda_runs, suites
from harness.step_table import HEAD, share_rows

TOKENS = 48
"""Number of profiled steps."""


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = cuda_runs.parser(__doc__ or "")
    parser.add_argument("--depths", default="512", help="tokens in the cache (%(default)s)")
    parser.add_argument("--widths", default="1", help="tokens of a step, with commas (%(default)s)")
    options = parser.parse_args()
    suite = cuda_runs.suite(options)
    if not torch.cuda.is_available():
        if options.smoke:
            print("no GPU here: nothing to profile", file=sys.stderr)
            return
        raise SettingError("no CUDA GPU here; only the CUDA backend has these kernels")
    depths = (16,) if options.smoke else suites.whole_numbers("--depths", options.depths, 1)
    widths = (1, 9) if options.smoke else suites.whole_numbers("--widths", options.widths, 1)
    device = torch.device("cuda")
    ceiling = gpu_speed(device).bytes_per_second
    sections = []
    for model in suite.benched_models():
        for depth, width in product(depths, widths):
            title = f"{model.name} @ d{depth}, {width} tokens"
            sections.append((title, _table(model, depth, width, ceiling, device)))
    cuda_runs.publish("A decode step on a GPU", cuda_runs.gpu_name(), suite, sections, options.out)


def _table(model: BenchedModel, depth: int, width: int, ceiling: float, device: torch.device) -> str:
    with load(model.path, context=depth + TOKENS + 1, device="cuda", draft=None) as loaded:
        ids = random_ids(depth + width, loaded.engine.vocabulary_size, SEED)
        run = _answer if width == 1 else _verify
        run(loaded, ids, depth)
        shares = step_shares(kernel_runs(device, lambda: run(loaded, ids, depth)))
    read = _bytes_read(model)
    rates = [read[share.role] / share.total_seconds if share.role in read else 0.0 for share in shares]
    rates.append(sum(read.values()) / sum(share.total_seconds for share in shares))
    rows = [
        [*row, f"{rate / 1e9:.0f}" if rate else NOTHING, f"{rate / ceiling:.0%}" if rate else NOTHING]
        for row, rate in zip(share_rows(shares), rates, strict=True)
    ]
    return markdown((*HEAD, "GB/s", "of reading"), rows)


def _answer(model: Model, ids: list[int], depth: int) -> None:
    for _ in model.stream(ids[:depth], max_tokens=TOKENS, temperature=0.0):
        pass


def _verify(model: Model, ids: list[int], depth: int) -> None:
    engine = model.engine
    if engine.ids[:depth] != ids[:depth]:
        engine.rewind(0)
        engine.append(ids[:depth])
    for _ in range(TOKENS):
        engine.rewind(depth)
        engine.append_all(ids[depth:])


def _bytes_read(model: BenchedModel) -> dict[str, int]:
    """Bytes of weights that a step's kernels read, by role, for a dense model."""
    sizes = model_sizes(model.path)
    read: Counter[str] = Counter(head=matrix_bytes(sizes.head))
    for layer in sizes.layers:
        attention, feed_forward = layer.blocks[:2]
        read["q, k, v"] += sum(map(matrix_bytes, attention.inputs()))
        read["output"] += sum(map(matrix_bytes, attention.outputs()))
        read["gate and up"] += sum(map(matrix_bytes, feed_forward.inputs()))
        read["down"] += sum(map(matrix_bytes, feed_forward.outputs()))
    return dict(read)


if __name__ == "__main__":
    suites.main(main)
