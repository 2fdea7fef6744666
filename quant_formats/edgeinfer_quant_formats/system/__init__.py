"""Calls that differ between operating systems, as far as files and child processes are concerned."""
