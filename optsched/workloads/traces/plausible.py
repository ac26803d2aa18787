"""What the times of requests can mean, whatever the format: impossible rows and odd traces.

What is odd is a warning, but an error where it is ``sure`` to be wrong (`Findings.odd`). `time` are
arrivals in nanoseconds, `latency` measured seconds, and `unit` that in which arrivals are read.
"""

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from optsched.files.measured import DAY_S
from optsched.workloads.traces.base import Block, Source
from optsched.workloads.traces.exact import (
    DURATIONS,
    PLACES,
    UNIT_WORDS,
    exact_ns,
    exact_stamp,
)

_UNIT_SAYS = "the option unit (--unit) says what is meant"
_POINT_SAYS = (
    "a point in time is named by {0} (of csv and jsonl, --column {0}=NAME), another unit by --unit"
)
# A word for a unit at the end of a name, behind a mark as in ``time (ms)`` or as in ``timeMs``.
_IN_NAME = re.compile(rf"(?:[_\-. (\[/]|(?<=[a-z])(?=[A-Z]))((?i:{'|'.join(UNIT_WORDS)}))[)\]]?$")


def unit_in_name(name: str) -> str | None:
    """Return the unit that the name of a column ends in, as in ``send_time_us``, if any."""
    match = _IN_NAME.search(name)
    return None if match is None else UNIT_WORDS[match[1].casefold()]


def shown_unit(texts: Iterable[str], point: bool) -> str | None:
    """Return the unit that points in time show: dates, or seconds or others since 1970, if any.

    `point`: whether the texts are points in time. Durations show no unit.
    """
    if not point:
        return None

    first = next((text for text in texts if text not in ("", "null")), "")
    if exact_stamp(first) is not None:
        return "datetime"

    # From 2001 to 2096, a number since 1970 lies between 1 and 4 billion seconds: 10^9 s are
    # 10^(18 - places) of a unit with so many places. Read as nanoseconds a number stays as it is.
    number = exact_ns(first, "ns") or 0
    lows = {unit: 10 ** (18 - places) for unit, places in PLACES.items()}
    return next((unit for unit, low in lows.items() if low <= number <= 4 * low), None)


def impossible_times(block: Block) -> dict[int, str]:
    """Return the rows whose measured times cannot be, and what is wrong with each."""
    wrong: dict[int, str] = {}
    ttft, latency = block.ttft_s, block.latency_s
    for name, times in (("latency", latency), ("ttft", ttft)):
        if times is None:
            continue

        too_small = times <= 0 if name == "latency" else times < 0
        for i in np.flatnonzero(too_small | (times > DAY_S)).tolist():
            length = f"of {times[i]:.10g} s"
            if times[i] < 0:
                length = f"that ends {-times[i]:.10g} s before the arrival"

            words = f"{name}: found a {name} {length}; expected more than 0 and at most a day; "
            wrong[i] = words + _POINT_SAYS.format(DURATIONS[name])

    if ttft is not None and latency is not None:
        # Sums of the same steps may differ in the last digits.
        for i in np.flatnonzero(ttft > latency * (1 + 1e-9)).tolist():
            words = f"ttft: found {ttft[i]:.10g} s; expected at most its latency {latency[i]:.10g}"
            wrong.setdefault(i, f"{words} (another unit is said by --unit ttft=ms)")

    return wrong


def waiting_clients(kept: Block, stated: tuple[str, int | None] | None) -> tuple[str, int] | None:
    """Return how many clients sent a request whenever one of theirs had ended, and how that shows.

    Without latencies it is what the file says, if anything. What it says counts if that many ran at
    some time: else it never held a request back. Where it says nothing, nearly as many requests as
    ever must run from each start on, but for the first ones, and each must come right after an end.
    In open traffic both happen by chance, but hardly at 19 of 20 starts: with few clients an end is
    seldom near, and with many their number varies.

    `stated`: what the file says in words, and a number or None. What is returned has the words
    first, too.
    """
    time, latency = kept.time_ns, kept.latency_s
    if time is None:
        return None
    if latency is None or len(time) < 2:  # with no number known, there may be a client for each
        return None if stated is None else (stated[0], stated[1] or len(time))

    start, end = np.sort(time), np.sort(time + np.round(latency * 1e9).astype(np.int64))
    ended = np.searchsorted(end, start + 1000, side="right")  # a microsecond: times are rounded
    running = np.arange(1, len(start) + 1) - ended  # from each start on, itself included
    peak = int(running.max())
    if stated is not None and peak >= (stated[1] or 1):
        return stated[0], stated[1] or peak

    # The time since the last end before each start, negative before the first end. It is short if
    # it is at most a twentieth of a usual latency.
    since_end = start - end[np.maximum(ended, 1) - 1]
    is_soon = since_end <= 0.05e9 * np.median(latency)
    # The first `peak` requests only fill the clients. So many must come behind them that chance
    # can hardly do the same.
    follows = (running >= min(0.9 * peak, peak - 1)) & is_soon
    if len(start) >= max(peak + 10, 3 * peak) and follows[peak:].mean() >= 0.95:
        return "each request starts when another has ended", peak

    return None


def check_trace(kept: Block, source: Source, unit: str) -> None:
    """Refuse a trace whose times are surely not in the unit, and tell the findings what is odd."""
    time = kept.time_ns
    if time is not None and len(time) and unit in PLACES:
        _check_arrivals(time, source, unit)
    if kept.latency_s is not None and len(kept.latency_s):
        _check_latencies(kept, source, kept.latency_s)


def _check_arrivals(time: NDArray[np.int64], source: Source, unit: str) -> None:
    """Compare arrivals with times since 1970 in other units, and their span with their number."""
    is_stated = source.says_unit("arrival")
    numbers = time / 10.0 ** PLACES[unit]
    span_s, n = float(time.max() - time.min()) / 1e9, len(time)

    for other, places in PLACES.items():
        # From 2001 to 2096, a number since 1970 lies between 1 and 4 billion seconds.
        low = 10.0 ** (18 - places)
        is_far = time.min() > 4e14  # five days, so hardly an offset from the beginning of a trace
        fits = bool((numbers >= low).all() and (numbers <= 4 * low).all())
        if is_far and other != unit and fits:
            # Time in too small a unit is too short, so a span below a minute makes it sure.
            source.findings.odd(
                f"arrivals like {numbers[0]:.16g} are read in {unit}, and look like times since "
                f"1970 in {other}: {_UNIT_SAYS}",
                sure=not is_stated and span_s <= 60,
            )

    if is_stated or n < 2 or not span_s:
        return

    # Odd are more than 100 requests a second (20, if there are fewer than 20), and less than one in
    # two minutes (in five, if there are fewer than 10, which may be as rare by chance).
    words = ""
    if span_s < 0.1 or n > (100 if n >= 20 else 20) * span_s:
        words = f"all {n} requests arrive within {span_s:g} s"
    elif span_s > (120 if n >= 10 else 300) * (n - 1):
        words = f"requests arrive {span_s / (n - 1):g} s apart on average"
    if words:
        source.findings.odd(f"{words}, if times are in {unit}; {_UNIT_SAYS}")


def _check_latencies(kept: Block, source: Source, latency: NDArray[np.float64]) -> None:
    """Compare measured times with the tokens they were spent on, and with the arrivals.

    Over a minute for each token after the first is surely wrong, unless the user says the unit. The
    rest is odd.
    """
    output, sure = kept.output_tokens, False
    # Where an answer is not streamed its first token comes with its last.
    after_first = np.zeros(len(latency)) if kept.ttft_s is None else latency - kept.ttft_s
    streamed = (output > 1) & (after_first > 0)

    if streamed.any():
        step_s = float(np.median(after_first[streamed] / (output[streamed] - 1)))
        sure = step_s > 60 and not source.says_unit("latency")
    else:  # which may be mostly queueing
        step_s = float(np.median(latency / output))

    if not 1e-4 < step_s < 5:  # no server is as fast, and hardly one as slow
        source.findings.odd(
            f"an output token takes {step_s:.3g} s in the median; {_UNIT_SAYS}, also of one field "
            "(--unit latency=ms)",
            sure=sure,
        )

    if kept.ttft_s is not None:  # the shortest one has not waited for others
        shortest, ttft = float(kept.ttft_s.min()), float(np.median(kept.ttft_s))
        if shortest > 10 or 0 < ttft < 1e-4:
            source.findings.odd(
                f"the first token takes {shortest:.3g} s or more, {ttft:.3g} s in the median; "
                f"{_UNIT_SAYS}, also of one field (--unit ttft=ms)"
            )

    if kept.time_ns is not None:
        _check_no_points(kept.time_ns, source, latency)


def _check_no_points(time: NDArray[np.int64], source: Source, latency: NDArray[np.float64]) -> None:
    """Tell the findings if latencies look like points in time.

    They surely are if there are 5 or more, and they grow as the arrivals do, up to a tenth of that,
    unless the user says the unit of latencies.
    """
    span_s, median = float(np.ptp(time)) / 1e9, float(np.median(latency))
    # Half of the requests would take longer than all arrivals, and over ten minutes, which an
    # overloaded server may also do to a short trace.
    if span_s > 1 and median > max(span_s, 600):
        source.findings.odd(
            f"latencies of {median:.6g} s in the median are longer than all arrivals "
            f"({span_s:g} s); {_UNIT_SAYS}"
        )

    # Points in time grow with the arrivals, second by second, and latencies do not. If these are
    # points, `after_arrival` is what requests took: above 0, and with a spread far below that of
    # the arrivals, while the points span about as much as the arrivals. Two values show nothing.
    after_arrival = latency - time / 1e9
    spread_s = float(np.ptp(after_arrival))
    if len(latency) < 3 or after_arrival.min() <= 0:
        return
    if spread_s > 0.5 * span_s or np.ptp(latency) < 0.5 * span_s:
        return

    source.findings.odd(
        "latencies grow with the arrivals as points in time do; "
        + _POINT_SAYS.format("finished_at")
        + "; --unit latency=s if they are latencies",
        sure=len(latency) >= 5 and spread_s < 0.1 * span_s and "latency" not in source.units,
    )
