"""`solve`, `bound` and `compare` find the same best schedule and the same bound, by one search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import answer, invoke, one_line_error, run
from sweeps import seeds

from optsched import Instance, Limits, generate
from optsched.files.read_write import write_instance
from optsched.optimize.consistency import TOLERANCE, is_met
from optsched.problem.sessions import UNKNOWN

MODEL = ("--cost-model", "llama2-7b-a100-infermax")
SLOS = ("--slo-ttft", 0.2)
LIMIT_S, NOISE = 4, 0.1
PROVED_S = 20  # where an exact method ends long before
"""Under a limit of time, the clock decides when a search ends, so that values may
differ by NOISE, a tenth."""


def drawn(seed: int, n: int, **columns: Any) -> Instance:
    """Return an instance in seconds with little KV, whose prompts are not split."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(20, 200, n), rng.integers(2, 9, n)
    arrival = np.zeros(n) if columns.pop("together", False) else np.sort(rng.random(n))
    given = {"kv_capacity": 500, "time_unit": "second", "chunked_prefill": False, **columns}
    return Instance(arrival, *sizes, **given)


def shared(seed: int) -> Instance:
    """Return twelve requests whose prompts share prefixes."""
    return generate("prefix-trees", seed=seed, n=12, rate=20, kv_capacity=1200)


def sessions(seed: int) -> Instance:
    """Return two sessions of three requests, each 0.1 s after the one before has ended."""
    after = ((), (0,), (1,), (), (3,), (4,))
    delay = np.array([0, 0.1, 0.1, 0, 0.1, 0.1])
    arrival = np.array([0, UNKNOWN, UNKNOWN, 0.1, UNKNOWN, UNKNOWN], dtype=float)
    return replace(drawn(seed, 6), arrival=arrival, after=after, delay=delay)


KINDS = {
    "rounds": lambda k: generate("jaillet-model-1", seed=k, n=6),
    "rounds-limits": lambda k: replace(
        generate("jaillet-model-1", seed=k, n=5), limits=Limits(max_running=2)
    ),
    "seconds": lambda k: drawn(k, 4, together=True),
    "arrivals": lambda k: drawn(k, 3),
    "chunks": lambda k: drawn(k, 4, chunked_prefill=True),
    "blocks": lambda k: drawn(k, 4, kv_block_tokens=16),
    "prefixes": shared,
    "sessions": sessions,
    "in-time": lambda k: drawn(k, 8),
}


@pytest.mark.parametrize("seed", seeds(1, 4))
@pytest.mark.parametrize("kind", list(KINDS))
def test_no_command_has_a_worse_schedule_or_a_weaker_bound(
    kind: str, seed: int, tmp_path: Path
) -> None:
    instance, file = KINDS[kind](seed), tmp_path / "i.json"
    write_instance(instance, file)
    limit = LIMIT_S if kind == "prefixes" else PROVED_S
    words = [file, *(() if instance.in_rounds else MODEL), "--time-limit", limit]
    asked = ["--objective", "slo_attainment", *SLOS] if kind == "in-time" else []
    solved, bounded = (answer(command, *words, *asked) for command in ("solve", "bound"))
    compared = answer("compare", *words, *(SLOS if asked else ()))

    name, sign = ("slo_attainment", -1) if asked else ("tel", 1)
    # A policy outside the bound's model has no ratio, and may be better than what is in it.
    inside = [row for row in compared["policies"] if row["ratio_to_best_known"] is not None]
    values = [row["metrics"][name] for row in inside]
    assert values
    best = min(sign * value for value in values)
    for found in (solved, bounded):
        assert sign * found["objective"] <= best + 1e-9 * abs(best)

    # Where an optimum is proved all three have it; else the clock decides how far each comes.
    noise = TOLERANCE if solved["status"] == "optimal" else NOISE
    assert sign * solved["bound"] >= sign * bounded["bound"] - noise * abs(bounded["bound"])
    if not asked:
        known = solved["objective"], bounded["objective"], compared["best_known"]
        assert max(known) <= min(known) * (1 + noise)


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_bounds_on_sessions_come_with_the_best_of_the_policies(seed: int, tmp_path: Path) -> None:
    """`bound` searches, too: its schedule is no worse than any policy of `compare`."""
    file = tmp_path / "i.json"
    write_instance(sessions(seed), file)
    words = (file, *MODEL, "--time-limit", LIMIT_S)
    found = answer("bound", *words, "--objective", "session_completion")
    rows = answer("compare", *words)["policies"]
    values = [row["metrics"]["session_completion"] for row in rows if row["metrics"]]
    assert found["objective"] <= min(values) * (1 + TOLERANCE)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "minimized: total latency in seconds (tel)"),
        (("--objective", "makespan"), "minimized: makespan in seconds (makespan)"),
        (("--objective", "makespan,tel"), "minimized: makespan in seconds (makespan,tel)"),
        (
            ("--objective", "slo_attainment:slo_ttft=1"),
            "maximized: SLO attainment (slo_attainment:slo_ttft=1)",
        ),
    ],
)
def test_the_first_line_says_what_is_minimized(words: Any, line: str, tmp_path: Path) -> None:
    write_instance(drawn(1, 3, together=True), tmp_path / "i.json")
    shown = run("solve", tmp_path / "i.json", *MODEL, *words)
    assert shown.splitlines()[0] == line


def test_the_first_line_says_so_in_rounds() -> None:
    assert run("solve", "tiny").splitlines()[0] == "minimized: total latency in rounds (tel)"


@pytest.mark.parametrize("words", [(), ("--objective", "mean_ttft"), ("--method", "search")])
@pytest.mark.parametrize("made", [shared, sessions])
def test_what_no_exact_method_can_do_is_searched(made: Any, words: Any, tmp_path: Path) -> None:
    """With shared prefixes and with sessions; the schedule is no worse than any policy's."""
    write_instance(made(1), tmp_path / "i.json")
    found = answer("solve", tmp_path / "i.json", *MODEL, *words, "--time-limit", LIMIT_S)
    assert (found["method"], found["scope"]["without"]) == ("search", [])
    if found["bound"] is not None:  # of sessions none is known on TTFT
        assert found["bound"] <= found["objective"]
    policies = answer("compare", tmp_path / "i.json", *MODEL, "--no-bound", "--time-limit", 20)
    name = "mean_ttft" if "mean_ttft" in words else "tel"
    values = [row["metrics"][name] for row in policies["policies"] if row["metrics"]]
    assert found["objective"] <= min(values) * (1 + TOLERANCE)


def test_no_method_is_named_that_nobody_asked_for(tmp_path: Path) -> None:
    write_instance(shared(1), tmp_path / "i.json")
    words = ("solve", tmp_path / "i.json", *MODEL, "--objective", "makespan,tel")
    assert "found auto, which cannot do" in one_line_error(invoke(*words))


@pytest.mark.parametrize(
    ("value", "bound", "met"),
    [
        (33, 33, True),
        (3_000_000_001, 3_000_000_000, False),  # integers are exact, though 3e-10 apart
        (573.6, 573.6 * (1 - 3e-13), True),
        (573.6, 573.6 * (1 - 2e-9), False),
        (0.949, 0.949 * (1 + 1e-10), True),
        (None, 1.0, False),
    ],
)
def test_a_value_meets_its_bound_up_to_a_stated_tolerance(
    value: Any, bound: Any, met: bool
) -> None:
    assert is_met(value, bound) is met
