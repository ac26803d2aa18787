"""The format that a file is in, found out by reading its beginning in every format."""

import json
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optsched.files.measured import Measured
from optsched.problem.errors import InputError, OptschedError
from optsched.problem.instance import Instance
from optsched.workloads.traces import read_with_findings
from optsched.workloads.traces.base import FORMATS
from optsched.workloads.traces.delimited import open_bytes
from optsched.workloads.traces.parquet import is_parquet

_ROWS = 200
_LINES = 1000
_BYTES = 1 << 20
_LENGTHS = ("prompt_tokens", "output_tokens")
_KV = 2**40  # whatever the requests need


class _Fit(NamedTuple):
    """A format that reads a file, what it finds of its own there (see `Findings`), and the rest."""

    name: str
    unreadable: int
    marked: bool | None
    fields: int
    instance: Instance
    measured: Measured | None

    @property
    def rank(self) -> tuple[int, bool, int, str]:
        """What sorts formats, the best last."""
        doubtful = self.marked is False
        return -self.unreadable, self.marked is True, 0 if doubtful else self.fields, self.name

    def is_like(self, other: "_Fit") -> bool:
        """Whether two formats read the same."""
        one, two = self.instance, other.instance
        pairs = [(getattr(one, name), getattr(two, name)) for name in ("arrival", *_LENGTHS)]
        seen = [None if fit.measured is None else fit.measured.latency for fit in (self, other)]
        pairs.append((seen[0], seen[1]))
        return all((a is None) is (b is None) and np.array_equal(a, b) for a, b in pairs)


def recognize(path: str | Path, run: int | None = None) -> str:
    """Return the name of the format that a file is in; of a file of several runs one may be picked.

    It is the one that reads most rows and whose marks stand in the file, such as Mooncake's ids; of
    others the one with the largest number of its fields there. If none reads it, it is the one
    whose words stand in the file: its reader says what is wrong.

    Raises
    ------
    InputError
        No format is like the file, or several read it that differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        head = _beginning(Path(path), Path(folder))
        found = [fit for name in FORMATS.all() if (fit := _fit(name, head, run)) is not None]

    fits = sorted(found, key=lambda fit: fit.rank)
    if not fits and (like := _like(Path(path))):
        return like
    if not fits:
        raise InputError(
            f"{path}: found no format that it is in; expected requests in one that `import --help` "
            "lists (--format NAME says why it is not in that), or an instance"
        )

    best, asked = fits[-1], list[str]()
    for fit in fits:
        as_good = fit.rank[:3] == best.rank[:3]
        doubtful = fit.marked is False and not best.marked and fit.fields >= best.fields
        doubtful = doubtful and fit.unreadable == best.unreadable
        if (as_good or doubtful) and not (fit.is_like(best) and best.marked is not False):
            asked.append(fit.name)

    if asked:
        names = " or ".join(sorted({*asked, best.name}))
        raise InputError(
            f"{path}: found what may be in the format {names}, but for its marks; expected "
            "--format NAME to say what it is"
        )

    return best.name


def _beginning(path: Path, folder: Path) -> Path:
    """Return a file with the first lines of a long one, or the beginning of each of its lists."""
    if is_parquet(path):
        return path
    with open_bytes(path) as stream:
        lines = stream.read(_BYTES).splitlines(keepends=True)
        if len(lines) <= _LINES and not stream.read(1):
            return path

    if lines[0].lstrip()[:1] in (b"{", b"["):
        first = None
        with suppress(ValueError):
            first = json.loads(lines[0])
        if not isinstance(first, dict) or len(lines) < 3:
            return _cut(path, folder)

    if len(lines) < 3:
        return path

    head = folder / path.name
    head.write_bytes(b"".join(lines[:-1][:_LINES]))
    return head


def _cut(path: Path, folder: Path) -> Path:
    """Return a file whose documents have short lists, so that it need not be read 25 times."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cut(one) for name, one in value.items()}

        return [cut(one) for one in value[:_ROWS]] if isinstance(value, list) else value

    with open_bytes(path) as stream:
        whole = stream.read()

    for documents in (whole.splitlines(), [whole]):
        with suppress(ValueError):
            made = [json.dumps(cut(json.loads(one))) for one in documents if one.strip()]
            head = folder / path.name
            head.write_text("\n".join(made))
            return head

    return path


def _like(path: Path) -> str:
    """Return the format of whose words a file has most, and nearly all; none without such."""
    if is_parquet(path):
        return ""
    with open_bytes(path) as stream:
        head = stream.read(_BYTES)

    names = head if head.lstrip()[:1] in (b"{", b"[") else head.partition(b"\n")[0]
    there = set(re.findall(rb"[@\w]+", names))

    most, like = 0.0, ""
    for name, form in FORMATS.all().items():
        have = sum(any(word.encode() in there for word in one) for one in form.words)
        share = have / max(len(form.words), 1)
        if have > 2 and (share > 0.7 or have == len(form.words)) and (have, share) > (most, 0.0):
            most, like = have, name

    return like


def _fit(name: str, path: Path, run: int | None) -> _Fit | None:
    """Return how a format reads the beginning of a file; None if it does not."""
    options = FORMATS.get(name).options
    picked = {"run": run} if "run" in options else {}
    for sessions in (False, True) if "sessions" in options else (False,):
        asked: dict[str, Any] = {"prefixes": False, "sessions": sessions, **picked}
        try:
            instance, report, findings = read_with_findings(
                name, path, limit=_ROWS, kv_capacity=_KV, **asked
            )
        except OptschedError:
            continue

        own = name, report.unreadable, findings.marked, findings.fields
        return _Fit(*own, instance, report.measured)

    return None
