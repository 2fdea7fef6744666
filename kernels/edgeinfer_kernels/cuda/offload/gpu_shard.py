"""The GPU shard of a split model: a backend that exchanges hidden states with the CPU or with another GPU."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from edgeinfer_kernels.backend import BatchPositions, OnHidden
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.current_device import on_open_device
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, synchronize
from edgeinfer_kernels.cuda.offload.cpu_stages import DecodeExchange, Host, NoHost, PrefillExchange
from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer
from edgeinfer_kernels.cuda.offload.expert_loading import (
    CountingHost,
    ExpertCache,
    ExpertCacheLayer,
    ExpertPolicy,
)
from edgeinfer_kernels.cuda.offload.streamed_layers import StreamingHost
from edgeinfer_kernels.cuda.trees.tree_words import tree_rows
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.cuda.weights.device_model import OnLoaded
from edgeinfer_kernels.cuda.weights.moe_weights import DeviceExperts
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights
from edgeinfer_kernels.stages import CPU, GPU, cpu_stages, part_of_block, shards_on


class ServingHost(Host, StreamingHost, CountingHost, Protocol):
    """The CPU shard, as `edgeinfer_kernels.cpu.cpu_shard.CpuShard`."""


class GpuShard(CudaBackend):
    """The layers of the `stages` in the options that are on a GPU.

    `serve_with` sets the CPU shard. Hidden states are exchanged through the `exchange_buffer`: steps start
    with `enter` and `sample_entered`.

    Raises:
        ValueError: the stages aren't those of the CPU and one GPU; see `cpu_stages`.
    """

    def __init__(
        self,
        specification: DecoderSpec,
        weights: DecoderWeights,
        context: int,
        device: torch.device,
        options: DeviceOptions,
        exchange_buffer: ExchangeBuffer,
        *,
        tuning: Tuning | None = None,
        on_loaded: OnLoaded | None = None,
    ) -> None:
        stages = cpu_stages(specification, GPU, options.stages)
        self._step_exchange = DecodeExchange(stages, exchange_buffer)
        self._prompt_exchange = PrefillExchange(stages, exchange_buffer, device)
        self._server: ServingHost | None = None
        super().__init__(specification, weights, context, device, options, tuning=tuning, on_loaded=on_loaded)

    def _exchanges(self) -> tuple[PrefillExchange | None, DecodeExchange | None]:
        return self._prompt_exchange, self._step_exchange

    def serve_with(self, host: ServingHost, *, meets_in_graph: bool = True) -> int:
        """Set the CPU shard that runs the CPU stages and whose weights are streamed during prefill; return
        how many bytes of these could not be pinned.

        `meets_in_graph`: see `exchange_speed.py`.
        """
        self._meet(host, meets_in_graph=meets_in_graph)
        self._server = host
        return self._connect(host)

    def begin_at_exchange_buffer(self) -> None:
        """Steps begin with the hidden states that another GPU has put into the exchange buffer."""
        self._meet(NoHost())

    def _meet(self, host: Host, *, meets_in_graph: bool = True) -> None:
        self._prompt_exchange.host = self.steps.host = host
        self.steps.meets_in_graph = self._cuda and meets_in_graph

    @on_open_device
    def _connect(self, host: ServingHost) -> int:
        return self._parts.sent.connect(host) if self._parts.sent else 0

    def observe(self, on_hidden: OnHidden) -> None:
        """Call `on_hidden` with some of the hidden rows of prompts whose weights are streamed."""
        self._parts.prefill.on_hidden = on_hidden

    @on_open_device
    def start_expert_cache(self, policy: ExpertPolicy) -> str | None:
        """Enable the expert cache with this policy, whose rows are the layers with an expert cache. Return
        None, or the reason why the experts stay fixed.
        """
        assert self._server is not None, "the CPU shard is set"
        on_cpu, layers = shards_on(CPU, self._options.stages), []
        for block in self._parts.model.blocks:
            here = block.weights
            if isinstance(here, DeviceExperts) and here.has_expert_cache:
                layer = self._parts.model.layers[block.index.layer]
                whole = self._weights.residual(BlockIndex(layer, block.index.position))
                theirs = part_of_block(whole, on_cpu[layer]).block
                requests = self._server.requests[layer]
                layers.append(ExpertCacheLayer.of(here, theirs, requests, self._server))
        self.steps.expert_cache = ExpertCache(layers, policy, self.device)
        return self.steps.expert_cache.ended

    @property
    def changed_experts(self) -> int:
        """Number of experts loaded to the device since the model was loaded."""
        expert_cache = self.steps.expert_cache
        return 0 if expert_cache is None else expert_cache.changes

    @on_open_device
    def enter(
        self,
        ids: Sequence[int],
        start: int,
        pages: npt.NDArray[np.int64] | None = None,
        parents: Sequence[int] = (),
    ) -> DeviceRows:
        """Evaluate the tokens `ids`, whose embeddings are in the exchange buffer, at positions start…,
        through all layers; in the `pages` (1, pages) of their sequence, if given; with `parents` as
        `forward_tree`.
        """
        self._logits.forget()
        rows = self._rows(len(ids))
        self._read(ids, rows, start, tree_rows(parents) if parents else (), pages)
        synchronize(self.device)
        return rows

    @on_open_device
    def enter_batch(
        self,
        ids: Sequence[int],
        positions: BatchPositions,
        before: Callable[[Sequence[int], BatchPositions], None],
        states: Sequence[int] = (),
    ) -> DeviceRows:
        """As `forward_batch`, of a split model; `before` each step the host embeds its tokens. `states`: the
        numbers of their sequences, if these have separate states.
        """
        self._logits.forget()
        self._batches.before = before
        self._batches.forward(ids, positions, states)
        return self._rows(len(ids))

    def enter_states(
        self,
        ids: Sequence[int],
        starts: Sequence[int],
        states: Sequence[int],
        before: Callable[[Sequence[int], BatchPositions], None],
    ) -> DeviceRows:
        """As `forward_states`, of a split model; `before` as in `enter_batch`."""
        return self.enter_batch(ids, self._sequences.positions(starts, states), before, states)

    @on_open_device
    def sample_entered(
        self, token_id: int, start: int, request: Sequence[float] | None, recent: Sequence[int]
    ) -> int:
        """`sample_next` for a split model: the token's embedding is in the exchange buffer."""
        self._select()
        return self._sampling.sample_entered(token_id, start, request, recent)
