"""The command line, which ``optsched --help`` describes.

Modules of this package import nothing heavy at the top, so that ``optsched --help`` is instant.
"""

import codecs
import os
import signal
import sys

__all__ = ["app", "main"]


def main() -> None:
    """Run the ``optsched`` script. Ctrl-C outside a command ends it without a traceback."""
    signal.signal(signal.SIGINT, _end)
    _complete_streams()
    from optsched.cli.application import main as run

    run()


def _complete_streams() -> None:
    """Open the standard streams that are closed, and let every text through the others.

    A daemon may have no standard output, and then the first file that is opened would get its
    number, and whatever libraries print. Names of files need not be texts of the stream's encoding,
    and that encoding need not have the lines of tables.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))

    codecs.register_error("optsched", _through)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="optsched")


def _through(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return the bytes of a file's name as they are, and ? for what an encoding does not have."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("replace")(error)


def _end(number: int, frame: object) -> None:
    """End at Ctrl-C, at once and without what Python does at exit."""
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def __getattr__(name: str) -> object:
    if name != "app":
        raise AttributeError(name)

    from optsched.cli.application import app

    return app
