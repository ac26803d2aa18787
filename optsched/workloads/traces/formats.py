"""Traces whose fields are numbers: delimited text, JSON lines and Parquet.

Each format declares its columns. Its own function has what is special about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Block, Source, trace_format
from optsched.workloads.traces.delimited import find_columns, read_delimited
from optsched.workloads.traces.fields import Fields
from optsched.workloads.traces.json_objects import read_objects
from optsched.workloads.traces.parquet import is_parquet, parquet_columns, parquet_rows

FIELDS = ("arrival", "prompt_tokens", "output_tokens", "ttft", "latency")
"""Fields of a request for which a user can name a column."""

_OPTIONAL = ("arrival", "ttft", "latency")


def _block(rows: Fields, unit: str) -> Block:
    """Return a block of rows with `FIELDS`.

    All times are in the unit. If the unit is ``"datetime"``, arrivals are dates and the other
    times are seconds.
    """
    found = rows.columns
    prompt, output = rows.whole_numbers("prompt_tokens"), rows.whole_numbers("output_tokens")
    duration = "s" if unit == "datetime" else unit
    arrival = None
    if "arrival" in found:
        dates = unit == "datetime"
        arrival = rows.timestamps("arrival") if dates else rows.nanoseconds("arrival", unit)
    return Block(
        line=rows.line,
        prompt_tokens=prompt,
        output_tokens=output,
        time_ns=arrival,
        ttft_s=rows.seconds("ttft", duration) if "ttft" in found else None,
        latency_s=rows.seconds("latency", duration) if "latency" in found else None,
    )


def _delimited(
    source: Source, unit: str, *names: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Iterator[Block]:
    """Yield the rows of a CSV file. ``names`` has the column names of each of `FIELDS`."""
    wanted = dict(zip(FIELDS, names, strict=False))
    for rows in read_delimited(source.path, source.window, wanted, optional):
        yield _block(rows, unit)


@trace_format("azure", "Azure LLM inference traces 2023 and 2024 (CSV)")
def read_azure(source: Source) -> Iterator[Block]:
    """Yield the rows of Azure's traces (Patel et al. 2024; Stojkovic et al. 2024).

    Parameters
    ----------
    source : Source

    Yields
    ------
    Block

    Raises
    ------
    InputError
        A missing column or a malformed row, with its line.
    """
    return _delimited(source, "datetime", ("TIMESTAMP",), ("ContextTokens",), ("GeneratedTokens",))


@trace_format("burstgpt", "BurstGPT: ChatGPT and GPT-4 requests (CSV)")
def read_burstgpt(source: Source) -> Iterator[Block]:
    """Yield the rows of BurstGPT (Wang et al. 2024). A request without response tokens failed.

    Parameters
    ----------
    source : Source

    Yields
    ------
    Block

    Raises
    ------
    InputError
        A missing column or a malformed row, with its line.
    """
    for block in _delimited(source, "s", ("Timestamp",), ("Request tokens",), ("Response tokens",)):
        yield Block(**{**vars(block), "failed": block.output_tokens == 0})


@trace_format("vidur", "Vidur and InferMax traces (CSV), with or without arrivals")
def read_vidur(source: Source) -> Iterator[Block]:
    """Yield the rows of Vidur's traces (Agrawal et al. 2024). Some files have no arrivals.

    Parameters
    ----------
    source : Source

    Yields
    ------
    Block

    Raises
    ------
    InputError
        A missing column or a malformed row, with its line.
    """
    return _delimited(
        source, "s", ("arrived_at", "arrival_time"), ("num_prefill_tokens",),
        ("num_decode_tokens",), optional=("arrival",),
    )  # fmt: skip


@trace_format("mooncake", "Mooncake traces (JSON lines)")
def read_mooncake(source: Source) -> Iterator[Block]:
    """Yield the rows of Mooncake's traces (Qin et al. 2025). Their ``hash_ids`` are not used.

    Parameters
    ----------
    source : Source

    Yields
    ------
    Block

    Raises
    ------
    InputError
        A missing field or a malformed row, with its line.
    """
    names = {
        "arrival": ("timestamp",),
        "prompt_tokens": ("input_length",),
        "output_tokens": ("output_length",),
    }
    for rows in read_objects(source.path, source.window, names):
        yield _block(rows, "ms")


@trace_format("llmservingsim", "measured runs of vLLM by LLMServingSim (JSON lines)")
def read_llmservingsim(source: Source) -> Iterator[Block]:
    """Yield the requests of a run, with measured times (Cho et al. 2026).

    A request arrives when vLLM has queued it, and times count from there.

    Parameters
    ----------
    source : Source

    Yields
    ------
    Block

    Raises
    ------
    InputError
        A missing field or a malformed row, with its line.
    """
    names = ("queued_ts", "input_toks", "output_toks", "first_token_ts", "last_token_ts")
    wanted = {field: (name,) for field, name in zip(FIELDS, names, strict=True)}
    for rows in read_objects(source.path, source.window, wanted):
        block, queued = _block(rows, "s"), rows.seconds("arrival", "s")
        assert block.ttft_s is not None
        assert block.latency_s is not None
        yield replace(block, ttft_s=block.ttft_s - queued, latency_s=block.latency_s - queued)


@trace_format("csv", "Any CSV or Parquet file with named columns", options=("columns", "unit"))
def read_columns(source: Source) -> Iterator[Block]:
    """Yield the rows of a file with named columns.

    Parameters
    ----------
    source : Source
        By default, the column of a field has the field's name. The columns of ``arrival``,
        ``ttft`` and ``latency`` may be missing. The last two are measured from the arrival.

    Yields
    ------
    Block

    Raises
    ------
    InputError
        An unknown field, a missing column or a malformed row, with its line.
    """
    unknown = [field for field in source.columns if field not in FIELDS]
    if unknown:
        raise InputError(f"columns: found {unknown[0]!r}; expected fields of {', '.join(FIELDS)}")
    names = [(source.columns.get(field, field),) for field in FIELDS]
    optional = tuple(field for field in _OPTIONAL if field not in source.columns)
    if not is_parquet(source.path):
        yield from _delimited(source, source.unit, *names, optional=optional)
        return
    header = parquet_columns(source.path)
    where = find_columns(source.path, header, dict(zip(FIELDS, names, strict=True)), optional)
    found = {field: header[k] for field, k in where.items()}
    for first, batch in parquet_rows(source.path, source.window, list(found.values())):
        # Numbers are turned into texts, so that they pass the same checks as in a CSV file.
        columns = {field: _texts(batch.column(name)) for field, name in found.items()}
        lines = range(first, first + batch.num_rows)
        yield _block(Fields.from_texts(source.path, lines, found, columns), source.unit)


def _texts(column: Any) -> list[str]:
    import pyarrow as pa

    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ns"))
        values = column.to_numpy(zero_copy_only=False).astype("datetime64[ns]")
        return [str(text).replace("T", " ") for text in values]
    return ["" if value is None else str(value) for value in column.to_pylist()]
