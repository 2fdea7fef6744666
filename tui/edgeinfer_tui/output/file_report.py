"""The report of `show` on a GGUF file, gathered first and printed later, so that text and JSON agree."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from edgeinfer.registry.low_bits import SizedTensor, low_bits_note
from edgeinfer.tokenizer import tokenizer_kind
from edgeinfer_tui.output.columns import one_line, print_columns, print_pairs, shown_bytes

LONGEST_ARRAY = 16
NOTHING: Mapping[str, Any] = {}

# The most important values: (label, metadata key without the architecture prefix).
METADATA_KEYS = (
    ("context", "context_length"),
    ("layers", "block_count"),
    ("width", "embedding_length"),
    ("feed-forward width", "feed_forward_length"),
    ("heads", "attention.head_count"),
    ("key-value heads", "attention.head_count_kv"),
    ("experts", "expert_count"),
    ("experts in use", "expert_used_count"),
    ("draft heads", "nextn_predict_layers"),
    ("target layers", "target_layers"),
    ("block size", "block_size"),
)


class FileMetadata(Protocol):
    """The fields of a file that the report reads: see `edgeinfer_quant_formats.GGUFFile`."""

    origin: Any
    version: int

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, SizedTensor]: ...


def file_report(
    file: FileMetadata,
    name: str,
    size_bytes: int,
    runs_with: str,
    layers: Mapping[str, int] = NOTHING,
    sampling: Mapping[str, Any] = NOTHING,
    drafts: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything that `show` prints, as JSON values. `runs_with`: the engine that runs the file; `layers`:
    its recurrent layers; `sampling`: the model's defaults; `drafts`: files of drafts next to it.
    """
    architecture = file.metadata.get("general.architecture")
    weights = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    tensor_bytes = sum(tensor.nbytes for tensor in file.tensors.values())
    values = {label: file.metadata.get(f"{architecture}.{key}") for label, key in METADATA_KEYS}
    return {
        "name": name,
        "path": str(file.origin),
        "size_bytes": size_bytes,
        "gguf_version": file.version,
        "architecture": _plain(architecture),
        "runs_with": runs_with,
        "parameters": weights,
        "bits_per_weight": 8 * tensor_bytes / weights if weights else None,
        "note": low_bits_note(file.tensors.values()),
        "facts": {label: _plain(value) for label, value in values.items() if value is not None}
        | dict(layers),
        "vocabulary": _vocabulary(file.metadata),
        "chat_template": "tokenizer.chat_template" in file.metadata,
        "sampling": dict(sampling),
        "drafts": list(drafts),
        "tensor_types": _by_type(file.tensors),
        "unknown_types": {
            tensor_name: tensor.format.name
            for tensor_name, tensor in file.tensors.items()
            if not tensor.format.is_known
        },
        "metadata": {key: _plain(file.metadata[key]) for key in file.metadata},
        "tensors": [
            {
                "name": tensor_name,
                "type": tensor.format.name,
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
            }
            for tensor_name, tensor in file.tensors.items()
        ],
    }


def _kind(report: Mapping[str, Any]) -> str:
    """What the file is; a folder has no version."""
    version = report["gguf_version"]
    return f"GGUF v{version}" if version else "Hugging Face folder"


def print_report(report: Mapping[str, Any]) -> None:
    """Print the report as text."""
    bits = "" if report["bits_per_weight"] is None else f", {report['bits_per_weight']:.2f} bits each"
    vocabulary = report["vocabulary"]
    print_pairs(
        [
            ("name", one_line(report["name"])),
            (
                "file",
                f"{one_line(report['path'], 1000)} ({shown_bytes(report['size_bytes'])}, {_kind(report)})",
            ),
            ("architecture", one_line(report["architecture"])),
            ("runs with", one_line(report["runs_with"])),
            ("parameters", f"{shown_count(report['parameters'])} ({report['parameters']:,}{bits})"),
            *([("note", report["note"])] if report["note"] else []),
            *(_fact(label, value) for label, value in report["facts"].items()),
            ("vocabulary", _shown_vocabulary(vocabulary)),
            ("tokenizer", vocabulary["tokenizer"] or "unknown"),
            ("chat template", "yes" if report["chat_template"] else "no"),
            *([("sampling", shown_sampling(report["sampling"]))] if report["sampling"] else []),
            *([("drafts", one_line(", ".join(report["drafts"])))] if report["drafts"] else []),
        ]
    )
    _print_types(report["tensor_types"])
    if report["unknown_types"]:
        print("\nTensors of types that edgeinfer can't read")
        print_pairs([(one_line(name), kind) for name, kind in report["unknown_types"].items()])
    print("\nMetadata")
    print_pairs([(one_line(key), one_line(_described(value))) for key, value in report["metadata"].items()])
    if "tensors" in report:
        print("\nTensors (rows x columns)")
        print_columns(
            ["NAME", "TYPE", "SHAPE", "BYTES"],
            [
                [one_line(row["name"]), row["type"], " x ".join(map(str, row["shape"])), f"{row['bytes']:,}"]
                for row in report["tensors"]
            ],
            right={3},
        )


def _fact(label: str, value: Any) -> tuple[str, str]:
    """A label and the text of its value."""
    name = label.removesuffix(" bytes")
    return (label, one_line(value)) if name == label else (name, f"{shown_bytes(value)} at any context")


def shown_sampling(sampling: Mapping[str, Any]) -> str:
    """Sampling parameters as text."""
    return ", ".join(f"{name} {value}" for name, value in sampling.items())


def _print_types(types: Mapping[str, Any]) -> None:
    print("\nTensors by type")
    print_columns(
        ["TYPE", "TENSORS", "WEIGHTS", "BYTES", "BITS", "SHARE"],
        [
            [
                kind,
                str(row["tensors"]),
                f"{row['weights']:,}",
                f"{row['bytes']:,}",
                f"{row['bits_per_weight']:.4g}",
                f"{row['share']:.1%}",
            ]
            for kind, row in types.items()
        ],
        right={1, 2, 3, 4, 5},
    )


def shown_count(count: int) -> str:
    """A parameter count as in model names: 31876608 -> "31.9M"."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _by_type(tensors: Mapping[str, SizedTensor]) -> dict[str, dict[str, Any]]:
    """Tensors, weights and bytes of each block format, the largest first."""
    rows: dict[str, dict[str, Any]] = {}
    for tensor in tensors.values():
        row = rows.setdefault(tensor.format.name, {"tensors": 0, "weights": 0, "bytes": 0})
        row["tensors"] += 1
        row["weights"] += math.prod(tensor.shape)
        row["bytes"] += tensor.nbytes
    total = sum(row["bytes"] for row in rows.values())
    for row in rows.values():
        row["bits_per_weight"] = 8 * row["bytes"] / row["weights"]
        row["share"] = row["bytes"] / total if total else 0.0
    return dict(sorted(rows.items(), key=lambda item: -item[1]["bytes"]))


def _shown_vocabulary(vocabulary: Mapping[str, Any]) -> str:
    pre = "" if vocabulary["pre"] is None else f" ({one_line(vocabulary['pre'])})"
    return f"{vocabulary['tokens']} tokens, {one_line(vocabulary['model'])}{pre}"


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return {
        "tokens": len(tokens) if isinstance(tokens, list) else 0,
        "tokenizer": tokenizer_kind(metadata),
        "model": _plain(metadata.get("tokenizer.ggml.model")),
        "pre": _plain(metadata.get("tokenizer.ggml.pre")),
    }


def _plain(value: Any) -> Any:
    """A metadata value as JSON; a long array becomes its length and its first elements."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        if len(value) > LONGEST_ARRAY:
            return {"count": len(value), "first": [_plain(item) for item in value[:3]]}
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _described(value: Any) -> object:
    if isinstance(value, dict):
        return f"{value['count']} values: {', '.join(map(repr, value['first']))}, ..."
    return value
