"""optsched: how good could an LLM-serving schedule have been, with a proof.

    >>> import optsched
    >>> problem = optsched.Problem(optsched.Instance([0, 0], [1, 2], [3, 1], kv_capacity=6))
    >>> optsched.run(problem, "mc-sf").metrics["tel"]
    4

Everything is loaded on first use, so that importing the package is fast. The public names stand in
``__init__.pyi``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
