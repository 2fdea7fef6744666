"""The sampling options of `run`, in the order in which the samplers are applied; help as in `options`."""

from typing import Annotated

from typer import Option

SAMPLERS = "Samplers, in the order in which they work"

LogitBias = Annotated[
    list[str] | None,
    Option(
        "--logit-bias",
        metavar="ID=BIAS",
        help="Add to a token's logit; -inf bans it. May be repeated.",
        rich_help_panel=SAMPLERS,
    ),
]
RepeatPenalty = Annotated[
    float | None,
    Option(
        "--repeat-penalty",
        help="Divide said tokens' logits. [dim](1.0: off)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
RepeatLastN = Annotated[
    int | None,
    Option(
        "--repeat-last-n",
        help="How many tokens back the three penalties look; -1: all. [dim](64)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
PresencePenalty = Annotated[
    float | None,
    Option(
        "--presence-penalty",
        help="Taken once from a said token's logit. [dim](0.0: off)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    Option(
        "--frequency-penalty",
        help="Taken each time that it was said. [dim](0.0: off)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
DryMultiplier = Annotated[
    float | None,
    Option(
        "--dry-multiplier",
        help="DRY: penalize what would carry on a repeated passage. [dim](0.0: off)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
DryBase = Annotated[
    float | None,
    Option("--dry-base", help="DRY: growth a token of length. [dim](1.75)[/]", rich_help_panel=SAMPLERS),
]
DryAllowedLength = Annotated[
    int | None,
    Option(
        "--dry-allowed-length",
        help="DRY: repeated tokens that go free. [dim](2)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
DryPenaltyLastN = Annotated[
    int | None,
    Option(
        "--dry-penalty-last-n",
        help="DRY: how many tokens back it looks; -1: all. [dim](-1)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
DrySequenceBreakers = Annotated[
    list[str] | None,
    Option(
        "--dry-sequence-breaker",
        help=r'DRY: behind this text a repetition starts afresh. May be repeated. [dim](\n : " *)[/]',
        rich_help_panel=SAMPLERS,
    ),
]
TopK = Annotated[
    int | None,
    Option("--top-k", help="Keep the k best; 0: all. [dim](40)[/]", rich_help_panel=SAMPLERS),
]
TypicalP = Annotated[
    float | None,
    Option(
        "--typical-p",
        help="Keep the least surprising, up to this share. [dim](1.0: off)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
TopP = Annotated[
    float | None,
    Option("--top-p", help="Keep the best, up to this share. [dim](0.95)[/]", rich_help_panel=SAMPLERS),
]
MinP = Annotated[
    float | None,
    Option(
        "--min-p",
        help="Keep what is so probable against the best. [dim](0.05)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
XtcProbability = Annotated[
    float | None,
    Option(
        "--xtc-probability",
        help="How often the top choices are left out. [dim](0.0: off)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
XtcThreshold = Annotated[
    float | None,
    Option(
        "--xtc-threshold",
        help="XTC: what counts as a top choice. [dim](0.1)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
Temperature = Annotated[
    float | None,
    Option(
        "--temperature",
        help="Higher is bolder; 0 always takes the best. [dim](0.8)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
Mirostat = Annotated[
    int | None,
    Option(
        "--mirostat",
        metavar="0|2",
        help="2: keep the surprise even, in place of top-k to XTC. [dim](0: off)[/]",
        rich_help_panel=SAMPLERS,
    ),
]
MirostatTau = Annotated[
    float | None,
    Option("--mirostat-tau", help="Wanted surprise, in bits. [dim](5.0)[/]", rich_help_panel=SAMPLERS),
]
MirostatEta = Annotated[
    float | None,
    Option("--mirostat-eta", help="How fast it learns. [dim](0.1)[/]", rich_help_panel=SAMPLERS),
]
