"""A draft head (MTP) in torch: one layer of its target's kind, and its file.

x = W·[norm(e); norm(h)] with the embedding e of a token and the target's hidden state h before it (after the
output norm), then attention and a feed-forward, then a norm and an output of the ids that it can draft.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from frozen_target import Target, causal_attention, read_tensor
from torch import Tensor, nn
from torch.nn import functional

from edgeinfer_quant_formats import FORMATS, GGUFFile, GGUFWriter

OUTPUT, IDS = "nextn.shared_head_head", "d2t"
KEPT = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm")
"""Weights of the target's last layer with which a head begins."""
ROUNDED = "Q4_0"
"""The type for which a head can be trained: its matrices are rounded to it in each step."""


def rounded(weights: Tensor) -> Tensor:
    """A matrix as a file in type ROUNDED has it; gradients pass as if it weren't rounded (Bengio et al. 2013,
    arXiv:1308.3432).
    """
    spec = FORMATS[ROUNDED]
    with torch.no_grad():
        blocks = weights.reshape(-1, spec.block_elements)
        largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
        scale = largest / -spec.offset
        steps = (blocks / scale + 0.5).floor().clamp(*spec.level_range)
        steps = torch.where(scale == 0, 0, steps)
        change = (steps * scale.half().float()).view_as(weights) - weights
    return weights + change


class Head(nn.Module):
    """The draft head of the token ids `ids`; it begins as the target's last layer, with the most heavily
    weighted neurons, and with the target's output. `rounds`: it drafts with matrices as in type ROUNDED.
    """

    ids: Tensor

    def __init__(self, target: Target, neurons: int, ids: Tensor, *, rounds: bool = False) -> None:
        super().__init__()
        self.target, width = target, target.width
        self._rounds = rounds
        self.register_buffer("ids", ids)
        last = target.weights[-1]
        up, down = last["ffn_up"], last["ffn_down"]
        best = (up.norm(dim=1) * down.norm(dim=0)).argsort(descending=True)[:neurons]
        start = {
            "nextn.eh_proj": torch.cat([0.5 * torch.eye(width), torch.eye(width)], 1).to(target.device),
            "nextn.enorm": torch.ones(width, device=target.device),
            "nextn.hnorm": torch.ones(width, device=target.device),
            "nextn.shared_head_norm": target.norm,
            "ffn_up": up[best],
            "ffn_down": down[:, best],
            OUTPUT: target.output[ids],
        }
        start |= {name: last[name] for name in KEPT}
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(value.clone()) for name, value in start.items()}
        )
        self.names = list(start)
        compiles = target.device.type == "cuda"
        self._before = torch.compile(self._projected, dynamic=False) if compiles else self._projected
        self._after = torch.compile(self._result, dynamic=False) if compiles else self._result

    def w(self, name: str) -> nn.Parameter:
        return self.weights[name.replace(".", "/")]

    def matrix(self, name: str) -> Tensor:
        """The weights of a matrix with which the head drafts."""
        weights = self.w(name)
        return rounded(weights) if self._rounds else weights

    def forward(self, embeddings: Tensor, states: Tensor, known: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(rows, tokens, width): the states after one more token; `known`: keys and values of the passes
        before, to which those of this pass are added.
        """
        first, count = len(known), embeddings.shape[1]
        angles = self.target.cos[first : first + count], self.target.sin[first : first + count]
        x, q, k, v = self._before(embeddings, states, angles)
        known.append((k, v))
        return self._after(x, self._mixed(q, known))

    def logits(self, states: Tensor) -> Tensor:
        """(…, ids): what the head drafts after its states."""
        return functional.linear(states, self.matrix(OUTPUT))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.target.normed(x, self.w(name))

    def _projected(
        self, embeddings: Tensor, states: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, and the layer's queries, keys and values."""
        t = self.target
        pair = torch.cat([self._norm(embeddings, "nextn.enorm"), self._norm(states, "nextn.hnorm")], -1)
        x = functional.linear(pair, self.matrix("nextn.eh_proj"))
        y = self._norm(x, "attn_norm")

        def heads(name: str, count: int) -> Tensor:
            return functional.linear(y, self.matrix(name)).unflatten(-1, (count, -1)).transpose(1, 2)

        q, k = (t.rotated(heads(*each), *angles) for each in (("attn_q", t.heads), ("attn_k", t.kv_heads)))
        return x, q, k, heads("attn_v", t.kv_heads)

    def _result(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + functional.linear(mixed.transpose(1, 2).flatten(2), self.matrix("attn_output"))
        hidden = functional.relu(functional.linear(self._norm(x, "ffn_norm"), self.matrix("ffn_up"))).square()
        return self._norm(x + functional.linear(hidden, self.matrix("ffn_down")), "nextn.shared_head_norm")

    def _mixed(self, q: Tensor, known: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention to the true states up to a position, and to those of the draft that began there."""
        (keys, values), *later = known
        if not later:
            return causal_attention(q, keys, values)
        count, groups = q.shape[-2], self.target.heads // self.target.kv_heads
        keys = torch.cat([keys, *(key for key, _ in later)], 2)
        values = torch.cat([values, *(value for _, value in later)], 2)
        seen = torch.eye(count, dtype=torch.bool, device=q.device)
        mask = torch.cat([torch.ones_like(seen).tril(), *[seen] * len(later)], 1)
        return functional.scaled_dot_product_attention(
            q,
            keys.repeat_interleave(groups, 1),
            values.repeat_interleave(groups, 1),
            torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf),
        )

    def continue_from(self, file: GGUFFile) -> None:
        """Take the weights of a head that was written before. If it has fewer neurons, the others give 0 at
        first.
        """
        prefix = f"blk.{self.target.layers}"
        neurons = file.tensors[f"{prefix}.ffn_up.weight"].shape[0]
        self.w("ffn_down").data[:, neurons:] = 0
        for name in self.names:
            values = read_tensor(file, f"{prefix}.{name}.weight")
            known = tuple(slice(length) for length in values.shape)
            self.w(name).data[known] = values.to(self.target.device)

    def write(self, path: Path, kind: str, output_kind: str) -> None:
        """Write the head's file: the metadata that differ from the target's, and the tensors of its layer,
        with matrices of type `kind` and an output of type `output_kind`.
        """
        t = self.target
        metadata: dict[str, Any] = {
            "general.architecture": t.name,
            "general.name": f"draft head of {t.file.metadata['general.name']}",
            "general.type": "draft_head",
            f"{t.name}.block_count": t.layers + 1,
            f"{t.name}.nextn_predict_layers": 1,
            f"{t.name}.feed_forward_length": self.w("ffn_up").shape[0],
        }
        for key, value in t.file.metadata.items():
            if key.startswith((f"{t.name}.", "general.license")):
                metadata.setdefault(key, value)
        with GGUFWriter(path, metadata) as writer:
            for name in self.names:
                values = self.w(name).detach().cpu().numpy()
                form = "F32" if values.ndim == 1 else output_kind if name == OUTPUT else kind
                writer.add_tensor(f"blk.{t.layers}.{name}.weight", values, form)
            writer.add_tensor(IDS, self.ids.cpu().numpy(), "I64")


def ids_of(file: GGUFFile) -> Tensor:
    """The token ids that a head drafts which was written before."""
    return torch.from_numpy(file.raw(IDS).reshape(-1).view(np.int64).copy())
