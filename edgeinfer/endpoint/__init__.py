"""Models of other servers, through OpenAI's API: the engine `openai`."""
