"""Several requests at once: tokens/s of 1, 4, 8 and 16 streams, the time to a first token while a long prompt
is read, and what two alternating chats read again.

python benchmarks/parallel.py --shapes llama-3.2-1b --types Q4_0 --threads 2
python benchmarks/parallel.py --llama-batched-bench build/bin/llama-batched-bench --models model.gguf
python benchmarks/parallel.py --device cuda --shapes llama-3-8b --types Q4_0
python benchmarks/parallel.py --tests clients
python benchmarks/parallel.py --tests drafts --threads 2

A stream is an asynchronous stream of the library; clients read streams of `edgeinfer serve`. The other side
is llama.cpp's `llama-batched-bench`, which samples no tokens; both sides run in turns.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx

from edgeinfer import Model
from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.random_files import random_file
from edgeinfer.benchmarking.speed_runs import BenchedModel
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.errors import EdgeInferError
from edgeinfer.generation.batching.scheduler import CHUNK_TOKENS
from edgeinfer.loading.loading import load
from edgeinfer.planning.model_plan import model_sizes
from harness import suites
from harness.drafts.shared_drafts import drafts_table

STREAMS = (1, 4, 8, 16)
DRAFTED_STREAMS = (1, 2, 4, 8)
"""Numbers of streams with drafts: the tokens of a step are at most 16."""
OUTPUT_SHOWN = 300
WORDS = ("one", "two", "three", "red", "green", "blue", "sun", "moon")
"""Of the prompts of clients."""


@dataclass(frozen=True)
class Sizes:
    """Tokens of a stream's prompt and completion, of a long and a short prompt, and streams at once."""

    prompt: int = 32
    generated: int = 64
    long: int = 4096
    short: int = 16
    streams: Sequence[int] = STREAMS
    drafted: int = 128

    @property
    def context(self) -> int:
        return self.long + self.generated + CHUNK_TOKENS


SMOKE = Sizes(prompt=8, generated=6, long=200, streams=(1, 2), drafted=8)


@dataclass
class StreamTimes:
    """When the tokens of one stream arrived, in seconds of the performance counter."""

    begin: float
    arrivals: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.begin

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


def prompt(model: Model, length: int, seed: int) -> list[int]:
    """Random tokens."""
    return random.Random(seed).choices(range(1000, model.tokenizer.vocabulary_size - 1000), k=length)


async def timed_stream(model: Model, ids: list[int], tokens: int) -> StreamTimes:
    """Run one stream to its end."""
    times = StreamTimes(time.perf_counter())
    async for _ in model.stream_async(ids, max_tokens=tokens, temperature=0.0):
        times.arrivals.append(time.perf_counter())
    return times


async def streams_together(model: Model, sizes: Sizes, count: int, seed: int) -> list[StreamTimes]:
    """Run `count` streams at once."""
    prompts = [prompt(model, sizes.prompt, seed + index) for index in range(count)]
    return await asyncio.gather(*(timed_stream(model, ids, sizes.generated) for ids in prompts))


def decode_rate(streams: Sequence[StreamTimes]) -> float:
    """Tokens/s of all streams while all of them are decoding."""
    begin = max(stream.arrivals[0] for stream in streams)
    end = min(stream.arrivals[-1] for stream in streams)
    counted = sum(begin < at <= end for stream in streams for at in stream.arrivals)
    return counted / (end - begin) if end > begin else 0.0


def percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


@dataclass(frozen=True)
class BatchedBench:
    """llama.cpp's `llama-batched-bench`."""

    program: Path

    def rates(self, model: Path, sizes: Sizes, threads: int, device: str) -> dict[int, float]:
        """Decoded tokens/s of all streams, by their number.

        Raises:
            EdgeInferError: the program fails, or its output has another format.
        """
        largest = max(sizes.streams)
        command = [
            *(str(self.program), "-m", str(model), "-t", str(threads), "-tb", str(threads)),
            *(("-ngl", "0") if device == "cpu" else ("-ngl", "99", "-fa", "on")),
            *("-c", str(largest * (sizes.prompt + sizes.generated + 8)), "-b", "512", "-ub", "512"),
            *("-npp", str(sizes.prompt), "-ntg", str(sizes.generated)),
            *("-npl", ",".join(map(str, sizes.streams)), "--output-format", "jsonl"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shown = done.stderr.strip()[-OUTPUT_SHOWN:]
            raise EdgeInferError(f"{self.program}: exit code {done.returncode}: {shown}")
        records: list[dict[str, Any]] = [
            json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
        ]
        if not records:
            raise EdgeInferError(f"{self.program}: its output has no JSON, wanted --output-format jsonl")
        return {record["pl"]: record["speed_tg"] for record in records}


def latency_table(
    what: str, runs: Mapping[int, Sequence[Sequence[StreamTimes]]], theirs: Sequence[dict[int, float]]
) -> str:
    """Tokens/s and latencies by number of streams; medians of the runs. `theirs`: tokens/s of llama.cpp."""
    rates = {count: median(map(decode_rate, done)) for count, done in runs.items()}
    rows = []
    for count, done in runs.items():
        gaps = [gap for streams in done for stream in streams for gap in stream.gaps]
        firsts = [stream.first for streams in done for stream in streams]
        other = median(rate[count] for rate in theirs) if theirs else None
        rows.append(
            [
                str(count),
                f"{rates[count]:.1f}",
                f"{rates[count] / rates[min(runs)]:.2f}",
                *(milliseconds(percentile(gaps, percent)) for percent in (50, 95, 99)),
                *(milliseconds(percentile(firsts, percent)) for percent in (50, 95)),
                *([f"{other:.1f}", f"{rates[count] / other:.2f}"] if other else ["-", "-"]),
            ]
        )
    head = [
        *(what, "tokens/s of all", "of one stream", "ms per token p50", "p95", "p99"),
        *("ms to first token p50", "p95", "llama.cpp tokens/s", "ratio"),
    ]
    return markdown(head, rows, left=())


def streams_table(model: Model, sizes: Sizes, rounds: int, theirs: Sequence[dict[int, float]]) -> str:
    """Tokens/s and latencies by number of streams; medians of the rounds."""
    runs: dict[int, list[list[StreamTimes]]] = {count: [] for count in sizes.streams}
    for index in range(rounds):
        for count in sizes.streams:
            runs[count].append(asyncio.run(streams_together(model, sizes, count, 100 * index)))
    return latency_table("streams", runs, theirs)


async def beside_a_long_prompt(model: Model, sizes: Sizes, seed: int) -> tuple[float, float, float, float]:
    """Seconds to the first token of a short request alone, and while a long prompt is read; seconds of a
    chunk then; and the longest gap of a stream that was decoding.
    """
    alone = await timed_stream(model, prompt(model, sizes.short, seed), 2)
    ids = prompt(model, sizes.long, seed + 1)
    running = asyncio.create_task(timed_stream(model, prompt(model, sizes.short, seed + 2), sizes.generated))
    await asyncio.sleep(2 * alone.first)
    long = asyncio.create_task(timed_stream(model, ids, 2))
    await asyncio.sleep(4 * alone.first)
    short = await timed_stream(model, prompt(model, sizes.short, seed + 3), 2)
    decoding = await running
    whole = await long
    chunk = whole.first / (sizes.long / CHUNK_TOKENS)
    return alone.first, short.first, chunk, max(decoding.gaps)


def long_prompt_table(model: Model, sizes: Sizes, rounds: int) -> str:
    runs = [asyncio.run(beside_a_long_prompt(model, sizes, 10_000 + 10 * index)) for index in range(rounds)]
    alone, beside, chunk, gap = (median(column) for column in zip(*runs, strict=True))
    head = [
        *("prompt", "ms to first token alone", "while it is read", "ms of a chunk and its steps"),
        *("chunks waited", "longest gap of a running stream, ms"),
    ]
    cells = [milliseconds(each) for each in (alone, beside, chunk)]
    row = [str(sizes.long), *cells, f"{beside / chunk:.1f}", milliseconds(gap)]
    return markdown(head, [row], left=())


@contextmanager
def server(path: Path, sizes: Sizes, arguments: Sequence[str]) -> Iterator[str]:
    """The address of `edgeinfer serve` with a model, for as many clients as there are streams."""
    command = [sys.executable, "-m", "edgeinfer", "serve", str(path), "--port", "0", "--draft", "none"]
    command += ["--parallel", str(max(sizes.streams)), "--context", str(4 * (sizes.prompt + sizes.generated))]
    process = subprocess.Popen(
        [*command, "--no-request-log", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stderr is not None
    try:
        output = ""
        while not (found := re.search(r"http://[\d.:]+/v1", output)):
            line = process.stderr.readline()
            if not line:
                raise EdgeInferError(f"serve has ended: {output.strip()[-OUTPUT_SHOWN:]}")
            output += line
        yield found[0]
    finally:
        process.terminate()
        process.communicate()


async def clients_together(address: str, sizes: Sizes, count: int, seed: int) -> list[StreamTimes]:
    """Run `count` clients at once, each with one streamed completion of another text."""

    async def one(client: httpx.AsyncClient, index: int) -> StreamTimes:
        words = random.Random(seed + index).choices(WORDS, k=sizes.prompt)
        body = {"prompt": " ".join(words), "max_tokens": sizes.generated, "temperature": 0}
        times = StreamTimes(time.perf_counter())
        async with client.stream("POST", f"{address}/completions", json={**body, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    times.arrivals.append(time.perf_counter())
        return times

    async with httpx.AsyncClient(timeout=600) as client:
        return await asyncio.gather(*(one(client, index) for index in range(count)))


def clients_table(path: Path, sizes: Sizes, rounds: int, arguments: Sequence[str]) -> str:
    """Tokens/s and latencies over HTTP by number of clients; the first round isn't counted."""
    runs: dict[int, list[list[StreamTimes]]] = {count: [] for count in sizes.streams}
    with server(path, sizes, arguments) as address:
        for index in range(rounds + 1):
            for count in sizes.streams:
                run = asyncio.run(clients_together(address, sizes, count, 1000 * index))
                runs[count] += [run] if index else []
    return latency_table("clients", runs, [])


def chats_table(model: Model, sizes: Sizes) -> str:
    """Tokens that two alternating chats read again, by turn."""
    texts = [prompt(model, sizes.long // 8, 20_000 + index) for index in range(2)]
    rows = []
    for turn in range(6):
        text = texts[turn % 2]
        added = prompt(model, 8, 30_000 + turn)
        known = len(text) if turn > 1 else 0
        completion = model.generate([*text, *added], max_tokens=sizes.generated // 4, temperature=0.0)
        again = max(0, known - completion.speed.cached_tokens)
        rows.append([str(turn + 1), "AB"[turn % 2], str(len(text) + len(added)), str(again)])
        texts[turn % 2] = [*text, *added, *completion.ids]
    return markdown(["turn", "chat", "prompt", "read again"], rows, left=(1,))


def library_sections(
    benched: BenchedModel, sizes: Sizes, rounds: int, threads: int, options: argparse.Namespace, where: str
) -> list[tuple[str, str]]:
    """The tables of a model that this process loads."""
    theirs: list[dict[int, float]] = []
    if options.llama_batched_bench:
        bench = BatchedBench(options.llama_batched_bench)
        theirs = [bench.rates(benched.path, sizes, threads, options.device) for _ in range(rounds)]
    most = max(sizes.streams)
    parallel = max(2, -(-most * (sizes.prompt + sizes.generated + 64) // sizes.context) + 2)
    if model_sizes(benched.path).is_recurrent:  # A request has a state, and no share of a pool.
        parallel = most
    with load(
        benched.path, device=options.device, context=sizes.context, threads=threads, draft=None,
        parallel=parallel, kv=options.kv,
    ) as model:  # fmt: skip
        return [
            (f"{where}: streams", streams_table(model, sizes, rounds, theirs)),
            (
                f"{where}: a short request while a long prompt is read",
                long_prompt_table(model, sizes, rounds),
            ),
            (f"{where}: two alternating chats", chats_table(model, sizes)),
        ]


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = suites.parser(__doc__ or "")
    parser.add_argument("--llama-batched-bench", type=Path, help="llama.cpp's program (default: without)")
    parser.add_argument("--kv", default="f16", help="type of the KV cache (%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--tests", default="streams,clients", help="streams, clients, drafts (%(default)s)")
    parser.add_argument("--draft-shape", default="smollm2-135m", help="of the draft model (%(default)s)")
    parser.set_defaults(shapes="llama-3.2-1b", types="Q4_0", rounds=3)
    options = parser.parse_args()
    sizes, rounds = (SMOKE, 1) if options.smoke else (Sizes(), options.rounds)
    suite = suites.suite("Several requests at once", options)
    sections: list[tuple[str, str]] = []
    for benched in suite.benched_models():
        threads = suite.threads[-1]
        where = f"{benched.name}, " + (f"{threads} threads" if options.device == "cpu" else options.device)
        if "streams" in suites.words(options.tests):
            sections += library_sections(benched, sizes, rounds, threads, options, where)
        if "drafts" in suites.words(options.tests):
            small = random_file(options.draft_shape, "Q4_0")
            counts = DRAFTED_STREAMS[: 2 if options.smoke else None]
            table = drafts_table(benched.path, small, options.device, threads, counts, sizes.drafted, rounds)
            sections.append((f"{where}: drafts of {options.draft_shape}", table))
        if "clients" in suites.words(options.tests):
            arguments = ["--device", options.device, "--kv", options.kv, "--threads", str(threads)]
            table = clients_table(benched.path, sizes, rounds, arguments)
            sections.append((f"{where}: clients of a server", table))
    facts = [
        f"a stream: {sizes.prompt} tokens of prompt, {sizes.generated} generated",
        f"chunks of {CHUNK_TOKENS} tokens while a stream is decoding",
        *this_machine(command_line()).lines(),
    ]
    suites.write_report("Several requests at once", facts, sections, options.out)


if __name__ == "__main__":
    suites.main(main)
