"""The hindsight program: every method against exhaustive search, windows, limits, exports.

Exhaustive search (brute_force.py) tries all start times by the definitions alone; the judge looks
at every schedule.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from brute_force import brute_force_tel
from sweeps import parts, seeds

from optsched import Instance, Limits, evaluate, model
from optsched.optimize.formulations import Task, get
from optsched.optimize.formulations.rounds.horizon import (
    place,
    round_data,
    serial_schedule,
    start_windows,
    volume_bound,
    without_idle,
)
from optsched.optimize.formulations.rounds.integer_program import (
    linear_model,
    program,
    read_starts,
    start_values,
)
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.problem.errors import InfeasibleError, UsageError
from optsched.problem.schedule import from_starts

METHODS = ("highs", "cpsat", "pulp")
LP_FOLDER = Path(__file__).resolve().parent.parent / "models" / "lp"
TWO = SolveOptions(time_limit_s=60, threads=2)  # two threads
TINY = {
    "hindsight-tiny": Instance([0, 0], [1, 2], [3, 2], 6),
    "hindsight-tiny-limits": Instance(
        [0, 1, 1], [1, 2, 1], [2, 1, 2], 5,
        kv_accounting="cached", limits=Limits(max_batch_tokens=3, max_running=2),
        hybrid_batching=False,
    ),
}  # fmt: skip


def model_1(rng, n, *, capacity=(8, 12), prompt=5):
    """All at 0: M ~ U{capacity}, s ~ U{1..prompt}, o ~ U{1..M - s} (MC-SF, section 5.1)."""
    m = int(rng.integers(capacity[0], capacity[1] + 1))
    s = rng.integers(1, min(prompt, m - 1) + 1, n)
    o = np.array([rng.integers(1, m - v + 1) for v in s])
    return Instance(np.zeros(n, dtype=int), s, o, m)


def model_2(rng, n, **sizes):
    """The same sizes; arrivals of a Poisson process of rate U[0.5, 1.5], counted per round."""
    base = model_1(rng, n, **sizes)
    gaps = rng.exponential(1 / rng.uniform(0.5, 1.5), n)
    return Instance(
        np.floor(np.cumsum(gaps)).astype(int), base.prompt_tokens, base.output_tokens,
        base.kv_capacity,
    )  # fmt: skip


def varied(rng, index, **sizes):
    """Return an instance of n <= 5 in one of the models, with KV accounting, limits, switches."""
    base = (model_1, model_2)[index % 2](rng, int(rng.integers(1, 6)), **sizes)
    longest = int(base.prompt_tokens.max())
    limits = (
        Limits(),
        Limits(max_batch_tokens=longest + int(rng.integers(0, 4))),
        Limits(max_prefill_tokens=longest + int(rng.integers(0, 3))),
        Limits(max_running=int(rng.integers(1, 4))),
        Limits(max_batch_tokens=longest + 2, max_prefill_tokens=longest + 1, max_running=2),
    )[index % 5]
    return Instance(
        base.arrival, base.prompt_tokens, base.output_tokens, base.kv_capacity,
        kv_accounting=("generated", "cached")[index // 2 % 2], limits=limits,
        hybrid_batching=False if index % 7 == 3 else None,
    )  # fmt: skip


def run(instance, method, options=TWO):
    """Return a method's answer, whose schedule the judge finds to be worth what the method says."""
    answer = get("hindsight").methods[method].run(Task(instance, objective=("tel",)), options)
    assert answer.schedule is not None
    judged = evaluate(instance, answer.schedule).metrics["tel"]
    assert round(answer.objective) == judged
    return answer


@pytest.mark.parametrize("seed", seeds(6, 20))
def test_every_method_equals_exhaustive_search_on_both_synthetic_models(seed):
    """Up to five requests: each method proves the optimum that trying all start times finds."""
    for index in range(10):
        rng = np.random.default_rng([seed, index])
        instance = (model_1, model_2)[index % 2](rng, int(rng.integers(1, 6)))
        optimum, _ = brute_force_tel(instance)
        for method in METHODS:
            answer = run(instance, method)
            assert answer.status is Status.OPTIMAL
            assert round(answer.objective) == optimum, (method, instance.to_dict())


@pytest.mark.parametrize("seed", seeds(3, 10))
def test_every_method_equals_exhaustive_search_under_limits_and_both_accountings(seed):
    # The same of `varied`, whose 14 turns have all limits, both accountings and no hybrid batches.
    for index in range(14):
        instance = varied(np.random.default_rng([seed, index, 1]), index)
        optimum, _ = brute_force_tel(instance)
        for method in METHODS:
            answer = run(instance, method)
            assert answer.status is Status.OPTIMAL
            assert round(answer.objective) == optimum, (method, instance.to_dict())


@pytest.mark.parametrize("seed", range(4))
def test_every_method_equals_exhaustive_search_at_the_papers_sizes(seed):
    """M is 30 to 50 as in the paper, with 3 requests, so that all start times can be tried."""
    rng = np.random.default_rng([seed, 2])
    instance = (model_1, model_2)[seed % 2](rng, 3, capacity=(30, 50))
    optimum, _ = brute_force_tel(instance)
    for method in METHODS:
        assert round(run(instance, method).objective) == optimum


def agree(instance, limit_s):
    """Solve by every method: one proves the optimum, and none contradicts another."""
    answers = {m: run(instance, m, SolveOptions(time_limit_s=limit_s, threads=2)) for m in METHODS}
    proved = {m: round(a.objective) for m, a in answers.items() if a.status is Status.OPTIMAL}
    assert proved, "no method proved the optimum within the limit"
    assert len(set(proved.values())) == 1
    optimum = next(iter(proved.values()))
    for answer in answers.values():
        assert round(answer.objective) >= optimum
        assert answer.bound is None or answer.bound <= optimum + 1e-3


@pytest.mark.parametrize(("n", "seed"), [(7, 0), pytest.param(8, 1, marks=pytest.mark.slow)])
def test_methods_agree_where_exhaustive_search_is_out_of_reach(n, seed):
    model = (model_1, model_2)[seed % 2]
    agree(model(np.random.default_rng([n, seed]), n, capacity=(14, 18)), 3)


@pytest.mark.slow
@pytest.mark.parametrize("n", [8, 9, 10])
@pytest.mark.parametrize("seed", range(4))
def test_methods_agree_at_the_papers_sizes(n, seed):
    model = (model_1, model_2)[seed % 2]
    agree(model(np.random.default_rng([n, seed, 3]), n, capacity=(30, 50)), 60)


def test_the_windows_lose_no_optimum():
    # 300 tiny instances, limits and hybrid off among them: the least total latency within the
    # windows equals that of the exhaustive search over the naive horizon.
    for index in range(300):
        rng = np.random.default_rng([index, 4])
        instance = varied(rng, index, capacity=(5, 9), prompt=3)
        optimum, starts = brute_force_tel(instance)
        prog = program(instance)
        data = prog.data
        # Every optimal schedule lies within them, so the one found must.
        assert (np.array(starts) - data.shift <= prog.last).all()
        tight = start_windows(data, optimum)
        assert (np.array(starts) - data.shift <= tight).all()
        assert volume_bound(data) <= optimum <= data.tel(prog.warm)


@pytest.mark.parametrize("numbers", parts(12, 40))
def test_the_windows_solved_by_highs_equal_the_naive_horizon(numbers):
    """HiGHS finds the same optimum with windows of start times as with all start times."""
    for index in numbers:
        instance = varied(np.random.default_rng([index, 5]), index)
        wide = program(instance, windows=False)
        from optsched.optimize.solvers.highs import solve_linear_model

        naive = solve_linear_model(linear_model(wide), TWO)
        assert naive.status is Status.OPTIMAL
        assert round(naive.objective) == round(run(instance, "highs").objective)


def test_the_bound_without_a_request_holds_for_the_others():
    # `leave_out=i` bounds the total latency of all others, held against exhaustive search of them.
    for index in range(60):
        instance = varied(np.random.default_rng([index, 6]), index)
        if instance.n == 1:
            continue
        data = round_data(instance)
        i = index % instance.n
        others = instance.subset([j for j in range(instance.n) if j != i])
        assert volume_bound(data, leave_out=i) <= brute_force_tel(others)[0]


def test_the_serial_schedule_is_always_feasible_and_within_the_windows():
    """One after the other: the judge accepts it, and everybody ends by the end of its window."""
    for index in range(200):
        rng = np.random.default_rng([index, 7])
        base = varied(rng, index, capacity=(6, 20))
        arrival = base.arrival + rng.integers(0, 3, base.n) * int(rng.integers(0, 60))
        instance = Instance(
            arrival, base.prompt_tokens, base.output_tokens, base.kv_capacity,
            kv_accounting=base.kv_accounting, limits=base.limits,
            hybrid_batching=base.hybrid_batching,
        )  # fmt: skip
        schedule = serial_schedule(instance)
        evaluate(instance, schedule)
        data = round_data(instance)
        assert (schedule.starts - data.shift + data.output <= data.deadline).all()


def test_placement_takes_the_earliest_feasible_start():
    """The judge refuses the schedule if the request that is placed last starts any earlier."""
    for index in range(120):
        instance = varied(np.random.default_rng([index, 8]), index)
        data = round_data(instance)
        starts = place(data, np.arange(instance.n))
        i = instance.n - 1  # placed last, unless its block is an earlier one
        if data.block[i] != data.block.max():
            continue
        for earlier in range(int(data.arrival[i]), int(starts[i])):
            moved = starts.copy()
            moved[i] = earlier
            with pytest.raises(Exception, match="round"):
                evaluate(instance, data.schedule(moved))


def test_a_long_gap_between_arrivals_is_cut_out_and_put_back():
    far = 10**12
    instance = Instance([0, far, 0, far + 1], [1, 2, 3, 1], [3, 2, 2, 4], 7)
    data = round_data(instance)
    # Requests 0 and 2 are over by 0 + 3 + 2 = 5, so request 1 arrives at 5, and 3 at 6.
    assert data.arrival.tolist() == [0, 5, 0, 6]
    assert data.block.tolist() == [0, 1, 0, 1]
    # By its deadline, the last arrival and all outputs of its block, each can be over.
    assert data.deadline.tolist() == [5, 6 + 2 + 4, 5, 6 + 2 + 4]
    # For exhaustive search, 20 instead of 10^12: still long after 5, so the optimum is the same.
    near = Instance([0, 20, 0, 21], [1, 2, 3, 1], [3, 2, 2, 4], 7)
    optimum, _ = brute_force_tel(near)
    for method in METHODS:
        answer = run(instance, method)
        assert answer.status is Status.OPTIMAL
        assert round(answer.objective) == optimum


def test_idle_rounds_are_cut_out_of_a_warm_start():
    instance = Instance([0, 0, 2], [1, 1, 1], [2, 1, 1], 3)
    data = round_data(instance)
    # Rounds 1, 2 run request 0; 3 to 9 idle after the last arrival; request 2 in 10; 1 in 13.
    # Without rounds 3 to 9, 11 and 12, request 2 runs in round 3 and 1 in round 4: a start of k is
    # round k + 1.
    moved = without_idle(data, np.array([0, 12, 9]))
    assert moved.tolist() == [0, 3, 2]
    prog = program(instance, warm_start=from_starts([0, 12, 9], instance))
    assert data.tel(prog.warm) <= data.tel(moved)


def test_twins_of_the_warm_start_are_put_in_order():
    instance = Instance([0, 0], [2, 2], [2, 2], 4)
    prog = program(instance, warm_start=from_starts([2, 0], instance))
    assert prog.warm.tolist() == [0, 2]


def test_start_values_satisfy_the_model():
    """A warm start keeps every row, costs what its schedule does, and is read back as it was."""
    for index in range(60):
        prog = program(varied(np.random.default_rng([index, 9]), index))
        model = linear_model(prog)
        values = start_values(prog, model)
        activity = np.zeros(model.rows)
        column = np.repeat(np.arange(model.columns), np.diff(model.start))
        np.add.at(activity, model.index, model.value * values[column])
        assert (activity <= model.row_upper + 1e-9).all()
        assert (activity >= model.row_lower - 1e-9).all()
        assert model.cost @ values == prog.data.tel(prog.warm)
        assert read_starts(prog, values).tolist() == prog.warm.tolist()


@pytest.mark.parametrize("limit", ["max_batch_tokens", "max_prefill_tokens"])
def test_a_prompt_beyond_a_limit_is_infeasible_by_name(limit):
    instance = Instance([0, 0], [2, 5], [1, 1], 9, limits=Limits(**{limit: 4}))
    for method in (*METHODS, "placement"):
        with pytest.raises(InfeasibleError, match=f"{limit}: found 4 below request 1's prompt_"):
            get("hindsight").methods[method].run(Task(instance, objective=("tel",)), TWO)


def test_seconds_are_refused():
    instance = Instance([0.5], [1], [1], 4, time_unit="second")
    with pytest.raises(UsageError, match="--rounds"):
        program(instance)


def test_a_program_beyond_memory_is_refused_before_it_is_built():
    # A nonzero for each request, each start and each of its 500 rounds from there: too many.
    n = 1500
    instance = Instance(np.zeros(n, dtype=int), np.ones(n, dtype=int), np.full(n, 500), 16000)
    with pytest.raises(UsageError, match="placement has no such"):
        linear_model(program(instance))
    assert get("hindsight").choose(Task(instance, objective=("tel",))) == "lns"


def test_auto_takes_the_ramp_relaxation_for_tens_of_requests_with_little_kv():
    def chosen(n, capacity, **rest):
        instance = Instance(np.zeros(n, dtype=int), np.ones(n, dtype=int), np.full(n, 9), capacity)
        return get("hindsight").choose(
            Task(replace(instance, **rest) if rest else instance, objective=("tel",))
        )

    # Up to 10 requests CP-SAT proves at once; beyond these the ramp relaxation is taken up to 100.
    assert [chosen(n, 40) for n in (10, 11, 100, 101)] == ["cpsat", "ramp", "ramp", "lns"]
    # Multisets of live requests multiply with M, so that it is CP-SAT up to 32 and then the search.
    # The ramp relaxation knows no limits on batches.
    assert [chosen(n, 400) for n in (32, 33)] == ["cpsat", "lns"]
    assert chosen(20, 40, limits=Limits(max_running=3)) == "cpsat"


def test_thousands_of_arrivals_far_apart_leave_a_short_time_axis():
    # Each request has ended 50 rounds after its arrival, so 2,000 of them need 100,000 rounds.
    n = 2000
    instance = Instance(10**6 * np.arange(n), np.ones(n, dtype=int), np.full(n, 50), 51)
    data = round_data(instance)
    assert data.end == 50 * n
    assert data.block.tolist() == list(range(n))
    assert data.arrival.tolist() == (50 * np.arange(n)).tolist()
    # Each ends 50 rounds after its arrival.
    assert data.tel(serial_schedule(instance).starts - data.shift) == 50 * n


def test_blocks_far_apart_are_solved_as_if_alone():
    # Run one after the other, two of them end 4 + 3 = 7 rounds after their arrival.
    part = Instance([0, 0], [2, 1], [4, 3], 9)
    alone, _ = brute_force_tel(part)
    far = Instance([0, 0, 7, 7, 500, 500], [2, 1] * 3, [4, 3] * 3, 9)
    assert round_data(far).block.tolist() == [0, 0, 1, 1, 2, 2]
    for method in METHODS:
        run = get("hindsight").methods[method].run
        assert run(Task(far, objective=("tel",)), TWO).objective == 3 * alone


def test_rows_that_cannot_be_violated_are_left_out():
    # Both together hold at most 3 + 4 = 7 tokens, and never meet a limit of 7.
    prog = program(Instance([0, 0], [1, 2], [2, 2], 7))
    # What is left says of each of the two that it starts once.
    assert linear_model(prog).rows == 2


@pytest.mark.parametrize("name", sorted(TINY))
def test_the_shipped_lp_file_is_current(name, tmp_path):
    model(TINY[name]).write(tmp_path / "now.lp")
    assert (LP_FOLDER / f"{name}.lp").read_text() == (tmp_path / "now.lp").read_text()


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize("ending", ["lp", "mps"])
def test_an_exported_program_has_the_same_optimum(name, ending, tmp_path):
    """HiGHS reads the file by itself; the optimum is that of exhaustive search."""
    import highspy

    path = tmp_path / f"model.{ending}"
    model(TINY[name]).write(path, ending)
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.readModel(str(path))
    highs.run()
    assert round(highs.getInfo().objective_function_value) == brute_force_tel(TINY[name])[0]


def test_exported_names_read_like_the_paper(tmp_path):
    model(TINY["hindsight-tiny"]).write(tmp_path / "model.lp")
    text = (tmp_path / "model.lp").read_text()
    for name in ("once_0:", "memory_1:", "x_0_0", "x_1_1"):
        assert name in text
