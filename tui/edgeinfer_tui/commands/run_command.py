"""`edgeinfer run`: complete one prompt, or chat on the terminal."""

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from edgeinfer_tui import interrupts, library
from edgeinfer_tui.commands.pull_command import pull_model
from edgeinfer_tui.confirmation import agreed, on_terminal
from edgeinfer_tui.failures import report, reporting, say
from edgeinfer_tui.interrupts import INTERRUPTED
from edgeinfer_tui.library import Conversation, LoadedModel, Stream
from edgeinfer_tui.options import options
from edgeinfer_tui.options.option_sets import taking
from edgeinfer_tui.options.run_options import RunOptions, run_options
from edgeinfer_tui.options.settings import filled
from edgeinfer_tui.output.answer_output import print_answer, print_text
from edgeinfer_tui.output.byte_sizes import shown_bytes
from edgeinfer_tui.output.progress_line import BUILDING, ProgressLine, shown_time
from edgeinfer_tui.output.script_output import collected, print_failure, print_record, prompts_by_line
from edgeinfer_tui.output.status_line import context_lines, status_line
from edgeinfer_tui.output.terminal_output import control
from edgeinfer_tui.output.word_wrap import WordWrap
from edgeinfer_tui.prompt_source import joined_prompt, piped_text
from edgeinfer_tui.terminal_chat.chat_session import ChatSession, open_session

if TYPE_CHECKING:
    from edgeinfer.results import Generation

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


@taking("run")
@reporting
def run(
    invocation: typer.Context,
    model: options.ModelArgument = None,
    prompt: options.PromptArgument = None,
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

      edgeinfer run ~/models/granite.gguf --temperature 0 -n 200 -f question.txt

      git diff | edgeinfer run ~/models/coder.gguf "Describe this change."

      edgeinfer run               [dim]# chat with the built-in model[/]

      edgeinfer run --continue    [dim]# continue the last chat[/]

      edgeinfer run tiny --lines --output json < prompts.txt > answers.jsonl
    """
    wishes = run_options(filled(invocation.params))
    if model is not None and wishes.resume and wishes.prompt is None and not _is_here(model):
        # A continued chat has its model, so a single argument is the prompt.
        wishes, model = replace(wishes, model=None, prompt=model), None
    kept = open_session(wishes, wishes.prompt is not None or not on_terminal(sys.stdin))
    if kept is not None and kept.model and model is None:
        wishes = replace(wishes, model=kept.model)
    if kept is not None:
        wishes = replace(wishes, loading={**wishes.loading, "snapshots": True})
    check_model(wishes)
    if wishes.lines and on_terminal(sys.stdin):
        raise typer.BadParameter("--lines reads prompts from standard input, and nothing is piped there")
    piped = None if wishes.lines else piped_text(sys.stdin, wishes.prompt is not None)
    text = joined_prompt(wishes.prompt, piped)
    if text is None and not wishes.lines and not (on_terminal(sys.stdin) and on_terminal(sys.stdout)):
        raise typer.BadParameter(
            'no prompt, and standard input is empty; try: edgeinfer run tiny "Once upon a time"'
        )
    start = time.perf_counter()
    with _load(wishes) as loaded:
        if wishes.verbose or on_terminal(sys.stderr):
            for note in loaded.notes:
                say(note)
        if wishes.verbose:
            _describe(loaded, wishes, time.perf_counter() - start)
        interrupts.raise_exception()
        if wishes.lines:
            _answer_lines(loaded, wishes)
        elif text is None:
            _chat(loaded, wishes, kept)
        else:
            _answer(loaded, wishes, text, kept)
        if kept is not None and (owner := kept.snapshot_owner):
            loaded.keep_snapshot(owner)


def _is_here(name: str) -> bool:
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


def _answer_lines(loaded: LoadedModel, wishes: RunOptions) -> None:
    """Complete each line of standard input; a failure is reported, and the next line follows."""
    from edgeinfer.errors import EdgeInferError

    code = 0
    for line in prompts_by_line(sys.stdin.buffer):
        text = joined_prompt(wishes.prompt, line) or line
        try:
            _answer(loaded, wishes, text, None)
        except EdgeInferError as error:
            if wishes.json:
                print_failure(error, loaded.name, text)
            code = report(error)
    if code:
        raise typer.Exit(code)


def _load(wishes: RunOptions) -> LoadedModel:
    reading = ProgressLine("loading the model", sys.stderr, shown=shown_bytes)
    building = ProgressLine(BUILDING, sys.stderr, at_once=True)
    try:
        return library.load_model(wishes.model, wishes.loading, reading.update, building.update)
    finally:
        building.erase()
        reading.erase()


def check_model(wishes: RunOptions) -> None:
    """Refuse a missing model before slow imports.

    A single argument may be a prompt instead of a model's name.
    """
    from edgeinfer.errors import NotPulledError, UnknownModelError
    from edgeinfer.registry.registry import find_model

    try:
        find_model(wishes.model)
    except NotPulledError as missing:
        if not _agrees_to_pull(missing.name):
            raise
        pull_model(missing.name, wishes.loading.get("engine", "edgeinfer"))
    except UnknownModelError:
        if wishes.model is None or wishes.prompt is not None or " " not in wishes.model.strip():
            raise
        shown = wishes.model if len(wishes.model) <= 60 else wishes.model[:57] + "..."
        raise UnknownModelError(
            f'"{shown}" reads like a prompt, but the model comes first: edgeinfer run tiny "{shown}"'
        ) from None


def _agrees_to_pull(name: str) -> bool:
    """Ask on a terminal; a script gets an error that names the command."""
    if not (on_terminal(sys.stdin) and on_terminal(sys.stderr)):
        return False
    try:
        return agreed(f"{name} isn't on this disk yet. Pull it now?", default=True)
    except KeyboardInterrupt:
        return False


def _answer(loaded: LoadedModel, wishes: RunOptions, text: str, session: ChatSession | None) -> None:
    """Stream one completion; Ctrl-C ends the program with the exit code of an interrupted program."""
    if wishes.counts:
        _several(loaded, wishes, text)
        return
    progress = ProgressLine("reading the prompt", sys.stderr)
    settings = {**wishes.answering, "progress": progress.update}
    stream: Stream
    column = 0
    if session is not None:
        _check_template(loaded)
        stream = session.conversation(loaded, wishes).stream(text, **settings)
    elif _in_chat_template(loaded, wishes):
        stream = loaded.chat(system=wishes.system).stream(text, **settings)
    else:
        if on_terminal(sys.stdout) and on_terminal(sys.stderr) and not wishes.json:
            column = _show_prompt(text)
        stream = loaded.stream(text, raw=True, **settings)
    if wishes.json:
        answer = collected(stream, progress)
        print_record(answer, loaded.name, text)
    else:
        answer = print_answer(stream, progress, column=column)
        _report(answer, loaded, wishes)
    if answer.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


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


def _several(loaded: LoadedModel, wishes: RunOptions, text: str) -> None:
    """Print several completions once all are complete; their labels go to stderr."""
    progress = ProgressLine("reading the prompt", sys.stderr)
    settings = {**wishes.answering, "progress": progress.update}
    prompt: str | list[dict[str, Any]] = text
    if _in_chat_template(loaded, wishes):
        system = [{"role": "system", "content": wishes.system}] if wishes.system else []
        prompt = [*system, {"role": "user", "content": text}]
    counts = {"n": 1, **wishes.counts}
    try:
        found = loaded.generate(prompt, **counts, **settings)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        progress.erase()
    for index, answer in enumerate(found):
        if wishes.json:
            print_record(answer, loaded.name, text)
            continue
        if len(found) > 1 and on_terminal(sys.stderr):
            say(f"answer {index + 1} of {len(found)}")
        print_text(answer.text)
        _report(answer, loaded, wishes)


def _in_chat_template(loaded: LoadedModel, wishes: RunOptions) -> bool:
    """Whether the prompt is a chat message, not a text to continue."""
    has_template = loaded.chat_format is not None
    wanted = wishes.raw is False or wishes.system is not None
    if wanted and not has_template:
        from edgeinfer.errors import ChatTemplateError

        raise ChatTemplateError(
            f"{loaded.name}: the file holds no chat template; give --chat-template FILE, or use --raw"
        )
    if wishes.raw is not None or wanted:
        return not wishes.raw
    return has_template and loaded.prompt_style != "raw"


def _check_template(loaded: LoadedModel) -> None:
    if loaded.chat_format is None:
        from edgeinfer.errors import ChatTemplateError

        raise ChatTemplateError(
            f"{loaded.name}: no chat without a chat template; give one with --chat-template FILE, or a prompt"
        )


def _chat(loaded: LoadedModel, wishes: RunOptions, session: ChatSession | None) -> None:
    from edgeinfer_tui.terminal_chat.line_chat import LineChat

    _check_template(loaded)
    chat: Conversation = loaded.chat(system=wishes.system)
    if session is not None:
        chat = session.conversation(loaded, wishes)
        if greeting := session.greeting():
            print(greeting, file=sys.stderr)
    LineChat(loaded, chat, wishes.answering, show_speed=wishes.speed, private=wishes.private).run()


def _describe(loaded: LoadedModel, wishes: RunOptions, seconds: float) -> None:
    """Print the --verbose lines before the completion."""
    say(f"{loaded.name} loaded in {shown_time(seconds, exact=True)}, context {loaded.context} tokens")
    given: dict[str, Any] = {**wishes.loading, **wishes.answering}
    if given:
        say(
            "given: "
            + ", ".join(f"{name} {value!r}" for name, value in given.items() if name != "chat_template")
        )
    if loaded.plan is not None:
        print(loaded.plan.explain(), file=sys.stderr)


def _report(answer: "Generation", loaded: LoadedModel, wishes: RunOptions) -> None:
    """Print warnings and the status line after the completion, on stderr."""
    if wishes.answering.get("logprobs") is not None:
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
    if wishes.speed or on_terminal(sys.stderr):
        print(status_line(answer, loaded.context), file=sys.stderr)
