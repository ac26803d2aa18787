"""InferMax's constraint satisfaction problem in seconds, a file per method."""
