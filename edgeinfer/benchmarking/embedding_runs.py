"""Embeddings of many texts on the CPU against llama.cpp, alternating: a random BERT base."""

import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.benchmarking.timings import BEST_DECILE, MEDIAN, Timings, speed_ratio
from edgeinfer.llama_cpp.library import llama_cpp_library
from edgeinfer.loading.loading import load
from edgeinfer_quant_formats import GGUFWriter

Vectors = npt.NDArray[np.float32]
SHORTEST, LONGEST = 20, 500
"""Tokens of a text, with the two around it."""
CONTEXT = 512
LLAMA_CPP_BATCH = 2048
"""Tokens of a batch of llama.cpp, which holds several texts."""
HEAD = ("engine", "texts", "tokens", "best decile t/s", "median t/s", "best decile ratio", "median ratio")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_bert(path: Path, layers: int, width: int, vocabulary: int, kind: str) -> list[str]:
    """Write a BERT of random weights with heads of 64; return its words, one token each."""
    random = np.random.default_rng(0)
    words = ["".join(letters) for letters in product(ascii_lowercase, repeat=4)][: vocabulary - len(SPECIAL)]
    metadata = {
        "general.architecture": "bert",
        "bert.block_count": layers,
        "bert.embedding_length": width,
        "bert.context_length": CONTEXT,
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
        for name, rows in (("token_embd", vocabulary), ("position_embd", CONTEXT), ("token_types", 2)):
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


def measure(
    path: Path, texts: list[str], tokens: int, threads: int, rounds: int, alone: bool
) -> list[list[str]]:
    """A row of the table for each engine."""
    with load(path, context=CONTEXT, threads=threads, device="cpu") as model:
        engines: dict[str, Callable[[list[str]], Vectors]] = {"edgeinfer": model.embed}
        if not alone:
            engines["llama.cpp"] = llama_cpp_embedder(path, threads)
        few = texts[:4]
        vectors = [embed(few) for embed in engines.values()]
        closest = min(float((vectors[0] * other).sum(axis=1).min()) for other in vectors)
        print(f"cosine of the first texts: at least {closest:.5f}", file=sys.stderr, flush=True)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, embed in engines.items():
                seconds[name].append(seconds_of(embed, texts))
    timings = {name: Timings(tuple(each), tokens) for name, each in seconds.items()}
    rows = []
    for name, each in timings.items():
        rates = [f"{each.rate_at(share):.0f}" for share in (BEST_DECILE, MEDIAN)]
        ratios = [f"{speed_ratio(timings['edgeinfer'], each, share):.2f}x" for share in (BEST_DECILE, MEDIAN)]
        rows.append([name, str(len(texts)), str(tokens), *rates, *ratios])
    return rows


def embeddings_table(threads: int, rounds: int, texts: int, kind: str, smoke: bool, alone: bool) -> str:
    """Many texts with a random BERT, of the size of BERT base unless `smoke`."""
    sizes = (2, 128, 1000) if smoke else (12, 768, 30_522)
    count, longest = (4, 40) if smoke else (texts, LONGEST)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bert.gguf"
        words = write_bert(path, *sizes, kind)
        given, tokens = random_texts(words, count, longest)
        return markdown(HEAD, measure(path, given, tokens, threads, rounds, alone), left=(0,))
