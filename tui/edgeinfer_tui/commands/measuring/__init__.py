"""Commands that measure: speed, quality, and the activity of experts and neurons."""
