"""Bundle files: a model's neurons, each in one piece, next to the model's file.

A file is a GGUF of tensors of bytes: `blk.3.bundles` (neurons, bytes of a bundle) and `blk.3.factors`, the
factors of down that neurons share. Its metadata has the fingerprint of the model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.disk.bundle_layout import BundleLayout, make_bundles
from edgeinfer_kernels.cpu.disk.bundle_windows import Bundles, LayerBundles
from edgeinfer_kernels.pages import Bytes
from edgeinfer_offload.runtime.activity_profile import model_hash
from edgeinfer_quant_formats import FormatError, GGUFFile, GGUFWriter

SUFFIX = ".bundles"
ARCHITECTURE = "edgeinfer-bundles"
MODEL_KEY = "edgeinfer.bundles.model"
VERSION_KEY = "edgeinfer.bundles.version"
VERSION = 1
ALIGNMENT = 4096
REMEDY = "write it again with edgeinfer quantize --bundle"


class BundleFileError(ValueError):
    """An unusable bundle file; the message has the reason in one line."""


@dataclass(frozen=True)
class BundleFile:
    """The layers of a checked bundle file."""

    path: Path
    layers: Mapping[int, LayerBundles]

    def window(self, slots: int) -> Bundles:
        """The bundles with a window of `slots` of each layer."""
        return Bundles(self.path, self.layers, slots)


def bundle_path(model: Path) -> Path:
    """The path of a model's bundle file."""
    return model.with_name(model.name + SUFFIX)


def write_bundles(model: Path, layers: Mapping[int, FeedForwardWeights], kernels: Kernels) -> Path:
    """Write the bundles of these feed-forwards of a model's file next to it, completely or not at all.

    Raises OSError: they can't be written.
    """
    path = bundle_path(model)
    with GGUFWriter(path, {"general.architecture": ARCHITECTURE}, ALIGNMENT) as writer:
        writer.add_metadata(VERSION_KEY, VERSION)
        writer.add_metadata(MODEL_KEY, model_hash(model))
        for layer, weights in layers.items():
            layout = BundleLayout.of(weights)
            source = _Source(weights, kernels)
            writer.add_tensor(_name(layer), source.bundles, "I8", (layout.neurons, layout.nbytes))
            writer.add_tensor(_factors(layer), source.factors, "I8", (layout.factor_bytes,))
    return path


class _Source:
    """The bytes of a layer's two tensors, which are made once."""

    def __init__(self, weights: FeedForwardWeights, kernels: Kernels) -> None:
        self._weights, self._kernels = weights, kernels
        self._made_factors: Bytes | None = None

    def bundles(self) -> Iterator[Bytes]:
        pieces, self._made_factors = make_bundles(self._weights, self._kernels)
        for piece in pieces:
            yield piece.reshape(-1)

    def factors(self) -> Bytes:
        assert self._made_factors is not None  # tensors are written in their order
        made, self._made_factors = self._made_factors, None
        return made


def _name(layer: int) -> str:
    return f"blk.{layer}.bundles"


def _factors(layer: int) -> str:
    return f"blk.{layer}.factors"


def find_bundles(model: Path, layers: Mapping[int, FeedForwardWeights]) -> BundleFile | None:
    """The bundles of these feed-forwards of a model; None: it has no bundle file.

    Raises:
        BundleFileError: the file is damaged, of another model, or lacks one of the layers.
        OSError: it can't be read.
    """
    path = bundle_path(model)
    if not path.exists():
        return None
    try:
        with GGUFFile.open(path) as file:
            _check(path, file, model)
            return BundleFile(path, {layer: _layer(path, file, layer, w) for layer, w in layers.items()})
    except FormatError as error:
        raise BundleFileError(f"{error}; {REMEDY}") from error


def _check(path: Path, file: GGUFFile, model: Path) -> None:
    version, hashed = file.metadata.get(VERSION_KEY), file.metadata.get(MODEL_KEY)
    if file.metadata.get("general.architecture") != ARCHITECTURE or version != VERSION:
        raise BundleFileError(f"{path}: not a bundle file of version {VERSION}; {REMEDY}")
    wanted = model_hash(model)
    if hashed != wanted:
        raise BundleFileError(
            f"{path}: bundles of another model (hash {str(hashed)[:12]!r}, wanted {wanted[:12]!r}); {REMEDY}"
        )


def _layer(path: Path, file: GGUFFile, layer: int, weights: FeedForwardWeights) -> LayerBundles:
    layout = BundleLayout.of(weights)
    bundles, factors = file.tensors.get(_name(layer)), file.tensors.get(_factors(layer))
    wanted = (layout.neurons, layout.nbytes), (layout.factor_bytes,)
    seen = None if bundles is None or factors is None else (bundles.shape, factors.shape)
    if bundles is None or seen != wanted or bundles.offset % ALIGNMENT:
        raise BundleFileError(f"{path}: saw {seen} of layer {layer}, wanted {wanted}; {REMEDY}")
    return LayerBundles(bundles.offset, file.raw(_factors(layer)).reshape(-1))
