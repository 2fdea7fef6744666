"""Trains a draft head (MTP) on texts of a frozen target model; writes it as a small GGUF file.

python training/train_draft_head.py MODEL.gguf OUT.gguf TEXTS.npz... --steps 6000 --device cuda
torchrun --nproc-per-node 4 training/train_draft_head.py ...

The head drafts the token ids that are most frequent in the texts. It learns from its own hidden states too
(EAGLE-3, Li et al. 2025, arXiv:2503.01840): in pass j a position drafts its j-th token from the states of
pass j - 1, and attends to the true states up to where the draft began and to those of the draft. The loss is
the divergence from the target's distribution, and how improbable the target's best token is to the head:
greedy completions accept no other one. A head in Q4_0 is trained with weights that are rounded to it. With
several processes each has a GPU and other rows of text.
"""

import argparse
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from draft_head import OUTPUT, ROUNDED, Head, ids_of
from frozen_target import Target
from torch import Tensor, distributed
from torch.nn import functional

from edgeinfer_quant_formats import GGUFFile

PASSES, PASS_WEIGHT = 5, 0.9
HELD_OUT_ROWS = 128
WARM_UP = 0.03
REPORTS = 10
ALIGNED = 8
"""Masks of attention of a multiple of this size needn't be copied."""
ADAM_RATE = 1e-3


def cross_entropy(logits: Tensor, goal: Tensor) -> Tensor:
    """The mean over all positions; the weights of a position's ids in `goal` need not add up to 1."""
    x, weights = logits.float(), goal.float()
    return (weights.sum(-1) * x.logsumexp(-1) - (weights * x).sum(-1)).mean()


FUSED = torch.compile(cross_entropy)
"""In few kernels: otherwise most of a step on a GPU passes in those of the loss."""


class Lesson:
    """Rows of text with the target's states: what the head is trained and judged on."""

    def __init__(self, head: Head, ids: Tensor, passes: int) -> None:
        target = head.target
        self._cross_entropy = FUSED if target.device.type == "cuda" else cross_entropy
        self._head, self._ids, self._passes = head, ids, passes
        self._states = target.hidden(ids)
        self._count = (ids.shape[1] - passes - 1) // ALIGNED * ALIGNED

    def _after(self, values: Tensor, first: int) -> Tensor:
        """The values of the positions from `first` on."""
        return values[:, first : first + self._count]

    def drafts(self) -> Iterator[Tensor]:
        """The draft logits (rows, tokens, drafted ids) of each pass: pass j drafts token p + 2 + j from p."""
        given, known = self._after(self._states, 0), list[tuple[Tensor, Tensor]]()
        for j in range(self._passes):
            embedded = functional.embedding(self._after(self._ids, 1 + j), self._head.target.embedding)
            given = self._head(embedded, given, known)
            yield self._head.logits(given)

    def loss(self, best_weight: float) -> Tensor:
        """The loss of all passes, but for the entropy of the target."""
        with torch.no_grad():
            output = self._head.target.output[self._head.ids]
            goal = functional.linear(self._states, output).softmax(-1, torch.float32)
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
        with torch.autocast(self._ids.device.type, enabled=False):
            whole = functional.linear(self._states, self._head.target.output).argmax(-1)
        alive, shares, tokens = torch.ones_like(self._after(whole, 0), dtype=torch.bool), [], 1.0
        for j, logits in enumerate(self.drafts()):
            best = self._after(whole, 1 + j)
            agreed = self._head.ids[logits.argmax(-1)] == best
            tokens += float((alive & agreed).float().mean())
            shares.append(float(agreed[alive].float().mean()))
            alive = alive & agreed & (best == self._after(self._ids, 2 + j))
        return [*shares, tokens]


class Muon:
    """Momentum with orthogonalized updates for matrices (Jordan et al. 2024), Adam for the others.
    Of several processes each has the mean of all gradients.
    """

    def __init__(self, head: Head, rate: float) -> None:
        output = head.w(OUTPUT)
        self.matrices = [p for p in head.parameters() if p.ndim == 2 and p is not output]
        vectors = [p for p in head.parameters() if p.ndim == 1]
        self.adam = torch.optim.AdamW([*vectors, output], betas=(0.9, 0.95), weight_decay=0)
        self.momenta, self.rate = [torch.zeros_like(p) for p in self.matrices], rate

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Change the weights by their gradients, with a part of the learning rates."""
        if distributed.is_initialized():
            for p in (*self.matrices, *self.adam.param_groups[0]["params"]):
                distributed.all_reduce(p.grad, distributed.ReduceOp.AVG)
        for p, momentum in zip(self.matrices, self.momenta, strict=True):
            assert p.grad is not None
            momentum.lerp_(p.grad, 0.05)
            update = _orthogonal(p.grad.lerp(momentum, 0.95))
            p.add_(update, alpha=-factor * self.rate * 0.2 * math.sqrt(max(p.shape)))
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * factor
        self.adam.step()


def _orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with singular values of about 1, by Newton-Schulz steps."""
    x = (matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).float()


class Gradients:
    """Computes the gradients of a step; on a GPU it replays a captured one, as the host would take longer to
    launch the kernels than these take.
    """

    def __init__(self, head: Head, rows: Tensor, options: argparse.Namespace) -> None:
        """`rows`: as many as those of each step, of the same length."""
        self._head, self._rows, self._options = head, rows, options
        self._replay: Callable[[], None] | None = None
        if head.target.device.type == "cuda":
            self._capture()

    def of(self, rows: Tensor) -> Tensor:
        """The loss of rows of text; the weights then have its gradients."""
        self._rows.copy_(rows)
        if self._replay is None:
            self._compute()
        else:
            self._replay()
        return self._loss

    def _compute(self) -> None:
        self._head.zero_grad(set_to_none=True)
        with torch.autocast(self._rows.device.type, torch.bfloat16, cache_enabled=False):
            lesson = Lesson(self._head, self._rows, self._options.passes)
            loss = lesson.loss(self._options.best)
        loss.backward()
        self._loss = loss.detach()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._head.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self._compute()
        self._replay = graph.replay


def train(head: Head, ids: Tensor, options: argparse.Namespace) -> None:
    """Train for some steps; the rate rises at first, and falls to 0 at the end. The head is written with
    each report.
    """
    optimizer, device, is_first = Muon(head, options.rate), head.target.device, process() == 0
    held = min(HELD_OUT_ROWS, max(1, len(ids) // 50))
    generator = torch.Generator().manual_seed(1 + process())

    def report(text: str) -> None:
        chunks = ids[:held].split(options.rows)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            found = [Lesson(head, chunk.to(device), options.passes).acceptance() for chunk in chunks]
        *shares, tokens = np.mean(found, 0)
        accepted = " ".join(f"{share:.3f}" for share in shares)
        print(f"{text}accepted {accepted}, {tokens:.2f} tokens per forward", flush=True)

    if is_first:
        report("")
        head.write(options.out, options.type, options.output_type)
    gradients = Gradients(head, ids[: options.rows].to(device), options)
    for step in range(options.steps):
        rows = held + torch.randint(len(ids) - held, (options.rows,), generator=generator)
        loss = gradients.of(ids[rows])
        done = (step + 1) / options.steps
        optimizer.step(min(1.0, done / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done)))
        if is_first and (step + 1) * REPORTS // options.steps > step * REPORTS // options.steps:
            report(f"{done:4.0%}  step {step + 1}  loss {float(loss):.3f}  ")
            head.write(options.out, options.type, options.output_type)


def process() -> int:
    """The number of this process among those that train together."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def frequent(ids: Tensor, vocabulary: int, count: int) -> Tensor:
    """The most frequent token ids of texts, in ascending order."""
    return torch.bincount(ids.flatten(), minlength=vocabulary).argsort(descending=True)[:count].sort().values


def main() -> None:
    """Train a head and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="the target's .gguf file")
    parser.add_argument("out", type=Path, help="the .gguf file to write")
    parser.add_argument("texts", type=Path, nargs="+", help="files of write_texts.py")
    parser.add_argument("--steps", type=int, default=6000, help="of training (%(default)s)")
    parser.add_argument("--neurons", type=int, default=1024, help="of the feed-forward (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=4096, help="ids that it can draft (%(default)s)")
    parser.add_argument("--passes", type=int, default=PASSES, help="of each position (%(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="of text in a step of a process (%(default)s)")
    parser.add_argument("--best", type=float, default=1.0, help="weight of the best token (%(default)s)")
    parser.add_argument("--device", default="cpu", help="of torch (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate (%(default)s)")
    parser.add_argument("--type", default="Q6_K", help="of its matrices (%(default)s)")
    parser.add_argument("--output-type", default="Q4_K", help="of its output (%(default)s)")
    parser.add_argument("--begin", type=Path, help="a head to continue from, of no more neurons, best in F16")
    parser.add_argument("--threads", type=int, help="(all)")
    options = parser.parse_args()
    torch.manual_seed(1)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    if "RANK" in os.environ:
        distributed.init_process_group()
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        if device.type == "cuda":
            torch.cuda.set_device(device)
    target = Target(options.model, device)
    ids = torch.from_numpy(np.concatenate([np.load(path)["ids"] for path in options.texts])).long()
    begin = GGUFFile.open(options.begin) if options.begin else None
    drafted = frequent(ids, len(target.embedding), options.vocabulary) if begin is None else ids_of(begin)
    rounds = (options.type, options.output_type) == (ROUNDED, ROUNDED)
    head = Head(target, options.neurons, drafted.to(device), rounds=rounds)
    if begin is not None:
        head.continue_from(begin)
    train(head, ids, options)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
