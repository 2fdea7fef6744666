"""The chat page: its static files, and the JSON API of the chat store."""
