"""Results and failures of the helper thread are returned; the thread ends with its owner."""

import gc
import threading

import pytest

from edgeinfer.structured.helper_thread import HelperThread


def test_results_are_available_in_any_order() -> None:
    helper = HelperThread("test")
    here = threading.get_ident()
    first, second = helper.do(threading.get_ident), helper.do(lambda: 2)
    assert second.result() == 2
    assert first.result() != here


def test_a_failure_is_raised_in_the_caller_and_the_thread_continues() -> None:
    helper = HelperThread("test")
    failing = helper.do(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert helper.do(lambda: "on").result() == "on"


@pytest.mark.slow
def test_the_thread_ends_without_references() -> None:
    helper = HelperThread("short-lived")
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "short-lived"]
    del helper
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
