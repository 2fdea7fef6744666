"""Formatting of text: sizes, columns, progress, status."""

import io
import sys
from pathlib import Path

import pytest

from edgeinfer.results import FinishReason, Generation, Speed, Token
from edgeinfer_tui.failures import one_line as failure_line
from edgeinfer_tui.output.columns import one_line, shown_bytes
from edgeinfer_tui.output.file_report import shown_count
from edgeinfer_tui.output.progress_line import ProgressLine, shown_time
from edgeinfer_tui.output.status_line import short_status_line, status_line
from edgeinfer_tui.prompt_source import unescaped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (20_678_048, "19.7 MiB"), (8 << 30, "8.0 GiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert shown_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (31_730_176, "31.7M"), (1_100_048_384, "1.1B")])
def test_counts(count: int, text: str) -> None:
    assert shown_count(count) == text


def test_a_name_from_a_file_can_neither_break_the_line_nor_control_the_terminal() -> None:
    assert one_line("a\n\x1b[2Jb\udcff") == "a\\n\\x1b[2Jb\\udcff"
    assert one_line("x" * 200, 10) == "xxxxxxx..."


def test_escapes_in_a_stop_text() -> None:
    assert unescaped(r"a\n\tb\\n") == "a\n\tb\\n"


def test_status_line_names_cached_tokens_drafts_and_the_ending() -> None:
    speed = Speed(
        prompt_tokens=30,
        cached_tokens=21,
        generated_tokens=1,
        seconds_to_first_token=0.5,
        prompt_tokens_per_second=0.0,
        decode_tokens_per_second=5.25,
        gigabytes_per_second=12.3,
        gpu_experts=0.375,
        accepted_share=0.61,
        tokens_per_forward=2.25,
        speculation_gain=1.4,
    )
    response = Generation("x", [1], "length", speed, tokens=[Token(1, "x")])
    assert status_line(response, 1024) == (
        "ttft 0.50 s · prompt - t/s (9 tokens, 21 cached) · decode 5.2 t/s (1 token) · 12.3 GB/s"
        " · 38% of experts on the GPU · draft accepted 61% · 2.2 tokens per forward · drafts gained +40%"
        " · context 31/1024 · stopped at --max-tokens"
    )


def test_the_short_status_line_has_the_speed_and_the_ending() -> None:
    def line(first: float, rate: float, reason: FinishReason = "stop") -> str:
        speed = Speed(seconds_to_first_token=first, decode_tokens_per_second=rate)
        return short_status_line(Generation("x", [1], reason, speed))

    assert status_line(Generation("x", [1], "stop", Speed(generated_tokens=4)), 64, 6.0).endswith(
        "decode - t/s (4 tokens) · 1.5 J per token · context 4/64"
    )
    assert line(0.21, 54.4) == "54 tokens/s, first token 0.2 s"
    assert line(0.021, 5.25, "length") == "5.2 tokens/s, first token 0.02 s, stopped at --max-tokens"
    assert line(75.3, 0.0) == "first token 75.3 s"


def test_the_status_line_counts_omitted_tokens() -> None:
    response = Generation(
        "x", [1, 2], "stop", Speed(), prompt_ids=[3] * 1500, context_shifts=2, evicted_tokens=512
    )
    assert status_line(response, 1024).endswith("· context 990/1024 · shifted 2 times, 512 tokens evicted")


def test_progress_shows_after_a_second_on_a_terminal_and_is_erased() -> None:
    now = 0.0
    terminal, pipe = Terminal(), io.StringIO()
    on_terminal, in_pipe = (
        ProgressLine("reading", terminal, lambda: now),
        ProgressLine("reading", pipe, lambda: now),
    )
    for seconds in [0.5, 1.5, 1.55, 2.0]:
        now = seconds
        on_terminal.update(int(seconds * 100), 400)
        in_pipe.update(int(seconds * 100), 400)
    on_terminal.erase()
    assert terminal.getvalue() == "\r\x1b[Kreading 150/400 (38%)\r\x1b[Kreading 200/400 (50%)\r\x1b[K"
    assert pipe.getvalue() == ""


def test_a_known_long_operation_is_announced_at_once() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    lines = [ProgressLine("compiling", out, lambda: 0.0, at_once=True) for out in (terminal, pipe)]
    for line in lines:
        line.update(0, 34)
        line.update(1, 34)
    assert terminal.getvalue() == "\r\x1b[Kcompiling 0/34 (0%)"
    assert pipe.getvalue() == "edgeinfer: compiling, 34 in all\n"
    for line in lines:
        line.erase()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert pipe.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "short", "exact"),
    [(0.21, "0 s", "0.21 s"), (5.27, "5 s", "5.3 s"), (89.9, "90 s", "89.9 s"), (300, "5 min", "5 min")],
)
def test_times(seconds: float, short: str, exact: str) -> None:
    assert shown_time(seconds) == short
    assert shown_time(seconds, exact=True) == exact


@pytest.mark.skipif(sys.platform == "win32", reason="its texts are those of POSIX")
def test_an_os_error_names_its_file() -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        Path("/no/such/file").read_bytes()
    assert failure_line(caught.value) == "/no/such/file: No such file or directory"
