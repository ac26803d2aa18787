"""What is public is described: every parameter, what comes back, and what goes wrong.

Public is `optsched.__all__`, and what the API reference (docs/api) shows: what its modules define
under names without an underscore, or those members that a page lists.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import optsched

ROOT = Path(__file__).resolve().parent.parent
ENTRY = re.compile(r"^::: ([\w.]+)$(?:\n    options:\n      members: (false|\[.+\])$)?", re.M)
SECTION = re.compile(r"^(?P<name>[A-Z][A-Za-z ]+)\n-{3,}$", re.MULTILINE)
ITEM = re.compile(r"^(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: : .+)?$")


def shown() -> Iterator[Any]:
    """Yield what the pages of the API reference show of each module."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name, listed in ENTRY.findall(page.read_text()):
            try:
                module = import_module(name)
            except ModuleNotFoundError:  # a class of a module
                home, _, own = name.rpartition(".")
                yield getattr(import_module(home), own)
                continue

            if listed:
                names = [] if listed == "false" else listed.strip("[]").split(", ")
                yield from (getattr(module, one) for one in names)
            else:
                yield from (
                    value
                    for one, value in vars(module).items()
                    if not one.startswith("_")
                    and getattr(value, "__module__", None) == module.__name__
                )


def public_callables() -> Iterator[tuple[str, Any]]:
    """Yield functions, classes and their methods with their names, each once."""
    seen = set()
    for value in (*(getattr(optsched, name) for name in optsched.__all__), *shown()):
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        name = f"{value.__module__}.{value.__qualname__}"
        if name in seen or not value.__module__.startswith("optsched"):
            continue
        seen.add(name)
        yield name, value
        if inspect.isclass(value):
            fields = getattr(value, "__dataclass_fields__", {})  # a default may be a function
            for attribute, method in vars(value).items():
                if attribute in fields:
                    continue
                method = getattr(method, "__func__", method)
                if not attribute.startswith("_") and inspect.isfunction(method):
                    yield f"{name}.{attribute}", method


PUBLIC = dict(public_callables())


def sections(text: str) -> dict[str, str]:
    """Return the sections of a numpydoc text by name; what precedes them is under ''."""
    parts = SECTION.split(text)
    return dict(zip(["", *parts[1::2]], parts[0::2], strict=True))


def described(section: str) -> set[str]:
    """Return the names that a section of parameters describes."""
    items = (ITEM.match(line) for line in section.splitlines())
    names = (item["names"].split(", ") for item in items if item)
    return {name.lstrip("*") for group in names for name in group}


def parameters(value: Callable[..., Any]) -> set[str]:
    """Return the names of a callable's parameters, without the object that it belongs to."""
    if inspect.isclass(value):
        if getattr(value, "_is_protocol", False):
            return set()
        if not dataclasses.is_dataclass(value) and "__init__" not in vars(value):
            return set(getattr(value, "_fields", ()))
        value = value.__init__
    return set(inspect.signature(value).parameters) - {"self", "cls"}


def text_of(value: Any) -> str:
    """Return the docstring; of a class, with that of its ``__init__``."""
    text = value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)
    text = inspect.cleandoc(text or "")
    if inspect.isclass(value) and not dataclasses.is_dataclass(value):
        own = vars(value).get("__init__")
        text += "\n\n" + inspect.cleandoc((own.__doc__ if own else "") or "")
    return text


@pytest.mark.parametrize("name", PUBLIC)
def test_public_callables_say_what_they_take_and_give(name: str) -> None:
    value = PUBLIC[name]
    text = text_of(value)
    assert text, f"{name}: no docstring"
    found = sections(text)
    told = described(found.get("Parameters", "")) | described(found.get("Attributes", ""))
    for base in value.__mro__[1:] if inspect.isclass(value) else ():  # it says its own fields
        if dataclasses.is_dataclass(base):
            told |= described(sections(text_of(base)).get("Parameters", ""))
    if not text.startswith("See `"):  # a method that says whose promise it keeps
        missing = parameters(value) - told
        assert not missing, f"{name}: not described: {', '.join(sorted(missing))}"
    if inspect.isclass(value) or text.startswith("See `"):
        return
    returns = inspect.signature(value).return_annotation
    summary = found[""].lstrip().lower()
    gives = returns in ("None", None, inspect.Signature.empty)
    said = "Returns" in found or "Yields" in found
    said = said or summary.startswith(("return", "yield", "whether", "draw"))
    assert gives or said, f"{name}: what it returns is not said"
