"""OpenAI's API, without responses: readers of bodies and writers of responses."""
