"""Requests of a file in OpenAI's batch format, completed into another file."""
