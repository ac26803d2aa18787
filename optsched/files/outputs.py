"""Every output of optsched: whether it can be written, and writing it as a whole or not at all."""

import gzip
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optsched.problem.errors import InputError
from optsched.problem.text_files import reason

_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr)|/(?:dev|proc/self)/fd/(\d{1,9})", re.ASCII)


def write_bytes(content: bytes, path: str | Path) -> None:
    """Write a file atomically: it is either the old one or the new one, never half of it.

    Devices, pipes and open descriptors (``/dev/stdout``) are written to directly. What is written
    to a name in ``.gz`` is compressed, and the same content always gives the same bytes.
    """
    file = Path(path)
    if file.suffix == ".gz":
        content = gzip.compress(content, mtime=0)

    with _writing(file):
        number = descriptor(file)
        if number is not None:
            sys.stdout.flush()
            with os.fdopen(os.dup(number), "wb") as stream:
                stream.write(content)

            return

        target, mode = _target(file)  # the mode of the file that is there, None if none is
        if mode is not None and not stat.S_ISREG(mode):
            target.write_bytes(content)  # a device or pipe cannot be replaced
            return

        # A file beside the target takes its place in one step, once all of it is on the disk. Names
        # end at 255 bytes.
        temporary = target.with_name(f".{target.name[:200]}.{os.urandom(6).hex()}.tmp")
        try:
            with open(temporary, "xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())

            if mode is not None:  # the new file is as private as the old one
                os.chmod(temporary, stat.S_IMODE(mode))

            os.replace(temporary, target)
        finally:
            with suppress(OSError):  # after a success it is gone, and it may never have been made
                temporary.unlink()


def check_output(path: str | Path) -> Path | None:
    """Check that a file can be written, before work is done whose result would be lost.

    The file that a path leads to is returned, to tell two apart; None for an open descriptor.
    """
    if not str(path):
        raise InputError("found an empty name; expected a file")

    file = Path(path)
    if descriptor(file) is not None:
        return None
    with _writing(file):
        target, mode = _target(file)
        if mode is None or stat.S_ISREG(mode):  # a device or a pipe is written in place
            with tempfile.TemporaryFile(dir=target.parent):
                pass

    return target


def check_outputs(*paths: str | None) -> None:
    """Check that the files of a command can be written, and are different ones.

    None and ``-``, which is standard output, are no files.
    """
    seen: set[Path] = set()
    for text in paths:
        target = None if text is None or text == "-" else check_output(text)
        if target in seen:
            raise InputError(f"{text}: found for two outputs; expected two files")
        if target is not None:
            seen.add(target)


def check_folder(path: str | Path | None) -> None:
    """Check that a folder for results is there or can be made, and can be written to, if any."""
    if path is None:
        return

    # Where it is yet to be made, the nearest folder above it that is there has to take it.
    folder = Path(path)
    with _writing(folder):
        nearest = folder.absolute()
        while not _is_there(nearest):
            nearest = nearest.parent
        with tempfile.TemporaryFile(dir=nearest):
            pass


def make_folder(path: str | Path) -> Path:
    """Return a folder for results, made with those above it if they are not there."""
    folder = Path(path)
    check_folder(folder)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)

    return folder


def file_name(words: str, taken: set[str]) -> str:
    """Return a file's name for words such as a policy's, which no other has, and add it to `taken`.

    Of the path of a user's file its last part is left. A name begins with a letter or a digit, as
    a folder's listing hides others, and has at most 100 characters.
    """
    without_path = re.sub(r".*[/\\](?=[^/\\]*\.py:)", "", words)
    plain = re.sub(r"[^A-Za-z0-9._=,-]+", "_", without_path)
    base = re.sub(r"^[^A-Za-z0-9]+", "", plain)[:100] or "policy"
    name, count = base, 1
    while name.lower() in taken:  # some systems have no capitals
        count += 1
        name = f"{base}-{count}"

    taken.add(name.lower())
    return name


def _target(file: Path) -> tuple[Path, int | None]:
    """Return the file that a path leads to, and its mode, or None if it is yet to be made."""
    try:
        mode = os.stat(file).st_mode
    except FileNotFoundError:
        mode = None

    if mode is not None and stat.S_ISDIR(mode):
        raise InputError(f"{file}: found a directory; expected a file")
    if mode is not None and not os.access(file, os.W_OK):
        raise InputError(f"{file}: cannot be written: it is read-only")

    return Path(os.path.realpath(file)), mode


def _is_there(folder: Path) -> bool:
    """Return whether a folder is there, or raise an `InputError` if none can be made there."""
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise InputError(f"{folder}: found a file; expected a folder")
    except FileNotFoundError:
        if os.path.islink(folder):
            raise InputError(f"{folder}: found a link to nothing; expected a folder") from None

        return False

    return True


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Turn what the system says against writing a file into an `InputError`."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the pipe has closed it, which is no error of the file
    except FileNotFoundError:
        raise InputError(f"{file}: cannot be written: its folder does not exist") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be written: {reason(error)}") from None


def descriptor(path: str | Path) -> int | None:
    """Return the open descriptor that a path like ``/dev/stdout`` names."""
    match = _DESCRIPTOR.fullmatch(str(path))
    if match is None:
        return None

    return {"stdout": 1, "stderr": 2}.get(match[1]) or int(match[2])
