"""A feed-forward whose neurons are all on the GPU, of which a step reads only the active ones."""
