"""Programs to which rows of one's own are added, solved and judged.

Optima are computed by hand, or by exhaustive search.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from brute_force import brute_force

import optsched
from instances import small
from optsched import Instance, Problem, evaluate, model, solve
from optsched.problem.errors import SolverError, UsageError
from optsched.problem.instance import Limits

# Six requests, of five outputs of one token and one of three; all fit at once: 6 x 2 = 12.
SEVEN = Instance([0] * 6, [1] * 6, [1, 1, 1, 1, 1, 3], kv_capacity=12)


def test_at_most_so_many_prefills_in_a_round_by_hand() -> None:
    # Five requests of one token and one of three; KV for all six at once (6 * 2 = 12 <= M), so
    # that without a row all start at 0: 5 * 1 + 3 = 8. At most three prefills in a round: three
    # start at 0 and three at 1, which costs each of these a round more, 8 + 3 = 11.
    free = model(SEVEN)
    assert free.solve().value == solve(SEVEN).value == 8
    asked = model(SEVEN)
    for t in range(1, asked.readable.length + 1):
        asked.add(asked.prefills(t) <= 3)

    found = asked.solve()
    assert (found.value, found.bound, found.status) == (11, 11, "optimal")
    assert "what the rows of your model rule out" in str(found.scope)
    assert "of your model" in repr(found)
    assert sorted(found.schedule.starts.tolist()) == [0, 0, 0, 1, 1, 1]


def test_rows_are_added_as_in_pulp_and_weights_count() -> None:
    # M = 4, one at a time. Smith's rule serves request 0 (weight 5) first: 5 * 3 + 1 * 5 = 20.
    # A row that request 1 starts first: 1 * 2 + 5 * 5 = 27.
    two = Instance([0, 0], [1, 1], [3, 2], kv_capacity=4, weight=[5, 1])
    asked = model(Problem(two, None, "weighted_latency"))
    assert asked.solve().value == 20
    asked.program += asked.start(1) <= asked.start(0), "one_first"
    assert asked.solve().value == 27
    with pytest.raises(UsageError, match="expected rows added to its own"):
        asked.program = model(SEVEN).program


def test_a_fairness_row_by_hand() -> None:
    # M = 4: the long request (o = 3, peak 4) and each short one (o = 1, KV 2) run one after the
    # other, but for a short one in the first round of the long one (2 + 2). Shortest first: both
    # short ones at 0 (2 + 2 = 4), the long one at 1: 1 + 1 + 4 = 6. A row that the long one waits
    # for nobody: it starts at 0 with one short one, and the other one starts at 3: 3 + 1 + 4 = 8.
    instance = Instance([0, 0, 0], [1, 1, 1], [3, 1, 1], kv_capacity=4)
    assert solve(instance).value == 6
    fair = model(instance)
    fair.add(fair.start(0) <= fair.start(1), "first_come")
    fair.add(fair.start(0) <= fair.start(2))
    found = fair.solve()
    assert (found.value, found.bound) == (8, 8)
    assert found.schedule.starts.tolist() in ([0, 0, 3], [0, 3, 0])


def test_a_row_on_first_tokens_by_hand() -> None:
    # The same requests. TTFT is start + 1, and in the optimum of 6 the long one (request 0) starts
    # at 1, so that at most 2 rounds for its TTFT change nothing. At most 1 has it start at 0, which
    # is the fairness row's case: starts 0, 0 and 3, 8 in all.
    instance = Instance([0, 0, 0], [1, 1, 1], [3, 1, 1], kv_capacity=4)
    for limit, total in (2, 6), (1, 8):
        asked = model(instance)
        asked.add(asked.start(0) + 1 <= limit)
        assert asked.solve().value == total


def test_rows_that_rule_everything_out_are_infeasible() -> None:
    """Request 0 is to start after request 1, and request 1 no earlier than request 0."""
    asked = model(SEVEN)
    asked.add(asked.start(0) >= asked.start(1) + 1)
    asked.add(asked.start(1) >= asked.start(0))
    found = asked.solve()
    assert (found.status, found.schedule) == ("infeasible", None)


@pytest.mark.parametrize("name", ["tel", "makespan", "mean_ttft"])
def test_without_rows_the_optimum_is_that_of_solve(name: str) -> None:
    """Exhaustive search over all starts says what the optimum is."""
    for seed in range(5):
        instance = small(seed, 4)
        found = model(Problem(instance, None, name)).solve(threads=1)
        assert found.status == "optimal"
        assert found.value == pytest.approx(float(brute_force(instance, name)[0]))


@pytest.mark.parametrize("seed", range(8))
def test_a_limit_written_as_rows_costs_what_the_limit_costs(seed: int) -> None:
    """At most two run in a round, as rows; exhaustive search has it as a limit of the instance."""
    instance = small(seed, 4)
    asked, outputs = model(instance), instance.output_tokens.tolist()
    for t in range(1, asked.readable.length + 1):
        every = asked.readable.variables.items()
        asked.add(sum(var for (_, i, k), var in every if k < t <= k + outputs[i]) <= 2)

    limited = replace(instance, limits=Limits(max_running=2))
    assert asked.solve(threads=1).value == brute_force(limited, "tel")[0]


def test_starts_are_rounds_of_the_instance_and_not_cut_off() -> None:
    # Request 1 arrives at 50. It may start until 50 + 3 + 3 - 3 = 53 or later, and at 53 if a row
    # says so: 3 + 3 + 3 = 9.
    instance = Instance([0, 50], [1, 1], [3, 3], kv_capacity=4)
    asked = model(instance)
    asked.add(asked["x", 1, 53] == 1)
    found = asked.solve()
    # Latencies: 3 of request 0, and 53 + 3 - 50 = 6 of request 1.
    assert (found.value, found.schedule.starts.tolist()) == (9, [0, 53])
    with pytest.raises(UsageError, match="found no variable"):
        asked["x", 1, 54]

    longer = model(instance, length=60)
    longer.add(longer["x", 1, 57] == 1)
    # Request 1 ends at 57 + 3 = 60, 10 rounds after its arrival at 50.
    assert longer.solve().value == 3 + 10


def test_arrays_are_the_program() -> None:
    """SciPy solves the arrays alone: 8 as above, all at once."""
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import csc_array

    asked = model(SEVEN)
    arrays = asked.arrays()
    shape = len(arrays.row_lower), len(arrays.cost)
    matrix = csc_array((arrays.value, arrays.index, arrays.start), shape=shape)
    rows = LinearConstraint(matrix, arrays.row_lower, arrays.row_upper)
    found = milp(arrays.cost, integrality=arrays.integrality, bounds=(0, 1), constraints=rows)
    assert found.fun == pytest.approx(8)
    assert len(asked.program.variables()) == shape[1]


def test_an_objective_of_ones_own_is_refused_by_the_judge() -> None:
    asked = model(SEVEN)
    asked.program.setObjective(-asked.start(0))
    with pytest.raises(SolverError, match="claimed"):
        asked.solve()


# --- batches ------------------------------------------------------------------------------------


def batches() -> Problem:
    """Return three requests that fit into one batch, with a cost of 1 ms a batch and 1 a token."""
    cost = optsched.BatchCost("plain", 1, {"base": "1", "token": "1"})
    instance = Instance(
        [0, 0, 0], [2, 2, 2], [2, 2, 2], kv_capacity=100, time_unit="second",
        chunked_prefill=False,
    )  # fmt: skip
    return Problem(instance, cost, "makespan")


def test_the_program_of_batches_by_hand() -> None:
    # Two batches: 1 + 6 ms for three prefills and 1 + 3 ms for three decodes, 11 ms. With at most
    # one prefill in a batch, which may hold decodes, too: 3 prefills in batches 1 to 3, decodes in
    # 2 to 4: 9 tokens and 4 batches, 13 ms.
    free = model(batches()).solve(threads=1)
    assert free.value == pytest.approx(0.011)
    assert free.status == "optimal"
    asked = model(batches())
    for j in range(1, asked.readable.length + 1):
        asked.add(asked.prefills(j) <= 1)

    found = asked.solve(threads=1)
    assert found.value == pytest.approx(0.013)
    assert found.status == "optimal"
    assert evaluate(batches(), found.schedule).metrics["makespan"] == found.value


def test_a_row_on_the_batch_of_a_token_by_hand() -> None:
    # Request 0 has its first token in batch 1 and the others not, so that they prefill later:
    # 1 + 2, then 1 + 1 + 4 (a decode and two prefills), then 1 + 2 decodes: 12 ms.
    asked = model(batches())
    asked.add(asked["g", 0, 1] == 1)
    asked.add(asked["g", 1, 1] + asked["g", 2, 1] == 0)
    assert asked.solve(threads=1).value == pytest.approx(0.012)


def test_what_the_programs_do_not_have_is_refused() -> None:
    """Batches know no `tel` and no arrivals apart; rounds no `max_stretch`."""
    with pytest.raises(UsageError, match="'tel'"):
        model(batches().about("tel"))
    late = batches().on(Instance([0.0, 1.0], [2, 2], [2, 2], kv_capacity=100, time_unit="second"))
    with pytest.raises(UsageError, match="different times"):
        model(late)
    with pytest.raises(UsageError, match="max_stretch"):
        model(Problem("tiny", None, "max_stretch"))
    assert np.isfinite(model("tiny").arrays().cost).all()


def test_what_a_row_may_not_be_is_said() -> None:
    asked = model("tiny")
    for request in (-1, asked.task.instance.n):
        with pytest.raises(UsageError, match=f"request: found {request}; expected 0 to"):
            asked.start(request)
    with pytest.raises(UsageError, match="expected a row, with <=, >= or =="):
        asked.add(asked.prefills(1))
    asked.add(asked.prefills(1) <= 1, "one")
    with pytest.raises(UsageError, match="name: "):
        asked.add(asked.prefills(2) <= 1, "one")
