"""OpenAI's Responses API: readers of bodies, writers of responses, and the stored responses."""
