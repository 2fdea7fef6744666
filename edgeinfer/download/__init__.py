"""Model downloads: search, resumable transfer, and verification."""
