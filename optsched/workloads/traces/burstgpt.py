"""BurstGPT: requests to ChatGPT and GPT-4 through Azure (Wang et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator

from optsched.workloads.traces.base import Block, Source, trace_format
from optsched.workloads.traces.delimited import read_delimited
from optsched.workloads.traces.numbers import nanoseconds, whole_numbers

_COLUMNS = {
    "time": ("Timestamp",),
    "prompt": ("Request tokens",),
    "output": ("Response tokens",),
}


@trace_format("burstgpt", "BurstGPT: ChatGPT and GPT-4 requests (CSV)")
def read_burstgpt(source: Source) -> Iterator[Block]:
    """Yield the rows; no response tokens mark a failed request."""
    for rows in read_delimited(source.path, source.window, _COLUMNS):
        output = whole_numbers(rows, "output")
        yield Block(
            line=rows.line,
            prompt_tokens=whole_numbers(rows, "prompt"),
            output_tokens=output,
            time_ns=nanoseconds(rows, "time", "s"),
            failed=output == 0,
        )
