"""Split-model runtime: the backend, the expert cache policy, activity profiles."""
