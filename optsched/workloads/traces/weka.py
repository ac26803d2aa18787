"""Sessions of agents: those by Weka, with ids of blocks that are local to them, and others."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.errors import InputError
from optsched.problem.instance import MAX_SECOND
from optsched.workloads.traces.base import Block, Source, objects, trace_format
from optsched.workloads.traces.fields import Fields, Mask
from optsched.workloads.traces.json_objects import as_text, objects_in_blocks

_FIELDS = {"arrival": "t", "prompt_tokens": "in", "output_tokens": "out"}
_AGENTIC = {
    "arrival": "arrival_time_ns",
    "prompt_tokens": "input_toks",
    "output_tokens": "output_toks",
    "tool": "tool_duration_ns",
}
Ints = NDArray[np.int64]


@trace_format(
    "weka",
    "Weka's sessions of coding agents (JSON lines, a session each)",
    options=("unit", "sessions"),
    ids_tokens=64,
)
def read_weka(source: Source) -> Iterator[Block]:
    """Yield one row per call, in the line of its session; the window counts sessions.

    Calls of sub-agents are calls of their session. Every session begins at 0, since the file does
    not say when it did. Ids are made global by the line of the session. In closed loop a call is
    released ``think_time`` after the end of the one before it.
    """
    for sessions in objects_in_blocks(source, rows=64):
        lines, calls, links = list[int](), list[dict[str, Any]](), list[Any]()
        for line, session in sessions:
            own = list[Call]()
            _link(own, session.get("requests"))
            lines += [line] * len(own)
            calls += [call for call, _, _ in own]
            links += [
                ((line, k), tuple((line, j) for j in before), round(delay * 1e9))
                for k, (_, before, delay) in enumerate(own)
            ]

        ids = list[Any]()
        for line, call in zip(lines, calls, strict=True):
            found = call.get("hash_ids")
            ids.append([(line, str(one)) for one in found] if isinstance(found, list) else found)

        rows = _fields(source, lines, calls, _FIELDS)
        prompt, output, left = _tokens(rows)
        time = None if source.drawn else rows.points("arrival", source.unit("arrival", "s"), left)
        block = Block(rows.line, prompt, output, time, ids=objects(ids), calls=objects(links))
        yield block.pick(~rows.unreadable)


@trace_format(
    "llmservingsim-agentic",
    "Sessions of LLMServingSim, with the times of tools (JSON lines)",
    options=("unit", "sessions"),
    ids_tokens=1,
)
def read_agentic(source: Source) -> Iterator[Block]:
    """Yield one row per call, in the line of its session; the window counts sessions.

    Each call is released ``tool_duration_ns`` after the end of the one before it. A line without
    ``sub_requests`` is a session of one call.
    """
    if not source.closed:
        raise InputError(
            f"{source.path}: found sessions, whose later calls have no arrivals; expected "
            "sessions=True (--sessions)"
        )

    for sessions in objects_in_blocks(source, rows=64):
        lines, calls = list[int](), list[dict[str, Any]]()
        for line, session in sessions:
            own = session.get("sub_requests", [session])
            if not isinstance(own, list) or not all(isinstance(one, dict) for one in own):
                source.findings.skip(line, f"sub_requests: found {own!r:.40}; expected objects")
                continue

            begin = session.get("arrival_time_ns")
            lines += [line] * len(own)
            calls += [{"tool_duration_ns": 0, **one, "arrival_time_ns": begin} for one in own]

        rows = _fields(source, lines, calls, _AGENTIC)
        prompt, output, left = _tokens(rows)
        time = rows.points("arrival", source.unit("arrival", "ns"), left)
        waits = rows.nanoseconds("tool", "ns", left)
        for k in np.flatnonzero(waits < 0).tolist():
            rows.refuse("tool", k, "a time of 0 or more")

        left |= rows.unreadable
        links, before = list[Any](), dict[int, int]()
        for k, line in enumerate(lines):
            last = before.get(line)
            links.append(
                ((line, k), *(((), 0) if last is None else (((line, last),), waits[last])))
            )
            if not left[k]:
                before[line] = k

        ids = objects([one.get("input_tok_ids") for one in calls])
        for k, call in enumerate(calls):
            found, more = ids[k], call.get("output_tok_ids") or []
            ids[k] = [str(one) for one in [*found, *more]] if isinstance(found, list) else found

        listed = None if all(one is None for one in ids) else ids
        block = Block(rows.line, prompt, output, time, ids=listed, calls=objects(links))
        yield block.pick(~rows.unreadable)


def _fields(
    source: Source, lines: list[int], calls: list[dict[str, Any]], names: dict[str, str]
) -> Fields:
    texts = {key: [as_text(call.get(name)) for call in calls] for key, name in names.items()}
    return Fields(source, lines, names, texts)


def _tokens(rows: Fields) -> tuple[Ints, Ints, Mask]:
    """Return the tokens of calls, and which will be left out."""
    prompt, output = rows.whole_numbers("prompt_tokens"), rows.whole_numbers("output_tokens")
    return prompt, output, (prompt <= 0) | (output <= 0) | rows.unreadable


Call = tuple[dict[str, Any], tuple[int, ...], float]
"""A call, the places of those that it comes after, and the seconds from the last end to it."""


def _link(
    found: list[Call], requests: Any, base: float = 0.0, last: tuple[int, float] | None = None
) -> tuple[int, float] | None:
    """Append the calls of a session or a sub-agent that begins at a time; return the last's end.

    Each comes after the one before it. A sub-agent's first one comes after the call before the
    sub-agent, and the next call of the session that begins when the sub-agent has ended waits for
    it, too. `last`: the place and the end of the call before.
    """
    own, running = False, list[tuple[int, float]]()
    for one in requests if isinstance(requests, list) else []:
        if not isinstance(one, dict):
            continue

        start = base + _seconds(one.get("t"))
        if "requests" in one:
            ended = _link(found, one["requests"], start, last)
            if ended is not None and ended != last:
                running.append(ended)

            continue
        if not (_seconds(one.get("in")) and _seconds(one.get("out"))):
            found.append((one, (), 0.0))  # it will be left out, so nobody comes after it
            continue

        awaited = [one_end for one_end in running if one_end[1] <= start]
        running = [one_end for one_end in running if one_end[1] > start]
        before = awaited if last is None else [last, *awaited]
        delay = max(start - max((end for _, end in before), default=start), 0.0)
        if own and not awaited and "think_time" in one:
            delay = _seconds(one["think_time"])

        found.append((one, tuple(place for place, _ in before), delay))
        last, own = (len(found) - 1, start + _seconds(one.get("api_time"))), True

    return last


def _seconds(value: Any) -> float:
    plain = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
    return float(value) if plain and 0 < value < MAX_SECOND else 0.0
