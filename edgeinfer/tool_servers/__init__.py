"""Servers of tools (Model Context Protocol): their settings, and a client for a chat and its page."""
