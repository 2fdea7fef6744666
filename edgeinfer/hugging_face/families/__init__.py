"""The families of models that folders may hold: one row of names and settings for each."""
