"""An engine hands out hidden states to the drafter that asks for them, and copies nothing otherwise."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import edgeinfer
from edgeinfer.engine.hidden_states import OUTPUT_NORM, HiddenStep
from edgeinfer.errors import SettingError
from tests.edgeinfer.speculation.test_drafting import always_draft

PROMPT = "Once upon a time, there was a little girl named Lily."


class Reader(edgeinfer.Drafter):
    """Proposes nothing, and keeps what it observes."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self.steps: list[tuple[int, list[int], list[np.ndarray]]] = []

    @property
    def hidden_layers(self) -> Sequence[int]:
        return self._layers

    def observe(self, step: HiddenStep) -> None:
        assert list(step.text[step.start :]) == list(step.ids)
        self.steps.append((step.start, list(step.ids), [np.array(each) for each in step.states]))

    def propose(self, history: Sequence[int], request: edgeinfer.DraftRequest) -> edgeinfer.Draft:
        return edgeinfer.Draft()


@pytest.fixture(scope="module")
def plain() -> Iterator[edgeinfer.Model]:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=None, context=128) as model:
        yield model


@pytest.mark.slow
def test_a_drafter_observes_every_token_of_the_text(plain: edgeinfer.Model) -> None:
    reader = Reader((0, OUTPUT_NORM))
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=reader, context=128) as model:
        reader.steps.clear()
        always_draft(model, 1)  # no pause, in which steps are left out
        completion = model.generate(PROMPT, max_tokens=12, temperature=0.0)
    assert completion.ids == plain.generate(PROMPT, max_tokens=12, temperature=0.0).ids
    text = [*completion.prompt_ids, *completion.ids]
    observed = [token for _, ids, _ in reader.steps for token in ids]
    assert observed == text[: len(observed)]
    assert len(observed) == len(text) - 1
    assert [start for start, _, _ in reader.steps] == [
        sum(len(ids) for _, ids, _ in reader.steps[:index]) for index in range(len(reader.steps))
    ]


def test_the_states_after_the_output_norm_are_the_input_of_the_head(plain: edgeinfer.Model) -> None:
    reader = Reader((OUTPUT_NORM,))
    ids = plain.tokenizer.encode(PROMPT)
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=reader, context=128) as model:
        reader.steps.clear()
        model.engine.rewind(0)
        model.engine.append(ids)
    plain.engine.rewind(0)
    expected = plain.engine.rows(ids)
    np.testing.assert_array_equal(np.concatenate([states[0] for _, _, states in reader.steps]), expected)


@pytest.mark.parametrize("layers", [(11,), (-2,)])
def test_a_missing_layer_is_one_clear_line(layers: tuple[int, ...]) -> None:
    with pytest.raises(SettingError, match=f"after {layers[0]} layers, wanted -1 to 10"):
        edgeinfer.load("tiny", device="cpu", threads=1, draft=Reader(layers), context=128)
