"""The internal form of requests and responses, between the readers and writers of the APIs."""
