"""Continuous batching: live requests advanced together, and the cache that they share."""
