"""Files with drafts of a model next to its file, by the prefixes that llama.cpp's converters give them.

Sources: llama.cpp, common/download.cpp and common/preset.cpp.
"""

from pathlib import Path

from edgeinfer.registry.model_file import DRAFT_PREFIXES, LATER_PART, bits_of, quant_of


def draft_siblings(path: Path) -> list[Path]:
    """The files with drafts in the folder of a model's file, and of a snapshot in the Hugging Face cache
    those in the folders above it too.

    The nearest folder comes first; then the prefix, the type in the model's name, the nearest number of bits,
    and the name decide.
    """
    quant = quant_of(path.name)

    def rank(draft: Path) -> tuple[int, bool, float, str]:
        own = quant_of(draft.name)
        prefix = next(at for at, each in enumerate(DRAFT_PREFIXES) if draft.name.startswith(each))
        return prefix, own != quant, abs(bits_of(own) - bits_of(quant)), draft.name

    return [
        draft
        for folder in _folders(path)
        for draft in sorted(_drafts_in(folder), key=rank)
        if draft.name != path.name
    ]


def _drafts_in(folder: Path) -> list[Path]:
    """The files in a folder that are named as drafts; of one in several parts the first."""
    try:
        found = [each for each in folder.iterdir() if each.name.startswith(DRAFT_PREFIXES)]
        return [p for p in found if p.suffix == ".gguf" and not LATER_PART.search(p.name) and p.is_file()]
    except OSError:
        return []


def _folders(path: Path) -> list[Path]:
    """The folder of a model; in a snapshot those above it too, up to that of the revision."""
    if path.is_dir():
        return [path]
    parents = list(path.absolute().parents)
    for depth in range(len(parents) - 2):
        if parents[depth + 1].name == "snapshots" and parents[depth + 2].name.startswith("models--"):
            return parents[: depth + 1]
    return parents[:1]
