"""Analysis of policies: comparison with the optimum, and competitive ratios."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["library"])
