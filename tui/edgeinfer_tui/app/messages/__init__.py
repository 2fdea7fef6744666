"""The messages of a chat on the screen."""
