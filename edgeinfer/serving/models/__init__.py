"""The models of a server."""
