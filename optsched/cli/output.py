"""Output of commands: JSON, tables, and the line that shows the progress of a solver."""

import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

from optsched.files import read_write as io
from optsched.files.outputs import descriptor, write_bytes
from optsched.files.read_write import json_text, write_json
from optsched.files.strict_json import csv_text
from optsched.judge.evaluate import Evaluation
from optsched.problem.budget import work_time
from optsched.problem.errors import NoIncumbentError
from optsched.problem.instance import Instance
from optsched.problem.markup import latex
from optsched.problem.metrics import TABLE, time_words
from optsched.problem.notes import LOGGER
from optsched.problem.progress import LiveLine as LiveLine, number as number, percent as percent
from optsched.problem.schedule import Schedule

# The width of a table in characters where no terminal says one.
_PIPE_WIDTH = 160
# How narrow a column of long texts may become.
_TEXT_WIDTH = 20
# The seconds after a Ctrl-C in which another one is not taken as impatience.
_PATIENCE_S = 5.0
# How tables are printed, csv or latex, and then nothing else; see `only_tables`.
_table_format: str | None = None
# The streams for JSON while standard output is reserved for it; see `only_json`.
_answers: list[TextIO] = []


def unit(instance: Instance) -> str:
    """Return the unit of times in table headers."""
    return time_words(instance.time_unit)


def tell(text: str) -> None:
    """Print and log a line that belongs to no answer, on standard error."""
    print(text, file=sys.stderr)
    kind, _, message = text.partition(": ")
    levels = {"error": logging.ERROR, "warning": logging.WARNING, "note": logging.INFO}
    LOGGER.log(levels.get(kind, logging.INFO), "%s", message if kind in levels else text)


def emit_json(data: Mapping[str, Any], target: str | None) -> bool:
    """Write a result to a file, or for ``-`` to standard output. Returns whether it was ``-``."""
    if target is None:
        return False

    if target == "-":
        # Within `only_json`, standard output is kept in `_answers`.
        print(json_text(dict(data)), end="", file=_answers[-1] if _answers else None, flush=True)
    else:
        write_json(dict(data), target)

    return target == "-"


@contextmanager
def only_json() -> Iterator[None]:
    """Reserve standard output for `emit_json`. All other texts go to standard error.

    This holds for the file descriptors too, and so for what a user's policy or a process prints.
    """
    # `kept` becomes a second descriptor of standard output (1). Then 1 leads to standard error (2)
    # until the end, for whatever writes without this process's `sys.stdout`.
    out = sys.stdout
    out.flush()
    try:
        kept = os.dup(1) if out.fileno() == 1 else None
    except (OSError, ValueError):  # a captured stream has no descriptor
        kept = None

    answer = out
    if kept is not None:
        answer = os.fdopen(kept, "w", encoding=out.encoding, errors=out.errors)
        with suppress(OSError):  # standard error may be closed already
            os.dup2(2, 1)

    _answers.append(answer)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.pop()
        if kept is not None:
            with suppress(OSError):  # a closed pipe was reported at the write
                answer.flush()

            os.dup2(kept, 1)
            with suppress(OSError):
                answer.close()


@contextmanager
def only_tables(form: str) -> Iterator[None]:
    """Print tables as ``csv`` or ``latex``, and all other texts on standard error."""
    global _table_format
    _table_format = form
    try:
        with only_json():
            yield
    finally:
        _table_format = None


def one_table() -> bool:
    """Whether what is printed should be one table, since programs read it."""
    return _table_format == "csv"


def save_schedule(schedule: Schedule, target: str) -> None:
    """Write a schedule file; a large schedule's columns go into a Parquet file beside it."""
    from importlib.util import find_spec

    column = schedule.starts if schedule.request is None else schedule.request
    entries = 0 if column is None else len(column)
    # Nothing can lie beside a pipe, a device or a descriptor.
    is_special = os.path.exists(target) and not os.path.isfile(target)
    has_place = not is_special and descriptor(target) is None
    can_write_parquet = find_spec("pyarrow") is not None
    beside = entries > io.INLINE_ENTRIES and can_write_parquet and has_place
    io.write_schedule(schedule, target, columns="parquet" if beside else "json")
    if entries <= io.INLINE_ENTRIES:
        return

    where = "inside the JSON"
    if beside:
        where = f"are in {io.columns_file(target)}; keep the two together"
    elif has_place:
        where += "; with the package pyarrow they would be Parquet beside it"

    tell(f"note: {target}: {entries} entries {where}")


def write_requests(evaluation: Evaluation, target: str | None) -> None:
    """Write the table of requests as CSV or Parquet. The suffix of the file says which."""
    if target is None:
        return

    table = evaluation.to_frame()
    if target.endswith(".parquet"):
        content = table.to_parquet(None, index=False)
    else:
        # What a request does not have is an empty cell, and not "nan".
        cells = table.astype(object).where(table.notna(), None)
        content = csv_text(list(table.columns), cells.itertuples(index=False)).encode()

    write_bytes(content, target)


def show_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    text_columns: Sequence[int] = (0,),
    drop: Sequence[str] = (),
) -> list[str]:
    """Print a table with text to the left and numbers to the right.

    Numbers get as many digits as their size needs. On a narrow terminal, or if ``COLUMNS`` is
    small, columns are left out until the others fit. Otherwise no column is left out, and long
    text wraps at some 160 characters.

    `rows`: the cells. Texts are printed as they are, numbers are formatted, and None is a dash.
    `text_columns`: the places of columns of texts. `drop`: headers of the columns to leave out
    first, in this order. After them the last columns go.
    """
    if _table_format is not None:
        _print_plain_table(headers, rows, text_columns)
        return []

    from rich.console import Console

    columns = [
        list(map(_cell_text, column)) if k in text_columns else _number_texts(column)
        for k, column in enumerate(zip(*rows, strict=True))
    ]
    # The first column never wraps, since it names the row. Without rows there are no columns.
    widths = [
        _min_width(header, column, wraps=k > 0 and k in text_columns)
        for k, (header, column) in enumerate(zip(headers, columns, strict=False))
    ]
    width = _table_width()
    shown = list(range(len(headers)))
    if width is None:
        width = max(_PIPE_WIDTH, sum(widths) + 2 * len(widths))
    elif columns:
        shown = _columns_that_fit(headers, widths, width, drop)

    console = Console(highlight=False, width=width)
    with console.capture() as capture:
        console.print(_rich_table(headers, columns, shown, text_columns))

    # Lines without the spaces that fill up their last cells.
    print("\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n")))
    missing = [header for k, header in enumerate(headers) if k not in shown]
    if missing:
        names = ", ".join(header.split("\n")[0] for header in missing if header)
        print(f"(the terminal is too narrow for: {names})")

    return missing


def _print_plain_table(
    headers: Sequence[str], rows: Sequence[Sequence[Any]], text_columns: Sequence[int]
) -> None:
    """Print a table as CSV or LaTeX, with headers on one line and values as they are."""
    from pandas import DataFrame

    labels = [" ".join(header.split()) for header in headers]
    frame = DataFrame([list(row) for row in rows], columns=labels)
    if _table_format == "csv":
        text = frame.to_csv(index=False)
    else:
        alignment = "".join("l" if k in text_columns else "r" for k in range(len(headers)))
        text = latex(frame, alignment)

    # Within `only_json`, standard output is kept in `_answers`.
    print(text, file=_answers[-1] if _answers else None, flush=True)


def _columns_that_fit(
    headers: Sequence[str], widths: Sequence[int], width: int, drop: Sequence[str]
) -> list[int]:
    """Return the columns to show: those of ``drop`` go first, then the last ones; one stays.

    `widths`: the least that each column needs. `width`: that of the terminal, in characters.
    """
    shown = list(range(len(headers)))
    order = [headers.index(header) for header in drop]
    order += [k for k in reversed(shown) if k not in order]
    # A space stands behind each column, and one more between two.
    while len(shown) > 1 and sum(widths[k] + 2 for k in shown) - 1 > width:
        shown.remove(order.pop(0))

    return shown


def _rich_table(
    headers: Sequence[str],
    columns: Sequence[Sequence[str]],
    shown: Sequence[int],
    text_columns: Sequence[int],
) -> Any:
    """Return the shown columns as a table of rich.

    Headers of fewer lines begin with empty ones, so that all end just above the rows.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    height = max(headers[k].count("\n") for k in shown)
    for k in shown:
        is_first, is_number = k == 0, k > 0 and k not in text_columns
        table.add_column(
            Text("\n" * (height - headers[k].count("\n")) + headers[k]),
            justify="right" if is_number else "left",
            no_wrap=is_number or is_first,
            min_width=max(map(len, columns[0]), default=1) if is_first and columns else None,
        )

    for row in zip(*(columns[k] for k in shown if columns), strict=True):
        table.add_row(*map(Text, row))  # as `Text`, so that brackets are no markup

    return table


def _table_width() -> int | None:
    """Return the max width of tables, or None if there is no terminal that limits it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        return int(columns)

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _min_width(header: str, column: Sequence[str], *, wraps: bool) -> int:
    """Return the min width of a column. Long text may wrap, numbers may not."""
    widest = max(len(part) for cell in (header, *column) for part in cell.split("\n"))
    return min(widest, _TEXT_WIDTH) if wraps else widest


def _cell_text(value: object) -> str:
    """Return a cell that is no number, with a dash for None."""
    return "-" if value is None else str(value)


def _number_texts(column: Sequence[Any]) -> list[str]:
    """Format a column with equal decimals, so that its largest value has about four digits."""
    reals = [abs(v) for v in column if isinstance(v, float) and math.isfinite(v)]
    decimals = 0
    if reals and not all(v.is_integer() for v in reals):
        largest = max(reals)  # above 0, as one of them is no whole number
        if largest < 0.1:
            decimals = min(9, 3 - math.floor(math.log10(largest)))
        elif largest < 10:
            decimals = 3
        else:
            decimals = 2 if largest < 100 else 1

    return [f"{v:.{decimals}f}" if isinstance(v, float) else _cell_text(v) for v in column]


def show_metrics(metrics: Mapping[str, Any], instance: Instance) -> None:
    """Print the metrics of one schedule, each on a line."""
    rows = [
        (metric.words, _number_texts([value])[0], metric.unit_words(instance.time_unit))
        for name, metric in TABLE.items()
        if (value := metrics.get(name)) is not None
    ]
    show_table(("metric", "value", "unit"), rows, text_columns=(0, 2))


@contextmanager
def stop_at_ctrl_c() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets, so that the work ends and what was found is kept.

    A second Ctrl-C is the same wish, unless the work does not end within some seconds. After the
    work Ctrl-C changes nothing, since what was found is being written. While a loop is compiled
    nothing can look at the event, so the work is interrupted there.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield stop
        return

    pressed: list[float] = []  # when Ctrl-C was

    def handle(number: int, frame: object) -> None:
        pressed.append(time.monotonic())
        stop.set()
        # The clock of the work stands while a loop is compiled.
        if work_time.stands or pressed[-1] - pressed[0] > _PATIENCE_S:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise NoIncumbentError("interrupted before there was a first result") from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if stop.is_set() else before)
