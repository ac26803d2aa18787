"""Results of vLLM's and SGLang's serving benchmarks, with the measured times of every request."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Block, Source, objects, trace_format
from optsched.workloads.traces.exact import PLACES, Fields, Mask, exact_whole
from optsched.workloads.traces.json_objects import as_text, pick_run

_LATENCIES = ("latencies", "e2els")
_DETAILED = (
    "expected a benchmark run with --save-result and --save-detailed (vLLM) or --output-details "
    "(SGLang), which writes them"
)


_WORDS = ("input_lens", "num_prompts"), ("request_rate", "max_concurrency"), ("completed",)
_OPTIONS = ("unit", "run")


@trace_format(
    "vllm",
    "vLLM serving benchmark (JSON of --save-result --save-detailed)",
    options=_OPTIONS,
    words=(*_WORDS, ("model_id",)),
)
@trace_format(
    "sglang",
    "SGLang serving benchmark (JSON lines of --output-file --output-details)",
    options=_OPTIONS,
    words=(*_WORDS, ("dataset_name",)),
)
def read_vllm(source: Source) -> Iterator[Block]:
    """Yield one block with the requests of a benchmark.

    The entry k of every list is request k, and counts as line k + 1. The latency of a request is
    its entry of ``latencies``. If there is no such list, it is the time to the first token plus
    the sum of the inter-token latencies. A request with an error or without output failed.
    Results without ``start_times`` have no arrivals, unless all requests were sent at once. Where
    arrivals are drawn, lengths are enough. Where the server speculated, the shares of accepted
    drafts are read.
    """
    _, run = pick_run(source, floats=float)
    # Both formats have the same fields, so `recognize` goes by the backend that the run names: 1 if
    # it is this format's, in place of the number of fields.
    source.findings.fields = int(
        source.form is not None and source.form.name in str(run.get("backend"))
    )
    run = {name: value for name, value in run.items() if value is not None}
    source.findings.model = str(run.get("model_id", ""))
    latencies = next((name for name in _LATENCIES if name in run), None)
    times = ("ttfts", "itls") if latencies is None else (latencies,)
    lists = _lists(source, run, times)
    inside = source.window.take(len(lists["input_lens"]))
    if inside.start == inside.stop:
        return

    lists = {name: values[inside] for name, values in lists.items()}
    texts = {name: list(map(as_text, values)) for name, values in lists.items()}
    lines = range(inside.start + 1, inside.stop + 1)
    rows = Fields(source, lines, {name: name for name in lists}, texts)
    prompt, output = rows.whole_numbers("input_lens"), rows.whole_numbers("output_lens")
    failed = output <= 0
    if "errors" in lists:
        failed |= np.array([bool(error) for error in lists["errors"]], dtype=bool)

    failed &= ~rows.unreadable
    skip = failed | rows.unreadable  # which need no times

    ttft, latency, time, gaps = None, None, None, None
    has_times = lists.keys() >= set(times)
    if "ttfts" in lists:
        ttft = rows.seconds("ttfts", source.unit("ttft", "s"), skip)
    if has_times and latencies is not None:
        latency = rows.seconds(latencies, source.unit("latency", "s"), skip)
    elif has_times and ttft is not None:
        latency = ttft + _after_first(rows, lists["itls"], ttft, output, skip)

    if has_times and "itls" in lists:  # a unit in seconds: `PLACES` is 9 for s, 6 for ms
        gaps = _gaps(lists["itls"], output, skip, 10.0 ** (PLACES[source.unit("latency", "s")] - 9))
    if (limit := exact_whole(as_text(run.get("max_concurrency")))) is not None:
        source.findings.clients = f"the file says max_concurrency {limit}", limit
    if isinstance(rates := run.get("spec_decode_per_position_acceptance_rates"), list):
        source.findings.accepted = rates
    if "start_times" in lists:
        time = rows.points("start_times", source.unit("arrival", "s"), skip)
    elif str(run.get("request_rate")) in ("inf", "Infinity") and not run.get("max_concurrency"):
        time = np.zeros(len(prompt), dtype=np.int64)

    block = Block(rows.line, prompt, output, time, failed, ttft, latency, gaps=gaps)
    yield block.pick(~rows.unreadable)


def _lists(source: Source, run: dict[str, Any], times: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return the lists of a run that are read, by name: lengths, `times`, and what else it has.

    `times`: the lists that together give latencies. A run may lack one of them where arrivals are
    drawn, and then it has no latencies.
    """
    for name in ("input_lens", "output_lens", *(() if source.drawn else times)):
        if name not in run:
            words = f"expected the list {name}; found {', '.join(run)[:200]}"
            if name == "input_lens":
                words = "input_lens: found no lists of requests"

            hint = "; or rate=R (--rate R), which needs no times" if name in times else ""
            raise InputError(f"{source.path}: {words}; {_DETAILED}{hint}")

    names = ["input_lens", "output_lens"]
    names += [name for name in ("ttfts", "start_times", "errors") if run.get(name)]
    if run.keys() >= set(times):
        names += times
    if "itls" not in times and run.get("itls"):  # of an answer that came token by token
        names.append("itls")

    return {name: _entries(source, run, name) for name in names}


def _entries(source: Source, run: dict[str, Any], name: str) -> list[Any]:
    """Return a list of a run, which has an entry for each request."""
    value = run[name]
    if not isinstance(value, list):
        raise InputError(f"{source.path}: {name}: found {str(value)[:40]!r}; expected a list")
    if len(value) != (n := len(run["input_lens"])):
        raise InputError(
            f"{source.path}: {name}: found {len(value)} entries; expected {n}, as many as "
            "input_lens has"
        )

    return value


def _gaps(
    itls: list[Any], output: NDArray[np.int64], skip: Mask, scale: float
) -> NDArray[Any] | None:
    """Return the times between tokens; None where most answers did not come token by token.

    `scale`: seconds of a unit of times.
    """
    gaps = []
    for steps, skips in zip(itls, skip, strict=True):
        known = steps if not skips and isinstance(steps, list) else []
        gaps.append([step * scale for step in known if type(step) in (int, float)])

    complete = sum(len(row) == n - 1 for row, n in zip(gaps, output.tolist(), strict=True))
    return objects(gaps) if 2 * complete > len(gaps) else None


def _after_first(
    rows: Fields, itls: list[Any], ttft: NDArray[np.float64], output: NDArray[np.int64], skip: Mask
) -> NDArray[np.float64]:
    """Return the seconds from each request's first token to its last: the sum of its steps (itls).

    Some files begin these lists with the time to the first token, which is no step. A file is taken
    for one of them if that is so of most requests, and the time is then taken off their sums.
    `ttft`: in seconds. `output`: numbers of tokens. `skip`: rows of which no time is read.
    """
    # Seconds of a unit of the steps: `PLACES` is 9 for seconds, 6 for milliseconds, and so on.
    scale = 10.0 ** (PLACES[rows.source.unit("latency", "s")] - 9)
    sums, first = np.zeros(len(ttft)), np.full(len(ttft), np.nan)
    sizes = np.zeros(len(ttft), dtype=np.int64)
    for i in np.flatnonzero(~skip).tolist():
        steps = itls[i]
        if not isinstance(steps, list) or not all(
            type(step) in (int, float) and step >= 0 for step in steps
        ):
            rows.refuse("itls", i, "a list of times, each 0 or more", steps)
        elif steps and not rows.unreadable[i]:
            sums[i], first[i], sizes[i] = sum(steps) * scale, steps[0] * scale, len(steps)

    has_steps = sizes > 0
    same, as_many = np.isclose(first, ttft, rtol=1e-6, atol=0), has_steps & (sizes == output)
    if 2 * same.sum() > has_steps.sum():
        rows.odd(
            "the inter-token times (itls) begin with the time to the first token, as vLLM's do "
            "not: it is counted once",
            same,
        )
        return sums - np.where(same, ttft, 0.0)

    if (as_many == has_steps).all():
        rows.odd(
            "requests have as many inter-token times (itls) as output tokens, where vLLM "
            "writes one less: latencies are too long if the first token's is among them",
            as_many,
        )

    return sums
