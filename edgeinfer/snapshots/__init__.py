"""The prompt cache: KV caches on disk, so that known prefixes aren't prefilled again."""
