"""Trains a draft head (MTP) on the hidden states of a frozen target model; writes it as a small GGUF file.

python training/train_draft_head.py MODEL.gguf STATES.npz OUT.gguf --minutes 20

The head is one layer of the target's kind: x = W·[norm(e); norm(h)] with the embedding e of a token and the
target's hidden state h before it (after the output norm), then attention and a feed-forward, then a norm and
the first `--vocabulary` rows of the target's head. It learns from its own hidden states too (EAGLE-3, Li et
al. 2025, arXiv:2503.01840): in pass j a position drafts its j-th token from the states of pass j - 1, and
attends to the true states up to where the draft began and to those of the draft. The loss is the divergence
from the target's distribution. Targets are Llama-like, with RoPE of neighboring pairs and an ungated
squared-ReLU feed-forward (GGUF `arcee`), as the built-in model.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from edgeinfer_quant_formats import GGUFFile, GGUFWriter, encode

PASSES, PASS_WEIGHT = 4, 0.8
BATCH_ROWS = 8
HELD_OUT = 0.02
WARM_UP = 0.05


class Target:
    """The tensors and sizes of the target's file."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile.open(path)
        meta = self.file.metadata
        self.name = str(meta["general.architecture"])

        def count(key: str) -> int:
            return int(meta[f"{self.name}.{key}"])

        self.layers, self.width = count("block_count"), count("embedding_length")
        self.heads, self.kv_heads = count("attention.head_count"), count("attention.head_count_kv")
        self.head_dim = count("attention.key_length")
        self.rope_base = float(meta[f"{self.name}.rope.freq_base"])
        self.epsilon = float(meta[f"{self.name}.attention.layer_norm_rms_epsilon"])

    def tensor(self, name: str) -> Tensor:
        """A tensor in float32."""
        shape = self.file.tensors[name].shape
        return torch.from_numpy(np.array(self.file.decode(name), np.float32).reshape(shape))

    def last_layer(self, name: str) -> Tensor:
        return self.tensor(f"blk.{self.layers - 1}.{name}.weight")


class Head(nn.Module):
    """The draft head; it begins as the target's last layer, with the most heavily weighted neurons."""

    def __init__(self, target: Target, neurons: int) -> None:
        super().__init__()
        self.target, width = target, target.width
        up, down = target.last_layer("ffn_up"), target.last_layer("ffn_down")
        best = (up.norm(dim=1) * down.norm(dim=0)).argsort(descending=True)[:neurons]
        start = {
            "nextn.eh_proj": torch.cat([0.5 * torch.eye(width), torch.eye(width)], 1),
            "nextn.enorm": torch.ones(width),
            "nextn.hnorm": torch.ones(width),
            "nextn.shared_head_norm": target.tensor("output_norm.weight"),
            "ffn_up": up[best],
            "ffn_down": down[:, best],
        }
        kept = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm")
        start |= {name: target.last_layer(name) for name in kept}
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(value.clone()) for name, value in start.items()}
        )
        self.names = list(start)

    def continue_from(self, path: Path) -> None:
        """Take the weights of a head that was written before."""
        file, prefix = GGUFFile.open(path), f"blk.{self.target.layers}"
        for name in self.names:
            values = np.array(file.decode(f"{prefix}.{name}.weight"), np.float32)
            self.w(name).data = torch.from_numpy(values).reshape(self.w(name).shape)

    def w(self, name: str) -> Tensor:
        return self.weights[name.replace(".", "/")]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.w(name), self.target.epsilon)

    def rope(self, x: Tensor, first: int) -> Tensor:
        """Rotated heads (rows, heads, tokens, head_dim) of positions first…; neighbours are a pair."""
        half, tokens = x.shape[-1] // 2, x.shape[-2]
        rates = self.target.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(first, first + tokens, dtype=torch.float64), rates).float()
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    def heads(self, x: Tensor, name: str, count: int) -> Tensor:
        return functional.linear(x, self.w(name)).unflatten(-1, (count, -1)).transpose(1, 2)

    def forward(self, embeddings: Tensor, states: Tensor, known: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(rows, tokens, width): the states after one more token; `known`: keys and values of the passes
        before, to which those of this pass are added.
        """
        t, passes = self.target, len(known)
        pair = torch.cat([self.norm(embeddings, "nextn.enorm"), self.norm(states, "nextn.hnorm")], -1)
        x = functional.linear(pair, self.w("nextn.eh_proj"))
        y = self.norm(x, "attn_norm")
        q = self.rope(self.heads(y, "attn_q", t.heads), passes)
        k = self.rope(self.heads(y, "attn_k", t.kv_heads), passes)
        known.append((k, self.heads(y, "attn_v", t.kv_heads)))
        groups = t.heads // t.kv_heads
        keys = [key.repeat_interleave(groups, 1) for key, _ in known]
        values = [value.repeat_interleave(groups, 1) for _, value in known]
        if not passes:
            mixed = functional.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        else:
            scale, tokens = 1 / math.sqrt(t.head_dim), q.shape[-2]
            future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            before = (q @ keys[0].mT * scale).masked_fill(future, -torch.inf)
            own = [(q * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
            shares = torch.cat([before, *own], -1).softmax(-1)
            mixed = shares[..., :tokens] @ values[0]
            for index, value in enumerate(values[1:]):
                mixed = mixed + shares[..., tokens + index, None] * value
        x = x + functional.linear(mixed.transpose(1, 2).flatten(2), self.w("attn_output"))
        hidden = functional.relu(functional.linear(self.norm(x, "ffn_norm"), self.w("ffn_up"))).square()
        return self.norm(x + functional.linear(hidden, self.w("ffn_down")), "nextn.shared_head_norm")


class Tables(NamedTuple):
    """The target's embedding, and the rows of its output that the head drafts with."""

    embedding: Tensor
    output: Tensor


def draft_passes(
    head: Head, ids: Tensor, states: Tensor, embedding: Tensor, output: Tensor, passes: int = PASSES
) -> list[Tensor]:
    """The draft logits (rows, tokens, vocabulary) of each pass: pass j drafts token p + 2 + j from p."""
    count = ids.shape[1] - passes - 1
    given, known, made = states[:, :count], list[tuple[Tensor, Tensor]](), []
    for j in range(passes):
        given = head(functional.embedding(ids[:, 1 + j : 1 + j + count], embedding), given, known)
        made.append(functional.linear(given, output))
    return made


class Muon:
    """Momentum with orthogonalized updates for matrices (Jordan et al. 2024), Adam for vectors."""

    def __init__(self, head: Head, rate: float) -> None:
        self.matrices = [p for p in head.parameters() if p.ndim == 2]
        self.vectors = torch.optim.AdamW(
            [p for p in head.parameters() if p.ndim == 1], lr=1e-3, betas=(0.9, 0.95), weight_decay=0
        )
        self.momenta, self.rate = [torch.zeros_like(p) for p in self.matrices], rate

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for p, momentum in zip(self.matrices, self.momenta, strict=True):
            assert p.grad is not None
            momentum.lerp_(p.grad, 0.05)
            update = _orthogonal(p.grad.lerp(momentum, 0.95))
            p.add_(update, alpha=-factor * self.rate * 0.2 * math.sqrt(max(p.shape)))
            p.grad = None
        for group in self.vectors.param_groups:
            group["lr"] = 1e-3 * factor
        self.vectors.step()
        self.vectors.zero_grad()


def _orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with singular values of about 1, by Newton-Schulz steps."""
    x = (matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).float()


@torch.no_grad()
def acceptance(head: Head, ids: Tensor, states: Tensor, embedding: Tensor, output: Tensor) -> list[float]:
    """The share of positions of each pass at which the drafted token is the target's most probable one, given
    that the text's tokens before it are.
    """
    alive, shares = None, []
    whole = functional.linear(states, embedding).argmax(-1)
    made = draft_passes(head, ids, states, embedding, output)
    for j, logits in enumerate(made):
        best = whole[:, 1 + j : 1 + j + logits.shape[1]]
        agreed = logits.argmax(-1) == best
        alive = torch.ones_like(agreed) if alive is None else alive
        shares.append(float(agreed[alive].float().mean()))
        alive = alive & agreed & (best == ids[:, 2 + j : 2 + j + logits.shape[1]])
    return shares


def divergence(head: Head, data: dict[str, Tensor], rows: Tensor, tables: Tables, passes: int) -> Tensor:
    """The loss: the divergence of the draft from the target's distribution, of all passes of some rows."""
    ids, states = data["ids"][rows], data["states"][rows].float()
    with torch.autocast("cpu", torch.bfloat16):
        made = draft_passes(head, ids, states, *tables, passes)
        with torch.no_grad():
            goal = functional.linear(states, tables.output)
    target, total = goal.float().log_softmax(-1), torch.zeros(())
    for j, logits in enumerate(made):
        wanted = target[:, 1 + j : 1 + j + logits.shape[1]].flatten(0, 1)
        drafted = logits.float().log_softmax(-1).flatten(0, 1)
        loss = functional.kl_div(drafted, wanted, reduction="batchmean", log_target=True)
        total = total + PASS_WEIGHT**j * loss
    return total


def train(head: Head, data: dict[str, Tensor], tables: Tables, options: argparse.Namespace) -> None:
    """Train for some minutes; the rate falls to 0 as the time passes."""
    count, optimizer = len(data["ids"]), Muon(head, options.rate)
    held = max(1, int(HELD_OUT * count))
    check = data["ids"][:held], data["states"][:held].float()
    generator, began, shown, steps = torch.Generator().manual_seed(1), time.monotonic(), 0.0, 0
    while (done := (time.monotonic() - began) / (60 * options.minutes)) < 1:
        rows = held + torch.randint(count - held, (BATCH_ROWS,), generator=generator)
        loss = divergence(head, data, rows, tables, options.passes)
        loss.backward()
        optimizer.step(min(1.0, done / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done)))
        steps += 1
        if done >= shown:
            text = " ".join(f"{share:.3f}" for share in acceptance(head, *check, *tables))
            print(f"{done:4.0%}  step {steps}  loss {float(loss.detach()):.3f}  accepted {text}", flush=True)
            shown += 0.1
    print("accepted " + " ".join(f"{share:.3f}" for share in acceptance(head, *check, *tables)), flush=True)


def write(head: Head, path: Path, kind: str, vocabulary: int) -> None:
    """Write the head's file: the metadata that differ from the target's, and the tensors of its layer."""
    t = head.target
    neurons = head.w("ffn_up").shape[0]
    metadata: dict[str, Any] = {
        "general.architecture": t.name,
        "general.name": f"draft head of {t.file.metadata['general.name']}",
        "general.type": "draft_head",
        f"{t.name}.block_count": t.layers + 1,
        f"{t.name}.nextn_predict_layers": 1,
        f"{t.name}.feed_forward_length": neurons,
        f"{t.name}.nextn_vocabulary": vocabulary,
    }
    for key, value in t.file.metadata.items():
        if key.startswith((f"{t.name}.", "general.license")):
            metadata.setdefault(key, value)
    with GGUFWriter(path, metadata) as writer:
        for name in head.names:
            values = head.w(name).detach().numpy()
            form = kind if values.ndim == 2 else "F32"
            blocks = encode(np.ascontiguousarray(values), form)
            writer.add_tensor(f"blk.{t.layers}.{name}.weight", blocks, form, values.shape)


def main() -> None:
    """Train a head and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="the target's .gguf file")
    parser.add_argument("states", type=Path, help="the file of collect_states.py")
    parser.add_argument("out", type=Path, help="the .gguf file to write")
    parser.add_argument("--minutes", type=float, default=20, help="of training (%(default)s)")
    parser.add_argument("--neurons", type=int, default=1024, help="of the feed-forward (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=4096, help="ids that it can draft (%(default)s)")
    parser.add_argument("--passes", type=int, default=PASSES, help="of each position (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate (%(default)s)")
    parser.add_argument("--type", default="Q8_0", help="of its matrices (%(default)s)")
    parser.add_argument("--begin", type=Path, help="a head of the same sizes to continue from, best in F16")
    parser.add_argument("--threads", type=int, help="(all)")
    options = parser.parse_args()
    torch.manual_seed(1)
    if options.threads:
        torch.set_num_threads(options.threads)
    target = Target(options.model)
    loaded = np.load(options.states)
    data = {name: torch.from_numpy(loaded[name]) for name in ("ids", "states")}
    data["ids"] = data["ids"].long()
    embedding = target.tensor("token_embd.weight")
    head = Head(target, options.neurons)
    if options.begin:
        head.continue_from(options.begin)
    train(head, data, Tables(embedding, embedding[: options.vocabulary]), options)
    write(head, options.out, options.type, options.vocabulary)


if __name__ == "__main__":
    main()
