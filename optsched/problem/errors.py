"""Errors that optsched reports: each is one line that says where, what and what would be right."""

from __future__ import annotations


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
    """A combination of options that has no meaning, with the one that has."""


class InfeasibleError(OptschedError):
    """The instance admits no schedule in the model asked for."""

    exit_code = 3


class NoIncumbentError(OptschedError):
    """No schedule was found within the limits (a time limit, or an endless loop of a policy)."""

    exit_code = 4


class PolicyError(OptschedError):
    """A policy broke the rules of the engine: unknown request, no progress, an exception."""


class LoopError(NoIncumbentError):
    """A policy that repeats itself for ever, detected and stopped."""


class SolverError(OptschedError):
    """A solver failed, or its objective differs from the judge's."""

    exit_code = 1


class ViolationError(OptschedError):
    """A schedule or certificate that does not verify.

    Parameters
    ----------
    message : str
        The constraint that is broken, in words.
    rule : str
        Short name of the constraint, for example ``"kv_capacity"``.
    batch, request : int, optional
        Where: index of the batch (or the round, for a schedule of starts) and of the request.
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
