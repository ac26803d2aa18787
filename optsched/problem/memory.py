"""How much memory a model or a table may take. Whoever makes one asks before."""

from optsched.problem.errors import TooLargeError

MAX_BYTES = 2 * 10**9
"""The max memory of a model, with what its solver copies, or of a table."""


def check_size(found: float, each: int, what: str, instead: str, field: str = "method") -> None:
    """Raise `TooLargeError` if something of so many parts would need more than `MAX_BYTES`."""
    if found * each > MAX_BYTES:
        raise TooLargeError(
            f"{field}: found up to {found:.2g} {what}; expected at most {MAX_BYTES / each:.2g} "
            f"({instead})"
        )
