"""An OpenAI-compatible HTTP server for one model, for programs on this machine."""
