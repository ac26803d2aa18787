"""Strict JSON in, atomic files out: what all of optsched's file formats share."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from optsched.problem.columns import plain_numbers
from optsched.problem.errors import InputError

FORMATS = ("instance", "schedule", "result", "comparison", "certificate", "measured")
"""Names of the file formats; a file's ``format`` is ``optsched-`` and one of them."""

VERSION = 1
"""Version of every format."""

MAX_BYTES = 1 << 29
"""Size of a file, decompressed, beyond which it is not read: parsing takes many times as much."""

_MESSAGE_CHARS = 600
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr)|/(?:dev|proc/self)/fd/(\d{1,9})", re.ASCII)


def read_json(
    path: str | Path, *, expect: str | Sequence[str] | None = None, version: int = VERSION
) -> dict[str, Any]:
    """Return the JSON object in a file of optsched's.

    Parameters
    ----------
    path : str or Path
        A ``.json`` file, or ``.json.gz``.
    expect : str or sequence of str, optional
        The formats allowed, of `FORMATS`; the file's shape is checked against its own. None:
        any JSON object, unchecked.
    version : int
        The version that the file must have.

    Raises
    ------
    InputError
        One line that begins with the file.
    """
    data, _ = read_json_and_digest(path)
    if expect is not None:
        with Place(Path(path)):
            check_format(data, expect, version=version)
    return data


def read_json_and_digest(path: str | Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a file, unchecked, and the SHA-256 of the file.

    A pipe can be read only once, and a file may change: who needs to know the format first
    dispatches on this object.

    Raises
    ------
    InputError
        See `read_json`.
    """
    file = Path(path)
    with Place(file):
        content = _read_bytes(file)
        data = _parse(_decoded(file, content))
        if not isinstance(data, dict):
            raise InputError(f"holds a JSON {type(data).__name__}; an object is right")
    return data, hashlib.sha256(content).hexdigest()


def check_format(
    data: dict[str, Any], expect: str | Sequence[str], *, version: int = VERSION
) -> str:
    """Check a JSON object's ``format``, ``version`` and shape; return its format's name.

    Raises
    ------
    InputError
        Another format or version, or a field that is unknown, missing or of the wrong kind.
    """
    names = (expect,) if isinstance(expect, str) else tuple(expect)
    words = " or ".join(f"'optsched-{name}'" for name in names)
    if "format" not in data:
        raise InputError(f"format: missing; {words} is right")
    name = str(data["format"]).removeprefix("optsched-")
    if name not in names or data["format"] != f"optsched-{name}":
        raise InputError(f"format: {data['format']!r}; {words} is right")
    if "version" not in data:
        raise InputError(f"version: missing; {version} is right")
    if type(data["version"]) is not int or data["version"] != version:
        raise InputError(
            f"version: {data['version']!r}; this optsched reads version {version} of {name} files"
        )
    from optsched.files import schemas  # pydantic is only needed where files are

    schemas.check_shape(name, data)
    return name


def write_json(data: dict[str, Any], path: str | Path) -> None:
    """Write a JSON object atomically; see `json_text`.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    write_bytes(json_text(data).encode(), path)


def json_text(data: dict[str, Any]) -> str:
    """Return a JSON object as text: a field per line, lists of numbers on one line.

    NumPy numbers and arrays become plain ones; NaN and infinities become null, since files
    state what is unknown as null.
    """
    return _layout(data, 0) + "\n"


def write_bytes(content: bytes, path: str | Path) -> None:
    """Write a file so that it is either the old one or the new one, never half of it.

    The content goes to a temporary file in the same folder, which then takes the file's place.
    A path that ends in ``.gz`` is compressed, with the same bytes for the same content. Devices,
    pipes and open descriptors (``/dev/stdout``) are written to as they are.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    file = Path(path)
    if file.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    temporary: Path | None = None
    try:
        number = descriptor(file)
        if number is not None:
            sys.stdout.flush()
            with os.fdopen(os.dup(number), "wb") as stream:
                stream.write(content)
            return
        target = Path(os.path.realpath(file))
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and stat.S_ISDIR(mode):
            raise InputError(f"{file}: is a directory; a file is right")
        if mode is not None and not stat.S_ISREG(mode):
            target.write_bytes(content)  # a device or pipe cannot be replaced
            return
        if mode is not None and not os.access(target, os.W_OK):
            raise InputError(f"{file}: cannot be written: it is read-only")
        temporary = target.with_name(f".{target.name[:200]}.{os.urandom(6).hex()}.tmp")
        with open(temporary, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if mode is not None:
            os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, target)
    except BrokenPipeError:
        raise  # the reader has seen enough
    except FileNotFoundError:
        raise InputError(f"{file}: cannot be written: its folder does not exist") from None
    except (OSError, ValueError) as error:
        words = reason(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"{file}: cannot be written: {words}") from None
    finally:
        if temporary is not None:
            with suppress(OSError):  # it is gone where all went well, or was never made
                temporary.unlink()


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as CSV that a spreadsheet shows and does not run.

    Texts that begin with ``=``, ``+``, ``-``, ``@``, a tab or an end of line get a leading
    apostrophe, so that no spreadsheet takes them for a formula; numbers stay as they are, floats
    with all their digits, and None is an empty cell. Lines end with a line feed.
    """
    lines: list[str] = []
    # The writer only quotes the ends of lines that it writes itself: cells may hold both kinds.
    end = SimpleNamespace(write=lambda line: lines.append(line[:-2] + "\n"))
    writer = csv.writer(end, lineterminator="\r\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_harmless(cell) for cell in row])
    return "".join(lines)


def _harmless(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def descriptor(path: str | Path) -> int | None:
    """Return the descriptor that a path like ``/dev/stdout`` names, or None for any other."""
    found = _DESCRIPTOR.fullmatch(str(path))
    if found is None:
        return None
    return {"stdout": 1, "stderr": 2}.get(found[1]) or int(found[2])


class Place:
    """A context that puts the file in front of an input error, and keeps it to one line.

    Parameters
    ----------
    file : Path
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InputError):
            text = " ".join(str(error).split())
            if len(text) > _MESSAGE_CHARS:
                text = f"{text[: _MESSAGE_CHARS // 2]} ... {text[-_MESSAGE_CHARS // 2 :]}"
            raise InputError(f"{self.file}: {text}") from None


def stem(file: Path) -> str:
    """Return a file's name without ``.json`` and ``.gz``."""
    return file.name.removesuffix(".gz").removesuffix(".json")


def reason(error: OSError) -> str:
    """Return why the system refused, in lower case."""
    return (error.strerror or str(error)).lower()


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise InputError("no such file") from None
    except IsADirectoryError:
        raise InputError("is a directory; a file is right") from None
    except (OSError, ValueError) as error:
        words = reason(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"cannot be read: {words}") from None


def _decoded(file: Path, content: bytes) -> str:
    if file.suffix == ".gz":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as unpacked:
                content = unpacked.read(MAX_BYTES + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise InputError(f"broken or truncated gzip file: {error}") from None
    elif content[:2] == b"\x1f\x8b":
        raise InputError("is compressed with gzip; a name that ends in .json.gz is right")
    if len(content) > MAX_BYTES:
        raise InputError(f"is too large: more than {MAX_BYTES >> 20} MiB of JSON")
    if not content or content.isspace():
        raise InputError("is empty; a JSON object is right")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text: byte {error.start} is {error.reason}") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise InputError(
            f"line {error.lineno}, column {error.colno}: not JSON: {error.msg.lower()}"
        ) from None
    except RecursionError:
        raise InputError("not a file of optsched's: nested too deeply") from None
    except ValueError:
        raise InputError("holds a number of thousands of digits") from None


def _no_constant(word: str) -> None:
    raise InputError(f"{word} is not JSON; a finite number or null is right")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"{twice}: given twice in one object")
    return data


def _layout(value: Any, depth: int) -> str:
    if isinstance(value, dict) and value and depth < 2:
        pad = "  " * (depth + 1)
        lines = (f"{pad}{json.dumps(str(k))}: {_layout(v, depth + 1)}" for k, v in value.items())
        return "{\n" + ",\n".join(lines) + "\n" + "  " * depth + "}"
    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_without_nan(value), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return plain_numbers(value) if value.dtype.kind in "iuf" else value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in a JSON file")


def _without_nan(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
