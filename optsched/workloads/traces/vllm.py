"""Results of vLLM's and SGLang's serving benchmarks, with the measured times of every request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Block, Source, trace_format
from optsched.workloads.traces.fields import PLACES
from optsched.workloads.traces.json_objects import pick_run

_LISTS = ("input_lens", "output_lens", "ttfts", "itls")
_LATENCIES = ("latencies", "e2els")


@trace_format(
    "vllm",
    "vLLM serving benchmark (JSON of --save-result --save-detailed)",
    options=("unit", "run"),
)
@trace_format(
    "sglang",
    "SGLang serving benchmark (JSON lines of --output-file --output-details)",
    options=("unit", "run"),
)
def read_vllm(source: Source) -> Iterator[Block]:
    """Yield one block with the requests of a benchmark.

    The entry k of every list is request k, and counts as line k + 1. The latency of a request is
    its entry of ``latencies``. If there is no such list, it is the time to the first token plus
    the sum of the inter-token latencies. A request with an error or without output failed.
    Results without ``start_times`` have no arrivals, unless all requests were sent at once.
    """
    _, data = pick_run(source, floats=float)
    missing = [name for name in _LISTS if name not in data]
    if len(missing) == len(_LISTS):
        raise InputError(
            f"{source.path}: input_lens: found no lists of requests; expected a benchmark run with "
            "--save-result and --save-detailed (vLLM) or --output-details (SGLang), which writes "
            "them"
        )
    if missing:
        raise InputError(
            f"{source.path}: expected the list {missing[0]}; found {', '.join(data)[:200]}"
        )
    lists = _Lists(source, data)
    prompt, output = lists.tokens("input_lens"), lists.tokens("output_lens")
    failed = output <= 0
    if data.get("errors"):
        failed = failed | np.array([bool(error) for error in lists.entries("errors")], dtype=bool)
    failed &= ~lists.unreadable
    ttft = lists.times("ttfts", "ttft", failed)
    named = next((name for name in _LATENCIES if name in data), None)
    if named is not None:
        latency = lists.times(named, "latency", failed)
    else:
        latency = lists.latencies(ttft, output, failed)

    time_ns = None
    if "start_times" in data:
        starts = lists.times("start_times", "arrival", failed)
        time_ns = np.rint(starts * 1e9).astype(np.int64)
    elif str(data.get("request_rate")) in ("inf", "Infinity") and not data.get("max_concurrency"):
        time_ns = np.zeros(len(prompt), dtype=np.int64)
    yield Block(
        line=np.arange(lists.inside.start + 1, lists.inside.stop + 1),
        prompt_tokens=prompt,
        output_tokens=output,
        time_ns=time_ns,
        failed=failed,
        ttft_s=ttft,
        latency_s=latency,
    ).pick(~lists.unreadable)


class _Lists:
    """The lists of a run, with an entry for each request in the window."""

    def __init__(self, source: Source, data: dict[str, Any]) -> None:
        self.source, self.data = source, data
        self.inside = slice(0, None)
        self.inside = source.window.take(len(self.entries("input_lens")))
        self.unreadable = np.zeros(self.inside.stop - self.inside.start, dtype=bool)

    def entries(self, name: str) -> list[Any]:
        value, first = self.data[name], self.data["input_lens"]
        path = self.source.path
        if not isinstance(value, list):
            raise InputError(f"{path}: {name}: found {str(value)[:40]!r}; expected a list")
        if len(value) != len(first):
            raise InputError(
                f"{path}: {name}: found {len(value)} entries; expected {len(first)}, as many as "
                "input_lens has"
            )
        return value[self.inside]

    def tokens(self, name: str) -> NDArray[np.int64]:
        values = self.entries(name)
        for row, value in enumerate(values):
            if type(value) is not int or abs(value) > MAX_TOKENS:
                right = f"expected an integer of at most {MAX_TOKENS}"
                self._refuse(name, row, f"found {value!r:.80}; {right}")
                values[row] = 0
        return np.array(values, dtype=np.int64)

    def times(self, name: str, field: str, failed: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return a list of times in seconds, with 0 for requests that failed."""
        values, scale = self.entries(name), self._scale(field)
        for row, value in enumerate(values):
            if failed[row] or not self._is_time(name, row, value, scale):
                values[row] = 0.0
        return np.array(values, dtype=np.float64) * scale

    def latencies(
        self, ttft: NDArray[np.float64], output: NDArray[np.int64], failed: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Return times to the first token plus the sums of the steps after it.

        Where the first step of every request is its time to the first token, the steps hold it.
        """
        sums, first = np.zeros(len(ttft)), np.full(len(ttft), np.nan)
        sizes, scale = np.zeros(len(ttft), dtype=np.int64), self._scale("latency")
        for row, steps in enumerate(self.entries("itls")):
            if failed[row]:
                continue
            if not isinstance(steps, list):
                self._refuse("itls", row, f"found {str(steps)[:40]!r}; expected a list")
            elif steps and all(self._is_time("itls", row, step, scale) for step in steps):
                sums[row] = np.array(steps, dtype=np.float64).sum()
                first[row], sizes[row] = steps[0], len(steps)
        with_steps = (sizes > 0) & ~self.unreadable
        same = with_steps & np.isclose(first * scale, ttft, rtol=1e-6, atol=0)
        if with_steps.any() and 2 * same.sum() > with_steps.sum():
            self.source.findings.odd(
                "the inter-token times (itls) begin with the time to the first token, as vLLM's do "
                "not: it is counted once",
                self.inside.start + int(np.argmax(same)) + 1,
                int(same.sum()),
            )
            return np.where(same, 0.0, ttft) + sums * scale
        as_many = with_steps & (sizes == output)
        if as_many.any() and as_many.sum() == with_steps.sum():
            self.source.findings.odd(
                "requests have as many inter-token times (itls) as output tokens, where vLLM "
                "writes one less: latencies are too long if the first token's is among them",
                self.inside.start + int(np.argmax(as_many)) + 1,
                int(as_many.sum()),
            )
        return ttft + sums * scale

    def _scale(self, field: str) -> float:
        """Return the seconds of a field's unit."""
        unit = self.source.unit(field, "s")
        if unit not in PLACES:
            raise InputError(f"unit: found {unit!r}; expected one of {', '.join(PLACES)}")
        return 1.0 if unit == "s" else float(10.0 ** (PLACES[unit] - PLACES["s"]))

    def _is_time(self, name: str, row: int, value: Any, scale: float) -> bool:
        if type(value) in (int, float) and 0 <= value * scale < 4e9:
            return True
        self._refuse(name, row, f"found {value!r:.80}; expected a time in seconds, 0 or more")
        return False

    def _refuse(self, name: str, row: int, words: str) -> None:
        if self.unreadable[row]:
            return
        request = self.inside.start + row
        error = InputError(f"{self.source.path}: {name}: request {request}: {words}")
        self.source.findings.skip(request + 1, error)
        self.unreadable[row] = True
