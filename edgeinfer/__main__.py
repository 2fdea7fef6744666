"""`python -m edgeinfer`: the command line."""

import importlib

if __name__ == "__main__":
    importlib.import_module("edgeinfer_tui.command_line").main()
