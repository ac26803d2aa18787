"""Results of vLLM's serving benchmark, with the measured times of every request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.files.strict_json import read_json
from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Block, Source, Window, trace_format

_LISTS = ("input_lens", "output_lens", "ttfts", "itls")


@trace_format("vllm", "vLLM serving benchmark (JSON of --save-result --save-detailed)")
def read_vllm(source: Source) -> Iterator[Block]:
    """Yield one block with the requests of a benchmark.

    The entry k of every list is request k, and counts as line k + 1. The latency of a request is
    its entry of ``latencies``. If there is no such list, it is the time to the first token plus
    the sum of the inter-token latencies. A request with an error or without output failed.
    Results of versions without ``start_times`` have no arrivals.

    Parameters
    ----------
    source : Source

    Yields
    ------
    Block

    Raises
    ------
    InputError
        A list is missing, has another length or holds an impossible value. The error names the
        request.
    """
    data = read_json(source.path)
    missing = [name for name in _LISTS if name not in data]
    if len(missing) == len(_LISTS):
        raise InputError(
            f"{source.path}: input_lens: found no lists of requests; expected a benchmark run with "
            "--save-result and --save-detailed, which writes them"
        )
    if missing:
        raise InputError(
            f"{source.path}: expected the list {missing[0]}; found {', '.join(data)[:200]}"
        )
    lists = _Lists(source.path, data, source.window)
    prompt, output = lists.tokens("input_lens"), lists.tokens("output_lens")
    ttft = lists.times("ttfts")
    failed = output <= 0
    if data.get("errors"):
        failed = failed | np.array([bool(error) for error in lists.entries("errors")], dtype=bool)
    time_ns = None
    if "start_times" in data:
        time_ns = np.rint(lists.times("start_times") * 1e9).astype(np.int64)
    yield Block(
        line=np.arange(lists.inside.start + 1, lists.inside.stop + 1),
        prompt_tokens=prompt,
        output_tokens=output,
        time_ns=time_ns,
        failed=failed,
        ttft_s=ttft,
        latency_s=lists.times("latencies") if "latencies" in data else ttft + lists.sums("itls"),
    )


class _Lists:
    """The lists of a file, with an entry for each request in a window."""

    def __init__(self, path: Path, data: dict[str, Any], window: Window) -> None:
        self.path, self.data = path, data
        self.inside = slice(0, None)
        self.inside = window.take(len(self.entries("input_lens")))

    def entries(self, name: str) -> list[Any]:
        value, first = self.data[name], self.data["input_lens"]
        if not isinstance(value, list):
            raise InputError(f"{self.path}: {name}: found {str(value)[:40]!r}; expected a list")
        if len(value) != len(first):
            raise InputError(
                f"{self.path}: {name}: found {len(value)} entries; expected {len(first)}, as many "
                "as input_lens has"
            )
        return value[self.inside]

    def tokens(self, name: str) -> NDArray[np.int64]:
        values = self.entries(name)
        for request, value in enumerate(values, self.inside.start):
            if type(value) is not int or abs(value) > MAX_TOKENS:
                right = f"expected an integer of at most {MAX_TOKENS}"
                raise self._refuse(name, request, f"found {value!r:.80}; {right}")
        return np.array(values, dtype=np.int64)

    def times(self, name: str) -> NDArray[np.float64]:
        values = self.entries(name)
        for request, value in enumerate(values, self.inside.start):
            self._check_time(name, request, value)
        return np.array(values, dtype=np.float64)

    def sums(self, name: str) -> NDArray[np.float64]:
        sums = []
        for request, steps in enumerate(self.entries(name), self.inside.start):
            if not isinstance(steps, list):
                raise self._refuse(name, request, f"found {str(steps)[:40]!r}; expected a list")
            for step in steps:
                self._check_time(name, request, step)
            sums.append(np.array(steps, dtype=np.float64).sum())
        return np.array(sums, dtype=np.float64)

    def _check_time(self, name: str, request: int, value: Any) -> None:
        if type(value) not in (int, float) or not 0 <= value < 4e9:
            raise self._refuse(
                name, request, f"found {value!r:.80}; expected a time in seconds, 0 or more"
            )

    def _refuse(self, name: str, request: int, words: str) -> InputError:
        return InputError(f"{self.path}: {name}: request {request}: {words}")
