"""The draft controller with the tokens and probabilities of the built-in draft head, in simulated time.

The head drafts at every position of greedy completions, so that a completion with any draft lengths can be
replayed: a clock advances by given costs. Compared are drafts of the best constant length, drafts that end
where no other token pays with at most the controller's length, and the same with the length that it allows a
drafter that ends drafts itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.generation.request import Prompt
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.draft_controller import DraftController
from edgeinfer.speculation.draft_costs import MAX_DRAFTED, DraftCosts, MeasuredCosts
from edgeinfer.speculation.drafter import Draft, DraftRequest
from harness.drafts.comparison import STORY_START, report

STORIES = (
    STORY_START,
    "Ben and Mia went to the park.",
    "Max was a dog. He lived with",
    "One day, a boy",
    "There was a big tree in the garden.",
    "A small bird wanted to fly.",
    "Tom had a red ball.",
    "Sara and her mom went to the shop.",
)
SUBJECTS = (
    "a fox and a bear",
    "a hedgehog",
    "a girl with a key",
    "rain",
    "a cat",
    "two friends",
    "a boat",
    "snow",
)
TEXTS: dict[str, Sequence[Prompt]] = {
    "stories": STORIES,
    "chats": [[{"role": "user", "content": f"Tell me a story about {subject}."}] for subject in SUBJECTS],
}
COSTS = {
    "a small model, 16 threads": MeasuredCosts({1: 1.0, 2: 1.3, 4: 1.7, 8: 2.4}, 0.1, 0.3),
    "a small model, one thread": MeasuredCosts({1: 1.0, 2: 1.3, 4: 2.0, 8: 3.5}, 0.13, 0.2),
    "a model read from memory": MeasuredCosts({1: 1.0, 2: 1.0, 4: 1.05, 8: 1.4}, 0.08, 0.02),
}
"""As measured on CPUs, in steps of one token: those of steps, of each draft token, and of a draft."""
PASSES = 3
"""How many times the controller sees all texts of a kind."""


@dataclass(frozen=True)
class Recording:
    """A greedy completion, and a draft of the most tokens at each of its positions."""

    ids: Sequence[int]
    drafts: Sequence[Draft]

    @classmethod
    def of(cls, model: Model, prompt: Prompt, tokens: int) -> "Recording":
        """Of a model with a draft head."""
        speculator = model.speculator
        assert speculator is not None
        completion = model.generate(prompt, max_tokens=tokens, temperature=0.0)
        request, engine = DraftRequest(MAX_DRAFTED, SamplingParams(temperature=0.0)), model.engine
        text, first = [*completion.prompt_ids, *completion.ids], len(completion.prompt_ids)
        engine.rewind(0)
        engine.pause_hidden(0)
        engine.append(text[:first])
        drafts = list[Draft]()
        for end in range(first + 1, len(text) - MAX_DRAFTED):
            drafts.append(speculator.drafter.propose(text[:end], request))
            engine.append(text[end - 1 : end])
        return cls(completion.ids, drafts)

    def accepted(self, at: int, kept: int) -> int:
        """How many of the first tokens of the draft after token `at` are accepted."""
        drafted, right = self.drafts[at].ids, self.ids[at + 1 :]
        return next((n for n in range(kept) if drafted[n] != right[n]), kept)


Length = Callable[[DraftController], int]
"""The most tokens of the next draft."""


def costs_of(measured: MeasuredCosts) -> DraftCosts:
    """The clock of a replay: it isn't updated."""
    costs = DraftCosts()
    costs.begin(measured)
    return costs


def seconds_of(costs: DraftCosts, made: int, kept: int) -> tuple[float, float]:
    """Of a draft of some tokens, and of the forward that verifies those that are kept."""
    return costs.fixed + made * costs.each, costs.relative(1 + kept)


def ended(probs: Sequence[float], length: int, least: float, least_to_continue: float) -> tuple[int, int]:
    """How many tokens a drafter makes, at most `length`, and how many of them it keeps."""
    reached = 1.0
    for n, prob in enumerate(probs[:length]):
        reached *= prob
        if reached < least:
            return n + 1, n
        if reached < least_to_continue:
            return n + 1, n + 1
    return length, length


def constant(recordings: Sequence[Recording], measured: MeasuredCosts, length: int) -> float:
    """The speed with drafts of a constant length, relative to baseline decoding."""
    tokens, seconds, cycle = 0, 0.0, sum(seconds_of(costs_of(measured), length, length))
    for recording in recordings:
        at = 0
        while at < len(recording.drafts):
            at += 1 + recording.accepted(at, length)
            seconds += cycle
        tokens += at
    return tokens / seconds


def controlled(recordings: Sequence[Recording], measured: MeasuredCosts, length_of: Length) -> float:
    """The speed with a controller, which knows the costs at first, relative to baseline decoding."""
    controller, clock, tokens, seconds = DraftController(), costs_of(measured), 0, 0.0
    controller.costs.begin(measured)
    for recording in [*recordings] * PASSES:
        at = 0
        while at < len(recording.drafts):
            length = 0 if controller.cooldown_tokens else length_of(controller)
            controller.cooldown_tokens = max(0, controller.cooldown_tokens - 1)
            if not length:
                controller.record_baseline(1.0)
                at, seconds = at + 1, seconds + 1.0
                continue
            probs = recording.drafts[at].probs
            made, kept = ended(probs, length, *controller.min_probs(length))
            accepted = recording.accepted(at, kept)
            draft, forward = seconds_of(clock, made, kept)
            controller.record_step(accepted + 1, 1 + kept, made, draft, forward)
            controller.record_accepted(kept, accepted, probs[:kept])
            at, seconds = at + 1 + accepted, seconds + draft + forward
        tokens += at
    return tokens / seconds


def best_of_all(controller: DraftController) -> int:
    """The length that is best for all drafts alike."""
    return controller.length(MAX_DRAFTED)


def longest(controller: DraftController) -> int:
    """The length for a drafter that ends drafts itself."""
    length = controller.length(MAX_DRAFTED)
    return controller.longest(length, MAX_DRAFTED) if length else 0


def table(tokens: int) -> str:
    """Speeds by costs and texts."""
    rows = []
    with load("tiny", device="cpu", draft="mtp", context=1024) as model:
        recorded = {}
        for name, prompts in TEXTS.items():
            report(f"drafts after each token of {name}")
            recorded[name] = [Recording.of(model, prompt, tokens) for prompt in prompts]
    for name, costs in COSTS.items():
        for kind, recordings in recorded.items():
            best = max(constant(recordings, costs, length) for length in range(1, MAX_DRAFTED + 1))
            short, long = (controlled(recordings, costs, length_of) for length_of in (best_of_all, longest))
            speeds = [f"{speed:.2f}x" for speed in (best, short, long)]
            rows.append([name, kind, *speeds, f"{long / short:.3f}"])
    head = ["costs", "texts", "best constant length", "ended, of the best length", "ended, longer", "gain"]
    return markdown(head, rows, left=(0, 1))
