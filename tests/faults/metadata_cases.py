"""Model files with metadata of wrong types and extreme values: loaded, run, shown and planned."""

import io
import json
import math
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import edgeinfer
from edgeinfer.planning.model_plan import model_sizes
from edgeinfer_quant_formats import GGUFFile, GGUFWriter
from edgeinfer_quant_formats.gguf.metadata import Metadata
from edgeinfer_tui.output.file_report import file_report, print_report
from tests.edgeinfer.tokenizer.charsmap_writer import charsmap
from tests.faults.outcomes import Case, report
from tests.model_zoo import ZOO
from tests.quant_formats import raw_gguf as raw
from tests.random_models import VOCABULARY

Value = tuple[str, int, bytes]
BYTE_PAIRS, WORD_PIECES, UNIGRAM = "byte-pairs", "word-pieces", "unigram"
TOKENIZERS: dict[str, dict[str, object]] = {
    BYTE_PAIRS: {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.merges": ["t h", "h e"],
        "tokenizer.ggml.add_bos_token": True,
    },
    WORD_PIECES: {"tokenizer.ggml.model": "bert", "tokenizer.ggml.normalizer.lowercase": True},
    UNIGRAM: {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.precompiled_charsmap": charsmap({"\t": " ", "e\u0301": "é", "²": "2"}),
        "tokenizer.ggml.remove_extra_whitespaces": True,
    },
}
"""Metadata of models with another tokenizer than SentencePiece, by the name of the case."""
TOKENIZER_KEYS = [
    "add_bos_token",
    "add_eos_token",
    "add_space_prefix",
    "eot_token_id",
    "eom_token_id",
    "padding_token_id",
    "mask_token_id",
    "pre",
    "merges",
    "seperator_token_id",
    "precompiled_charsmap",
    "remove_extra_whitespaces",
    "normalizer.lowercase",
    "normalizer.strip_accents",
]
ARCHITECTURE_KEYS = [
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.scale",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "pooling_type",
    "expert_count",
    "expert_used_count",
    "expert_gating_func",
    "expert_weights_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "expert_group_count",
    "expert_group_used_count",
    "leading_dense_block_count",
]
OTHER_KEYS = [
    "tokenizer.chat_template",
    "tokenizer.chat_template.tool_use",
    "general.name",
    "general.alignment",
    "split.count",
    "split.no",
]
SCALARS: tuple[tuple[int, str, tuple[float, ...]], ...] = (
    (raw.UINT32, "I", (0, 1, 2, 7, 255, 2**31, 2**32 - 1)),
    (raw.INT32, "i", (-1, -(2**31))),
    (raw.UINT64, "Q", (2**63, 2**64 - 1)),
    (raw.INT64, "q", (-(2**63),)),
    (raw.FLOAT32, "f", (0.0, -1.0, 0.5, 1e-38, 3e38, math.nan, math.inf, -math.inf)),
    (raw.FLOAT64, "d", (math.nan, 1e308, 5e-324)),
    (raw.UINT8, "B", (255,)),
    (raw.BOOL, "?", (False, True)),
)
TEXTS = (
    "",
    "1",
    "x" * 5000,
    "{% for i in range(10**9) %}{% endfor %}",
    "{{",
    "<0xZZ>",
    "\0\x1b[2J",
    "yarn",
    "nan",
)


def values() -> Iterator[Value]:
    """(name, type, encoded value): scalars of every type, texts, and arrays, also one for each token."""
    for kind, code, numbers in SCALARS:
        for number in numbers:
            yield f"{code} {number}", kind, struct.pack(f"<{code}", number)
    for text in TEXTS:
        yield f"text {text[:12]!r}", raw.STRING, raw.string(text)
    yield "broken UTF-8", raw.STRING, raw.string(b"a\xff\xed\xa0\x80")
    for count in (0, 1, VOCABULARY):
        for kind, code, number in (
            (raw.INT32, "i", -5),
            (raw.UINT64, "Q", 2**64 - 1),
            (raw.FLOAT32, "f", math.nan),
            (raw.BOOL, "?", True),
        ):
            payload = struct.pack(f"<{count}{code}", *[number] * count)
            yield f"{count} of {code}", raw.ARRAY, raw.array(kind, count, payload)
        for text in ("", "<0xZZ>"):
            yield f"{count} of {text!r}", raw.ARRAY, raw.array(raw.STRING, count, raw.string(text) * count)


def source_file(folder: Path, name: str) -> Path:
    """A valid model."""
    path = ZOO["llama" if name in TOKENIZERS else name].write(folder / "sound.gguf")
    if name not in TOKENIZERS:
        return path
    target = folder / "other.gguf"
    with GGUFFile.open(path) as file:
        metadata = {**file.metadata, **TOKENIZERS[name]}
        with GGUFWriter(target, metadata) as writer:
            for tensor in file.tensors:
                writer.add_tensor(tensor, file.decode(tensor), "F32")
    return target


def with_value(file: GGUFFile, key: str, value: Value) -> bytes:
    """The file's bytes with one metadata value replaced, or added."""
    metadata = file.metadata
    assert isinstance(metadata, Metadata)
    keys = [*metadata, *([] if key in metadata else [key])]
    out = bytearray(b"GGUF" + raw.uint32(3) + raw.uint64(len(file.tensors)) + raw.uint64(len(keys)))
    for each in keys:
        out += raw.string(each)
        out += raw.uint32(value[1]) + value[2] if each == key else metadata.encoded(each)
    data = bytearray()
    for name, info in file.tensors.items():
        data += bytes(-len(data) % 32)
        out += raw.string(name) + raw.uint32(len(info.shape)) + b"".join(map(raw.uint64, info.shape[::-1]))
        out += raw.uint32(info.format.type_id) + raw.uint64(len(data))
        data += file.raw(name).tobytes()
    return bytes(out) + bytes(-len(out) % 32) + bytes(data)


def use(path: Path) -> None:
    """Everything that reads a model's metadata."""
    model_sizes(path)
    with GGUFFile.open(path) as file, redirect_stdout(io.StringIO()):
        result = file_report(file, "model", path.stat().st_size, "edgeinfer")
        json.dumps(result, allow_nan=False)
        print_report(result)
    with edgeinfer.load(path, device="cpu", threads=1, draft=None) as model:
        model.generate("the cat", max_tokens=2, temperature=0)
        model.embed("a")
        if model.chat_format is not None:
            model.chat().say("hi", max_tokens=2)


def cases(folder: Path, name: str, share: float) -> Iterator[Case]:
    """A `share` of all keys times all values, seeded."""
    architecture = "llama" if name in TOKENIZERS else ZOO[name].architecture
    more = [f"tokenizer.ggml.{key}" for key in TOKENIZER_KEYS]
    more += [f"{architecture}.{key}" for key in ARCHITECTURE_KEYS] + OTHER_KEYS
    noise, path = random.Random(name), folder / "damaged.gguf"
    with GGUFFile.open(source_file(folder, name)) as file:
        for key in dict.fromkeys([*file.metadata, *more]):
            for value in values():
                if noise.random() < share:
                    path.unlink(missing_ok=True)
                    path.write_bytes(with_value(file, key, value))
                    yield f"{name}: {key} = {value[0]}", lambda: use(path)


if __name__ == "__main__":
    folder, model, share = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    report(cases(folder, model, share), folder / "report.json")
