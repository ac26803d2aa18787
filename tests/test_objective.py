"""Objectives: a metric, a sense and parameters, read from text in one place."""

from __future__ import annotations

import pickle
import re

import pytest

from optsched import Problem
from optsched.bounds import list_bounds, lower_bound
from optsched.optimize.formulations import Task, formulations
from optsched.optimize.solve import solve
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.metrics import TABLE
from optsched.problem.objective import (
    TOTAL_LATENCY,
    Objective,
    parse_objectives,
    service_limits,
)

INSTANCE = Instance([0, 0], [1, 2], [3, 1], kv_capacity=6)


def test_names_separated_by_commas_are_lexicographic() -> None:
    # A text, a text with spaces, a list of texts, and a list with an objective.
    assert parse_objectives("tel") == (TOTAL_LATENCY,)
    assert parse_objectives("tel, makespan") == (Objective("tel"), Objective("makespan"))
    assert parse_objectives(["tel", "makespan"]) == parse_objectives("tel,makespan")
    assert parse_objectives([TOTAL_LATENCY, "tps"])[1].maximized


@pytest.mark.parametrize(
    "text", ["tel", "slo_goodput:slo_ttft=1", "slo_attainment:slo_ttft=0.5,slo_tpot=0.02"]
)
def test_the_text_of_an_objective_reads_back(text: str) -> None:
    (found,) = parse_objectives(text)
    assert str(found) == text
    assert pickle.loads(pickle.dumps(found)) == found


def test_parameters_belong_to_the_objective_before_them() -> None:
    goodput, makespan = parse_objectives("slo_goodput:slo_ttft=1,slo_tpot=0.1,makespan")
    assert goodput == Objective("slo_goodput", (("slo_ttft", 1.0), ("slo_tpot", 0.1)))
    assert makespan == Objective("makespan")
    assert service_limits([goodput, makespan]) == {"slo_ttft": 1.0, "slo_tpot": 0.1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latency", "objective: 'latency' is unknown; did you mean 'p99_latency'? known are tel"),
        ("", "objective: '' is unknown"),
        ("tel,tel", "objective: found 'tel' twice"),
        ([], "objective: found none; expected one or more of tel,"),
        ("slo_goodput:slo_ttft=0", "slo_ttft: found 0.0; expected a time > 0"),
        (
            "slo_goodput:slo_ttft=1,slo_attainment:slo_ttft=2",
            "slo_ttft: found both 1 and 2; expected one value",
        ),
    ],
)
def test_a_text_that_means_nothing_is_refused(text: str | list[str], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        parse_objectives(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tel:slo_ttft=1", "objective 'tel': parameter 'slo_ttft' is unknown; known are none"),
        ("slo_goodput:slo_ttft=soon", "parameter slo_ttft: found 'soon'; expected a number"),
        ("slo_goodput:slo_ttft", "found 'slo_ttft'; expected key=value"),
    ],
)
def test_a_parameter_that_cannot_be_read_is_named(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_objectives(text)


def test_sense_and_whole_numbers_are_facts_of_the_metric() -> None:
    # Integral: a sum of latencies in rounds and any count, but no seconds and no mean. Better: less
    # of total latency and more of throughput, never the same, and anything than nothing.
    seconds = Instance([0.0], [1], [1], 6, time_unit="second", kv_accounting="cached")
    assert TOTAL_LATENCY.integral(INSTANCE)
    assert not TOTAL_LATENCY.integral(seconds)
    assert not Objective("mean_ttft").integral(INSTANCE)
    assert Objective("evictions").integral(seconds)
    assert TOTAL_LATENCY.better(3, 4)
    assert Objective("tps").better(4, 3)
    assert not TOTAL_LATENCY.better(3, 3)
    assert TOTAL_LATENCY.better(3, None)
    assert not TOTAL_LATENCY.better(None, 3)


def test_formulations_and_bounds_speak_of_metrics_in_the_table() -> None:
    names = {
        name for f in formulations().values() for m in f.methods.values() for name in m.objectives
    }
    names |= {name for bound in list_bounds().values() for name in bound.objectives}
    assert {"tel", "makespan", "tps"} <= names <= set(TABLE)


def test_strings_and_objectives_are_taken_alike() -> None:
    # A text is the objective of that name, `tel` where none is given; an objective stays itself.
    assert Task(INSTANCE, objective=("tel",)).objective == (TOTAL_LATENCY,)  # type: ignore[arg-type]
    texts, values = (Problem(INSTANCE, objective=one) for one in ("tel", TOTAL_LATENCY))
    assert lower_bound(texts) == lower_bound(values)
    by_text, by_value = solve(texts), solve(values)
    assert by_text.objective_name == by_value.objective_name == "tel"
    # Both fit at once, with 2 + 3 of 6 tokens in the first round, so latencies are 3 and 1.
    assert by_text.value == by_value.value == 4
    with pytest.raises(UsageError, match="'slo_goodput'"):
        solve(Problem(INSTANCE, objective=Objective("slo_goodput", (("slo_ttft", 1.0),))))
