"""LP and MPS files of PuLP problems, without loss of digits in rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optsched.problem.errors import UsageError

LONGEST = 10**12
"""Integers below it have at most the 12 digits that PuLP writes."""


def write_problem(problem: Any, format_name: str, path: str | Path) -> None:
    """Write a PuLP problem as an LP or MPS file.

    PuLP writes 12 significant digits. Rows of integers must not lose any: a limit of 10^12 + 1
    would become one of 10^12. Costs in milliseconds are rounded to these digits.
    """
    held = problem.constraints  # a mapping, in later versions a method
    for row in held() if callable(held) else held.values():
        for number in (*row.values(), row.constant):
            if number == round(number) and float(f"{number:.12g}") != number:
                raise UsageError(
                    f"export: found {round(abs(number))} in row {row.name}; expected numbers of at "
                    f"most 12 digits, as {format_name} files have them (json has all digits)"
                )

    (problem.writeLP if format_name == "lp" else problem.writeMPS)(str(path))
