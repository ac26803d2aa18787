"""Scores of policies: what they are, that they repeat, and that bad policies cost a row only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from command_line import answer, invoke, one_line_error, run

import optsched
from optsched.analysis import library
from optsched.analysis.score import Row, Score, score
from optsched.files.schemas import check_shape
from optsched.problem.errors import InputError, UsageError
from optsched.problem.processes import Processes

POLICIES = """
import os
from optsched import Batch, Rules

def small(): return Rules(order="volume", admission="lookahead")

class OneByOne:
    def batch(self, view):
        chosen = (view.running or view.waiting)[0]
        return Batch({chosen: view.rest(chosen)})

class Hangs:
    def batch(self, view):
        while True:
            pass

class Eats:
    def batch(self, view):
        self.memory = bytearray(1 << 40)

class Ends:
    def batch(self, view):
        os._exit(3)

class Raises(OneByOne):
    def batch(self, view):
        if len(view.waiting) > 2:
            raise KeyError("three wait")
        return super().batch(view)

class Liar(OneByOne):
    def __init__(self):
        import optsched.judge.evaluate as judge, optsched.analysis.score as score
        judge.evaluate = score.evaluate = None  # the judge works elsewhere

class Pauses(OneByOne):
    turn = 0
    def batch(self, view):
        self.turn += 1
        return Batch(stall=True) if view.running and self.turn % 2 else super().batch(view)

class Overfull:
    def batch(self, view):
        return Batch({i: view.rest(i) for i in [*view.running, *view.waiting]})
"""


@pytest.fixture(scope="module")
def pool() -> Any:
    processes = Processes()
    yield processes
    processes.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(POLICIES, encoding="utf-8")
    return path


def row(**more: Any) -> Row:
    known = {"bound": 60.0, "best_known": 70.0, "fcfs": 100.0}
    return Row("one", "some", "tel", **{"value": 80.0, **known, **more})


@pytest.mark.parametrize(
    ("value", "captured"),
    [
        # The optimum is in [60, 70]: of 30 to 40 that fcfs loses, 20 are gained.
        (80.0, (20 / 40, 20 / 30)),
        (100.0, (0.0, 0.0)),
        (120.0, (-20 / 30, -20 / 40)),
        # Better than the best known: the optimum is in [60, 65].
        (65.0, (35 / 40, 1.0)),
        (60.0, (1.0, 1.0)),
        (None, None),
    ],
)
def test_the_captured_share_is_an_interval(
    value: float | None, captured: tuple[float, float] | None
) -> None:
    assert row(value=value).captured == captured


def test_nothing_is_captured_where_fcfs_may_be_optimal() -> None:
    assert row(value=100.0, best_known=100.0).captured is None


def test_a_score_is_a_geometric_mean_and_has_a_floor() -> None:
    rows = row(), row(value=40.0, fcfs=50.0, bound=20.0, best_known=40.0)
    found = Score("mine", 0, "2026.1", rows)
    assert found.score == pytest.approx(math.sqrt(0.8 * 0.8))
    assert found.floor == pytest.approx(math.sqrt(0.6 * 0.4))
    assert found.best_known == pytest.approx(math.sqrt(0.7 * 0.8))
    assert found.reached == pytest.approx(found.floor / 0.8)
    failed = Score("mine", 0, "2026.1", (*rows, row(value=None)))
    assert (failed.score, failed.reached) == (None, 0.0)


def test_a_policy_in_a_file_has_the_value_that_it_has_elsewhere(
    file: Path, pool: Processes
) -> None:
    found = score(f"{file}:small", ["tiny"], processes=pool)
    data = library.read_library()["instances"]
    for one in found.rows:
        instance = library.load(one.instance)
        for policy, value in ((f"{file}:small", one.value), ("fcfs", one.fcfs)):
            judged = optsched.evaluate(instance, optsched.simulate(instance, policy))
            assert judged.metrics["tel"] == value
        entry = data[one.instance]
        assert (one.bound, one.best_known) == (entry["bound"]["value"], entry["best"]["value"])

    assert found.score is not None
    assert found.floor <= found.best_known <= found.score < 1


def test_a_changed_file_is_read_anew_and_equal_runs_give_equal_bytes(
    file: Path, pool: Processes
) -> None:
    one, two = (
        json.dumps(score(f"{file}:small", ["tiny", "csp"], processes=pool).to_dict())
        for _ in range(2)
    )
    assert one == two
    file.write_text(POLICIES.replace('"volume"', '"arrival"'), encoding="utf-8")
    third = score(f"{file}:small", ["tiny", "csp"], processes=pool)
    assert json.dumps(third.to_dict()) != one
    assert all(row.wall_s > 0 for row in third.rows)
    assert "wall_s" in third.to_dict(times=True)["instances"][0]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("Hangs", "no schedule within 0.4 s"),
        ("Eats", "raised MemoryError()"),
        ("Ends", "its process ended without a schedule"),
        ("Raises", "raised KeyError('three wait')"),
        ("Nobody", "Nobody"),
        ("Overfull", "kv_capacity"),
        ("Pauses", "it pauses running requests"),  # and so the bound says nothing of it
    ],
)
def test_a_policy_that_fails_costs_rows_and_says_why(
    file: Path, pool: Processes, policy: str, words: str
) -> None:
    names = ["tiny-n4", "tiny-n8"]
    limits = {"time_limit_s": 0.4 if policy == "Hangs" else 10.0}
    found = score(f"{file}:{policy}", names, processes=pool, **limits)
    assert [one.value for one in found.rows] == [None, None]
    assert (found.score, found.reached) == (None, 0.0)
    for one in found.rows:
        assert one.failure is not None
        assert words in one.failure["error"]

    good = score(f"{file}:OneByOne", names, processes=pool)
    assert None not in [one.value for one in good.rows]


def test_a_failure_shows_on_a_few_requests(file: Path, pool: Processes) -> None:
    (one,) = score(f"{file}:Raises", ["tiny-n8"], processes=pool).rows
    assert one.failure is not None
    assert one.failure["first_requests"] == 4  # of 1, 2, 4 the first with more than two waiting


def test_a_policy_cannot_reach_the_judge(file: Path, pool: Processes) -> None:
    honest, liar = (
        score(f"{file}:{name}", ["tiny-n8"], processes=pool).rows[0].value
        for name in ("OneByOne", "Liar")
    )
    assert honest == liar


def test_instances_without_a_bound_are_not_scored(pool: Processes) -> None:
    with pytest.raises(UsageError, match="found 'slo-chat', which has no bound"):
        score("fcfs", ["slo"], processes=pool)
    with pytest.raises(InputError, match="'nothing' is unknown"):
        score("fcfs", ["nothing"], processes=pool)


def test_the_command_prints_a_table_and_json(file: Path) -> None:
    words = ("score", f"{file}:small", "--library", "tiny-n8", "--library", "tiny-n10")
    said = run(*words)
    assert "tiny-n8" in said
    assert "no policy is below the floor" in said
    data = answer(*words)
    check_shape("score", data)
    assert data["combined_score"] == pytest.approx(data["floor"] / data["score"])
    assert [one["instance"] for one in data["instances"]] == ["tiny-n8", "tiny-n10"]
    one_line_error(invoke("score", "fcfs", "--library", "nothing"))
