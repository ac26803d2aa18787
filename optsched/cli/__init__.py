"""The command line, which ``optsched --help`` describes.

Modules of this package import nothing heavy at the top, so that ``optsched --help`` is instant.
"""

import os
import signal

__all__ = ["app", "main"]


def main() -> None:
    """Run the ``optsched`` script. Ctrl-C outside a command ends it without a traceback."""
    signal.signal(signal.SIGINT, _end)
    from optsched.cli.application import main as run

    run()


def _end(number: int, frame: object) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def __getattr__(name: str) -> object:
    if name != "app":
        raise AttributeError(name)

    from optsched.cli.application import app

    return app
