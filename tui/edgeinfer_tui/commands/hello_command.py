"""`edgeinfer hello`: a greeting."""

from edgeinfer_tui.options.command_options import command


@command("hello")
def hello(name: str = "world") -> None:
    """Print a greeting."""
    print(f"Hello, {name}!")
