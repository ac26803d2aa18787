"""Parquet files, read in batches of rows. pyarrow is imported only to read such a file."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Window


def is_parquet(path: Path) -> bool:
    """Return whether a file is Parquet, by its first bytes."""
    if not path.is_file():
        return False  # reading from a pipe would consume its first bytes
    try:
        with open(path, "rb") as stream:
            return stream.read(4) == b"PAR1"
    except OSError:
        return False  # the reader of the file reports the error


def parquet_columns(path: Path) -> list[str]:
    """Return the names of a file's columns."""
    with _parquet_file(path) as file:
        return list(file.schema_arrow.names)


def parquet_rows(
    path: Path, window: Window, columns: Sequence[str], batch_rows: int = 65_536
) -> Iterator[tuple[int, Any]]:
    """Yield the rows in a window of a file, in batches, each with the number of its first row."""
    with _parquet_file(path) as file:
        first = 1
        for batch in file.iter_batches(batch_size=batch_rows, columns=list(columns)):
            inside = window.take(batch.num_rows)
            if inside.stop > inside.start:
                yield first + inside.start, batch.slice(inside.start, inside.stop - inside.start)

            first += batch.num_rows
            if window.done:
                return


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """Open a file, and turn what pyarrow raises about it into an `InputError`."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(
            f"{path}: found a Parquet file, which needs the package pyarrow; install it "
            "(pip install 'optsched[parquet]'), or give a CSV file"
        ) from None

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: expected a Parquet file; {error}") from None
