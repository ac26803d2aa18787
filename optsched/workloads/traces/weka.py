"""Sessions of agents by Weka, with ids of blocks that are local to them."""

import itertools
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from optsched.problem.instance import MAX_SECOND
from optsched.workloads.traces.base import Block, Source, objects, trace_format
from optsched.workloads.traces.declared import check_unit
from optsched.workloads.traces.exact import PLACES, Fields
from optsched.workloads.traces.json_objects import as_text, objects_in_blocks

_FIELDS = {"arrival": "t", "prompt_tokens": "in", "output_tokens": "out"}


@trace_format(
    "weka",
    "Weka's sessions of coding agents (JSON lines, a session each)",
    options=("unit", "sessions"),
    ids_tokens=64,
    scopes=("local", "global"),
)
def read_weka(source: Source) -> Iterator[Block]:
    """Yield one row per call, in the line of its session; the window counts sessions.

    Calls of sub-agents are calls of their session, and their times count from the beginning of the
    sub-agent, as in the public files. Every session begins at 0, since the file does not say when
    it did. Ids are those of one session unless it says that their scope is global. In closed loop a
    call is released ``think_time`` after the end of the one before it.
    """
    unit, session_names = source.unit("arrival", "s"), itertools.count()
    for sessions in objects_in_blocks(source, rows=64):
        # One entry for each call of all sessions. A link is its name, the names of the calls before
        # it, and the nanoseconds between (`Block.calls`). A name is two numbers: the session's and
        # that of the call in it.
        lines, calls, links, ids = list[int](), list[Call](), list[Any](), list[Any]()
        for line, session in sessions:
            check_unit(source, line, session, "s")
            of_session, name = list[Call](), next(session_names)
            # The seconds of a unit: `PLACES` is 9 for seconds, 6 for milliseconds, and so on.
            _link(of_session, session.get("requests"), 10.0 ** (PLACES.get(unit, 9) - 9))
            _check_base(source, line, of_session)
            lines += [line] * len(of_session)
            calls += of_session
            scope = None if session.get("hash_id_scope") == "global" else name
            for k, call in enumerate(of_session):
                before = tuple((name, j) for j in call.before)
                links.append(((name, k), before, round(call.delay * 1e9)))
                hash_ids: Any = call.fields.get("hash_ids")
                if isinstance(hash_ids, list):
                    hash_ids = [(scope, str(value)) for value in hash_ids]

                ids.append(hash_ids)

        texts = {
            field: [as_text(call.fields.get(name)) for call in calls]
            for field, name in _FIELDS.items()
        }
        rows = Fields(source, lines, _FIELDS, texts)
        prompt, output = rows.whole_numbers("prompt_tokens"), rows.whole_numbers("output_tokens")
        time = None
        if not source.drawn:
            skip = (prompt <= 0) | (output <= 0) | rows.unreadable  # which need no time
            base = np.array([round(call.base * 1e9) for call in calls], dtype=np.int64)
            time = rows.points("arrival", unit, skip) + base

        block = Block(rows.line, prompt, output, time, ids=objects(ids), calls=objects(links))
        yield block.pick(~rows.unreadable)


class Call(NamedTuple):
    """A call, when its agent began, the places of those before it, and the wait after them.

    Times are seconds from the beginning of the session.
    """

    fields: dict[str, Any]
    base: float
    before: tuple[int, ...] = ()
    delay: float = 0.0


def _link(
    calls: list[Call],
    requests: Any,
    scale: float,
    base: float = 0.0,
    last: tuple[int, float] | None = None,
) -> tuple[int, float] | None:
    """Append the calls of a session, or of a sub-agent that begins at the time `base`.

    Return the place and the end of the last one, or `last` if there is none.
    Each comes after the one before it. A sub-agent's first one comes after the call before the
    sub-agent, and the next call of the session that begins when the sub-agent has ended waits for
    it, too. `requests`: the list in the file. `scale`: the seconds of a unit of times. `last`: the
    place and the end of the call before.
    """
    # `running`: place and end of the last call of each sub-agent that no call has waited for yet.
    is_first, running = True, list[tuple[int, float]]()
    for entry in requests if isinstance(requests, list) else []:
        if not isinstance(entry, dict):
            continue

        start = base + _number(entry.get("t")) * scale
        if "requests" in entry:  # a sub-agent
            last_of_agent = _link(calls, entry["requests"], scale, start, last)
            if last_of_agent is not None and last_of_agent != last:  # it made a call
                running.append(last_of_agent)

            continue
        if not (_number(entry.get("in")) and _number(entry.get("out"))):
            calls.append(Call(entry, base))  # it will be left out, so nobody comes after it
            continue

        awaited = [(place, end) for place, end in running if end <= start]
        running = [(place, end) for place, end in running if end > start]
        before = awaited if last is None else [last, *awaited]
        delay = max(start - max((end for _, end in before), default=start), 0.0)
        # Its think time counts from the end of the call before it. So it is not used for a first
        # call, nor for one that waited for sub-agents.
        if not is_first and not awaited and "think_time" in entry:
            delay = _number(entry["think_time"]) * scale

        calls.append(Call(entry, base, tuple(place for place, _ in before), delay))
        last = len(calls) - 1, start + _number(entry.get("api_time")) * scale
        is_first = False

    return last


def _check_base(source: Source, line: int, calls: list[Call]) -> None:
    """Tell the findings if no call of any sub-agent begins before its sub-agent does."""
    inner = [call for call in calls if call.base > 0]
    if inner and all(_number(call.fields.get("t")) >= call.base for call in inner):
        source.findings.odd(
            "calls of sub-agents are read from the beginning of their sub-agent, and none is "
            "earlier than that: do they count from that of the session?",
            line,
            len(inner),
        )


def _number(value: Any) -> float:
    """Return a number of tokens or a time; 0 for what is none or out of range."""
    is_number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < MAX_SECOND else 0.0
