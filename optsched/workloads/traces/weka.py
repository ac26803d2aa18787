"""Sessions of agents by Weka, with ids of blocks that are local to them."""

import itertools
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.problem.instance import MAX_SECOND
from optsched.workloads.traces.base import Block, Source, objects, trace_format
from optsched.workloads.traces.declared import check_unit
from optsched.workloads.traces.exact import PLACES, Fields, Mask
from optsched.workloads.traces.json_objects import as_text, objects_in_blocks

_FIELDS = {"arrival": "t", "prompt_tokens": "in", "output_tokens": "out"}
Ints = NDArray[np.int64]


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
    unit, name = source.unit("arrival", "s"), itertools.count()
    for sessions in objects_in_blocks(source, rows=64):
        lines, calls, links, ids = list[int](), list[Call](), list[Any](), list[Any]()
        for line, session in sessions:
            check_unit(source, line, session, "s")
            own, session_name = list[Call](), next(name)
            _link(own, session.get("requests"), 10.0 ** (PLACES.get(unit, 9) - 9))
            _check_base(source, line, own)
            lines += [line] * len(own)
            calls += own
            scope = None if session.get("hash_id_scope") == "global" else session_name
            for k, call in enumerate(own):
                before = tuple((session_name, j) for j in call.before)
                links.append(((session_name, k), before, round(call.delay * 1e9)))
                found: Any = call.fields.get("hash_ids")
                listed = isinstance(found, list)
                ids.append([(scope, str(one)) for one in found] if listed else found)

        rows = _fields(source, lines, [call.fields for call in calls], _FIELDS)
        prompt, output, left = _tokens(rows)
        time = None
        if not source.drawn:
            begun = np.array([round(call.base * 1e9) for call in calls], dtype=np.int64)
            time = rows.points("arrival", unit, left) + begun

        block = Block(rows.line, prompt, output, time, ids=objects(ids), calls=objects(links))
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


class Call(NamedTuple):
    """A call, when its agent began, the places of those before it, and the wait after them.

    Times are seconds from the beginning of the session.
    """

    fields: dict[str, Any]
    base: float
    before: tuple[int, ...] = ()
    delay: float = 0.0


def _link(
    found: list[Call],
    requests: Any,
    scale: float,
    base: float = 0.0,
    last: tuple[int, float] | None = None,
) -> tuple[int, float] | None:
    """Append the calls of a session or a sub-agent that begins at a time; return the last's end.

    Each comes after the one before it. A sub-agent's first one comes after the call before the
    sub-agent, and the next call of the session that begins when the sub-agent has ended waits for
    it, too. `scale`: the seconds of a unit of times. `last`: the place and the end of the call
    before.
    """
    own, running = False, list[tuple[int, float]]()
    for one in requests if isinstance(requests, list) else []:
        if not isinstance(one, dict):
            continue

        start = base + _number(one.get("t")) * scale
        if "requests" in one:
            ended = _link(found, one["requests"], scale, start, last)
            if ended is not None and ended != last:
                running.append(ended)

            continue
        if not (_number(one.get("in")) and _number(one.get("out"))):
            found.append(Call(one, base))  # it will be left out, so nobody comes after it
            continue

        awaited = [one_end for one_end in running if one_end[1] <= start]
        running = [one_end for one_end in running if one_end[1] > start]
        before = awaited if last is None else [last, *awaited]
        delay = max(start - max((end for _, end in before), default=start), 0.0)
        if own and not awaited and "think_time" in one:
            delay = _number(one["think_time"]) * scale

        found.append(Call(one, base, tuple(place for place, _ in before), delay))
        last, own = (len(found) - 1, start + _number(one.get("api_time")) * scale), True

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
    plain = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
    return float(value) if plain and 0 < value < MAX_SECOND else 0.0
