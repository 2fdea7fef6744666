"""Ollama's API: readers of bodies and writers of responses."""
