"""Structured output: completions that match a JSON schema or a grammar."""
