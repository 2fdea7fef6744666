"""Embeddings of many texts against llama.cpp, alternating: a random BERT base."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.benchmarking.timings import BEST_DECILE, MEDIAN, Timings, speed_ratio
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.llama_cpp.library import llama_cpp_library
from edgeinfer.loading.loading import load
from edgeinfer_quant_formats import GGUFWriter
from harness.llama_bench import LlamaBench

Vectors = npt.NDArray[np.float32]
SHORTEST, LONGEST = 20, 500
"""Tokens of a text, with the two around it."""
CONTEXT = 512
LLAMA_CPP_BATCH = 2048
"""Tokens of a batch of llama.cpp, which holds several texts."""
LLAMA_BENCH_TEXTS = (128, 256, 512, LLAMA_CPP_BATCH)
"""Tokens of the one text that llama-bench reads; the fastest counts."""
HEAD = ("engine", "run", "tokens", "best decile t/s", "median t/s", "best decile ratio", "median ratio")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class EmbeddingRun:
    """What is measured: `texts` texts with a file of `kind`; `smoke`: four short ones with a small model."""

    texts: int
    rounds: int
    kind: str
    smoke: bool

    @contextmanager
    def file(self) -> Iterator[tuple[Path, list[str], int]]:
        """A file of a random BERT, the texts, and the number of their tokens."""
        sizes = (2, 128, 1000) if self.smoke else (12, 768, 30_522)
        count, longest = (4, 40) if self.smoke else (self.texts, LONGEST)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bert.gguf"
            words = write_bert(path, *sizes, self.kind)
            yield path, *random_texts(words, count, longest)


def write_bert(path: Path, layers: int, width: int, vocabulary: int, kind: str) -> list[str]:
    """Write a BERT of random weights with heads of 64; return its words, one token each."""
    random = np.random.default_rng(0)
    words = ["".join(letters) for letters in product(ascii_lowercase, repeat=4)][: vocabulary - len(SPECIAL)]
    metadata = {
        "general.architecture": "bert",
        "bert.block_count": layers,
        "bert.embedding_length": width,
        "bert.context_length": LLAMA_CPP_BATCH,
        "bert.feed_forward_length": 4 * width,
        "bert.attention.head_count": width // 64,
        "bert.attention.layer_norm_epsilon": 1e-12,
        "bert.attention.causal": False,
        "bert.pooling_type": 1,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "bert-bge",
        "tokenizer.ggml.tokens": [*SPECIAL, *(f"▁{word}" for word in words)],
        "tokenizer.ggml.token_type": np.array([3] * len(SPECIAL) + [1] * len(words), np.int32),
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }

    def values(*shape: int) -> Vectors:
        return random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))

    with GGUFWriter(path, metadata) as writer:
        for name, rows in (
            ("token_embd", vocabulary),
            ("position_embd", LLAMA_CPP_BATCH),
            ("token_types", 2),
        ):
            writer.add_tensor(f"{name}.weight", values(rows, width), kind if rows == vocabulary else "F32")
        norms = ["token_embd_norm"]
        for layer in range(layers):
            prefix = f"blk.{layer}"
            sizes = {f"attn_{part}": (width, width) for part in ("q", "k", "v", "output")}
            sizes |= {"ffn_up": (4 * width, width), "ffn_down": (width, 4 * width)}
            for name, (rows, columns) in sizes.items():
                writer.add_tensor(f"{prefix}.{name}.weight", values(rows, columns), kind)
                writer.add_tensor(f"{prefix}.{name}.bias", 0.1 * values(rows), "F32")
            norms += [f"{prefix}.{name}_output_norm" for name in ("attn", "layer")]
        for name in norms:
            writer.add_tensor(f"{name}.weight", np.ones(width, np.float32), "F32")
            writer.add_tensor(f"{name}.bias", np.zeros(width, np.float32), "F32")
    return words


def random_texts(words: list[str], count: int, longest: int) -> tuple[list[str], int]:
    """Texts of words with lengths from SHORTEST to `longest` tokens, and the number of all tokens."""
    random = np.random.default_rng(1)
    lengths = random.integers(SHORTEST, longest + 1, count)
    return [" ".join(random.choice(words, length - 2)) for length in lengths], int(lengths.sum())


def llama_cpp_embedder(path: Path, threads: int) -> Callable[[list[str]], Vectors]:
    """llama.cpp's embeddings of texts."""
    batch = LLAMA_CPP_BATCH
    model = llama_cpp_library("the comparison").Llama(
        str(path), embedding=True, n_ctx=batch, n_batch=batch, n_ubatch=batch, n_threads=threads,
        n_threads_batch=threads, n_gpu_layers=0, pooling_type=1, verbose=False,
    )  # fmt: skip
    return lambda texts: np.array(model.embed(texts, normalize=True), np.float32)


def seconds_of(embed: Callable[[list[str]], Vectors], texts: list[str]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    embed(texts)
    return time.perf_counter() - begin


def cpu_table(run: EmbeddingRun, threads: int, alone: bool) -> str:
    """Many texts on the CPU, against llama.cpp with the same texts unless `alone`."""
    with run.file() as (path, texts, tokens), load(path, **_loading("cpu", threads)) as model:
        engines: dict[str, Callable[[list[str]], Vectors]] = {"edgeinfer": model.embed}
        if not alone:
            engines["llama.cpp"] = llama_cpp_embedder(path, threads)
        few = texts[:4]
        vectors = [embed(few) for embed in engines.values()]
        closest = min(float((vectors[0] * other).sum(axis=1).min()) for other in vectors)
        print(f"cosine of the first texts: at least {closest:.5f}", file=sys.stderr, flush=True)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(run.rounds):
            for name, embed in engines.items():
                seconds[name].append(seconds_of(embed, texts))
    timings = {name: Timings(tuple(each), tokens) for name, each in seconds.items()}
    return _table(timings, f"{len(texts)} texts")


def gpu_table(run: EmbeddingRun, device: str, bench: LlamaBench | None) -> str:
    """Many texts on a device, against llama-bench with one text of several lengths."""
    timings: dict[str, Timings] = {}
    workloads = [Workload("prompt", tokens, 0) for tokens in LLAMA_BENCH_TEXTS]
    with run.file() as (path, texts, tokens), load(path, **_loading(device, None)) as model:
        model.embed(texts)
        own: list[float] = []
        theirs: dict[int, list[float]] = {each.tokens: [] for each in workloads}
        for _ in range(run.rounds):
            own.append(seconds_of(model.embed, texts))
            for each in bench.run(path, workloads, run.rounds) if bench else ():
                theirs[each.tokens] += each.seconds
    timings["edgeinfer"] = Timings(tuple(own), tokens)
    for length, seconds in theirs.items():
        if seconds:
            timings[f"llama.cpp, {length} tokens"] = Timings(tuple(seconds), length)
    return _table(timings, f"{len(texts)} texts")


def _loading(device: str, threads: int | None) -> dict[str, Any]:
    return {"context": CONTEXT, "device": device} | ({} if threads is None else {"threads": threads})


def _table(timings: Mapping[str, Timings], described: str) -> str:
    rows = []
    for name, each in timings.items():
        rates = [f"{each.rate_at(share):.0f}" for share in (BEST_DECILE, MEDIAN)]
        ratios = [f"{speed_ratio(timings['edgeinfer'], each, share):.2f}x" for share in (BEST_DECILE, MEDIAN)]
        rows.append([name, described, str(each.tokens), *rates, *ratios])
    return markdown(HEAD, rows, left=(0, 1))
