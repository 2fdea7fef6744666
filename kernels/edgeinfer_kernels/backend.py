"""Protocols of a backend, which runs the layers of a decoder on hidden states."""

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
    """A backend with a KV cache in device memory."""

    def cached(self, end: int) -> list[npt.NDArray[np.generic]]:
        """Copies of the keys and values of the first `end` positions, in a backend-specific order and
        layout.
        """
        ...

    def put_cached(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        """Restore the arrays that `cached` returned, for `end` positions.

        Raises:
            ValueError: the arrays have other shapes or dtypes.
        """
        ...


@runtime_checkable
class EvictingBackend(Protocol):
    """A backend with a KV cache in device memory that supports eviction in all its caches."""

    def forget(self, gone: npt.NDArray[np.int64], end: int) -> None:
        """Evict positions `gone` (ascending). The remaining ones up to `end` are compacted and their keys get
        the RoPE of their new positions.

        Raises:
            ValueError: some of `gone` do not exist, or they are not ascending.
        """
        ...


PAGE = LANES
"""Positions of a page: sequences that share a cache are stored in such pages."""


@dataclass(frozen=True)
class Places:
    """Positions of tokens of several sequences, and their slots in the cache.

    positions: (tokens,) int64. pages: (tokens, pages of the longest sequence) int64, the cache page that
    holds each PAGE positions of a token's sequence. copies: for each token, or for none, further cache slots
    that receive its key and value.
    """

    positions: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]
    copies: tuple[tuple[int, ...], ...] = ()

    def slots(self, token: int, end: int) -> npt.NDArray[np.int64]:
        """Cache slots that hold the first `end` positions of a token's sequence."""
        position = np.arange(end)
        return np.asarray(self.pages[token, position // PAGE] * PAGE + position % PAGE)


class BackendError(RuntimeError):
    """The device failed during execution; the message describes the failure. The backend is unusable
    afterwards.
    """


class Rows(Protocol):
    """Hidden states of some tokens, on any device; a slice has the same type."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


X = TypeVar("X", bound=Rows)


class Backend(Protocol[X]):
    """The loaded layers of a decoder. The result of `embed` belongs to the backend and is valid until the
    next `embed`.
    """

    name: str

    def embed(self, ids: Sequence[int]) -> X:
        """Scaled embeddings of at most `batch` tokens."""
        ...

    def all_layers(self, x: X, start: int) -> None:
        """Run both blocks of every layer in order, for tokens at positions start…; their keys and values are
        written to the caches.
        """
        ...

    def logits(self, x: X) -> npt.NDArray[np.float32]:
        """(tokens, vocabulary) float32: logits of the hidden states x, as a new array."""
        ...

    def normed(self, x: X) -> npt.NDArray[np.float32]:
        """(tokens, hidden_size) float32: the hidden states x after the final norm, which are the input of the
        head.
        """
        ...

    def close(self) -> None:
        """Release threads and memory."""
        ...


@runtime_checkable
class PackingBackend(Protocol):
    """A backend that evaluates tokens of several sequences in one step."""

    most_placed: int
    """Maximum number of tokens of such a step."""

    def embed(self, ids: Sequence[int]) -> Any:
        """As `Backend.embed`."""
        ...

    def all_layers_at(self, x: Any, places: Places) -> None:
        """As `all_layers`, for tokens at `places`. A token attends to its sequence up to its own position,
        including positions of earlier steps.
        """
        ...

    def logits(self, x: Any) -> npt.NDArray[np.float32]:
        """As `Backend.logits`."""
        ...


@runtime_checkable
class LayeredBackend(Protocol):
    """A backend that can skip layers."""

    def embed(self, ids: Sequence[int]) -> Any:
        """As `Backend.embed`."""
        ...

    def some_layers(self, x: Any, start: int, layers: Sequence[int]) -> None:
        """As `all_layers`, for these layers only."""
        ...


@runtime_checkable
class SteppingBackend(Protocol):
    """A backend that computes the logits of a few tokens in one call."""

    most_stepped: int
    """Maximum number of tokens of such a step; at most the batch size."""

    def logits_behind(self, ids: Sequence[int], start: int) -> npt.NDArray[np.float32]:
        """(len(ids), vocabulary) float32, a new array: the logits of tokens at positions start…

        They are bit-identical to those of `embed`, `all_layers` and `logits`.
        """
        ...


@runtime_checkable
class DividingBackend(Protocol):
    """A backend that can split the experts of a layer between two devices."""

    @property
    def pairs(self) -> PairCounts:
        """Counts of token-expert assignments in such layers: all of them, and those that the CPU computed."""
        ...


class BlockBackend(Backend[Activations], Protocol):
    """A backend in main memory that runs single blocks; x is (tokens, hidden_size) float32."""

    def attention_block(self, layer: int, x: Activations, start: int) -> None:
        """x += attention, for tokens at positions start…; their keys and values are written to the layer's
        cache.
        """
        ...

    def feed_forward_block(self, layer: int, x: Activations) -> None:
        """x += feed-forward."""
        ...


@runtime_checkable
class AskingBackend(BlockBackend, Protocol):
    """A backend that returns the queries of its attention blocks."""

    specification: DecoderSpecification
    weights: DecoderWeights

    def queries(self, layer: int, tokens: int) -> Activations:
        """(tokens, heads, head_dim): queries of a layer's last attention block, after RoPE; for a q4_0 cache
        also multiplied with the Hadamard matrix. A view, valid until the next block.
        """
        ...
