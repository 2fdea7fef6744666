"""Decoding and prompts on the CPU against llama.cpp, alternating; cost of verifying n tokens; time per token.

python benchmarks/cpu_speed.py --tests decode --shapes tinyllama-1.1b --types Q4_0,Q4_K_M --widths
python benchmarks/cpu_speed.py --tests prompts --prompts 512,32
python benchmarks/cpu_speed.py --tests embeddings --texts 256 --types Q8_0
"""

from collections.abc import Sequence
from itertools import product

from edgeinfer.benchmarking.speed_runs import BenchedModel
from edgeinfer.benchmarking.tables import markdown, shown_milliseconds
from edgeinfer.benchmarking.timings import BEST_DECILE, MEDIAN, Timings
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.loading.loading import load
from harness import embedding_runs, suites
from harness.suites import Suite
from harness.token_time import token_time

WIDTHS = (1, 2, 4, 8, 16)
"""Tokens verified by one forward."""


def widths_table(suite: Suite, widths: Sequence[int], depth: int) -> str:
    """t(n)/t(1): the time of a forward of n tokens divided by that of one."""
    workloads = [Workload("verify", width, depth) for width in widths]
    sides: dict[tuple[str, int, str], list[Timings]] = {}
    if suite.alone:
        for model, row in suite.speed_rows(workloads):
            sides.setdefault((model.name, row.threads, "edgeinfer"), []).append(row.timings)
    else:
        for model, pair in suite.versus(workloads):
            sides.setdefault((model.name, pair.threads, "edgeinfer"), []).append(pair.ours)
            sides.setdefault((model.name, pair.threads, "llama.cpp"), []).append(pair.theirs)
    rows = []
    for (name, threads, engine), timings in sides.items():
        for share, label in ((BEST_DECILE, "best decile"), (MEDIAN, "median")):
            seconds = [each.seconds_at(share) for each in timings]
            cells = [f"{value / seconds[0]:.2f}" for value in seconds]
            rows.append([name, str(threads), engine, label, shown_milliseconds(seconds[0]), *cells])
    head = ["model", "threads", "engine", "share", "t(1)", *(f"t({n})/t(1)" for n in widths)]
    return markdown(head, rows, left=(0, 2, 3))


def token_time_table(suite: Suite) -> str:
    """Median time of a token, in kernels and outside."""
    rows = []
    for model in suite.benched_models():
        for threads in suite.threads:
            rows.append([model.name, str(threads), *_token_time_cells(model, threads, suite.smoke)])
    head = ["model", "threads", "token", "in kernels", "rest", "share of rest", "calls"]
    return markdown(head, rows)


def _token_time_cells(model: BenchedModel, threads: int, smoke: bool) -> list[str]:
    tokens = 4 if smoke else 64
    with load(model.path, context=tokens + 1, threads=threads, device="cpu", draft=None) as loaded:
        token_times = token_time(loaded.engine, tokens)
    times = [
        shown_milliseconds(seconds) for seconds in (token_times.total, token_times.kernels, token_times.rest)
    ]
    return [*times, f"{token_times.rest / token_times.total:.1%}", f"{token_times.calls:.0f}"]


def decode_sections(suite: Suite, depths: Sequence[int], widths: bool) -> list[tuple[str, str]]:
    """The decoding tables."""
    tokens = 4 if suite.smoke else 128
    sections = [("tg, tokens/s", suite.speeds([Workload("generate", tokens, depth) for depth in depths]))]
    if widths or suite.smoke:
        counts = WIDTHS[:2] if suite.smoke else WIDTHS
        sections.append(("Cost of verifying n tokens", widths_table(suite, counts, depths[0])))
    return [*sections, ("Time of a token by part (medians)", token_time_table(suite))]


def main() -> None:
    """Run the tests given on the command line."""
    parser = suites.parser(__doc__ or "")
    parser.add_argument("--tests", default="decode,prompts", help="also: embeddings (%(default)s)")
    parser.add_argument("--prompts", default="512,32", help="lengths with commas (%(default)s)")
    parser.add_argument("--depths", default="0", help="tokens in the cache, with commas (%(default)s)")
    parser.add_argument("--texts", type=int, default=256, help="texts to embed (%(default)s)")
    parser.add_argument("--widths", action="store_true", help="t(n)/t(1) as well")
    options = parser.parse_args()
    suite = suites.suite("Decoding and prompts on the CPU", options)
    depths = suites.whole_numbers("--depths", options.depths, 0)
    sections = []
    if "decode" in suites.words(options.tests):
        sections += decode_sections(suite, depths, options.widths)
    if "prompts" in suites.words(options.tests):
        prompts = (16,) if suite.smoke else suites.whole_numbers("--prompts", options.prompts, 1)
        workloads = [Workload("prompt", tokens, depth) for depth in depths for tokens in prompts]
        sections.append(("pp, tokens/s", suite.speeds(workloads)))
    if suite.smoke or "embeddings" in suites.words(options.tests):
        kinds = ("Q8_0",) if suite.smoke else suite.types
        for threads, kind in product(suite.threads, kinds):
            run = embedding_runs.EmbeddingRun(options.texts, suite.rounds, kind, suite.smoke)
            table = embedding_runs.cpu_table(run, threads, suite.alone)
            sections.append((f"Embeddings of texts, {kind}, {threads} threads", table))
    suite.publish(sections)


if __name__ == "__main__":
    suites.main(main)
