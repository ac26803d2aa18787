"""The command line, which ``optsched --help`` describes.

Modules of this package import nothing heavy at the top, so that ``optsched --help`` is instant.
"""

from optsched.cli.application import app, main

__all__ = ["app", "main"]
