"""How much memory a model or a table may take. Whoever makes one asks before."""

from __future__ import annotations

from optsched.problem.errors import TooLargeError

MAX_BYTES = 2 * 10**9
"""The max memory of a model, with what its solver copies, or of a table."""


def check_size(found: float, each: int, what: str, instead: str, field: str = "method") -> None:
    """Raise `TooLargeError` if something would need more than `MAX_BYTES`.

    Parameters
    ----------
    found : float
        An upper bound on the number of its parts.
    each : int
        Bytes that each takes, measured.
    what : str
        The parts in words.
    instead : str
        What can be done instead.
    field : str
        What the user chose, for the message.
    """
    if found * each > MAX_BYTES:
        raise TooLargeError(
            f"{field}: found up to {found:.2g} {what}; expected at most {MAX_BYTES / each:.2g} "
            f"({instead})"
        )
