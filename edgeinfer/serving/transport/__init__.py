"""HTTP: access checks, bodies, streams, errors, and records of requests."""
