"""The errors that optsched raises: each is one line with the place, what was found and expected."""

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar

T = TypeVar("T")


def meant(found: str, known: Iterable[str]) -> str:
    """Return the question whether the known name that is most like one was meant, if one is.

    Parameters
    ----------
    found : str
    known : iterable of str
    """
    from difflib import get_close_matches

    # Case and hyphens do not count, and 0.7 of the letters must be the same.
    plain = {name.replace("-", ""): name for name in known}
    near = get_close_matches(found.lower().replace("-", ""), plain, 1, 0.7)
    return f"did you mean {plain[near[0]]!r}? " if near else ""


def unknown(what: str, found: str, known: Iterable[str]) -> str:
    """Return that a name is unknown, which one may be meant, and which there are.

    Parameters
    ----------
    what : str
        What the name is of.
    found : str
    known : iterable of str
    """
    names = list(known)
    words = f"{meant(str(found), names)}known are {', '.join(names) or 'none'}"
    return f"{what} {found!r} is unknown; {words}"


def kind_of(value: object) -> str:
    """Return what a value is in words, for errors about a wrong one.

    Parameters
    ----------
    value : object
    """
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it"

    return "None" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"


def check_kind(what: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise `InputError` unless a value is an object of one of some classes.

    Parameters
    ----------
    what : str
        What the value is, as a caller knows it.
    value : object
    kinds : type or tuple of types
    expected : str
        The classes in words.
    """
    if not isinstance(value, kinds):
        raise InputError(f"{what}: found {kind_of(value)}; expected {expected}")


def check_keywords(
    function: Callable[..., Any], found: Iterable[str], others: Iterable[str]
) -> None:
    """Raise `UsageError` for a keyword that a function with ``**`` does not know.

    Parameters
    ----------
    function : callable
    found : iterable of str
        The keywords that its ``**`` took.
    others : iterable of str
        The keywords that it knows besides its parameters.
    """
    known = list(others)
    for name in found:
        if name not in known:
            parameters = signature(function).parameters.values()
            named_ones = [p.name for p in parameters if p.kind is not Parameter.VAR_KEYWORD]
            raise UsageError(unknown(f"{function.__name__}: keyword", name, [*named_ones, *known]))


def raised(error: BaseException) -> str:
    """Return an exception of a user's code in words, with the file and the line where it arose.

    Parameters
    ----------
    error : BaseException
    """
    ours = str(Path(__file__).parents[1]), "<frozen", "<string>"
    frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    if not frames:
        return repr(error)

    # The outermost file that is not optsched's is the user's; libraries that it calls come below.
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{error!r} ({last.filename}, line {last.lineno})"


def in_words(error: BaseException) -> str:
    """Return the kind of an exception and what it says, on one line.

    Parameters
    ----------
    error : BaseException
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def some(texts: Sequence[str]) -> str:
    """Return up to eight of some texts, and how many more there are.

    Parameters
    ----------
    texts : sequence of str
    """
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")


class OptschedError(Exception):
    """Base of every error that optsched raises on purpose.

    Attributes
    ----------
    exit_code : int
        Exit status of the command line for this error.
    """

    exit_code = 2


class InputError(OptschedError):
    """Bad input: a file, a field, a value, an option."""


class UsageError(OptschedError):
    """A combination of options that has no meaning; the message names one that has."""


def named(
    what: str,
    name: str,
    values: Mapping[str, T],
    error: Callable[[str], OptschedError] = InputError,
) -> T:
    """Return the value of a name, or raise an error that says which names there are.

    Parameters
    ----------
    what : str
        What the name is of.
    name : str
    values : mapping of str to value
    error : callable, optional
        Makes the error of its text.
    """
    if name not in values:
        raise error(unknown(what, name, values))

    return values[name]


class InfeasibleError(OptschedError):
    """The instance has no feasible schedule in the chosen model."""

    exit_code = 3


class NoIncumbentError(OptschedError):
    """No schedule was found, because the time ran out or a policy looped for ever."""

    exit_code = 4


class PolicyError(OptschedError):
    """A policy cannot run here, named an unknown request, stood still or raised an exception."""


class OutOfTimeError(NoIncumbentError):
    """The time limit or an interruption came while something was made that is of no use in part."""


class TooLargeError(UsageError):
    """A model would need more memory than is allowed, so it is not built."""


class LoopError(NoIncumbentError):
    """A policy repeated the same states for ever and was stopped."""


class SolverError(OptschedError):
    """A solver failed, or its objective differs from the judge's value."""

    exit_code = 1


class ViolationError(OptschedError):
    """A schedule or a certificate breaks a constraint.

    Parameters
    ----------
    message : str
        One line that says which constraint is broken, and where.
    rule : str
        Short name of the constraint, for example ``"kv_capacity"``.
    batch, request : int, optional
        Index of the batch (of the round, for a schedule of starts) and of the request, where
        there is one.
    value, limit : float, optional
        The value found and the limit that it breaks.
    """

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        rule: str,
        batch: int | None = None,
        request: int | None = None,
        value: float | None = None,
        limit: float | None = None,
    ) -> None:
        super().__init__(message)
        self.rule = rule
        self.batch = batch
        self.request = request
        self.value = value
        self.limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle makes an exception again from `args`, which has no keywords: `rule`, which the
        # constructor needs, is bound to it, and the attributes are set afterwards.
        return partial(type(self), rule=self.rule), self.args, vars(self)
