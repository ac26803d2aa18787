"""Results of vLLM's serving benchmark, with every request's measured times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.files.strict_json import read_json
from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Block, Source, trace_format

_LISTS = ("input_lens", "output_lens", "ttfts", "itls")


@trace_format("vllm", "vLLM serving benchmark (JSON of --save-result --save-detailed)")
def read_vllm(source: Source) -> Iterator[Block]:
    """Yield one block: the k-th entry of every list is request k, and counts as line k + 1.

    A request's latency is its entry of ``latencies`` where there is such a list, else its time
    to the first token and the sum of its inter-token latencies. One with an error, or without
    output, failed. Results of versions without ``start_times`` have no arrivals.
    """
    path = source.path
    data = read_json(path)
    missing = [name for name in _LISTS if name not in data]
    if len(missing) == len(_LISTS):
        raise InputError(
            f"{path}: input_lens: missing: the file has no per-request lists; a benchmark run "
            "with --save-result and --save-detailed writes them"
        )
    if missing:
        raise InputError(f"{path}: {missing[0]}: missing; the file has {', '.join(data)[:200]}")
    count = len(_list(path, data, "input_lens", None))
    inside = source.window.take(count)
    prompt = _tokens(path, _list(path, data, "input_lens", count)[inside], "input_lens", inside)
    output = _tokens(path, _list(path, data, "output_lens", count)[inside], "output_lens", inside)
    ttft = _times(path, _list(path, data, "ttfts", count)[inside], "ttfts", inside)
    if "latencies" in data:
        latencies = _list(path, data, "latencies", count)[inside]
        latency = _times(path, latencies, "latencies", inside)
    else:
        steps = _list(path, data, "itls", count)[inside]
        latency = ttft + np.array([_sum(path, inside.start + k, x) for k, x in enumerate(steps)])
    failed = output <= 0
    if data.get("errors"):
        errors = _list(path, data, "errors", count)[inside]
        failed = failed | np.array([bool(error) for error in errors], dtype=bool)
    time_ns = None
    if "start_times" in data:
        starts = _list(path, data, "start_times", count)[inside]
        time_ns = np.rint(_times(path, starts, "start_times", inside) * 1e9).astype(np.int64)
    yield Block(
        line=np.arange(inside.start + 1, inside.stop + 1),
        prompt_tokens=prompt,
        output_tokens=output,
        time_ns=time_ns,
        failed=failed,
        ttft_s=ttft,
        latency_s=latency,
    )


def _list(path: Any, data: dict[str, Any], name: str, count: int | None) -> list[Any]:
    value = data[name]
    if not isinstance(value, list):
        raise InputError(f"{path}: {name}: {str(value)[:40]!r} is not a list")
    if count is not None and len(value) != count:
        raise InputError(
            f"{path}: {name}: has {len(value)} entries, but input_lens has {count}; lists of "
            "equal length are right"
        )
    return value


def _tokens(path: Any, values: Sequence[Any], name: str, inside: slice) -> NDArray[np.int64]:
    for k, value in enumerate(values):
        if type(value) is not int or abs(value) > MAX_TOKENS:
            raise InputError(
                f"{path}: {name}: request {inside.start + k}: {value!r:.80} is not an integer of "
                f"at most {MAX_TOKENS}"
            )
    return np.array(values, dtype=np.int64)


def _times(path: Any, values: Sequence[Any], name: str, inside: slice) -> NDArray[np.float64]:
    for k, value in enumerate(values):
        if type(value) not in (int, float) or not 0 <= value < 4e9:
            raise InputError(
                f"{path}: {name}: request {inside.start + k}: {value!r:.80} is not a time in "
                "seconds, 0 or more"
            )
    return np.array(values, dtype=np.float64)


def _sum(path: Any, request: int, steps: Any) -> float:
    if not isinstance(steps, list):
        raise InputError(f"{path}: itls: request {request}: {str(steps)[:40]!r} is not a list")
    return float(_times(path, steps, "itls", slice(request, request + 1)).sum())
