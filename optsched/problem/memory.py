"""How large a model or a table may be, and the numbers in it. Whoever makes one asks before."""

from optsched.problem.errors import TooLargeError, UsageError

MAX_BYTES = 2 * 10**9
"""The max memory of a model, with what its solver copies, or of a table."""
LARGEST = 100_000
"""The largest integer in a row for which the tolerances of solvers in floats are safe.

HiGHS takes a row as satisfied if it is violated by at most 1e-6 of its largest coefficient.
Integers that violate a row of integers do so by 1 at least: ten times as much up to this size.
"""


def check_size(found: float, each: int, what: str, instead: str, field: str = "method") -> None:
    """Raise `TooLargeError` if something of so many parts would need more than `MAX_BYTES`.

    `found`: the number of parts. `each`: bytes of a part. `what`: what the parts are, in words.
    `instead`: what to do without it. `field`: the option that the error begins with.
    """
    if found * each > MAX_BYTES:
        raise TooLargeError(
            f"{field}: found up to {found:.2g} {what}; expected at most {MAX_BYTES / each:.2g} "
            f"({instead})"
        )


def check_tokens(largest: int, method: str) -> None:
    """Refuse requests of so many tokens that a solver in floats confuses them (`LARGEST`)."""
    if largest > LARGEST:
        raise UsageError(
            f"method: found a request of {largest} tokens, which solvers in floats confuse with "
            f"its neighbours; expected at most {LARGEST} for {method} (or the method cpsat)"
        )
