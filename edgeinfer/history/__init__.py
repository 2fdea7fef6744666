"""Saved chats: recorded as they are generated, continued, searched, exported."""
