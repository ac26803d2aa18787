"""Azure LLM inference traces of 2023 and 2024 (Patel et al., Splitwise; Stojkovic et al.)."""

from __future__ import annotations

from collections.abc import Iterator

from optsched.workloads.traces.base import Block, Source, trace_format
from optsched.workloads.traces.delimited import read_delimited
from optsched.workloads.traces.numbers import timestamps, whole_numbers

_COLUMNS = {
    "time": ("TIMESTAMP",),
    "prompt": ("ContextTokens",),
    "output": ("GeneratedTokens",),
}


@trace_format("azure", "Azure LLM inference traces 2023 and 2024 (CSV)")
def read_azure(source: Source) -> Iterator[Block]:
    """Yield the rows of TIMESTAMP, ContextTokens, GeneratedTokens."""
    for rows in read_delimited(source.path, source.window, _COLUMNS):
        yield Block(
            line=rows.line,
            prompt_tokens=whole_numbers(rows, "prompt"),
            output_tokens=whole_numbers(rows, "output"),
            time_ns=timestamps(rows, "time"),
        )
