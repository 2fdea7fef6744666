"""The protocols of a backend: the layers of a decoder on the activations of some tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.expert_routing import PairCounts
from edgeinfer_kernels.layer_cache import LANES
from edgeinfer_kernels.specification import DecoderSpecification
from edgeinfer_kernels.weights import DecoderWeights

Activations = npt.NDArray[np.float32]


@runtime_checkable
class CachingBackend(Protocol):
    """A backend with keys and values on a device of its own."""

    def cached(self, end: int) -> list[npt.NDArray[np.generic]]:
        """Copies of the keys and values of the first `end` positions, in an order and layout of its own."""
        ...

    def put_cached(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        """Write back what `cached` gave, `end` positions of it.

        Raises:
            ValueError: the arrays have other shapes or types.
        """
        ...


@runtime_checkable
class EvictingBackend(Protocol):
    """A backend that has keys and values on a device, and itself forgets in all of its caches."""

    def forget(self, gone: npt.NDArray[np.int64], end: int) -> None:
        """Forget positions `gone` (rising); the others up to `end` move together, their keys turned back.

        Raises:
            ValueError: some of `gone` aren't there, or they don't rise.
        """
        ...


PAGE = LANES
"""Positions of a page: texts that share a cache lie in such pages."""


@dataclass(frozen=True)
class Places:
    """Where tokens of several texts stand in their texts, and where these lie in the cache.

    positions: (tokens,) int64. pages: (tokens, pages of the longest text) int64, where in the cache each PAGE
    positions of a token's text lie, counted in PAGEs. copies: for each token, or for none, more positions of
    the cache that take its key and value.
    """

    positions: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]
    copies: tuple[tuple[int, ...], ...] = ()

    def slots(self, token: int, end: int) -> npt.NDArray[np.int64]:
        """Positions of the cache that hold the first `end` positions of a token's text."""
        position = np.arange(end)
        return np.asarray(self.pages[token, position // PAGE] * PAGE + position % PAGE)


class BackendError(RuntimeError):
    """The device failed in the middle of its work; the text says how. The backend is of no more use."""


class Rows(Protocol):
    """Rows of the residual stream, wherever they lie; a slice of them is such rows again."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


X = TypeVar("X", bound=Rows)


class Backend(Protocol[X]):
    """A decoder's layers, loaded. What `embed` returns is the backend's until the next `embed`."""

    name: str

    def embed(self, ids: Sequence[int]) -> X:
        """Scaled embeddings of at most `batch` tokens."""
        ...

    def all_layers(self, x: X, start: int) -> None:
        """Both blocks of every layer, the first layer first, for tokens at positions start…; their keys and
        values go to the caches.
        """
        ...

    def logits(self, x: X) -> npt.NDArray[np.float32]:
        """(tokens, vocabulary) float32 of the rows of x; a fresh array."""
        ...

    def normed(self, x: X) -> npt.NDArray[np.float32]:
        """(tokens, width) float32: the rows of x behind the last norm, as the head reads them."""
        ...

    def close(self) -> None:
        """Give back threads and memory."""
        ...


@runtime_checkable
class PackingBackend(Protocol):
    """A backend that reads tokens of several texts in one step."""

    most_placed: int
    """Tokens of such a step at most."""

    def embed(self, ids: Sequence[int]) -> Any:
        """As `Backend.embed`."""
        ...

    def all_layers_at(self, x: Any, places: Places) -> None:
        """As `all_layers`, for tokens that stand at `places`; a token sees the positions of its text up to
        its own, whichever step read them.
        """
        ...

    def logits(self, x: Any) -> npt.NDArray[np.float32]:
        """As `Backend.logits`."""
        ...


@runtime_checkable
class LayeredBackend(Protocol):
    """A backend that can leave layers out."""

    def embed(self, ids: Sequence[int]) -> Any:
        """As `Backend.embed`."""
        ...

    def some_layers(self, x: Any, start: int, layers: Sequence[int]) -> None:
        """As `all_layers`, by these layers only."""
        ...


@runtime_checkable
class SteppingBackend(Protocol):
    """A backend that goes from a few tokens to the logits behind them in one piece."""

    most_stepped: int
    """Tokens of such a step at most, as many as are in a batch at most."""

    def logits_behind(self, ids: Sequence[int], start: int) -> npt.NDArray[np.float32]:
        """(len(ids), vocabulary) float32, a fresh array: the logits of tokens at positions start…, to the
        last bit those of `embed`, `all_layers` and `logits`.
        """
        ...


@runtime_checkable
class DividingBackend(Protocol):
    """A backend that may have a layer's experts on two devices."""

    @property
    def pairs(self) -> PairCounts:
        """How many experts tokens have asked for in such layers, and how many of them the CPU computed."""
        ...


class BlockBackend(Backend[Activations], Protocol):
    """A backend in main memory, whose blocks can be run one by one; x is (tokens, width) float32."""

    def attention_block(self, layer: int, x: Activations, start: int) -> None:
        """x += attention, for tokens at positions start…; their keys and values go to the layer's cache."""
        ...

    def feed_forward_block(self, layer: int, x: Activations) -> None:
        """x += feed-forward."""
        ...


@runtime_checkable
class AskingBackend(BlockBackend, Protocol):
    """A backend that tells what its attention blocks ask with."""

    specification: DecoderSpecification
    weights: DecoderWeights

    def queries(self, layer: int, tokens: int) -> Activations:
        """(tokens, heads, head_dim) of a layer's last attention block, turned by their positions; for a cache
        of q4_0 times the Hadamard matrix too. A view, valid until the next block.
        """
        ...
