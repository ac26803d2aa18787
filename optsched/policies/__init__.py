"""Schedulers of the literature, one file per family, found by a registry."""
