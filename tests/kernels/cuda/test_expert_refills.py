"""Experts that change places while a divided mixture decodes: its logits stay those of the whole."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgeinfer_kernels.cpu.objects import Kernels
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.expert_refills import TOKENS_A_LOOK, ExpertRefills
from edgeinfer_kernels.division import LayerDivision
from edgeinfer_offload.expert_slots import ExpertSlots, Swap
from tests.kernels.cuda.decoders import Decoder, opened, worst
from tests.kernels.cuda.divided import divided
from tests.kernels.cuda.test_split_backend import TOLERANCE, read_split
from tests.random_models import ZOO


class Restless(ExpertSlots):
    """Always wants the expert with the lowest number that has no slot, in each layer in turn."""

    turn = 0
    noted: npt.NDArray[np.int64]

    def note(self, chosen: npt.NDArray[np.int64], tokens: int) -> None:
        before = getattr(self, "noted", np.zeros_like(chosen))
        self.noted = before + chosen
        super().note(chosen, tokens)

    def proposal(self) -> Swap | None:
        self.turn += 1
        row = self.turn % len(self.slots)
        leaves = int(np.argmax(self.slots[row]))
        expert = int(np.argmin(np.where(np.arange(self.slots.shape[1]) > leaves, self.slots[row], 9)))
        if self.slots[row, expert] >= 0:
            expert = int(np.argmin(self.slots[row]))
        return Swap(row, expert, int(self.slots[row, leaves]), leaves, 1.0)


def changing(decoder: Decoder) -> list[LayerDivision]:
    """A third of the experts of every layer on the device, all of them on the host."""
    found = []
    for index, layer in enumerate(decoder.weights.layers):
        count = layer.feed_forward.ffn_up_exps.experts  # type: ignore[union-attr]
        found.append(LayerDivision(True, experts=tuple(range(index % 2, count, 3)), changing=True))
    return found


def experts_of(divisions: Sequence[LayerDivision]) -> list[tuple[int, ...]]:
    return [division.experts for division in divisions]


@pytest.mark.parametrize(
    ("name", "send_from"), [("qwen2moe", 10), ("gpt-oss", 10), ("gpt-oss", None), ("smallthinker", None)]
)
def test_logits_are_those_of_the_whole_whoever_comes_and_goes(
    device: str, kernels: Kernels, tmp_path: Path, name: str, send_from: int | None
) -> None:
    steps = (4, 4, 1, 1, 1, 12, 1, 1, 1, 1)
    with opened(ZOO[name], tmp_path) as decoder:
        divisions, ids = changing(decoder), decoder.ids(sum(steps))
        count = decoder.weights.layers[0].feed_forward.ffn_up_exps.experts  # type: ignore[union-attr]
        with divided(decoder, device, divisions, kernels, send_from=send_from) as backend:
            policy, device_half = Restless(count, experts_of(divisions)), backend.device
            assert isinstance(device_half, CudaBackend)
            device_half.refill_experts(policy)
            found = read_split(backend, ids, steps)
            assert device_half.changed_experts or device == "cuda"
        assert (policy.slots != ExpertSlots(count, experts_of(divisions)).slots).any()
        assert worst(found, decoder.reference_logits(ids)) < TOLERANCE


def test_the_policy_hears_of_every_expert_that_steps_asked_for(
    device: str, kernels: Kernels, tmp_path: Path
) -> None:
    with opened(ZOO["granitemoe"], tmp_path) as decoder:
        divisions = changing(decoder)
        with divided(decoder, device, divisions, kernels) as backend:
            facts = decoder.specification.layers[0].feed_forward
            policy = Restless(facts.count, experts_of(divisions))  # type: ignore[union-attr]
            assert isinstance(backend.device, CudaBackend)
            backend.device.refill_experts(policy)
            widths = (4, 3, 1, 1)
            assert sum(widths[:-1]) == TOKENS_A_LOOK
            read_split(backend, decoder.ids(9), widths)
            if device == "cuda":
                backend.device._steps.refills.settle()  # type: ignore[union-attr]
            seen, _ = backend.pairs
        # A device that is at the next step meanwhile may have counted that too.
        assert policy.noted.sum() in ((seen, seen * 8 // 9) if device == "cuda" else (seen * 8 // 9,))
        assert (policy.noted.sum(axis=1) == policy.noted.sum() // len(divisions)).all()


class Exhausting(Restless):
    """Meets a device without memory."""

    def proposal(self) -> Swap | None:
        raise torch.OutOfMemoryError("nothing left")


def test_a_device_without_memory_ends_the_changes_and_not_the_answer() -> None:
    refills = ExpertRefills([], torch.zeros((1, 4), dtype=torch.int32), Exhausting(4, []))
    for _ in range(5):
        refills.between_steps(TOKENS_A_LOOK)
        refills.settle()
    assert refills.ended
    assert refills.changes == 0
    refills.close()
