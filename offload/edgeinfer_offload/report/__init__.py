"""The plan as text: the verdict in one line, the table, and the speed over batch size and context."""
