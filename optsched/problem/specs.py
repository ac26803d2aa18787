"""Reading of specifications ``name:key=value,...`` and of lists of ``key=value``."""

import hashlib
import importlib.util
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from optsched.problem.errors import InputError, OptschedError, check_kind, named, raised

_FILE = re.compile(r"[^,=]*?\.py:")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a policy, predictor or objective, which may be None (``none``, ``inf``)."""

    type: type
    optional: bool
    default: Any


def parameters_of(make: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a callable by name, read from its signature."""
    # A class is annotated in its constructor; what has no annotation is a text.
    maker: Any = type.__getattribute__(make, "__init__") if isinstance(make, type) else make
    hints = typing.get_type_hints(maker)
    parameters = {}

    for name, parameter in inspect.signature(make).parameters.items():
        # An annotation is a type, a union with None, or a Literal, whose arguments are words.
        hint = hints.get(name, str)
        options = typing.get_args(hint) or (hint,)
        not_none = [option for option in options if option is not types.NoneType]
        kind = not_none[0] if isinstance(not_none[0], type) else str
        optional = len(not_none) < len(options)
        parameters[name] = Parameter(kind, optional, parameter.default)

    return parameters


def is_file(name: str) -> bool:
    """Whether a specification names a user's ``file.py:attribute``."""
    return _FILE.match(name) is not None


def parse_spec(spec: str, kind: str = "policy") -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,...`` into the name and the texts of its parameters.

    The name of a user's own is ``file.py:attribute``. `kind`: what errors call the specification.
    """
    check_kind(kind, spec, str, "a specification, name:key=value,... or file.py:name")
    if spec.endswith(".py") and ":" not in spec:
        spec += ":"  # an empty attribute: `load_attribute` says which the file has
    if is_file(spec):
        file, _, after_file = spec.partition(".py:")
        attribute, _, pairs = after_file.partition(":")
        name = f"{file}.py:{attribute}"
    else:
        name, _, pairs = spec.partition(":")
        if pairs.isidentifier():  # a file without its ending, or a value without its key
            expected = f"key=value, or {name}.py:{pairs} of a file"
            raise InputError(f"{kind} {spec!r}: found {pairs!r}; expected {expected}")

    return name, read_pairs(filter(None, pairs.split(",")), f"{kind} {spec!r}")


def read_pairs(
    parts: Iterable[str], where: str, error: Callable[[str], OptschedError] = InputError
) -> dict[str, str]:
    """Return the texts of ``key=value`` parts by key."""
    texts: dict[str, str] = {}
    for part in parts:
        key, equals, value = (text.strip() for text in part.partition("="))
        if not equals or not key:
            raise error(f"{where}: found {part!r}; expected key=value")
        if key in texts:
            raise error(f"{where}: found {key!r} twice; expected each key once")

        texts[key] = value

    return texts


def read_entries(text: str) -> dict[str, tuple[list[str], str]]:
    """Return, by NAME, the MORE and the WORDS of entries ``NAME MORE: WORDS`` of a docstring.

    An entry begins in a line that is indented by two spaces, and goes on in lines with more.
    """
    entries: dict[str, tuple[list[str], str]] = {}
    for entry in re.split(r"\n  (?=\S)", "\n" + text.strip("\n")):
        if plain := " ".join(entry.split()):
            head, words = re.split(r":(?: |$)", plain, maxsplit=1)
            name, *more = head.split()
            entries[name] = more, words

    return entries


def split_specs(text: str) -> list[str]:
    """Split ``a:x=1,y=2,b`` into ``a:x=1,y=2`` and ``b``."""
    specs: list[str] = []
    for part in text.split(","):
        # ``y=2`` without a colon before it is one more parameter of the specification before.
        if specs and re.match(r"\s*[^:=]+=", part):
            specs[-1] += f",{part.strip()}"
        else:
            specs.append(part.strip())

    return specs


def convert_all(
    texts: Mapping[str, str], known: Mapping[str, Parameter], where: str, *, hint: str = ""
) -> dict[str, Any]:
    """Return the values of parameters from their texts. `hint`: more on what is missing."""
    values = {}
    for key, text in texts.items():
        parameter = named(f"{where}: parameter", key, known)
        values[key] = convert(text, parameter, f"{where}: parameter {key}")

    for key, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and key not in values:
            raise InputError(f"{where}: parameter {key!r}: found nothing; expected a value{hint}")

    return values


def convert(text: str, parameter: Parameter, where: str) -> Any:
    """Return the value of a parameter from its text."""
    if parameter.optional and text.lower() in ("none", "null", "inf"):
        return None
    if parameter.type is bool:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{where}: found {text!r}; expected true or false")

        return text.lower() == "true"

    if parameter.type in (int, float):
        try:
            value = parameter.type(text)
        except ValueError:
            value = math.nan

        if not -math.inf < value < math.inf:  # which NaN is not either
            kind = "an integer" if parameter.type is int else "a number"
            raise InputError(f"{where}: found {text!r:.80}; expected {kind}")

        return value

    return text


def load_attribute(name: str, kind: str, data: tuple[type, ...] = ()) -> Any:
    """Return the object that ``file.py:attribute`` names, executed again only after a change.

    It is a class, a function, or a value of one of the types `data`. `kind`: what errors call it.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    where = f"{kind} {name.removesuffix(':')!r}"
    if not path.is_file():
        raise InputError(f"{where}: {file}: no such file; expected file.py:name")
    try:
        state = path.stat()
        module = _load(str(path.resolve()), state.st_mtime_ns, state.st_size)
    except (Exception, SystemExit) as error:
        raise InputError(f"{where}: {file} fails to load: {raised(error)}") from error

    value = getattr(module, attribute, None)
    if callable(value) or isinstance(value, data):
        return value

    # The error names what the file itself defines, and not what it imports.
    missing = f"{file} defines no class or function {attribute!r}"
    if data:
        missing += f", and no {' or '.join(kind.__name__ for kind in data)} of that name"
    if not attribute:
        missing = f"found no class; expected {file}:CLASS"

    homes = {name: getattr(value, "__module__", "") for name, value in vars(module).items()}
    defined = ", ".join(name for name, home in homes.items() if home == module.__name__)
    raise InputError(f"{where}: {missing}; it defines {defined or 'none'}")


@lru_cache(maxsize=64)
def _load(file: str, changed_ns: int, size: int) -> types.ModuleType:
    """Execute a user's file. The time of its last change and its size identify its version.

    What it imports from its own folder is forgotten after that: another folder's module may have
    the same name, and the next version of the file shall see the next version of the module.
    """
    folder = Path(file).parent
    name = f"optsched_user_{Path(file).stem}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    loaded_before = set(sys.modules)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(folder))

    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(folder))
        # A module ``helper`` of the folder is helper.py, or a package with helper/__init__.py. All
        # modules of such a package go with it.
        new = set(sys.modules).difference(loaded_before, [name])
        files = {other: getattr(sys.modules[other], "__file__", None) or "/" for other in new}
        of_folder = {m for m, path in files.items() if Path(path).parent in (folder, folder / m)}
        for other in new:
            if other.partition(".")[0] in of_folder:
                del sys.modules[other]

    return module
