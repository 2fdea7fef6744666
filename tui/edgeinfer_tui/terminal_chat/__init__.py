"""The line-based chat of `edgeinfer run`."""
