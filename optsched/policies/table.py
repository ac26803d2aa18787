"""The policies that are data: ``table.toml`` has their fields, and what of them users may set."""

import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from optsched.policies import policy
from optsched.policies.base import Rules, Windows
from optsched.problem.errors import InputError

_TABLE = tomllib.loads(Path(__file__).with_name("table.toml").read_text(encoding="utf-8"))
# What a row has beside fields of `Rules` or `Windows`.
_ABOUT = ("summary", "paper", "clairvoyant", "text", "kind", "like", "may", "words")


def rules_like(name: str, **fields: object) -> Rules:
    """Return the rules of a policy of the table, with other values of some fields.

    Parameters
    ----------
    name : str
    **fields
        Fields of `Rules`.
    """
    made = _changed(_made_of(_TABLE[name]), fields)
    if not isinstance(made, Rules):
        raise InputError(f"policy {name!r}: found windows; expected rules")

    return made


def _changed(scheduler: Rules | Windows, fields: Mapping[str, Any]) -> Rules | Windows:
    """Return a scheduler with other values; in rounds, too, where these were the same there."""
    if not isinstance(scheduler, Rules) or scheduler.in_rounds is None or "in_rounds" in fields:
        return replace(scheduler, **fields)

    # Where a field differs in rounds, the table sets it for them alone, and it stays.
    rounds = scheduler.in_rounds
    same_there = {k: v for k, v in fields.items() if getattr(rounds, k) == getattr(scheduler, k)}
    return replace(scheduler, in_rounds=replace(rounds, **same_there), **fields)


def _made_of(row: Mapping[str, Any]) -> Rules | Windows:
    """Return the scheduler that a row of the table describes.

    A value that is a table is a scheduler of its own: the rules ``in_rounds`` or ``wide``. Lists
    become tuples, since schedulers are frozen.
    """
    fields: dict[str, Any] = {}
    for name in row.keys() - _ABOUT:
        value = row[name]
        inner = _made_of(value) if isinstance(value, dict) else value
        fields[name] = tuple(inner) if isinstance(inner, list) else inner

    if "like" in row:
        return _changed(_made_of(_TABLE[row["like"]]), fields)

    return Windows(**fields) if row.get("kind") == "windows" else Rules(**fields)


def _inherited(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with what it has from the one that it is like, but for its fields."""
    if "like" not in row:
        return row

    base = _inherited(_TABLE[row["like"]])
    return {**{key: base[key] for key in ("paper", "may", "words") if key in base}, **row}


def _maker(row: Mapping[str, Any]) -> Callable[..., Rules | Windows]:
    """Return a function that makes a policy from the values that may be set.

    ``may`` names all of them. They are fields, or ``words``, each of which sets several fields at
    once: to values of the row, or where these are "=" to its own.
    """
    default, keyword_only = _made_of(row), inspect.Parameter.KEYWORD_ONLY
    hints, words = get_type_hints(type(default)), row.get("words", {})
    # The field that each parameter sets. A word has one if its value goes there, or else "".
    fields = {key: key for key in row.get("may", ())}
    for word, sets in words.items():
        if word in fields:
            fields[word] = next((field for field, value in sets.items() if value == "="), "")

    def make(**values: object) -> Rules | Windows:
        # Parameters that are fields, and then those that are words, unless they are off.
        chosen: dict[str, Any] = {key: values[key] for key in values.keys() - words}
        for word, sets in words.items():
            if given := values.get(word):
                chosen |= {key: given if value == "=" else value for key, value in sets.items()}

        try:
            return _changed(default, chosen)
        except InputError as error:
            # It names a field of `Rules`, which may have another name among the parameters.
            text = str(error)
            for word in values.keys() & fields.keys():
                text = re.sub(rf"\b{fields[word] or word}\b", word, text)

            raise InputError(text) from None

    make.__doc__ = row.get("text")
    make.__annotations__ = {key: hints.get(field, bool) for key, field in fields.items()}
    make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, keyword_only, default=getattr(default, field, False))
            for key, field in fields.items()
        ]
    )
    return make


for _name, _row in _TABLE.items():
    _all = _inherited(_row)
    _about = {"clairvoyant": _row.get("clairvoyant", False), "paper": _all.get("paper", "")}
    policy(_name, _row["summary"], **_about)(_maker(_all))
