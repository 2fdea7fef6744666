"""Which commands take which options, in the order of `run --help`; each option is defined once."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

from edgeinfer_tui.options import options, sampler_options, session_options

Command = Callable[..., None]

_TAKEN: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", options.MaxTokens, "run chat"),
    ("stop", options.Stop, "run chat"),
    ("on_full", options.WhenFull, "run chat"),
    ("seed", options.Seed, "run chat"),
    ("answers", options.Answers, "run"),
    ("best_of", options.BestOf, "run"),
    ("beams", options.Beams, "run"),
    ("json_schema", options.JsonSchema, "run chat"),
    ("grammar", options.GrammarFile, "run chat"),
    ("prompt_option", options.PromptOption, "run"),
    ("prompt_file", options.PromptFile, "run"),
    ("lines", options.Lines, "run"),
    ("system", options.System, "run chat"),
    ("raw", options.Raw, "run"),
    ("continue_", session_options.Continue, "run chat"),
    ("session", session_options.Session, "run chat"),
    ("private", session_options.Private, "run chat"),
    ("light", options.Light, "chat"),
    ("chat_template", options.ChatTemplate, "run chat serve"),
    ("thinking", options.ThinkingLevel, "run chat serve"),
    ("template_arg", options.TemplateArg, "run chat serve"),
    ("assume_pre_tokenizer", options.PreTokenizer, "run chat"),
    ("context", options.Context, "run chat serve"),
    ("engine", options.Engine, "run chat"),
    ("device", options.Device, "run chat serve"),
    ("vram", options.Vram, "run chat serve"),
    ("ram", options.Ram, "run chat serve"),
    ("threads", options.Threads, "run chat serve"),
    ("repack", options.Repack, "run chat serve"),
    ("sparse", options.SparseFeedForward, "run chat"),
    ("draft", options.Draft, "run chat serve"),
    ("draft_leaves", options.DraftLeaves, "run"),
    ("reference", options.Reference, "run chat"),
    ("kv", options.Kv, "run chat serve"),
    ("logit_bias", sampler_options.LogitBias, "run chat"),
    ("repeat_penalty", sampler_options.RepeatPenalty, "run chat"),
    ("repeat_last_n", sampler_options.RepeatLastN, "run chat"),
    ("presence_penalty", sampler_options.PresencePenalty, "run chat"),
    ("frequency_penalty", sampler_options.FrequencyPenalty, "run chat"),
    ("dry_multiplier", sampler_options.DryMultiplier, "run chat"),
    ("dry_base", sampler_options.DryBase, "run chat"),
    ("dry_allowed_length", sampler_options.DryAllowedLength, "run chat"),
    ("dry_penalty_last_n", sampler_options.DryPenaltyLastN, "run chat"),
    ("dry_sequence_breakers", sampler_options.DrySequenceBreakers, "run chat"),
    ("top_k", sampler_options.TopK, "run chat"),
    ("typical_p", sampler_options.TypicalP, "run chat"),
    ("top_p", sampler_options.TopP, "run chat"),
    ("min_p", sampler_options.MinP, "run chat"),
    ("xtc_probability", sampler_options.XtcProbability, "run chat"),
    ("xtc_threshold", sampler_options.XtcThreshold, "run chat"),
    ("temperature", sampler_options.Temperature, "run chat"),
    ("mirostat", sampler_options.Mirostat, "run chat"),
    ("mirostat_tau", sampler_options.MirostatTau, "run chat"),
    ("mirostat_eta", sampler_options.MirostatEta, "run chat"),
    ("output", options.Output, "run"),
    ("speed", options.Speed, "run"),
    ("logprobs", options.Logprobs, "run"),
    ("verbose", options.Verbose, "run"),
)
"""Name, typer annotation, and the commands that take it."""


def options_of(command: str) -> dict[str, Any]:
    """Name -> annotation of the shared options that a command takes."""
    return {name: annotation for name, annotation, commands in _TAKEN if command in commands.split()}


def value_type(annotation: Any) -> Any:
    """The type of an option's values, unwrapped from typer's annotation."""
    return typing.get_args(annotation)[0]


def taking(command: str) -> Callable[[Command], Command]:
    """Decorator that gives a command its shared options in `**keywords`, except those in its own signature.

    An option that isn't given is None, so that the library's default applies; a flag is False.
    """

    def with_options(body: Command) -> Command:
        signature = inspect.signature(body, eval_str=True)
        options_here = options_of(command)
        own = [
            one
            for name, one in signature.parameters.items()
            if one.kind is not one.VAR_KEYWORD and name not in options_here
        ]
        taken = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if value_type(annotation) is bool else None,
                annotation=annotation,
            )
            for name, annotation in options_here.items()
        ]
        whole = signature.replace(parameters=[*own, *taken])
        body.__signature__ = whole  # type: ignore[attr-defined]
        body.__annotations__ = {name: one.annotation for name, one in whole.parameters.items()}
        return body

    return with_options
