"""The command line: see ``optsched --help``.

Modules of this package import nothing heavy at the top: ``optsched --help`` must be instant.
"""

from optsched.cli.application import app, main

__all__ = ["app", "main"]
