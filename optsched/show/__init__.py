"""Figures, reports and traces of schedules, for people to look at."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["plot"])
