"""Strict reading and plain writing of JSON, for all of optsched's file formats."""

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from optsched.files.outputs import write_bytes
from optsched.problem import text_files
from optsched.problem.columns import plain_numbers
from optsched.problem.errors import InputError

VERSION = 1
"""Version of every format."""

_MESSAGE_CHARS = 600
# What a cell begins with that a spreadsheet takes for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def read_json(path: str | Path, *, expect: str | Sequence[str] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, checked against expected formats; None: any object."""
    data, _ = read_json_and_digest(path)
    if expect is not None:
        with Place(Path(path)):
            check_format(data, expect)

    return data


def read_json_and_digest(path: str | Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a file, unchecked, and the SHA-256 of the file.

    One look must do, since a pipe can be read only once, and a file may change.
    """
    file = Path(path)
    content = text_files.read_bytes(file)
    with Place(file):
        data = text_files.parse_json(_decode(file, content))
        if not isinstance(data, dict):
            raise InputError(f"found a JSON {type(data).__name__}; expected an object")

    return data, hashlib.sha256(content).hexdigest()


def check_format(data: dict[str, Any], expect: str | Sequence[str]) -> str:
    """Check the ``format``, the ``version`` and the fields of a JSON object; return the format."""
    names = (expect,) if isinstance(expect, str) else tuple(expect)
    name = str(data.get("format")).removeprefix("optsched-")
    if name not in names or data["format"] != f"optsched-{name}":
        found = repr(data["format"]) if "format" in data else "nothing"
        words = " or ".join(f"'optsched-{name}'" for name in names)
        raise InputError(f"format: found {found}; expected {words}")
    if "version" not in data:
        raise InputError(f"version: found nothing; expected {VERSION}")
    if repr(data["version"]) != str(VERSION):  # 1.0 and true are no version 1
        raise InputError(
            f"version: found {data['version']!r}; expected {VERSION}, the version of {name} files "
            "that this optsched reads"
        )

    from optsched.files import schemas  # pydantic is only loaded where files are read

    schemas.check_shape(name, data)
    return name


def write_json(data: dict[str, Any], path: str | Path) -> None:
    """Write a JSON object to a file, atomically."""
    write_bytes(json_text(data).encode(), path)


def json_text(data: dict[str, Any]) -> str:
    """Return a JSON object as text, with a field per line and lists of numbers on one line.

    NaN and infinity become null, since files state what is unknown as null.
    """
    return _layout(data, 0) + "\n"


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as CSV text that no spreadsheet runs as a formula, by a leading apostrophe.

    Floats keep all their digits, and None is an empty cell.
    """
    lines: list[str] = []
    # The writer quotes a cell only for the characters of its own line end. With "\r\n" it quotes
    # cells that hold either of them, and the lines get a plain end here.
    stream = SimpleNamespace(write=lambda line: lines.append(line[:-2] + "\n"))
    writer = csv.writer(stream, lineterminator="\r\n")

    def harmless(cell: Any) -> Any:
        return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell

    writer.writerow(columns)
    for row in rows:
        writer.writerow([harmless(cell) for cell in row])

    return "".join(lines)


class Place:
    """A context that puts the file in front of an `InputError` and shortens it to one line."""

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
    """Return the name of a file without ``.json`` and ``.gz``."""
    return file.name.removesuffix(".gz").removesuffix(".json")


def _decode(file: Path, content: bytes) -> str:
    """Return the text of a file's bytes, which may be compressed if its name ends in ``.gz``."""
    if file.suffix == ".gz":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as unpacked:
                content = unpacked.read(text_files.MAX_BYTES + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise InputError(f"found a broken or truncated gzip file: {error}") from None
    elif content[:2] == b"\x1f\x8b":
        raise InputError("found gzip compression; expected a name that ends in .json.gz")

    if len(content) > text_files.MAX_BYTES:
        raise InputError(f"found too much JSON; expected at most {text_files.MAX_BYTES >> 20} MiB")
    if not content or content.isspace():
        raise InputError("found an empty file; expected a JSON object")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"expected UTF-8 text; byte {error.start}: {error.reason}") from None


def _layout(value: Any, depth: int) -> str:
    """Return JSON with a line for each field of the outer object and of the objects in it.

    Whatever is deeper stands on one line. `depth` is 0 for the outer object.
    """
    if isinstance(value, dict) and value and depth < 2:
        pad = "  " * (depth + 1)
        lines = (f"{pad}{json.dumps(str(k))}: {_layout(v, depth + 1)}" for k, v in value.items())
        return "{\n" + ",\n".join(lines) + "\n" + "  " * depth + "}"

    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except ValueError:  # a number in it is not finite
        return json.dumps(_without_nan(value), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    """Return what json writes for a value that it does not know."""
    if isinstance(value, np.ndarray):
        return plain_numbers(value) if value.dtype.kind in "iuf" else value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)

    raise TypeError(f"{type(value).__name__} has no place in a JSON file")


def _without_nan(value: Any) -> Any:
    """Return a value with null for each number in it that is not finite."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None

    return value
