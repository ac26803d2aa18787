"""Lower bounds and certificates."""
