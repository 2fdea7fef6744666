"""Text generation: sequences and token streams, from a request to the completion."""
