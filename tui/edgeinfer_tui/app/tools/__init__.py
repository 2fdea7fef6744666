"""Tools in the chat: a question before each call, and its result."""
