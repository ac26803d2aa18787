"""Public functions say in one line what they found and what they expect, whatever they are given.

Instances and cost models may be names or files everywhere. A class of a policy is made an object.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import optsched
from optsched.costs.cost import UnitCost
from optsched.engines.replay import replay
from optsched.problem.errors import OptschedError

TINY = optsched.read_instance("tiny")
PLAN = optsched.run(TINY, "mc-sf").schedule
LIMIT: dict[str, Any] = {"time_limit_s": 0.1}
CERTIFICATE = optsched.bound(TINY, time_limit_s=1).certificate


class OldestFirst:
    """Runs one request at a time, the oldest first."""

    def batch(self, view: optsched.View) -> optsched.Batch:
        order = view.running or view.waiting
        return optsched.Batch(tokens={order[0]: view.rest(order[0])})


class Demanding(OldestFirst):
    def __init__(self, size: int) -> None:
        self.size = size


# A call of each public function that takes an instance, with valid values of all else.
OF_INSTANCES: dict[str, Callable[[Any], Any]] = {
    "bound": partial(optsched.bound, **LIMIT),
    "capacity": lambda given: optsched.capacity(
        optsched.Problem(given, slo_latency=30), ["fcfs"], **LIMIT
    ),
    "compare": partial(optsched.compare, policies="fcfs", bound=False),
    "evaluate": lambda given: optsched.evaluate(given, PLAN),
    "from_batches": lambda given: optsched.from_batches([0, 0], [], [], instance=given),
    "from_starts": lambda given: optsched.from_starts([0] * TINY.n, given),
    "run": lambda given: optsched.run(given, "mc-sf"),
    "model": optsched.model,
    "predict": lambda given: optsched.predict(given, "oracle"),
    "solve": partial(optsched.solve, **LIMIT),
    "splits": lambda given: optsched.splits(
        optsched.Problem(given, optsched.Fleet.of(2)), ["fcfs"], prove=False, **LIMIT
    ),
    "verify": lambda given: optsched.verify(given, CERTIFICATE),
    "timeline": lambda given: optsched.timeline(given, PLAN),
    "why": lambda given: optsched.why(given, PLAN),
    "with_drafts": lambda given: optsched.with_drafts(given, 2),
    "write_instance": lambda given: optsched.write_instance(given, "/dev/null"),
}
# What is no instance: objects of other kinds, the class itself, and names of nothing.
NO_INSTANCES = (None, 3, {}, [TINY], optsched.Instance, PLAN, "nosuch", Path("nosuch.json"))


def refusal(call: Callable[[], Any]) -> str:
    """Return the one line by which a call is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((OptschedError, TypeError)) as caught:
            call()
    words = str(caught.value)
    assert words
    assert "\n" not in words, words
    assert "object has no attribute" not in words
    return words


def test_every_public_function_of_an_instance_is_in_the_table() -> None:
    import inspect

    public = {name: getattr(optsched, name) for name in optsched.__all__}
    takes = {
        name
        for name, one in public.items()
        if inspect.isfunction(one)
        and {"instance", "problem"} & {*inspect.signature(one).parameters}
    }
    assert takes - {"read_schedule"} == set(OF_INSTANCES)  # there it may be left out


@pytest.mark.parametrize("name", sorted(OF_INSTANCES))
def test_an_instance_is_an_object_a_name_or_a_file(name: str, tmp_path: Path) -> None:
    call = OF_INSTANCES[name]
    for wrong in NO_INSTANCES:
        words = refusal(partial(call, wrong))
        assert "expected" in words, (wrong, words)
    if name in ("from_batches", "from_starts"):  # these make values, and read no files
        assert "read_instance" in refusal(partial(call, "tiny"))
        return

    file = tmp_path / "mine.json"
    optsched.write_instance(TINY, file)
    # By name, by path and by text the answer, or the error, is that of the object.
    for same in ("tiny", file, str(file)):
        with suppress(OptschedError):  # as for the object, where pools are in rounds, or no server
            # `write_instance` returns None, and every other call returns an answer.
            assert call(same) is not None or name == "write_instance"
            continue
        assert refusal(partial(call, same)) == refusal(partial(call, TINY))


# Calls with a misspelt option, and the option that the error suggests.
UNKNOWN = (
    (partial(optsched.solve, "tiny", time_limit=3), "time_limit_s"),
    (partial(optsched.solve, "tiny", evictionfree=True), "eviction_free"),
    (partial(optsched.generate, "jaillet-model-1", N=3), "n"),
    (partial(optsched.generate, "lognormal", promt_mean=3), "prompt_mean"),
    (partial(optsched.read_trace, "azure", "no.csv", limt=3), "limit"),
    (partial(optsched.read_trace_report, "azure", "no.csv", kv_capacty=3), "kv_capacity"),
)


@pytest.mark.parametrize("place", range(len(UNKNOWN)))
def test_an_unknown_keyword_is_named_with_the_one_that_is_meant(place: int) -> None:
    call, meant = UNKNOWN[place]
    assert f"did you mean {meant!r}" in refusal(call)


def test_a_class_of_a_policy_is_made_an_object_or_refused() -> None:
    made = optsched.run(TINY, OldestFirst()).schedule
    for one in (OldestFirst, "fcfs", optsched.Rules, optsched.Windows):
        assert optsched.run(TINY, one).metrics["tel"] > 0  # type: ignore[arg-type, operator]
    found = optsched.run(TINY, OldestFirst).schedule  # type: ignore[arg-type]
    assert optsched.evaluate(TINY, found).metrics == optsched.evaluate(TINY, made).metrics
    # `Demanding` cannot be made without its argument `size`.
    assert "size" in refusal(lambda: optsched.run(TINY, Demanding).schedule)  # type: ignore[arg-type]
    rows = optsched.compare(TINY, [OldestFirst, "fcfs"], bound=False).rows  # type: ignore[list-item]
    assert [row.policy for row in rows] == ["OldestFirst", "fcfs"]


# By argument: a call with a value of it, and values that have to be refused in one line.
WRONG: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "policy": (
        lambda given: optsched.run(TINY, given).schedule,
        (None, 3, {}, object(), object, optsched.Batch, OldestFirst().batch, "nosuch", "", PLAN),
    ),
    "policies": (
        lambda given: optsched.compare(TINY, given, bound=False),
        (3, [3], [None], object(), [], {"a": 3}, "nosuch", optsched.Batch),
    ),
    "policies of capacity": (
        lambda given: optsched.capacity(optsched.Problem(TINY, slo_latency=30), given),
        (3, [3], [OldestFirst], object(), [], "nosuch"),
    ),
    "policies of splits": (
        lambda given: optsched.splits(
            optsched.Problem("tiny-seconds", optsched.Fleet.of(2, MODEL)), given
        ),
        (3, [3], [OldestFirst], object(), "nosuch"),
    ),
    "schedule": (
        lambda given: optsched.evaluate(TINY, given),
        (None, 3, "best.json", optsched.Schedule, {}, [0, 1], TINY),
    ),
    "schedule of timeline": (
        lambda given: optsched.timeline(TINY, given),
        (None, 3, "best.json", optsched.Schedule, {}, TINY),
    ),
    "schedule of why": (
        lambda given: optsched.why(TINY, given),
        (None, 3, "best.json", optsched.Schedule, {}, TINY),
    ),
    "schedule to write": (
        lambda given: optsched.write_schedule(given, "/dev/null"),
        (None, 3, "best.json", optsched.Schedule, {}, TINY),
    ),
    "cost model": (
        lambda given: optsched.run(optsched.Problem("tiny-seconds", given), "fcfs").schedule,
        (None, 3, {}, optsched.BatchCost, UnitCost, [3], [], "nosuch", object(), TINY),
    ),
    "cost model of solve": (
        lambda given: optsched.solve(optsched.Problem("tiny-seconds", given), **LIMIT),
        (None, 3, {}, optsched.BatchCost, UnitCost, [3], "nosuch", object(), TINY),
    ),
    "cost model of bound": (
        lambda given: optsched.bound(optsched.Problem("tiny-seconds", given), **LIMIT),
        (None, 3, {}, optsched.BatchCost, UnitCost, [3], "nosuch", object(), TINY),
    ),
    "cost model to load": (optsched.load_cost_model, (None, 3, {}, optsched.BatchCost, "nosuch")),
    "objective of solve": (
        lambda given: optsched.solve(optsched.Problem(TINY, objective=given), **LIMIT),
        (3, {}, object(), "nosuch", [3], [None], optsched.Result),
    ),
    "objective of bound": (
        lambda given: optsched.bound(optsched.Problem(TINY, objective=given), **LIMIT),
        (None, 3, {}, object(), "nosuch", [3], optsched.Result),
    ),
    "method": (
        lambda given: optsched.solve(TINY, method=given, **LIMIT),
        (None, 3, {}, object(), "nosuch", []),
    ),
    "method of bound": (
        lambda given: optsched.bound(TINY, method=given, **LIMIT),
        (None, 3, {}, object(), "nosuch", []),
    ),
    "formulation": (
        lambda given: optsched.solve(TINY, formulation=given, **LIMIT),
        (3, {}, object(), "nosuch", []),
    ),
    "warm start": (
        lambda given: optsched.solve(TINY, warm_start=given, **LIMIT),
        (3, {}, object(), "nosuch", [], optsched.Schedule),
    ),
    "fleet": (
        lambda given: optsched.Problem("tiny-seconds", given),
        (3, "1p1d", {}, object(), [], optsched.Problem),
    ),
    "measured": (
        lambda given: optsched.compare(TINY, "fcfs", measured=given),
        (3, "nosuch.json", {}, object(), [], optsched.Measured),
    ),
    "evaluation": (
        lambda given: optsched.timeline(TINY, PLAN, evaluation=given),
        (3, {}, object(), optsched.Evaluation),
    ),
    "predictor": (
        lambda given: optsched.run(TINY, "mc-sf", predictor=given).schedule,
        (3, {}, object(), "nosuch", [1]),
    ),
    "slos": (
        lambda given: optsched.run(optsched.Problem(TINY, **given), "mc-sf").schedule,
        (3, "slo_ttft", {"slo_tftt": 3}, {"slo_ttft": "fast"}, [3], object()),
    ),
    "one slo": (
        lambda given: optsched.evaluate(optsched.Problem(TINY, slo_ttft=given), PLAN),
        ("fast", -1, 0, {}, [3], object(), True),
    ),
    "generator": (optsched.generate, (None, 3, {}, "nosuch", object(), [])),
    "trace format": (
        lambda given: optsched.read_trace(given, "no.csv"),
        (None, 3, {}, "nosuch", object(), []),
    ),
    "trace file": (
        lambda given: optsched.read_trace("azure", given),
        (None, 3, {}, "nosuch.csv", object(), []),
    ),
    "file of an instance": (optsched.read_instance, (None, 3, {}, "nosuch", object(), [])),
    "file of a schedule": (optsched.read_schedule, (None, 3, {}, "nosuch", object(), [])),
    "file of measured times": (optsched.read_measured, (None, 3, {}, "nosuch", object(), [])),
    "measured to write": (
        lambda given: optsched.write_measured(given, "/dev/null"),
        (None, 3, {}, "nosuch", object(), [], optsched.Measured),
    ),
    "file to write": (
        lambda given: optsched.write_instance(TINY, given),
        (None, 3, {}, object(), [], ""),
    ),
    "policy of score": (optsched.score, (None, 3, {}, object(), "nosuch", OldestFirst)),
    "dataset": (optsched.fetch_dataset, (None, 3, {}, object(), "nosuch", [])),
    "engine": (
        lambda given: replay(TINY, given),
        (None, 3, {}, object(), "nosuch", []),
    ),
}
MODEL = "llama2-7b-a100-infermax"
# What is neither a seed nor a number of seconds.
NUMBERS = ("x", -1, {}, object(), [], float("nan"), complex(1))
for which in OF_INSTANCES:
    if which in ("bound", "capacity", "compare", "solve", "splits"):
        other = {"bound": False, "policies": "fcfs"} if which == "compare" else {}
        other |= {"policies": ["fcfs"]} if which in ("capacity", "splits") else {}
        fleet = optsched.Fleet.of(2 if which == "splits" else 1, MODEL)
        problem = optsched.Problem("tiny-seconds", fleet, slo_latency=30)
        about = problem if which in ("splits", "capacity") else TINY
        call_of = partial(getattr(optsched, which), about, **other)
        WRONG[f"seed of {which}"] = (
            lambda given, call=call_of: call(seed=given, **LIMIT),  # type: ignore[misc]
            (*NUMBERS, 1.5, None),
        )
        WRONG[f"time limit of {which}"] = (
            lambda given, call=call_of: call(time_limit_s=given),  # type: ignore[misc]
            NUMBERS,
        )


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_argument_is_one_line(what: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    call, values = WRONG[what]
    for value in values:
        try:
            refusal(partial(call, value))
        except BaseException as error:
            error.add_note(f"{what}: {value!r}")
            raise
