"""Drawing on a terminal that is closed meanwhile, or slow."""

import os
import pty

from edgeinfer_tui.app.lost_terminal import Screen


def test_what_a_closed_terminal_cannot_take_is_dropped_and_leaves_nothing_to_fail_with() -> None:
    window, terminal = pty.openpty()
    file = os.fdopen(terminal, "w")
    screen = Screen(file)
    screen.write("seen")
    screen.flush()
    assert os.read(window, 16) == b"seen"
    os.close(window)
    for _ in range(3):
        assert screen.write("x" * 20_000) == 20_000
        screen.flush()
    file.write("behind all of it")
    file.close()  # as Python does when it ends: an error here would be its exit code


def test_a_slow_terminal_is_not_taken_for_a_closed_one() -> None:
    window, terminal = pty.openpty()
    file = os.fdopen(terminal, "w")
    screen, number = Screen(file), file.fileno()
    screen._drop(BlockingIOError())
    assert os.isatty(number)
    screen.write("still")
    screen.flush()
    assert os.read(window, 16) == b"still"
    file.close()
    os.close(window)
