"""Activity profiles: how often each neuron and expert of every layer is active on a text, stored with the
model's hash.

Counts are separate for the two halves of the text, so that what is learned on one can be checked on the
other. A file is a NumPy archive: `header` (JSON in UTF-8), and arrays of counts (2, units) uint32 by name:
`neurons.3` for the neurons of layer 3, `experts.3` for its experts, `expert_neurons.3` for the neurons of all
its experts, one expert after another. Other arrays, such as predictors, are stored next to them.
"""

import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.uint32]
VERSION = 1
SUFFIX = ".profile.npz"
FIRST_BYTES = 1 << 20
PIECES, PIECE_BYTES = 256, 4096
EXPERT_NEURONS = "expert_neurons"
COUNTED = ("neurons", "experts", EXPERT_NEURONS)
DAMAGE = (
    *(ValueError, LookupError, TypeError, AttributeError, SyntaxError, EOFError, MemoryError, OverflowError),
    *(RuntimeError, OSError, zipfile.BadZipFile, zlib.error, struct.error),
)
"""Exceptions seen when reading a corrupted archive, and those documented by its readers."""


class ProfileError(ValueError):
    """An unusable profile; the message has the reason in one line."""


@dataclass(frozen=True)
class ActivityProfile:
    """How often each unit of each layer was active.

    `counts`: "neurons.3", "experts.3" or "expert_neurons.3" -> (2, units), one row for each half of the text.
    `tokens`: of each half. `arrays`: additional arrays, by name.
    """

    model_hash: str
    tokens: tuple[int, int]
    rule: str
    """Description of what counted as active."""
    counts: Mapping[str, Counts]
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def layers(self, kind: str) -> dict[int, Counts]:
        """Layer -> counts of its "neurons" or "experts"."""
        counts = {int(name.partition(".")[2]): value for name, value in self.counts.items()
                 if name.startswith(f"{kind}.")}  # fmt: skip
        return dict(sorted(counts.items()))

    def active_share(self, name: str) -> float:
        """The mean share of a layer's units that a token activates."""
        counts = self.counts[name]
        granules: int = counts.shape[1]
        return int(counts.sum()) / max(sum(self.tokens) * granules, 1)

    def share_in_experts(self, layer: int, experts: int, experts_per_token: int) -> float | None:
        """The mean share of the neurons of an expert that a token activates; None: it isn't known."""
        counts = self.counts.get(f"{EXPERT_NEURONS}.{layer}")
        if counts is None or not counts.any() or counts.shape[1] % experts:
            return None
        read: int = sum(self.tokens) * experts_per_token * (counts.shape[1] // experts)
        return int(counts.sum()) / max(read, 1)

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError if the folder can't be written."""
        header = {"version": VERSION, "model": self.model_hash, "tokens": self.tokens, "rule": self.rule}
        arrays: dict[str, Any] = {**self.arrays, **self.counts}
        arrays["facts"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        partial = path.with_name(f".{path.name}.partial")
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, **arrays)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> "ActivityProfile":
        """Read a file.

        Raises:
            ProfileError: a damaged file, or not a profile.
            OSError: it can't be opened.
        """
        file = path.open("rb")
        try:
            with file, np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            header = json.loads(bytes(arrays.pop("facts")))
            return cls._checked(path, header, arrays)
        except ProfileError:
            raise
        except DAMAGE as error:
            reason = " ".join(str(error).split())[:80] or type(error).__name__
            raise ProfileError(
                f"{path}: not a valid activity profile ({reason}); create it again with edgeinfer profile"
            ) from error

    @classmethod
    def _checked(
        cls, path: Path, header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]
    ) -> "ActivityProfile":
        if header["version"] != VERSION:
            raise ProfileError(
                f"{path}: an activity profile of version {header['version']}, wanted {VERSION}; "
                "create it again with edgeinfer profile"
            )
        counts = {name: value for name, value in arrays.items() if name.partition(".")[0] in COUNTED}
        first, last = (int(count) for count in header["tokens"])
        for name, value in counts.items():
            int(name.partition(".")[2])
            if value.ndim != 2 or len(value) != 2 or value.dtype != np.uint32 or not value.shape[1]:
                raise ValueError(f"{name} is {value.dtype} {value.shape}")
            if (value.max(axis=1) > (first, last)).any():
                raise ValueError(f"{name} counts more than its {first} and {last} tokens")
        others = {name: value for name, value in arrays.items() if name not in counts}
        return cls(str(header["model"]), (first, last), str(header["rule"]), counts, others)


def model_hash(path: Path) -> str:
    """A fingerprint of a model file: SHA-256 of its size, its first MiB, and 256 pieces of 4 KiB spread
    evenly.

    Takes milliseconds for any size. Raises OSError.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        digest.update(str(size).encode() + file.read(FIRST_BYTES))
        for piece in range(PIECES):
            file.seek(max(0, size - PIECE_BYTES) * piece // (PIECES - 1))
            digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def profile_paths(model: Path, hashed: str, data_folder: Path) -> tuple[Path, Path]:
    """The two possible paths of a model's profile: next to the model, and in the user's data folder."""
    own = data_folder / "profiles" / f"{model.stem}-{hashed[:12]}{SUFFIX}"
    return adjacent_profile_path(model), own


def adjacent_profile_path(model: Path) -> Path:
    """The path of a profile if the model's folder is writable."""
    return model.with_name(model.name + SUFFIX)


def find_profile(model: Path, data_folder: Path) -> ActivityProfile | None:
    """The profile of a model file; None if there is none.

    Raises:
        ProfileError: it is damaged, or of another model.
        OSError: the model or its profile can't be read.
    """
    own_folder = data_folder / "profiles"
    if not any([adjacent_profile_path(model).exists(), *own_folder.glob(f"{model.stem}-*{SUFFIX}")]):
        return None  # most models have no profile: skip hashing their files
    hashed = model_hash(model)
    for path in profile_paths(model, hashed, data_folder):
        if path.exists():
            profile = ActivityProfile.load(path)
            if profile.model_hash != hashed:
                raise ProfileError(
                    f"{path}: profile of another model (hash {profile.model_hash[:12]}, "
                    f"wanted {hashed[:12]}); create it again with edgeinfer profile"
                )
            return profile
    return None


def remove_profile(model: Path, data_folder: Path) -> Path | None:
    """Delete the profile of a model file, damaged or not; returns its path, None if there is none.

    Raises:
        OSError: the model can't be read, or the profile can't be deleted.
    """
    for path in profile_paths(model, model_hash(model), data_folder):
        if path.exists():
            path.unlink()
            return path
    return None


def save_profile(
    profile: ActivityProfile, model: Path, data_folder: Path, in_data_folder: bool = False
) -> Path:
    """Save next to the model, or in the user's data folder if `in_data_folder` or if the model's folder can't
    be written; returns the path.

    Raises:
        OSError: neither can be written.
    """
    next_to_model, own = profile_paths(model, profile.model_hash, data_folder)
    if not in_data_folder:
        try:
            profile.save(next_to_model)
        except OSError:  # a folder without write permission
            in_data_folder = True
    if in_data_folder:
        own.parent.mkdir(parents=True, exist_ok=True)
        profile.save(own)
    return own if in_data_folder else next_to_model
