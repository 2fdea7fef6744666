"""Whole blocks: feed-forward, experts, the draft loop, and the barriers between their phases."""
