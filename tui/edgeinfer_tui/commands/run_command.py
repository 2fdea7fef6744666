"""`edgeinfer run`: complete one prompt, or chat on the terminal."""

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from edgeinfer_tui import interrupts, library
from edgeinfer_tui.batch_lines import completed_together, prompt_groups
from edgeinfer_tui.commands.pull_command import pull_model
from edgeinfer_tui.confirmation import agreed, on_terminal
from edgeinfer_tui.failures import report, say
from edgeinfer_tui.interrupts import INTERRUPTED
from edgeinfer_tui.library import LoadedModel, Stream
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.options.parsed_options import ParsedOptions, parsed_options
from edgeinfer_tui.options.settings import filled
from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.completion_output import print_completion, print_text
from edgeinfer_tui.output.progress_line import BUILDING, ProgressLine, shown_time
from edgeinfer_tui.output.script_output import collected, print_failure, print_record
from edgeinfer_tui.output.status_line import context_lines, short_status_line, status_line
from edgeinfer_tui.output.terminal_output import control
from edgeinfer_tui.output.word_wrap import WordWrap
from edgeinfer_tui.prompt_source import joined_prompt, piped_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgeinfer.results import Generation
    from edgeinfer_tui.chat_session import ChatSession, SessionStore

LINES_TOGETHER = 64
"""Maximum lines of a batch that are completed together."""
MANY_COMPLETIONS = 8
"""More are announced: `-n` of llama.cpp is the number of tokens."""
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


@command("run")
def run(
    model: arguments.ModelArgument = None,
    prompt: arguments.PromptArgument = None,
    **given: Any,
) -> None:
    """Complete a prompt, or chat.

    The text is streamed to stdout, everything else goes to stderr.
    Piped input is the prompt; with a prompt on the command line as well,
    the piped text comes first, separated by a blank line. Without a prompt,
    on a terminal, a chat begins. Ctrl-C keeps the text so far.

    [bold]Examples[/]

      edgeinfer run tiny "Once upon a time"

      edgeinfer run tiny --chat --system "Be kind." "Tell me about a fox."

      edgeinfer run ~/models/granite.gguf --temperature 0 -f question.txt

      git diff | edgeinfer run ~/models/coder.gguf "Describe this change."

      edgeinfer run               [dim]# chat with the built-in model[/]

      edgeinfer run --continue    [dim]# continue the last chat[/]

      edgeinfer run tiny --batch --output json < prompts.txt > answers.jsonl
    """
    options = parsed_options(filled({"model": model, "prompt": prompt, **given}), "run")
    is_known = model is not None and not library.is_remote(options.loading) and _is_local(model)
    if model is not None and options.resume and options.prompt is None and not is_known:
        # A continued chat has its model, so a single argument is the prompt.
        options, model = replace(options, model=None, prompt=model), None
    _run(options, named=model is not None)


def _run(options: ParsedOptions, named: bool) -> None:
    """Check the input, then load the model and answer. `named`: the command line names the model."""
    from edgeinfer_tui.chat_session import open_store

    store = open_store(options, options.prompt is not None or not on_terminal(sys.stdin))
    if store is not None and store.stored is not None and not named:
        options = replace(options, model=store.stored.model)
    if store is not None:
        options = replace(options, loading={**options.loading, "snapshots": True})
    check_model(options)
    if options.batch and on_terminal(sys.stdin):
        raise typer.BadParameter("--batch reads prompts from standard input, and nothing is piped there")
    piped = None if options.batch else piped_text(sys.stdin, options.prompt is not None)
    text = joined_prompt(options.prompt, piped)
    if text is not None and not text.strip():
        raise typer.BadParameter("the prompt is blank; give a text, or none for a chat on a terminal")
    if text is None and not options.batch and not (on_terminal(sys.stdin) and on_terminal(sys.stdout)):
        if on_terminal(sys.stdin):
            raise typer.BadParameter("no prompt: give one, or let stdout be the terminal for a chat")
        raise typer.BadParameter(
            'no prompt, and standard input is empty; try: edgeinfer run tiny "Once upon a time"'
        )
    _complete_with(options, store, text)


def _complete_with(options: ParsedOptions, store: "SessionStore | None", text: str | None) -> None:
    """Load the model and complete the prompt `text`, or each line of the input, or chat."""
    start = time.perf_counter()
    with _load(options) as loaded:
        if options.verbose or on_terminal(sys.stderr):
            for warning in loaded.warnings:
                say(warning)
        if options.verbose:
            _describe(loaded, options, time.perf_counter() - start)
        session = None if store is None else _session(store, options, loaded)
        interrupts.raise_exception()
        if options.batch:
            _complete_batch(loaded, options)
        elif text is None:
            if store is not None and (continuation_message := store.continuation_message()):
                print(continuation_message, file=sys.stderr)
            _chat(loaded, options, session)
        else:
            _answer(loaded, options, text, session)
        if session is not None and (owner := session.snapshot_owner):
            loaded.keep_snapshot(owner)
        if options.verbose and loaded.plan is not None:
            # After the text: the first such plan measures the kernels, for seconds on a slow machine.
            print(loaded.plan.explain(), file=sys.stderr)


def _session(store: "SessionStore", options: ParsedOptions, loaded: LoadedModel) -> "ChatSession":
    """The session of the chat that the command line selects, which is recorded."""
    from edgeinfer_tui.chat_session import ChatSession, stored_model_name

    session = ChatSession() if store.stored is None else store.session(store.stored)
    if options.system is not None:
        session.system = options.system
    store.open()
    is_remote = library.is_remote(options.loading)
    name = loaded.name if is_remote else stored_model_name(options.model)
    store.record(session, lambda: name, store.stored)
    return session


def _is_local(name: str) -> bool:
    """Whether a model of this name is on this disk or in the registry."""
    from edgeinfer.errors import NotPulledError, UnknownModelError
    from edgeinfer.registry.registry import find_model

    try:
        find_model(name)
    except NotPulledError:
        return True
    except UnknownModelError:
        return False
    return True


def _complete_batch(loaded: LoadedModel, options: ParsedOptions) -> None:
    """Complete each line of standard input; a failure is reported, and the others follow. Lines that have
    arrived are completed together.
    """
    from edgeinfer.generation.completion_cache import CompletionCache

    code, cache = 0, CompletionCache(0 if options.counts else options.response_cache, loaded.sampling)
    for group in prompt_groups(sys.stdin.buffer, 1 if options.counts else LINES_TOGETHER):
        texts = [joined_prompt(options.prompt, line) or line for line in group]
        if options.counts:
            code = _complete_line(loaded, options, texts[0]) or code
            continue
        prompts = [_prompt_of(loaded, options, text) for text in texts]
        keys = [cache.key(text, options.generation) for text in texts]
        settings = {**options.generation, **({} if _in_chat_template(loaded, options) else {"raw": True})}
        answers = completed_together(loaded, prompts, settings, keys, cache)
        for text, answer in zip(texts, answers, strict=True):
            if not isinstance(answer, Exception):
                _print_whole(answer, loaded, options, text)
                continue
            if options.json:
                print_failure(answer, loaded.name, text)
            code = report(answer)
    if code:
        raise typer.Exit(code)


def _complete_line(loaded: LoadedModel, options: ParsedOptions, text: str) -> int:
    """Print several completions of a line; the exit code."""
    from edgeinfer.errors import EdgeInferError

    try:
        _several(loaded, options, text)
    except EdgeInferError as error:
        if options.json:
            print_failure(error, loaded.name, text)
        return report(error)
    return 0


def _print_whole(answer: "Generation", loaded: LoadedModel, options: ParsedOptions, text: str) -> None:
    """Print a completion that wasn't streamed."""
    if options.json:
        print_record(answer, loaded.name, text)
    else:
        print_text(answer.text)
        _report(answer, loaded, options)


def _load(options: ParsedOptions) -> LoadedModel:
    reading = ProgressLine("loading the model", sys.stderr, shown=shown_bytes)
    building = ProgressLine(BUILDING, sys.stderr, at_once=True)
    try:
        return library.load_model(options.model, options.loading, reading.update, building.update)
    finally:
        building.erase()
        reading.erase()


def check_model(options: ParsedOptions) -> None:
    """Refuse a missing model before slow imports.

    A single argument may be a prompt instead of a model's name. The models of a server aren't checked.
    """
    if library.is_remote(options.loading):
        return
    from edgeinfer.errors import NotPulledError, UnknownModelError
    from edgeinfer.registry.registry import find_model

    try:
        find_model(options.model)
    except NotPulledError as missing:
        if not (options.yes or _confirm_pull(missing.name)):
            raise
        pull_model(missing.name, options.loading.get("engine", "edgeinfer"))
    except UnknownModelError:
        if options.model is None or options.prompt is not None or " " not in options.model.strip():
            raise
        shown = options.model if len(options.model) <= 60 else options.model[:57] + "..."
        raise UnknownModelError(
            f'"{shown}" reads like a prompt, but the model comes first: edgeinfer run tiny "{shown}"'
        ) from None


def _confirm_pull(name: str) -> bool:
    """Ask on a terminal; a script gets an error that names the command."""
    if not (on_terminal(sys.stdin) and on_terminal(sys.stderr)):
        return False
    try:
        return agreed(f"{name} isn't on this disk yet. Pull it now?", default=True)
    except KeyboardInterrupt:
        return False


def _answer(
    loaded: LoadedModel, options: ParsedOptions, text: str, session: "ChatSession | None"
) -> "Generation | None":
    """Stream one completion and return it, None if several were printed; Ctrl-C ends the program with the
    exit code of an interrupted program.
    """
    if options.counts:
        _several(loaded, options, text)
        return None
    has_meter = options.speed and not library.is_remote(options.loading)
    used_joules = _joules_from_now(loaded.gpu) if has_meter else lambda: None
    progress = ProgressLine("reading the prompt", sys.stderr)
    settings = {**options.generation, "progress": progress.update}
    stream: Stream
    column = 0
    if session is not None:
        _check_template(loaded)
        stream = session.stream(loaded.chat(system=session.system), text, settings)
    elif _in_chat_template(loaded, options):
        stream = loaded.chat(system=options.system).stream(text, **settings)
    else:
        if on_terminal(sys.stdout) and on_terminal(sys.stderr) and not options.json:
            column = _show_prompt(text)
        stream = loaded.stream(text, raw=True, **settings)
    if options.json:
        answer = collected(stream, progress)
        print_record(answer, loaded.name, text)
    else:
        answer = print_completion(stream, progress, column=column)
        _report(answer, loaded, options, used_joules())
    if answer.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)
    return answer


def _joules_from_now(gpu: int | None) -> "Callable[[], float | None]":
    from edgeinfer_offload.machine.energy import energy_meter

    return energy_meter(gpu).since_now()


def _show_prompt(text: str) -> int:
    """Print the prompt before the completion; stdout still contains only the completion. Returns the column
    after the prompt.
    """
    control(sys.stderr, BOLD)
    wrap = WordWrap(sys.stderr)
    wrap.write(text)
    control(sys.stderr, PLAIN)
    sys.stderr.flush()
    return wrap.column


def _several(loaded: LoadedModel, options: ParsedOptions, text: str) -> None:
    """Print several completions once all are complete; their labels go to stderr."""
    progress = ProgressLine("reading the prompt", sys.stderr)
    settings = {**options.generation, "progress": progress.update}
    prompt = _prompt_of(loaded, options, text)
    counts = {"n": 1, **options.counts}
    if counts["n"] > MANY_COMPLETIONS:
        say(f"{counts['n']} completions (-n); --max-tokens limits the tokens of each")
    try:
        completions = loaded.generate(prompt, **counts, **settings)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        progress.erase()
    for index, answer in enumerate(completions):
        if not options.json and len(completions) > 1 and on_terminal(sys.stderr):
            say(f"completion {index + 1} of {len(completions)}")
        _print_whole(answer, loaded, options, text)


def _prompt_of(loaded: LoadedModel, options: ParsedOptions, text: str) -> str | list[dict[str, Any]]:
    """The prompt of a completion that isn't streamed: a text to continue, or a chat."""
    if not _in_chat_template(loaded, options):
        return text
    system = [{"role": "system", "content": options.system}] if options.system else []
    return [*system, {"role": "user", "content": text}]


def _in_chat_template(loaded: LoadedModel, options: ParsedOptions) -> bool:
    """Whether the prompt is a chat message, not a text to continue."""
    has_template = loaded.chat_format is not None
    needs_template = options.raw is False or options.system is not None
    if needs_template and not has_template:
        from edgeinfer.errors import ChatTemplateError

        raise ChatTemplateError(
            f"{loaded.name}: the file holds no chat template; give --chat-template FILE, or use --raw"
        )
    if options.raw is not None or needs_template:
        return not options.raw
    return has_template and loaded.prompt_style != "raw"


def _check_template(loaded: LoadedModel) -> None:
    if loaded.chat_format is None:
        from edgeinfer.errors import ChatTemplateError

        raise ChatTemplateError(
            f"{loaded.name}: no chat without a chat template; give one with --chat-template FILE, or a prompt"
        )


def _chat(loaded: LoadedModel, options: ParsedOptions, session: "ChatSession | None") -> None:
    from edgeinfer_tui.chat_session import ChatSession
    from edgeinfer_tui.terminal_chat.line_chat import LineChat

    _check_template(loaded)
    if session is None:
        session = ChatSession(system=options.system)
    LineChat(loaded, session, options.generation, show_speed=options.speed, private=options.private).run()


def _describe(loaded: LoadedModel, options: ParsedOptions, seconds: float) -> None:
    """Print the --verbose lines before the completion."""
    say(f"{loaded.name} loaded in {shown_time(seconds, exact=True)}, context {loaded.context} tokens")
    given: dict[str, Any] = {**options.loading, **options.generation}
    shown = [f"{name} {value!r}" for name, value in given.items() if name not in ("chat_template", "key")]
    if shown:
        say("given: " + ", ".join(shown))
    for detail in loaded.details:
        say(detail)


def _report(
    answer: "Generation", loaded: LoadedModel, options: ParsedOptions, joules: float | None = None
) -> None:
    """Print warnings and the status line after the completion, on stderr."""
    if options.generation.get("logprobs") is not None:
        for token in answer.tokens:
            chance = "" if token.logprob is None else f"{token.logprob:8.4f}"
            others = "  ".join(
                f"{loaded.tokenizer.decode([token_id])!r} {logprob:.4f}"
                for token_id, logprob in token.top_logprobs
            )
            print(
                f"{token.id:>7} {chance} {token.text!r}" + (f"  [{others}]" if others else ""),
                file=sys.stderr,
            )
    for line in context_lines(answer, loaded.context):
        say(line)
    if options.speed:
        print(status_line(answer, loaded.context, joules), file=sys.stderr)
    elif on_terminal(sys.stderr):
        print(short_status_line(answer), file=sys.stderr)
