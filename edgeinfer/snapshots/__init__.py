"""Keys and values on the disk: a text that was read before isn't read again."""
