"""Calls that differ between operating systems: the processor, waiting threads, locks, private folders."""
