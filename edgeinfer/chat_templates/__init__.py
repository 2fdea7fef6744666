"""Chats as text: templates, the sandbox they run in, and what fits the context."""
