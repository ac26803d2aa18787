"""Files of text that users give: read whole, and refused in one line whatever is in them."""

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from optsched.problem.errors import InputError

MAX_BYTES = 1 << 29
"""Maximum size of a file; parsing takes many times as much memory."""

# Half of a surrogate pair, an escape from \ud800 to \udfff: alone it is no character.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONG_NUMBER = re.compile(r"[\s\[:,-]\d{309}")  # no float is as large


def read_bytes(path: str | Path, expected: str = "a file") -> bytes:
    """Return what is in a file, or raise an `InputError` that begins with its path."""
    try:
        with open(path, "rb") as stream:
            content = stream.read(MAX_BYTES + 1)  # a device may have no end
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected {expected}") from None
    except IsADirectoryError:
        raise InputError(f"{path}: found a directory; expected {expected}") from None
    except (OSError, ValueError) as error:  # a name with a NUL character is a ValueError
        raise InputError(f"{path}: cannot be read: {reason(error)}") from None

    if len(content) > MAX_BYTES:
        raise InputError(f"{path}: found more than {MAX_BYTES >> 20} MiB; expected {expected}")

    return content


def read_text(path: str | Path, expected: str = "a file") -> str:
    """Return the text of a file in UTF-8, or raise an `InputError` that begins with its path."""
    content = read_bytes(path, expected)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {error.start}: {error.reason}; expected {expected} in UTF-8"
        ) from None


def read_object(path: str | Path, expected: str) -> dict[str, Any]:
    """Return the JSON object in a file of another program."""
    text = read_text(path, expected)
    try:
        data = parse_json(text)
    except InputError as error:
        raise InputError(f"{path}: {error}; expected {expected}") from None

    if not isinstance(data, dict):
        raise InputError(f"{path}: found a JSON {type(data).__name__}; expected {expected}")

    return data


def read_toml(path: str | Path, expected: str, **options: Any) -> dict[str, Any]:
    """Return what a TOML file says; ``options`` are those of `tomllib.loads`."""
    try:
        return tomllib.loads(read_text(path, expected), **options)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a readable TOML file ({error})") from None


def parse_json(text: str) -> Any:
    """Return what a JSON text says, with finite numbers and no key twice in an object."""
    if _LONG_NUMBER.search(text):
        raise InputError("found a number of hundreds of digits; expected fewer")
    try:
        data = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            object_pairs_hook=_object_of,
        )
    except json.JSONDecodeError as error:
        # What does not even begin as JSON may be a trace that was given for an instance.
        hint = "; `import` makes an instance of a trace" if error.pos == 0 else ""
        raise InputError(
            f"line {error.lineno}, column {error.colno}: not JSON: {error.msg.lower()}{hint}"
        ) from None
    except RecursionError:
        raise InputError("found JSON that is nested too deeply; expected optsched's") from None

    # A text with half of a pair could be neither printed nor written. Whole pairs are as common as
    # emojis, so encoding decides.
    if _SURROGATE.search(text):
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = str(error.object[error.start]).encode("unicode_escape").decode()
            raise InputError(f"found {half}, half of a character; expected text") from None

    return data


def reason(error: OSError | ValueError) -> str:
    """Return why a file cannot be read or written, in lower case."""
    return str((error.strerror if isinstance(error, OSError) else None) or error).lower()


def _refuse_constant(word: str) -> None:
    """Refuse NaN, Infinity and -Infinity, which Python's reader would take."""
    raise InputError(f"found {word}, which is not JSON; expected a finite number or null")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise InputError(f"found {text:.40}; expected a number below 1e308")

    return number


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of its keys and values; a key that comes twice is refused."""
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"{twice}: found twice in one object; expected once")

    return data
