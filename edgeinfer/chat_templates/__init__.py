"""Chat templates: rendering, sandbox, tool calls and reasoning."""
