"""Warnings of the library, which are also records of the logger ``optsched``.

The logger is silent by default. A program that wants its records gives it a handler, or calls
``logging.basicConfig``.
"""

import logging
import warnings

LOGGER = logging.getLogger("optsched")
"""Notes are records of level INFO, warnings WARNING, and errors of commands ERROR."""
LOGGER.addHandler(logging.NullHandler())


def warn(text: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warn as `warnings.warn` does, and log the same words.

    Parameters
    ----------
    text : str
    category : type
    stacklevel : int
        As for `warnings.warn`: 1 is the place of this call.
    """
    LOGGER.warning("%s", text)
    warnings.warn(text, category, stacklevel=stacklevel + 1)
