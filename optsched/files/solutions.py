"""Schedules from what a solver found for an exported program.

HiGHS (``--solution_file``), CBC (``solution FILE``), SCIP and Gurobi write a name and its value on
each line, as do files of MIP starts. CBC has the column's number before the name, and HiGHS writes
tables, too, with the name at the end.
"""

import re
from pathlib import Path

from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, from_batches, from_starts
from optsched.problem.text_files import read_text

# x_I_K, c_I_J and e_I_J of the exported programs, and the value behind.
_VALUE = re.compile(r"(?:^|\s)([xce])_(\d+)_(\d+)\s+([-+]?[\d.]\S*)")
# The same in HiGHS's tables: index, status, bounds, value, dual, type and name.
_ROW = re.compile(
    r"^ *\d+ +(?:[A-Z]+ +)?\S+ +\S+ +(\S+) +(?:\S+ +)?Integer +([xce])_(\d+)_(\d+)$", re.MULTILINE
)
# Where HiGHS goes on with what is no solution.
_END = "# Dual"
# By how much solvers let an integer differ from one.
_NEAR = 1e-4


def is_solution(path: Path) -> bool:
    """Whether a file is text that does not begin as JSON."""
    if path.suffix in (".json", ".gz", ".parquet") or not path.is_file():
        return False

    with path.open("rb") as file:
        return not file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"["))


def read_solution(path: Path, instance: Instance) -> Schedule:
    """Return the schedule of a solver's solution to the program that `optsched export` writes."""
    text = read_text(path).partition(_END)[0]
    found: dict[str, dict[tuple[int, int], int]] = {"x": {}, "c": {}, "e": {}}
    values = _VALUE.findall(text) + [(*row[1:], row[0]) for row in _ROW.findall(text)]
    for name, request, place, digits in values:
        column = f"{name}_{request}_{place}"
        try:
            value = float(digits)
        except ValueError:
            raise InputError(f"{path}: {column}: found {digits!r}; expected a number") from None

        if abs(value - round(value)) > _NEAR:
            raise InputError(f"{path}: {column}: found {digits}; expected an integer")
        if int(request) >= instance.n:
            raise InputError(
                f"{path}: {column}: found request {request}; expected 0 to {instance.n - 1}"
            )

        found[name][int(request), int(place)] = round(value)

    if not found["x" if instance.in_rounds else "c"]:
        first = next((line for line in text.splitlines() if line.strip()), "nothing")
        names = "x_I_K" if instance.in_rounds else "c_I_J"
        raise InputError(
            f"{path}: found no values of {names}, and first {first.strip()[:60]!r}; expected a "
            "schedule, or a solver's solution of the exported program"
        )

    return (_runs if instance.in_rounds else _batches)(path, instance, found)


def _runs(path: Path, instance: Instance, found: dict[str, dict[tuple[int, int], int]]) -> Schedule:
    starts: list[list[int]] = [[] for _ in range(instance.n)]
    for (request, start), value in found["x"].items():
        if value:
            starts[request].append(start)

    for request, own in enumerate(starts):
        if len(own) != 1:
            raise InputError(
                f"{path}: request {request}: found {len(own)} starts; expected one x_{request}_K "
                "of 1"
            )

    return from_starts([own[0] for own in starts], instance)


def _batches(
    path: Path, instance: Instance, found: dict[str, dict[tuple[int, int], int]]
) -> Schedule:
    """Return the batches that process anything, with the evictions before them."""
    entries = sorted((j, i, tokens) for (i, j), tokens in found["c"].items() if tokens)
    evicted = sorted((j, i) for (i, j), value in found["e"].items() if value)
    used = sorted({j for j, _, _ in entries})

    return from_batches(
        [sum(j < k for j, _, _ in entries) for k in used] + [len(entries)],
        [i for _, i, _ in entries],
        [tokens for _, _, tokens in entries],
        instance=instance,
        evicted_offsets=[sum(j < k for j, _ in evicted) for k in used] + [len(evicted)],
        evicted=[i for _, i in evicted],
    )
