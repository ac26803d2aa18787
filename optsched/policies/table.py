"""The policies that are data: ``table.toml`` has their fields, and what of them users may set."""

import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from optsched.policies import policy
from optsched.policies.base import Rules, Windows
from optsched.problem.errors import InputError

_TABLE = tomllib.loads(Path(__file__).with_name("table.toml").read_text(encoding="utf-8"))
_ABOUT = ("summary", "paper", "clairvoyant", "text", "kind", "like", "may", "words")
"""What a row has beside fields of `Rules` or `Windows`."""


def rules_like(name: str, **fields: object) -> Rules:
    """Return the rules of a policy of the table, with other values of some fields.

    Parameters
    ----------
    name : str
    **fields
        Fields of `Rules`.
    """
    made = replace(_made_of(_TABLE[name]), **fields)  # type: ignore[arg-type]
    if not isinstance(made, Rules):
        raise InputError(f"policy {name!r}: found windows; expected rules")

    return made


def _made_of(row: Mapping[str, Any]) -> Rules | Windows:
    """Return what a row describes."""
    fields: dict[str, Any] = {}
    for name in row.keys() - _ABOUT:
        value = row[name]
        inner = _made_of(value) if isinstance(value, dict) else value
        fields[name] = tuple(inner) if isinstance(inner, list) else inner

    if "like" in row:
        return replace(_made_of(_TABLE[row["like"]]), **fields)

    return Windows(**fields) if row.get("kind") == "windows" else Rules(**fields)


def _words(row: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    """Return the words of a row, or of the one that it is like."""
    while "words" not in row and "like" in row:
        row = _TABLE[row["like"]]

    return row.get("words", {})


def _maker(row: Mapping[str, Any]) -> Callable[..., Rules | Windows]:
    """Return what makes a policy from the values that may be set."""
    plain, own = _made_of(row), inspect.Parameter.KEYWORD_ONLY
    hints, words = get_type_hints(type(plain)), _words(row)
    fields = {key: key for key in row.get("may", ())}  # that of a word's value, or ""
    for word, sets in words.items():
        if word in fields:
            fields[word] = next((field for field, value in sets.items() if value == "="), "")

    def make(**values: object) -> Rules | Windows:
        chosen: dict[str, Any] = {key: values[key] for key in values.keys() - words}
        for word, sets in words.items():
            if given := values.get(word):
                chosen |= {key: given if value == "=" else value for key, value in sets.items()}

        if isinstance(plain, Rules) and (rounds := plain.in_rounds) is not None:
            alike = {k: v for k, v in chosen.items() if getattr(rounds, k) == getattr(plain, k)}
            chosen["in_rounds"] = replace(rounds, **alike)

        return replace(plain, **chosen)

    make.__doc__ = row.get("text")
    make.__annotations__ = {key: hints.get(field, bool) for key, field in fields.items()}
    make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, own, default=getattr(plain, field, False))
            for key, field in fields.items()
        ]
    )
    return make


for _name, _row in _TABLE.items():
    _about = {"clairvoyant": _row.get("clairvoyant", False), "paper": _row.get("paper", "")}
    policy(_name, _row["summary"], **_about)(_maker(_row))
