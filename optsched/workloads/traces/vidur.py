"""Processed traces of Vidur (Agrawal et al., 2024), and InferMax's in the same columns."""

from __future__ import annotations

from collections.abc import Iterator

from optsched.workloads.traces.base import Block, Source, trace_format
from optsched.workloads.traces.delimited import read_delimited
from optsched.workloads.traces.numbers import nanoseconds, whole_numbers

_COLUMNS = {
    "time": ("arrived_at", "arrival_time"),
    "prompt": ("num_prefill_tokens",),
    "output": ("num_decode_tokens",),
}


@trace_format("vidur", "Vidur and InferMax traces (CSV), with or without arrivals")
def read_vidur(source: Source) -> Iterator[Block]:
    """Yield the rows; ``arrived_at`` (``arrival_time``) in seconds is missing in some files."""
    for rows in read_delimited(source.path, source.window, _COLUMNS, optional=("time",)):
        yield Block(
            line=rows.line,
            prompt_tokens=whole_numbers(rows, "prompt"),
            output_tokens=whole_numbers(rows, "output"),
            time_ns=nanoseconds(rows, "time", "s") if "time" in rows else None,
        )
