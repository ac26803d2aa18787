"""Files of traces for the tests, and what reading them gives or refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from optsched.problem.errors import InputError, UsageError
from optsched.workloads.traces import TraceReport, read_trace_report

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
# Times 0, 0.25, 1.5 and 3.0 s, as the 2023 files write them: CRLF, 7 digits, no final newline.
OLD = "\r\n".join(
    [
        HEADER,
        "2023-11-16 18:15:59.7500000,10,2",
        "2023-11-16 18:16:00.0000000,20,3",
        "2023-11-16 18:16:01.2500000,30,4",
        "2023-11-16 18:16:02.7500000,40,5",
    ]
)
# The same times as the 2024 files write them: a zone, and no fraction where it is zero.
NEW = "\n".join(
    [
        HEADER,
        "2023-11-16 18:15:59.750000+00:00,10,2",
        "2023-11-16 18:16:00+00:00,20,3",
        "2023-11-16 18:16:01.250000+00:00,30,4",
        "2023-11-16 18:16:02.750000+00:00,40,5",
        "",
    ]
)


def put(folder: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    """Write a file and return its path."""
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def read(
    format: str, file: Path, **options: Any
) -> tuple[list[float], list[int], list[int], TraceReport]:
    """Return arrivals, prompts and outputs of a trace, and the report."""
    instance, report = read_trace_report(format, file, **options)
    columns = (instance.arrival, instance.prompt_tokens, instance.output_tokens)
    arrival, prompt, output = (column.tolist() for column in columns)
    return arrival, prompt, output, report


def refused(words: str, format: str, file: Path, **options: Any) -> str:
    """Expect an error of one line that holds the words, and return it."""
    with pytest.raises((InputError, UsageError), match=re.escape(words)) as caught:
        read_trace_report(format, file, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def skipped(words: str, format: str, file: Path, **options: Any) -> TraceReport:
    """Expect one row that cannot be read, for this reason: without strict it is only counted."""
    error = refused(words, format, file, strict=True, **options)
    report = read_trace_report(format, file, **options)[1]
    assert report.unreadable == 1
    assert any(note.endswith(error.removeprefix(f"{file}: ")) for note in report.notes)
    return report
