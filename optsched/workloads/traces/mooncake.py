"""Traces of Mooncake (Qin et al., FAST 2025): JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Block, Source, trace_format
from optsched.workloads.traces.delimited import from_texts
from optsched.workloads.traces.numbers import nanoseconds, whole_numbers
from optsched.workloads.traces.objects import number_text, objects_in_blocks

_FIELDS = ("timestamp", "input_length", "output_length")
_NAMES = {name: name for name in _FIELDS}


@trace_format("mooncake", "Mooncake traces (JSON lines)")
def read_mooncake(source: Source) -> Iterator[Block]:
    """Yield timestamp (ms), input_length and output_length; ``hash_ids`` are not used."""
    for rows in objects_in_blocks(source.path, source.window):
        lines = [line for line, _ in rows]
        columns = {
            name: [number_text(_field(source, line, row, name)) for line, row in rows]
            for name in _FIELDS
        }
        fields = from_texts(source.path, lines, _NAMES, columns)
        yield Block(
            line=np.asarray(lines),
            prompt_tokens=whole_numbers(fields, "input_length"),
            output_tokens=whole_numbers(fields, "output_length"),
            time_ns=nanoseconds(fields, "timestamp", "ms"),
        )


def _field(source: Source, line: int, row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise InputError(
            f"{source.path}: line {line}: {name}: missing; the object has {', '.join(row)[:200]}"
        )
    return row[name]
