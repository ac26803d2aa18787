"""A schedule below a bound that covers it is an error that names both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from command_line import invoke

from optsched import (
    BatchCost,
    Instance,
    Problem,
    bound,
    bounds as bounds_module,
    compare,
    from_starts,
)
from optsched.bounds import Proof, list_bounds, lower_bound
from optsched.files.read_write import write_instance
from optsched.optimize.consistency import float_noise, reconcile
from optsched.optimize.solve import solve
from optsched.problem.errors import SolverError
from optsched.problem.objective import TOTAL_LATENCY, Objective

ROUNDS = Instance([0, 0], [2, 2], [3, 1], kv_capacity=5)
SECONDS = Instance([0.0, 0.0], [2, 2], [3, 1], kv_capacity=5, time_unit="second")
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10"})


def wrong_bound(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    """Make a registered bound claim a value."""
    wrong = replace(list_bounds()[name], function=lambda *_: Proof(value))
    found = {**list_bounds(), name: wrong}
    monkeypatch.setattr(bounds_module, "list_bounds", lambda: found)


def test_compare_refuses_a_bound_above_a_schedule(monkeypatch) -> None:
    wrong_bound(monkeypatch, "srpt", 1000)
    with pytest.raises(SolverError, match=r"srpt: its tel bound 1000 contradicts .* tel \d+ \("):
        compare(ROUNDS, ["fcfs"])
    wrong_bound(monkeypatch, "work", 1000.0)
    with pytest.raises(SolverError, match=r"work: its tel bound 1000.0 .* tel 0\.\d+ \("):
        compare(Problem(SECONDS, PLAIN), ["fcfs"], time_limit_s=0)


def test_solve_refuses_a_bound_above_a_schedule(monkeypatch) -> None:
    wrong_bound(monkeypatch, "srpt", 1000)
    with pytest.raises(SolverError, match=r"srpt:.*bound 1000"):
        solve(ROUNDS, method="highs", warm_start=from_starts([0, 3], ROUNDS))


def test_bound_refuses_a_bound_above_a_schedule(monkeypatch) -> None:
    wrong_bound(monkeypatch, "srpt", 1000)
    with pytest.raises(SolverError, match=r"srpt: its tel bound 1000 .* tel \d+ \(search\)"):
        bound(ROUNDS, time_limit_s=5)


@pytest.mark.parametrize("command", ["bound", "compare"])
def test_the_command_line_ends_with_an_internal_error(tmp_path, monkeypatch, command) -> None:
    write_instance(SECONDS, tmp_path / "seconds.json")
    (tmp_path / "plain.toml").write_text(
        'format = "optsched-cost-model"\nversion = 1\nunit = "ms_per_layer"\nlayers = 1\n'
        "[coefficients]\ntoken = 1\nbase = 10\n"
    )
    monkeypatch.chdir(tmp_path)
    wrong_bound(monkeypatch, "work", 1000.0)
    words = command, "seconds.json", "--cost-model", "plain.toml", "--time-limit", 30
    ended = invoke(*words)
    assert ended.exit_code == 1  # an internal error, in one line
    assert "work: its tel bound 1000.0 contradicts a schedule of tel 0." in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_float_noise_is_forgiven_and_nothing_else() -> None:
    known = (2.0, "fcfs")
    noise = float_noise(SECONDS, "tel", 2.0)
    # A millionth of the value 2.0.
    assert noise == pytest.approx(2e-6)
    for value in (1.5, 2.0, 2.0 + noise / 2):
        kept = reconcile(SECONDS, TOTAL_LATENCY, known, (value, "work"))
        assert kept == min(value, 2.0)
    with pytest.raises(SolverError, match=r"work:.*bound 2.1.*tel 2.0"):
        reconcile(SECONDS, TOTAL_LATENCY, known, (2.1, "work"))
    with pytest.raises(SolverError, match="contradicts"):
        # In rounds values are whole numbers, and no noise is forgiven.
        reconcile(ROUNDS, TOTAL_LATENCY, (5, "fcfs"), (6, "srpt"))
    assert reconcile(ROUNDS, TOTAL_LATENCY, (5, "fcfs"), (5, "srpt")) == 5
    # Where more is better the bound lies above.
    with pytest.raises(SolverError, match="contradicts"):
        reconcile(SECONDS, Objective("tps"), (5.0, "a"), (4.0, "b"))
    assert reconcile(SECONDS, Objective("tps"), (None, None), (4.0, "b")) == 4.0


def huge(kind: str) -> Instance:
    """Return requests of microseconds beside years: as delays, an idle gap or a late arrival."""
    columns: dict = {"prompt_tokens": [100, 200, 300], "output_tokens": [10, 30, 100]}
    many = {
        "a chain": {
            "arrival": [1e9, None, None], "after": [None, 0, 1], "delay": [None, 1e9, 1e-9]
        },
        "delays": {"arrival": [0, None, None], "after": [None, 0, 0], "delay": [None, 1e9, 3e9]},
        "late session": {
            "arrival": [0, 4e9, None], "after": [None, None, 1], "delay": [None, None, 1e-9]
        },
        "idle gap": {"arrival": [0, 1e9, 1e9]},
        "late first": {"arrival": [4e9, 4e9, 4e9 + 1]},
    }  # fmt: skip
    return Instance(**columns, **many[kind], kv_capacity=2000, time_unit="second")


KINDS = ["a chain", "delays", "late session", "idle gap", "late first"]


@pytest.mark.parametrize("kind", KINDS)
def test_times_of_years_beside_batches_of_microseconds_contradict_nothing(kind) -> None:
    """A bound that is positive and not above the value, and one for each further objective,
    without an error."""
    instance, cost = huge(kind), BatchCost("x", 1, {"token": "1e-6"})
    found = compare(Problem(instance, cost), ["fcfs"], time_limit_s=0)
    assert found.bound is not None
    assert found.value is not None
    assert 0 < found.bound <= found.value
    for objective in ("tel", "makespan", "p99_latency", "session_completion"):
        if objective != ("session_completion" if instance.after is None else "p99_latency"):
            assert bound(Problem(instance, cost, objective), time_limit_s=1).bound is not None


def test_the_noise_is_that_of_a_clock_at_the_end_of_the_schedule() -> None:
    # At 1e9 s float64 has steps of 2**-23 s. There are 2 requests and 4 tokens.
    # A millionth of the value 2.0 is always noise.
    less = 2.0 * 1e-6
    assert float_noise(SECONDS, "tel", 2.0, 1e9) - less == pytest.approx(6 * 2.0**-23)
    # 2e-7 s apart: less than 6 * 2**-23 = 7.2e-7 s at 1e9 s, and far more than at 1e3 s.
    known, wrong = (2e-7, "fcfs"), (4e-7, "work")
    assert reconcile(SECONDS, TOTAL_LATENCY, known, wrong, 1e9) == 2e-7
    with pytest.raises(SolverError, match="contradicts"):
        reconcile(SECONDS, TOTAL_LATENCY, known, wrong, 1e3)


def test_the_noise_of_a_time_of_day_does_not_grow_with_the_day() -> None:
    # 1e-6 of a makespan at 1.7e9 s would forgive half an hour. It is 1e-6 of the 2 s since the
    # arrivals, and what floats are apart at 1.7e9 s, 2^-22 = 2.4e-7 s: 2.24e-6 s.
    late = replace(SECONDS, arrival=np.array([1.7e9, 1.7e9]))
    assert float_noise(late, "makespan", 1.7e9 + 2) < 3e-6
    assert float_noise(late, "tel", 2.0) == float_noise(SECONDS, "tel", 2.0)


def test_the_noise_of_a_late_clock_is_its_rounding_by_every_token() -> None:
    # At 2^30 s floats are 2^-22 s apart. Two requests and their four tokens are six times that,
    # and a makespan, which is such a time itself, once. A millionth of the 0.5 s is 5e-7 s.
    late = replace(SECONDS, arrival=np.array([0.0, 2.0**30]))
    assert float_noise(late, "tel", 0.5) == pytest.approx(6 * 2**-22 + 5e-7, rel=1e-12)
    both = replace(SECONDS, arrival=np.array([2.0**30, 2.0**30]))
    assert float_noise(both, "makespan", 2.0**30 + 0.5) == pytest.approx(2**-22 + 5e-7, rel=1e-9)


def test_a_gap_is_never_negative_after_noise(monkeypatch) -> None:
    honest = compare(Problem(SECONDS, PLAIN), ["fcfs"], time_limit_s=0)
    assert honest.value is not None
    # A billionth above the best known value, less than the millionth that is noise.
    wrong_bound(monkeypatch, "work", honest.value * (1 + 1e-9))
    found = compare(Problem(SECONDS, PLAIN), ["fcfs"], time_limit_s=0)
    assert lower_bound(Problem(SECONDS, PLAIN))[0] > found.value
    assert (found.gap, found.status) == (0.0, "optimal")
