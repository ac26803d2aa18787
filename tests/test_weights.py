"""Weights of requests: a column, two objectives, exact methods, a bound and its certificate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brute_force import brute_force
from command_line import answer, run
from exhaustive_batches import Exhaustive
from test_batch_bounds import tiny

import optsched
from instances import small
from optsched import Instance, Problem, bound, ratios, solve, verify
from optsched.bounds import BoundTask, lower_bound
from optsched.bounds.busy_time import WEIGHTED as SMITH_TIME
from optsched.bounds.certificate import certify
from optsched.bounds.checker import check_certificate
from optsched.bounds.checker.check import digest
from optsched.bounds.checker.parts import Rejected
from optsched.files.read_write import instance_from_dict, write_instance
from optsched.policies import Batch, View
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, UsageError, ViolationError
from optsched.problem.objective import Objective
from optsched.workloads.generate import generate
from optsched.workloads.traces import read_trace

GOALS = ("weighted_latency", "weighted_completion")
# M = 4: one at a time. Shortest first serves request 1 first, and Smith's rule request 0.
TWO = Instance([0, 0], [1, 1], [3, 2], kv_capacity=4, weight=[5, 1])


def weighted(seed: int) -> Instance:
    """Return two to four requests with weights of 1 to 8."""
    n = 2 + seed % 3
    return replace(small(seed, n), weight=np.random.default_rng([7, seed]).integers(1, 9, n))


def test_the_metrics_by_hand() -> None:
    # Request 0 ends at 3 and request 1 at 5: 5 * 3 + 1 * 5 = 20; the other order gives 2 + 25 = 27.
    found = solve(Problem(TWO, None, "weighted_latency"))
    assert (found.value, found.bound, found.evaluation.finish.tolist()) == (20, 20, [3, 5])
    judged = optsched.run(TWO, "mc-sf").metrics
    assert (judged["tel"], judged["weighted_latency"]) == (2 + 5, 27)
    later = replace(TWO, arrival=[10, 10])
    assert optsched.run(later, "mc-sf").metrics["weighted_completion"] == 27 + 6 * 10


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 508), marks=pytest.mark.slow)], ids=str
)
def test_exact_methods_find_what_brute_force_finds(seeds: range) -> None:
    for seed in seeds:
        for name in GOALS:
            problem = Problem(weighted(seed), None, name)
            least = brute_force(problem.instance, name)[0]
            for method in "cpsat", "highs":
                found = solve(problem, method=method, threads=1)
                assert (found.value, found.bound) == (least, least), (seed, name, method)


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 2100), marks=pytest.mark.slow)], ids=str
)
def test_smiths_bound_is_below_what_brute_force_finds(seeds: range) -> None:
    close = []
    for seed in seeds:
        instance = weighted(seed)
        least = brute_force(instance, "weighted_latency")[0]
        rest = int((instance.weight * instance.arrival).sum())  # completions less latencies
        proved, name = lower_bound(Problem(instance, None, "weighted_latency"))
        assert (proved <= least, name) == (True, "smith"), seed
        shifted = lower_bound(Problem(instance, None, "weighted_completion"))
        assert shifted == (proved + rest, "smith")
        close.append(proved / least)

    assert np.mean(close) > 0.9  # nor is it far below: a tenth in the mean


def test_a_certificate_proves_the_weighted_latency() -> None:
    instance = weighted(5)
    found = bound(Problem(instance, None, "weighted_latency"), time_limit_s=0)
    assert found.certificate["objective"] == "weighted_latency"
    assert verify(instance, found.certificate) == found.bound == found.certified


def test_a_certificate_of_other_weights_or_another_objective_is_refused() -> None:
    instance = weighted(5)
    made = bound(Problem(instance, None, "weighted_latency"), time_limit_s=0).certificate
    with pytest.raises(ViolationError):
        verify(replace(instance, weight=instance.weight + 1), made)

    # Mutants with a seal of their own: more is claimed, or the same of the total latency.
    for change in {"value": made["value"] + 1}, {"objective": "tel"}, {"objective": "makespan"}:
        mutant = {**made, **change}
        mutant["sha256"] = digest(mutant)
        with pytest.raises(Rejected):
            check_certificate(instance, mutant)


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 2012), marks=pytest.mark.slow)], ids=str
)
def test_the_starts_that_prices_leave_prove_what_brute_force_finds(seeds: range) -> None:
    for seed in seeds:
        instance, name = weighted(seed), GOALS[seed % 2]
        least = brute_force(instance, name)[0]
        made = bound(Problem(instance, None, name), method="starts", time_limit_s=60).certificate
        assert (made["value"], verify(instance, made)) == (least, least), seed
        # Prices that prove it alone are claimed as starts, too; their value is of latencies.
        if made["tree"]["relaxation"] == "prices":
            rows = {"relaxation": "starts", "value": made["tree"].get("value", least)}
            rest = int((instance.weight * instance.release_times).sum())
            rows["value"] -= rest if name == "weighted_completion" else 0
            made = {**made, "tree": {**made["tree"], **rows}}

        # Any prices prove something true: the value, or too much is left; never one more.
        leaf = made["tree"]
        other = [price // 2 for price in leaf["price"]]
        for tree in leaf, {**leaf, "price": other}, {**leaf, "price": [0] * len(other)}:
            for more in 0, 1:
                claimed = {**made, "tree": {**tree, "value": tree["value"] + more}}
                claimed["value"] += more
                claimed["sha256"] = digest(claimed)
                if more == 0:
                    assert check_certificate(instance, claimed) == least
                    continue

                with pytest.raises(Rejected, match=f"a schedule of {leaf['value']}; expected none"):
                    check_certificate(instance, claimed)


@pytest.mark.parametrize("name", GOALS)
@pytest.mark.parametrize("seed", [1, 2])
def test_an_optimum_of_weights_is_certified_with_its_schedule(name: str, seed: int) -> None:
    asked = {"kv_capacity": 60, "prompt_max": 10, "output_max": 20, "weight_max": 9}
    instance = generate("uniform", seed=seed, n=7, **asked)
    found = solve(Problem(instance, None, name), threads=1, time_limit_s=60, certify=True)
    made = found.certificate
    assert (made["claim"], made["objective"]) == ("optimal", name)
    assert verify(instance, made) == found.value == found.bound
    late = {**made["schedule"], "starts": [k + 1 for k in made["schedule"]["starts"]]}
    # A round later than the optimum, and all at once.
    for schedule in late, {**late, "starts": [0] * 7}:
        mutant = {**made, "schedule": schedule}
        with pytest.raises(Rejected, match="schedule"):
            check_certificate(instance, {**mutant, "sha256": digest(mutant)})


def test_leaves_that_prove_no_weights_are_refused_by_name() -> None:
    instance = weighted(5)
    made = bound(Problem(instance, None, "weighted_latency"), time_limit_s=0).certificate
    for kind in "pairs", "lengths", "ramp":
        mutant = {**made, "tree": {"relaxation": kind}}
        with pytest.raises(Rejected, match=f"weights beside '{kind}', for which prices and starts"):
            check_certificate(instance, {**mutant, "sha256": digest(mutant)})


def test_a_policy_of_ones_own_sees_the_weights_of_what_has_arrived() -> None:
    seen = []

    class Smith:
        def batch(self, view: View) -> Batch:
            seen.append(view.weight.tolist())
            queue = sorted(view.waiting, key=lambda i: view.remaining[i] / view.weight[i])
            chosen = (view.running or queue)[0]
            return Batch({chosen: view.rest(chosen)})

    # As by hand above: 5 * 3 + 1 * 5. Another that comes at 4 has no weight to see before.
    assert optsched.run(TWO, Smith()).metrics["weighted_latency"] == 20
    optsched.run(Instance([0, 4], [1, 1], [3, 2], kv_capacity=4, weight=[5, 9]), Smith())
    assert [5, -1] in seen
    assert [5, 9] in seen


@pytest.mark.parametrize("seed", range(20))
def test_with_weights_of_1_everything_is_as_without(seed: int) -> None:
    plain = small(seed, 4)
    ones = replace(plain, weight=[1] * 4)
    assert lower_bound(ones) == lower_bound(plain)
    assert optsched.run(ones, "mc-sf").metrics["tel"] == optsched.run(plain, "mc-sf").metrics["tel"]
    asked = Problem(ones, None, "weighted_latency")
    # The optimum is brute force's, of total latency and of weighted latency.
    total = brute_force(plain, "tel")[0]
    assert brute_force(ones, "weighted_latency")[0] == total
    assert lower_bound(asked)[0] <= total


def test_prices_of_total_latency_are_those_of_weights_of_1() -> None:
    from optsched.bounds.dual import Prices, dual_fraction

    rng = np.random.default_rng(3)
    for seed in range(50):
        instance = small(seed, 5)
        price = np.append(rng.integers(0, 50, 6), 0)
        # Prices, and so values, are fractions over 7.
        prices = Prices(np.arange(1, 8), price, 7)
        ones = np.ones(5, dtype=np.int64)
        assert dual_fraction(instance, prices) == dual_fraction(instance, prices, ones)
        # Weights of 3 and three times the prices are three times all.
        thrice = Prices(prices.from_round, 3 * price, 7)
        value, _ = dual_fraction(instance, prices)
        assert dual_fraction(instance, thrice, 3 * ones) == (3 * value, 7)


def test_ratios_and_generators_have_weights() -> None:
    # Weights of up to 9 change nothing else that is drawn, and ratios to the optimum are 1 or more.
    plain = generate("uniform", seed=1, n=5, output_max=5)
    drawn = generate("uniform", seed=1, n=5, output_max=5, weight_max=9)
    assert drawn.output_tokens.tolist() == plain.output_tokens.tolist()
    assert drawn.weight.max() > 1
    row = ratios("mc-sf", [drawn], objective="weighted_latency").rows[0]
    assert row.exact
    assert row.low >= 1
    found = answer(
        "ratios", "--set", "n=4", "--set", "weight_max=9", "--trials", 2, "--objective", GOALS[0]
    )
    assert min(found["ratios"]["low"]) >= 1


def test_weights_are_read_written_and_cut() -> None:
    """`TWO` has weights of 5 and 1. A weight is above 0, and each request has one."""
    assert instance_from_dict(TWO.to_dict(), name="two").weight.tolist() == [5, 1]
    assert TWO.subset([1]).weight.tolist() == [1]
    with pytest.raises(InputError, match=r"requests\.weight.*request 1.*0"):
        replace(TWO, weight=[1, 0])
    with pytest.raises(InputError, match=r"requests\.weight.*1.*2"):
        replace(TWO, weight=[1])
    with pytest.raises(UsageError, match="expected one with the column weight"):
        Problem("tiny", None, "weighted_latency")


def test_weights_are_imported_and_what_a_simulation_writes_is_read_back(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("arrival,prompt_tokens,output_tokens,tier\n0,4,2,7\n1,4,3,\n2,4,1,2\n")
    run("import", "csv", log, "--column", "weight=tier", "-o", tmp_path / "log.json")
    assert optsched.read_instance(tmp_path / "log.json").weights.tolist() == [7, 1, 2]  # no tier: 1
    assert read_trace("csv", log).weight is None
    run("simulate", tmp_path / "log.json", "llama2-7b-a100-infermax", "--policy", "fcfs",
        "--requests-out", tmp_path / "served.csv")  # fmt: skip
    some = read_trace("csv", tmp_path / "served.csv", sample=2)
    # Outputs of 2, 3 and 1 tokens tell the requests apart.
    assert [{2: 7, 3: 1, 1: 2}[o] for o in some.output_tokens.tolist()] == some.weights.tolist()

    log.write_text("arrival,prompt_tokens,output_tokens,weight\n0,4,2,5\n1,4,3,0\n")
    with pytest.raises(InputError, match=r"weight:.*request 1.*0.*line 3\)"):
        read_trace("csv", log)


def test_an_exported_program_minimizes_what_is_asked(tmp_path: Path) -> None:
    write_instance(TWO, tmp_path / "two.json")
    words = "export", tmp_path / "two.json", "--format", "lp", "--objective", "weighted_latency"
    run(*words, "-o", tmp_path / "two.lp")
    import highspy

    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.readModel(str(tmp_path / "two.lp"))
    highs.run()
    # One at a time: 3 rounds of weight 5, then 2 more of weight 1, 5 * 3 + 1 * 5.
    assert highs.getInfo().objective_function_value == pytest.approx(20)


# --- in seconds ---------------------------------------------------------------------------------


def mutants(leaf: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a leaf with other prices, another width and another denominator."""
    for name in ("p1", "p2"):
        yield {**leaf, name: [2 * price for price in leaf[name]]}
    yield {**leaf, "width": 3 * leaf["width"]}
    yield {**leaf, "denominator": 2 * leaf["denominator"]}


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 2060), marks=pytest.mark.slow)], ids=str
)
def test_prices_of_machine_time_are_below_what_exhaustive_search_finds(seeds: range) -> None:
    close = []
    for seed in seeds:
        rng = np.random.default_rng([13, seed])
        plain, cost = tiny(rng)
        instance = replace(plain, weight=rng.integers(1, 9, plain.n))
        least = Exhaustive(instance, cost).best("weighted_latency")[0]
        asked = Problem(instance, cost, "weighted_latency")
        proved, name = lower_bound(asked, time_limit_s=60)
        assert (name, proved <= least * (1 + 1e-12)) == ("smith-time", True), seed
        rest = float((instance.weights * instance.release_times).sum())
        later = lower_bound(Problem(instance, cost, "weighted_completion"), time_limit_s=60)[0]
        assert proved + rest == pytest.approx(later)
        if seed % 5 == 0:
            proof = SMITH_TIME.function(BoundTask.of(asked), Budget(60.0))
            made = certify(instance, cost, "weighted_latency", proof.tree)
            # The prover counts costs nearly, and the checker exactly.
            assert verify(Problem(instance, cost), made) == pytest.approx(proved, rel=1e-3)
            # Any prices prove something true, and nothing else than what is claimed.
            for leaf in mutants(made["tree"]):
                other = certify(instance, cost, "weighted_latency", leaf)
                assert verify(Problem(instance, cost), other) <= least * (1 + 1e-12)
                forged = {**other, "value": other["value"] + 1}
                with pytest.raises(ViolationError):
                    verify(Problem(instance, cost), {**forged, "sha256": digest(forged)})

        close.append(proved / least)

    assert np.mean(close) > 0.6  # and of some use


@pytest.mark.parametrize("seed", range(10))
def test_prices_of_equal_weights_are_those_of_total_latency(seed: int) -> None:
    plain, cost = tiny(np.random.default_rng([14, seed]))
    total = lower_bound(Problem(plain, cost), method="busy-time")[0]
    for weight in 1, 4:
        asked = replace(plain, weight=[weight] * plain.n)
        found = lower_bound(Problem(asked, cost, "weighted_latency"), method="smith-time")[0]
        assert found == pytest.approx(weight * total, rel=1e-6)


def test_what_proves_no_weights_is_refused_by_name() -> None:
    plain, cost = tiny(np.random.default_rng(1))
    weighted = replace(plain, weight=[2] * plain.n)
    with pytest.raises(UsageError, match="'work'"):
        certify(weighted, cost, "weighted_latency", {"relaxation": "work"})
    made = bound(Problem(weighted, cost, "weighted_latency"), method="smith-time").certificate
    # The certificate of the weighted instance, sealed again as one of the instance without.
    other = {**made, "instance_sha256": plain.sha256}
    with pytest.raises(ViolationError, match="expected weights on one machine"):
        verify(Problem(plain, cost), {**other, "sha256": digest(other)})
    more = Instance(
        [0, 0], [2, 2], [1, 1], 9, "second", weight=[2, 1],
        prefix_parent=[None, 0], prefix_tokens=[0, 1], prefix_block_tokens=1,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"prefix_block_tokens.*prefix_parent"):
        lower_bound(Problem(more, cost, "weighted_latency"), method="smith-time")


def test_who_knows_no_weights_refuses_them_by_name() -> None:
    plain, cost = tiny(np.random.default_rng(1))
    timed = Problem(replace(plain, weight=[2] * plain.n), cost, GOALS[0])
    with pytest.raises(UsageError, match=r"unknown to formulation infermax; .*bound.* smith-time"):
        solve(timed)
    with pytest.raises(UsageError, match="'weighted_latency'"):
        solve(Problem(TWO, None, "weighted_latency"), method="ramp")
    with pytest.raises(UsageError, match="weighted_latency"):
        lower_bound(Problem(TWO, None, "weighted_latency"), method="srpt")
    assert Objective("weighted_latency").integral(TWO)
