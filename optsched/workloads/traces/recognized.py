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

# What is looked at of a file: its first bytes, lines and requests.
_BYTES = 1 << 20
_LINES = 1000
_ROWS = 200
_KV = 2**40  # whatever the requests need


class _Fit(NamedTuple):
    """A format that reads a file, what it finds of its own there (see `Findings`), and the rest.

    `unreadable`: rows of which it can make nothing.
    """

    name: str
    unreadable: int
    marked: bool | None
    fields: int
    instance: Instance
    measured: Measured | None

    @property
    def rank(self) -> tuple[int, bool, int, str]:
        """What sorts formats, the best last. Without the format's marks its fields count nothing.

        ``marked`` is None where there are no marks to look for.
        """
        fields = 0 if self.marked is False else self.fields
        return -self.unreadable, self.marked is True, fields, self.name

    @property
    def columns(self) -> list[Any]:
        """What it reads: arrivals, lengths, and latencies or None."""
        instance, measured = self.instance, self.measured
        latency = None if measured is None else measured.latency
        return [instance.arrival, instance.prompt_tokens, instance.output_tokens, latency]

    def is_like(self, other: "_Fit") -> bool:
        """Whether two formats read the same."""
        pairs = zip(self.columns, other.columns, strict=True)
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
        readings = [_fit(name, head, run) for name in FORMATS.all()]

    fits = sorted((fit for fit in readings if fit is not None), key=lambda fit: fit.rank)
    if not fits and (like := _most_like(Path(path))):
        return like
    if not fits:
        raise InputError(
            f"{path}: found no format that it is in; expected requests in one that `import --help` "
            "lists (--format NAME says why it is not in that), or an instance"
        )

    # Another format may be meant that ranks as high, or that would if its marks counted. That is no
    # matter if both read the same, unless the best lacks its own marks.
    best, doubtful = fits[-1], list[str]()
    for fit in fits:
        ranks_equal = fit.rank[:3] == best.rank[:3]  # rows unread, marks and fields, not the name
        reads_as_much = fit.fields >= best.fields and fit.unreadable == best.unreadable
        lacks_marks = fit.marked is False and not best.marked
        may_be_meant = ranks_equal or (lacks_marks and reads_as_much)
        if may_be_meant and (best.marked is False or not fit.is_like(best)):
            doubtful.append(fit.name)

    if doubtful:
        names = " or ".join(sorted({*doubtful, best.name}))
        raise InputError(
            f"{path}: found what may be in the format {names}, but for its marks; expected "
            "--format NAME to say what it is"
        )

    return best.name


def _beginning(path: Path, folder: Path) -> Path:
    """Return a file with the first lines of a long one, or the beginning of each of its lists.

    It is written to `folder`. A short file, or one that cannot be cut, is returned as it is.
    """
    if is_parquet(path):
        return path
    with open_bytes(path) as stream:
        lines = stream.read(_BYTES).splitlines(keepends=True)
        if len(lines) <= _LINES and not stream.read(1):
            return path

    # A list or an object over many lines cannot be cut at a line. A whole object in the first of
    # several lines shows JSON lines, which can.
    if lines[0].lstrip()[:1] in (b"{", b"["):
        first = None
        with suppress(ValueError):
            first = json.loads(lines[0])
        if not isinstance(first, dict) or len(lines) < 3:
            return _cut(path, folder)

    if len(lines) < 3:  # a header, and a row that may be cut
        return path

    head = folder / path.name
    head.write_bytes(b"".join(lines[:-1][:_LINES]))  # the last line may be cut
    return head


def _cut(path: Path, folder: Path) -> Path:
    """Return a file whose documents have short lists, since every format tries to read it.

    It is written to `folder`. What is no JSON is returned as it is.
    """

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cut(entry) for name, entry in value.items()}

        return [cut(entry) for entry in value[:_ROWS]] if isinstance(value, list) else value

    with open_bytes(path) as stream:
        content = stream.read()

    # A document on each line, or else one in all.
    for documents in (content.splitlines(), [content]):
        with suppress(ValueError):
            texts = [json.dumps(cut(json.loads(text))) for text in documents if text.strip()]
            head = folder / path.name
            head.write_text("\n".join(texts))
            return head

    return path


def _most_like(path: Path) -> str:
    """Return the format of whose words a file has most: 3 or more, and above 70%. Else none."""
    if is_parquet(path):
        return ""
    with open_bytes(path) as stream:
        head = stream.read(_BYTES)

    # Names are anywhere in JSON, and in the header of other files.
    names = head if head.lstrip()[:1] in (b"{", b"[") else head.partition(b"\n")[0]
    there = set(re.findall(rb"[@\w]+", names))

    # Words: for each field of a format its possible names, of which a file needs one.
    max_count, like = 0, ""
    for name, form in FORMATS.all().items():
        count = sum(any(word.encode() in there for word in words) for words in form.words)
        if count > max(2, 0.7 * len(form.words)) and count >= max_count:
            max_count, like = count, name

    return like


def _fit(name: str, path: Path, run: int | None) -> _Fit | None:
    """Return how a format reads the beginning of a file; None if it does not.

    `run`: the number of the run to read, in formats whose files have several.
    """
    takes = FORMATS.get(name).options
    options: dict[str, Any] = {"run": run} if "run" in takes else {}
    # Prefixes do not matter, and in `_KV` all requests fit. In closed loop a format may do without
    # arrivals.
    for sessions in (False, True) if "sessions" in takes else (False,):
        options |= {"prefixes": False, "sessions": sessions, "limit": _ROWS, "kv_capacity": _KV}
        try:
            instance, report, findings = read_with_findings(name, path, **options)
        except OptschedError:
            continue

        marked, fields = findings.marked, findings.fields
        return _Fit(name, report.unreadable, marked, fields, instance, report.measured)

    return None
