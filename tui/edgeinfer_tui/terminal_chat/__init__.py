"""The line chat of `edgeinfer run`."""
