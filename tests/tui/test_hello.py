"""`edgeinfer hello`."""

from tests.tui.conftest import CommandLine


def test_hello_greets(edgeinfer: CommandLine) -> None:
    assert edgeinfer("hello", "--name", "fox").out == "Hello, fox!\n"
