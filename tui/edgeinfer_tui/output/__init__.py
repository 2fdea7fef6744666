"""Output of the commands: tables, progress, streamed text."""
