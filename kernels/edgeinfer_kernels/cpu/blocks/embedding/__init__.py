"""Block kinds of the embedding; their names begin with `embedding.`."""
