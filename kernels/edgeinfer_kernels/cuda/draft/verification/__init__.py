"""Steps that verify drafts, and drafts after them, started before the host knows the tokens."""
