"""Trains a draft head (MTP) on texts of a frozen target model; writes it as a small GGUF file.

python training/train_draft_head.py MODEL.gguf TEXTS.npz OUT.gguf --minutes 6 --device cuda

The head is one layer of the target's kind: x = W·[norm(e); norm(h)] with the embedding e of a token and the
target's hidden state h before it (after the output norm), then attention and a feed-forward, then a norm and
the first `--vocabulary` rows of the target's head. It learns from its own hidden states too (EAGLE-3, Li et
al. 2025, arXiv:2503.01840): in pass j a position drafts its j-th token from the states of pass j - 1, and
attends to the true states up to where the draft began and to those of the draft. The loss is the divergence
from the target's distribution, and how improbable the target's best token is to the head: greedy completions
accept no other one.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frozen_target import Target, causal_attention
from torch import Tensor, nn
from torch.nn import functional

from edgeinfer_quant_formats import GGUFFile, GGUFWriter, encode

PASSES, PASS_WEIGHT = 5, 0.9
BEST_WEIGHT = 0.5
"""Of the target's best token in the loss."""
HELD_OUT_ROWS = 64
WARM_UP = 0.03
ALIGNED = 8
"""Masks of attention of a multiple of this size needn't be copied."""


class Head(nn.Module):
    """The draft head; it begins as the target's last layer, with the most heavily weighted neurons."""

    def __init__(self, target: Target, neurons: int) -> None:
        super().__init__()
        self.target, width = target, target.width
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
        }
        kept = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm")
        start |= {name: last[name] for name in kept}
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(value.clone()) for name, value in start.items()}
        )
        self.names = list(start)

    def continue_from(self, path: Path) -> None:
        """Take the weights of a head that was written before. If it has fewer neurons, the others give 0 at
        first.
        """
        file, prefix = GGUFFile.open(path), f"blk.{self.target.layers}"
        neurons = file.tensors[f"{prefix}.ffn_up.weight"].shape[0]
        self.w("ffn_down").data[:, neurons:] = 0
        for name in self.names:
            tensor = f"{prefix}.{name}.weight"
            values = np.array(file.decode(tensor), np.float32).reshape(file.tensors[tensor].shape)
            known = tuple(slice(length) for length in values.shape)
            self.w(name).data[known] = torch.from_numpy(values).to(self.target.device)

    def w(self, name: str) -> Tensor:
        return self.weights[name.replace(".", "/")]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.target.normed(x, self.w(name))

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
        q = t.rope(self.heads(y, "attn_q", t.heads), passes)
        k = t.rope(self.heads(y, "attn_k", t.kv_heads), passes)
        known.append((k, self.heads(y, "attn_v", t.kv_heads)))
        mixed = self._mixed(q, known)
        x = x + functional.linear(mixed.transpose(1, 2).flatten(2), self.w("attn_output"))
        hidden = functional.relu(functional.linear(self.norm(x, "ffn_norm"), self.w("ffn_up"))).square()
        return self.norm(x + functional.linear(hidden, self.w("ffn_down")), "nextn.shared_head_norm")

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


def cross_entropy(logits: Tensor, goal: Tensor) -> Tensor:
    """The mean over all positions; the weights of a position's ids in `goal` need not add up to 1."""
    x, weights = logits.float(), goal.float()
    return (weights.sum(-1) * x.logsumexp(-1) - (weights * x).sum(-1)).mean()


FUSED = torch.compile(cross_entropy)
"""In few kernels: otherwise most of a step on a GPU passes in those of the loss."""


class Step:
    """Rows of text with the target's states: what the head is trained and judged on."""

    def __init__(self, head: Head, ids: Tensor, vocabulary: int, passes: int) -> None:
        target = head.target
        self._cross_entropy = FUSED if target.device.type == "cuda" else cross_entropy
        self._head, self._ids, self._passes = head, ids, passes
        self._output = target.output[:vocabulary]
        self._states = target.hidden(ids)
        self._count = (ids.shape[1] - passes - 1) // ALIGNED * ALIGNED

    def _after(self, values: Tensor, first: int) -> Tensor:
        """The values of the positions from `first` on."""
        return values[:, first : first + self._count]

    def drafts(self) -> Iterator[Tensor]:
        """The draft logits (rows, tokens, vocabulary) of each pass: pass j drafts token p + 2 + j from p."""
        given, known = self._after(self._states, 0), list[tuple[Tensor, Tensor]]()
        for j in range(self._passes):
            embedded = functional.embedding(self._after(self._ids, 1 + j), self._head.target.embedding)
            given = self._head(embedded, given, known)
            yield functional.linear(given, self._output)

    def loss(self, best_weight: float) -> Tensor:
        """The loss of all passes, but for the entropy of the target."""
        with torch.no_grad():
            goal = functional.linear(self._states, self._output).softmax(-1, torch.float32)
            best = goal.argmax(-1, keepdim=True)
            goal.scatter_add_(-1, best, torch.full(best.shape, best_weight, device=goal.device))
            goal = goal.bfloat16()
        total = torch.zeros((), device=goal.device)
        for j, logits in enumerate(self.drafts()):
            total = total + PASS_WEIGHT**j * self._cross_entropy(logits, self._after(goal, 1 + j))
        return total

    def acceptance(self) -> list[float]:
        """The share of positions of each pass at which the drafted token is the target's most probable one,
        given that the text's tokens before it are. Then the expected tokens of a forward with as many draft
        tokens.
        """
        whole = functional.linear(self._states, self._head.target.output).argmax(-1)
        alive, shares, tokens = torch.ones_like(self._after(whole, 0), dtype=torch.bool), [], 1.0
        for j, logits in enumerate(self.drafts()):
            best = self._after(whole, 1 + j)
            agreed = logits.argmax(-1) == best
            tokens += float((alive & agreed).float().mean())
            shares.append(float(agreed[alive].float().mean()))
            alive = alive & agreed & (best == self._after(self._ids, 2 + j))
        return [*shares, tokens]


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


def train(head: Head, ids: Tensor, options: argparse.Namespace) -> None:
    """Train for some minutes; the rate falls to 0 as the time passes."""
    optimizer, device, vocabulary = Muon(head, options.rate), head.target.device, options.vocabulary
    held = min(HELD_OUT_ROWS, max(1, len(ids) // 50))
    generator, shown, steps = torch.Generator().manual_seed(1), 0.0, 0

    def report(text: str) -> None:
        with torch.no_grad():
            found = Step(head, ids[:held].to(device), vocabulary, options.passes).acceptance()
        *shares, tokens = found
        accepted = " ".join(f"{share:.3f}" for share in shares)
        print(f"{text}accepted {accepted}, {tokens:.2f} tokens per forward", flush=True)

    began, seconds = time.monotonic(), 60 * options.minutes
    while (spent := time.monotonic() - began) < seconds:
        done = spent / seconds
        rows = held + torch.randint(len(ids) - held, (options.rows,), generator=generator)
        with torch.autocast(device.type, torch.bfloat16):
            loss = Step(head, ids[rows].to(device), vocabulary, options.passes).loss(options.best)
        loss.backward()
        optimizer.step(min(1.0, done / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done)))
        steps += 1
        if done >= shown:
            report(f"{done:4.0%}  step {steps}  loss {float(loss.detach()):.3f}  ")
            shown += 0.1
    report("")


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
            values = head.w(name).detach().cpu().numpy()
            form = kind if values.ndim == 2 else "F32"
            blocks = encode(np.ascontiguousarray(values), form)
            writer.add_tensor(f"blk.{t.layers}.{name}.weight", blocks, form, values.shape)


def main() -> None:
    """Train a head and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="the target's .gguf file")
    parser.add_argument("texts", type=Path, help="the file of write_texts.py")
    parser.add_argument("out", type=Path, help="the .gguf file to write")
    parser.add_argument("--minutes", type=float, default=20, help="of training (%(default)s)")
    parser.add_argument("--neurons", type=int, default=1024, help="of the feed-forward (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=4096, help="ids that it can draft (%(default)s)")
    parser.add_argument("--passes", type=int, default=PASSES, help="of each position (%(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="of text in a step (%(default)s)")
    parser.add_argument(
        "--best", type=float, default=BEST_WEIGHT, help="weight of the best token (%(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="of torch (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate (%(default)s)")
    parser.add_argument("--type", default="Q8_0", help="of its matrices (%(default)s)")
    parser.add_argument("--begin", type=Path, help="a head to continue from, of no more neurons, best in F16")
    parser.add_argument("--threads", type=int, help="(all)")
    options = parser.parse_args()
    torch.manual_seed(1)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    target = Target(options.model, torch.device(options.device))
    head = Head(target, options.neurons)
    if options.begin:
        head.continue_from(options.begin)
    train(head, torch.from_numpy(np.load(options.texts)["ids"]).long(), options)
    write(head, options.out, options.type, options.vocabulary)


if __name__ == "__main__":
    main()
