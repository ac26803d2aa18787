"""Sessions of coding agents by Weka: calls with ids of blocks that are local to their session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from optsched.workloads.traces.base import Block, Source, trace_format
from optsched.workloads.traces.fields import Fields
from optsched.workloads.traces.json_objects import as_text, objects_in_blocks

_FIELDS = {"arrival": "t", "prompt_tokens": "in", "output_tokens": "out"}


@trace_format(
    "weka",
    "Weka's sessions of coding agents (JSON lines, a session each)",
    options=("unit",),
    ids_tokens=64,
)
def read_weka(source: Source) -> Iterator[Block]:
    """Yield one row per call, in the line of its session; the window counts sessions.

    Calls of sub-agents are calls of their session. Every session begins at 0, since the file does
    not say when it did. Ids are made global by the line of the session.
    """
    for sessions in objects_in_blocks(source, rows=64):
        lines, calls = list[int](), list[dict[str, Any]]()
        for line, session in sessions:
            own = list(_calls(session.get("requests")))
            lines += [line] * len(own)
            calls += own

        texts = {key: [as_text(call.get(name)) for call in calls] for key, name in _FIELDS.items()}
        rows = Fields(source, lines, _FIELDS, texts)
        prompt, output = rows.whole_numbers("prompt_tokens"), rows.whole_numbers("output_tokens")
        left = (prompt <= 0) | (output <= 0) | rows.unreadable
        time = None if source.drawn else rows.points("arrival", source.unit("arrival", "s"), left)
        ids = np.empty(len(calls), dtype=object)
        for k, (line, call) in enumerate(zip(lines, calls, strict=True)):
            found = call.get("hash_ids")
            ids[k] = [(line, str(one)) for one in found] if isinstance(found, list) else found

        yield Block(rows.line, prompt, output, time, ids=ids).pick(~rows.unreadable)


def _calls(requests: Any) -> Iterator[dict[str, Any]]:
    """Yield the calls of a session, with those of its sub-agents in their place."""
    for one in requests if isinstance(requests, list) else []:
        if isinstance(one, dict) and "requests" in one:
            yield from _calls(one["requests"])
        elif isinstance(one, dict):
            yield one
