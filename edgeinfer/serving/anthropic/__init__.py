"""Anthropic's Messages API: readers of bodies and writers of responses."""
