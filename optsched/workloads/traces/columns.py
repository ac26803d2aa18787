"""Any CSV or Parquet file, its columns named by the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Block, Source, trace_format
from optsched.workloads.traces.delimited import Fields, find_columns, from_texts, read_delimited
from optsched.workloads.traces.numbers import nanoseconds, seconds, timestamps, whole_numbers
from optsched.workloads.traces.parquet import is_parquet, parquet_columns, parquet_rows

FIELDS = ("arrival", "prompt_tokens", "output_tokens", "ttft", "latency")
"""Fields of a request that a column can be given for."""

_OPTIONAL = ("arrival", "ttft", "latency")


@trace_format("csv", "Any CSV or Parquet file with named columns", options=("columns", "unit"))
def read_columns(source: Source) -> Iterator[Block]:
    """Yield the rows of the named columns; a field's own name is its column by default.

    Times are in the unit of the source, or arrivals dates and the others seconds. ``ttft`` and
    ``latency``, measured from the arrival, are read where there are such columns.
    """
    unknown = [field for field in source.columns if field not in FIELDS]
    if unknown:
        raise InputError(f"columns: {unknown[0]!r} is no field; {', '.join(FIELDS)} are")
    wanted = {field: (source.columns.get(field, field),) for field in FIELDS}
    optional = [field for field in _OPTIONAL if field not in source.columns]
    rows: Iterator[Fields]
    if is_parquet(source.path):
        rows = _parquet(source, wanted, optional)
    else:
        rows = read_delimited(source.path, source.window, wanted, optional)
    for fields in rows:
        yield _block(fields, source.unit)


def _block(rows: Fields, unit: str) -> Block:
    duration = "s" if unit == "datetime" else unit
    time = None
    if "arrival" in rows:
        if unit == "datetime":
            time = timestamps(rows, "arrival")
        else:
            time = nanoseconds(rows, "arrival", unit)
    return Block(
        line=rows.line,
        prompt_tokens=whole_numbers(rows, "prompt_tokens"),
        output_tokens=whole_numbers(rows, "output_tokens"),
        time_ns=time,
        ttft_s=seconds(rows, "ttft", duration) if "ttft" in rows else None,
        latency_s=seconds(rows, "latency", duration) if "latency" in rows else None,
    )


def _parquet(
    source: Source, wanted: Mapping[str, tuple[str, ...]], optional: list[str]
) -> Iterator[Fields]:
    """Yield the rows of a Parquet file as texts, so that its numbers meet the same checks."""
    header = parquet_columns(source.path)
    where = find_columns(source.path, header, wanted, optional)
    names = {field: header[k] for field, k in where.items()}
    for first, batch in parquet_rows(source.path, source.window, list(names.values())):
        lines = np.arange(first, first + batch.num_rows)
        columns = {field: _texts(batch.column(name)) for field, name in names.items()}
        yield from_texts(source.path, lines.tolist(), names, columns)


def _texts(column: Any) -> list[str]:
    import pyarrow as pa

    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ns"))
        values = column.to_numpy(zero_copy_only=False).astype("datetime64[ns]")
        return [str(text).replace("T", " ") for text in values]
    return ["" if value is None else str(value) for value in column.to_pylist()]
