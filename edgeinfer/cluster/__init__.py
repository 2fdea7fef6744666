"""Several machines of a Ray cluster: batches, and replicas of a server."""
