"""Decoding and prompts on a GPU against llama.cpp's CUDA build, alternating; the cost of verifying n tokens.

python benchmarks/gpu/speed.py --tests decode --llama-bench PATH --shapes llama-3-8b --types Q4_0,Q4_K_M,Q8_0
python benchmarks/gpu/speed.py --tests prompts --llama-bench PATH --prompts 512 --depths 0,4096
python benchmarks/gpu/speed.py --tests embeddings --llama-bench PATH --texts 256 --types Q8_0
python benchmarks/gpu/speed.py --tests split --llama-bench PATH --shapes llama-3-8b --types Q4_0 \
    --shares 0.25,0.5,0.75

"split" is a model larger than the GPU: within a budget against llama.cpp's best setting for it.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_offload.planner.plan_types import PROMPT
from harness import cuda_runs, embedding_runs, suites
from harness.llama_bench import LlamaBench
from harness.split_runs import HEAD, SplitSuite

EMBEDDING = ("-embd", "1", "-b", "2048", "-ub", "2048")
"""Further arguments of llama-bench for embeddings."""
WIDTHS = range(1, MAX_TOKENS + 1)
"""Numbers of verified tokens."""
DEPTHS = {"decode": "0,512,4096", "prompts": "0"}
"""Tokens in the cache, by test."""
TITLES = {"generate": "tg, tokens/s", "verify": "Cost of verifying n tokens", "prompt": "pp, tokens/s"}


def split_table(options: argparse.Namespace, shared: cuda_runs.CudaSuite) -> str:
    """Models within budgets, whose weights are on the GPU in part."""
    suite = SplitSuite(
        shared.benched_models(),
        suites.shares("0.5" if options.smoke else options.shares),
        options.llama_bench,
        options.threads,
        shared.rounds,
        shared.repetitions,
        options.device or "auto",
    )
    prompt, generated = (32, 8) if options.smoke else (PROMPT, options.generated)
    rows = list(suite.compare([Workload("generate", generated), Workload("prompt", prompt)]))
    return markdown(HEAD, [row.cells() for row in rows], left=(0, 2, 3, len(HEAD) - 1))


def main() -> None:
    """Run the tests given on the command line."""
    parser = cuda_runs.parser(__doc__ or "")
    parser.add_argument("--tests", default="decode,prompts", help="also: embeddings, split (%(default)s)")
    parser.add_argument(
        "--shares", default="0.25,0.5,0.75", help="split: budgets, as shares of the weights (%(default)s)"
    )
    parser.add_argument("--threads", type=int, help="split: of both programs (default: each chooses)")
    parser.add_argument("--generated", type=int, default=128, help="split: tokens of a run (%(default)s)")
    parser.add_argument("--prompts", default="512,2048", help="lengths with commas (%(default)s)")
    parser.add_argument("--depths", help="tokens in the cache (decode: 0,512,4096; prompts: 0)")
    parser.add_argument("--widths", action="store_true", help="t(n)/t(1) of verifying n tokens as well")
    parser.add_argument("--texts", type=int, default=256, help="texts to embed (%(default)s)")
    options = parser.parse_args()
    suite = cuda_runs.suite(options)
    tests = suites.words(options.tests)
    workloads: list[Workload] = []
    for test in tests:
        if test in ("embeddings", "split"):
            continue
        listed = "0" if options.smoke else options.depths or DEPTHS[test]
        depths = suites.whole_numbers("--depths", listed, 0)
        if test == "decode":
            workloads += [Workload("generate", 8 if options.smoke else 128, depth) for depth in depths]
            if options.widths or options.smoke:
                workloads += [Workload("verify", width, 0) for width in WIDTHS]
        else:
            prompts = (16,) if options.smoke else suites.whole_numbers("--prompts", options.prompts, 1)
            workloads += [Workload("prompt", tokens, depth) for depth in depths for tokens in prompts]
    comparisons = list(suite.compare(workloads)) if workloads else []
    sections = []
    for kind, title in TITLES.items():
        rows = [each for each in comparisons if each.workload.kind == kind]
        if rows:
            sections.append((title, (cuda_runs.widths_table if kind == "verify" else cuda_runs.table)(rows)))
    if options.smoke or "embeddings" in tests:
        bench = suite.bench and LlamaBench(options.llama_bench, ("-ngl", "99", *EMBEDDING))
        for kind in ("Q8_0",) if options.smoke else suite.types:
            run = embedding_runs.EmbeddingRun(options.texts, suite.rounds, kind, options.smoke)
            sections.append(
                (f"Embeddings of texts, {kind}", embedding_runs.gpu_table(run, suite.device, bench))
            )
    if options.smoke or "split" in tests:
        title = "Models larger than the GPU, tokens/s; budgets count weights, keys and values"
        sections.append((title, split_table(options, suite)))
    cuda_runs.publish("Decoding and prompts on a GPU", cuda_runs.gpu_name(), suite, sections, options.out)


if __name__ == "__main__":
    suites.main(main)
