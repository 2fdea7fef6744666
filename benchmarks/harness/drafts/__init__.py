"""Planted and simulated drafts."""
