"""An HTTP server with the APIs of OpenAI, Anthropic and Ollama, for programs on this machine."""
