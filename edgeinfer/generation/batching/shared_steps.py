"""The next tokens of live requests that share a forward, with or without drafts."""

from collections.abc import Collection, Mapping, Sequence

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.generation.loop import LiveRequest, SampledToken
from edgeinfer.speculation.batched.batch_speculator import BatchedText, BatchSpeculator
from edgeinfer.speculation.drafter import Draft
from edgeinfer_kernels.backend import BatchPositions, HiddenStates


def sample_rows(
    engine: NativeEngine,
    x: HiddenStates,
    last: Mapping[int, LiveRequest],
    following: BatchPositions | None = None,
) -> None:
    """Sample the next token of each request after its row of the hidden states x, as
    `NativeEngine.sample_batch`, or on the host.
    """
    plain = {row: live.sequence for row, live in last.items() if live.sequence.is_plain}
    rows = {row: (each.sampler, each.ids) for row, each in plain.items()}
    sampled = engine.sample_batch(x, rows, following)
    logits = None if sampled.keys() >= last.keys() else engine.logits(x)
    for row, live in last.items():
        try:
            if logits is None or row in sampled:
                live.sequence.sampler.accept(sampled[row])
                live.accept([SampledToken(sampled[row], None)])
            else:
                live.accept([live.sequence.sample(logits[row])])
        except Exception as error:
            live.fail(error)


class SharedDrafts:
    """The drafts of requests that share their steps, if the model has a drafter."""

    def __init__(self, engine: NativeEngine, end_ids: Collection[int]) -> None:
        self._engine, self._end_ids = engine, end_ids
        self._speculation: BatchSpeculator | None = None
        self._texts: dict[LiveRequest, BatchedText] = {}
        """The texts of the step in progress."""

    @property
    def may_draft(self) -> bool:
        """Whether the next step is likely to have drafts."""
        return self._speculation is not None and self._speculation.may_draft

    def draft(self, live: Sequence[LiveRequest], rows: int) -> dict[LiveRequest, Draft]:
        """The drafts of requests that begin a step of at most `rows` tokens."""
        speculator = next((each.speculator for each in live if each.speculator is not None), None)
        self._texts = {}
        if speculator is None:
            return {}
        if self._speculation is None or self._speculation.speculator is not speculator:
            self._speculation = BatchSpeculator(speculator)
        self._texts = {each: self._text(each) for each in live}
        drafts = self._speculation.draft(list(self._texts.values()), rows)
        return {each: draft for each, draft in zip(live, drafts, strict=True) if draft.ids}

    def _text(self, live: LiveRequest) -> BatchedText:
        sequence, limit = live.sequence, 0
        if live.speculator is not None and sequence.constraint is None:
            limit = min(sequence.remaining, self._engine.context - len(sequence.ids)) - 1
        return BatchedText(live, sequence.ids, sequence.sampler, max(0, limit), live.drafts)

    def accept(
        self, x: HiddenStates, last: Mapping[int, LiveRequest], drafts: Mapping[LiveRequest, Draft]
    ) -> None:
        """Give each request its next tokens: after its row of x, and after the rows of its draft, which
        follow it. The pages of a request then hold its tokens but for the last.
        """
        assert self._speculation is not None
        best = self._best(x, last, drafts)
        logits = self._engine.logits(x) if best is None else None
        for row, live in last.items():
            draft = drafts.get(live, Draft())
            rows = slice(row, row + 1 + len(draft.ids))
            assert live.text is not None
            live.text.length -= len(draft.ids)
            try:
                own = None if logits is None else logits[rows]
                ids = [] if best is None else best[rows]
                tokens = self._speculation.verify(self._texts[live], draft, own, ids, self._end_ids)
                live.accept(tokens)
            except Exception as error:
                live.fail(error)
            else:
                length = live.text.length + len(tokens) - 1
                live.text.length = min(length, len(live.sequence.ids))

    def _best(
        self, x: HiddenStates, last: Mapping[int, LiveRequest], drafts: Mapping[LiveRequest, Draft]
    ) -> list[int] | None:
        """The argmax of each row, found on the device; None: a request needs more than that, or the device
        can't.
        """
        sequences = [live.sequence for live in last.values()]
        if not all(sequence.is_plain and sequence.sampler.takes_best for sequence in sequences):
            return None
        rows = {
            row + index: (live.sequence.sampler, live.sequence.ids)
            for row, live in last.items()
            for index in range(1 + len(drafts[live].ids if live in drafts else ()))
        }
        found = self._engine.sample_batch(x, rows)
        return [found.get(row, 0) for row in range(len(x))] if found.keys() >= rows.keys() else None

    def end_step(self, rows: int, tokens: int) -> None:
        """The step had `rows` rows, and gave `tokens` tokens in all."""
        if self._texts and self._speculation is not None:
            self._speculation.end_step(rows, tokens)

    def forget(self, live: LiveRequest) -> None:
        """The request has ended."""
        if self._speculation is not None:
            self._speculation.forget(live)
