"""Answers that keep to a JSON schema or a grammar."""
