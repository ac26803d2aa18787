"""Prices within SLOs: no schedule contradicts them, and no step of the proof can be left out."""

from __future__ import annotations

import json
from fractions import Fraction
from operator import add
from pathlib import Path
from typing import Any

import brute_force
import numpy as np
import pytest
from command_line import invoke, one_line_error
from test_batch_bounds import tiny
from test_most_in_time import tiny as tiny_rounds
from test_service_bound import most_by_search, slos_for

from optsched import (
    BatchCost,
    Fleet,
    Instance,
    Problem,
    Schedule,
    bound,
    evaluate,
    generate,
    load_cost_model,
    read_instance,
    write_instance,
)
from optsched.analysis.capacity_question import scale_arrivals
from optsched.bounds import slo_prices
from optsched.bounds.base import BoundTask
from optsched.bounds.certificate import Steps, certify, cost_model_dict
from optsched.bounds.checker import check_certificate
from optsched.bounds.checker.check import digest
from optsched.bounds.checker.parts import Rejected
from optsched.bounds.checker.requests import ticks_since
from optsched.bounds.checker.seconds import proved_ticks
from optsched.bounds.checker.slo_prices import NEVER, Prices, demand_of, max_in_time
from optsched.bounds.leaves import TICKS_PER_SECOND, slo_prices_leaf
from optsched.bounds.service import most_within
from optsched.bounds.slo_method import Method
from optsched.costs.model_file import to_toml
from optsched.problem.budget import Budget
from optsched.problem.errors import OptschedError
from optsched.problem.limits import all_limits

NO_LIMIT = Budget(None)


def drawn(generator: np.random.Generator, steps: int) -> tuple[Instance, BatchCost]:
    """Return some requests of few tokens of own work, and costs that are mostly fixed.

    Refills mostly take longer than batches, so that steps have a cadence.
    """
    n = int(generator.integers(1, 7))
    cost = BatchCost("fixed", 1, {
        "base": str(generator.integers(1, 9)),
        "decode_base": str(generator.choice([0, 0, 5])),
        "prefill_base": str(generator.choice([0, 0, 3])),
        "prefill_token": str(generator.choice([0, 5, 20, 20])),
        "token": str(generator.choice([0, 0.01, 0.2])),
        "decode_kv": str(generator.choice([0, 0, 0.1, 1])),
    })  # fmt: skip
    return Instance(
        np.sort(generator.random(n)) * 0.02 * steps * generator.choice([0, 0.1, 0.5, 1]),
        generator.integers(1, 4, n), generator.integers(1, steps, n), kv_capacity=10_000,
        time_unit="second",
    ), cost  # fmt: skip


def some_schedule(
    generator: np.random.Generator, instance: Instance, workers: int, evictions: bool
) -> Schedule:
    """Return a schedule that lets nearly everybody take part in every batch, and evicts some."""
    n, prompt = instance.n, instance.prompt_tokens.tolist()
    output, lazy = instance.output_tokens.tolist(), generator.choice([0.0, 0.0, 0.0, 0.3])
    restart = evictions and generator.random() < 0.5
    on = generator.integers(0, workers, n).tolist()
    cached, produced, came = [0] * n, [0] * n, np.argsort(instance.arrival, kind="stable").tolist()
    batches: list[tuple[int, list[tuple[int, int]], list[int]]] = []
    known = 1
    while any(p < o for p, o in zip(produced, output, strict=True)):
        running = [i for i in came[:known] if produced[i] < output[i]]
        if known < n and (not running or generator.random() < 0.3):
            known += 1
            continue
        worker = on[running[int(generator.integers(len(running)))]]
        mine = [i for i in running if on[i] == worker]
        out = [i for i in mine if evictions and cached[i] and generator.random() < 0.1]
        for i in out:
            cached[i], produced[i] = 0, 0 if restart else produced[i]
        taken = [i for i in mine if generator.random() >= lazy] or mine[:1]
        batch = []
        for i in taken:
            left = prompt[i] + produced[i] - cached[i]
            tokens = left if generator.random() < 0.8 else int(generator.integers(1, left + 1))
            batch.append((i, tokens))
            cached[i] += tokens
            produced[i] += tokens == left
        batches.append((worker, batch, out))

    sizes, gone = [len(b) for _, b, _ in batches], [len(out) for *_, out in batches]
    return Schedule(
        "batches",
        batch_offsets=np.append(0, np.cumsum(sizes)),
        request=np.array([i for _, b, _ in batches for i, _ in b]),
        tokens=np.array([t for _, b, _ in batches for _, t in b]),
        evicted_offsets=np.append(0, np.cumsum(gone)),
        evicted=np.array([i for *_, out in batches for i in out], np.int64),
        worker=np.array([w for w, *_ in batches]),
        evict_mode="restart" if restart else "recompute",
    )


def just_in_time(generator: np.random.Generator, judged, instance: Instance) -> dict:
    """Return limits that all requests of a schedule are within, and many exactly."""
    steps = instance.output_tokens - 1
    tpot = (judged.latency - judged.ttft) / np.maximum(steps, 1)
    columns = {"slo_ttft": judged.ttft, "slo_latency": judged.latency}
    columns["slo_tpot"] = np.where(steps > 0, tpot, np.inf)
    kept = [name for name in columns if generator.random() < 0.7] or ["slo_latency"]
    none = np.full(instance.n, np.inf)
    if generator.random() < 0.3:  # the same for all
        columns = {
            k: np.full(instance.n, v[np.isfinite(v)].max(initial=1.0)) for k, v in columns.items()
        }
    return {name: columns[name] if name in kept else none for name in (*columns, "slo_gap")}


def contradicts(demand, n: int, generator: np.random.Generator) -> bool:
    """Return whether prices say that not all n requests can be in time, those found or random."""
    found = slo_prices.find(demand, n, n, NO_LIMIT, least=0.5)
    if found is not None and max_in_time(demand, found.prices) < n:
        return True
    for _ in range(3):
        method = Method(demand, n, 1, None, 1.0)
        for column in method.state:
            column[:] = generator.random(len(column)) * generator.choice([0, 1, 5], len(column))
        method.look_for_stretches()
        method.state.stretch[:] = generator.random(len(method.state.stretch))
        if max_in_time(demand, method.prices()) < n:
            return True
    return False


def judged_case(generator: np.random.Generator, steps: int, workers: int):
    """Return an instance, its cost model, and limits that a schedule of it is just within."""
    while True:
        instance, cost = drawn(generator, steps)
        schedule = some_schedule(generator, instance, workers, bool(generator.random() < 0.3))
        problem = Problem(instance, Fleet.of(workers, cost))
        try:
            judged = evaluate(problem, schedule)
        except OptschedError:
            continue
        return instance, cost, just_in_time(generator, judged, instance)


def contradicted(seed: int, count: int, change: Any = lambda demand: demand) -> int | None:
    """Return the first of some schedules that the judge accepts and prices contradict, or None."""
    generator = np.random.default_rng(seed)
    for k in range(count):
        workers = int(generator.choice([1, 1, 2]))
        instance, cost, limits = judged_case(generator, 20, workers)
        demand = change(slo_prices.Ask(instance, cost, limits, workers).demand())
        if len(demand.who) < instance.n or contradicts(demand, instance.n, generator):
            return k
    return None


def test_no_schedule_that_is_just_in_time_contradicts_them() -> None:
    assert contradicted(1, 25) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_the_same_by_the_hundred(seed: int) -> None:
    assert contradicted(seed, 300) is None


# What the proof must not do, as changes of the demand: each is contradicted by some schedule.
CHANGES = {
    "a fixed cost 1.6 times": lambda d: d._replace(fixed=d.fixed * 8 // 5),
    "a fixed cost 1.1 times": lambda d: d._replace(fixed=d.fixed * 11 // 10),
    "whole windows for prefills only": lambda d: d._replace(last=np.minimum(d.last, d.first)),
    "short refills with a cadence": lambda d: d._replace(
        steps=np.where(d.early > 0, np.maximum(d.steps, 5), d.steps)
    ),
    "a tenth more work of steps": lambda d: d._replace(later=d.later * 11 // 10),
    "a tenth more work of prefills": lambda d: d._replace(prefill=d.prefill * 11 // 10),
    "one machine for two": lambda d: d._replace(room=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_counts_too_much_is_contradicted(change: str) -> None:
    """Seed 5, 100 cases: on one of them at least a schedule is in time that prices exclude."""
    assert contradicted(5, 100, CHANGES[change]) is not None


def in_step(n: int, steps: int, kv: str = "0") -> tuple[Any, int]:
    """Return what n requests do that arrive one after another, and take each step together.

    A batch takes 5 ms, a prompt of one token 20 ms more and a step ``kv`` ms for each token held.
    Request i comes with the batch 3 i, so all are in time whose limits are what this schedule does.
    """
    cost = BatchCost("steps", 1, {"base": "5", "prefill_token": "20", "decode_kv": kv})
    at, first, last, came = 0.0, [0.0] * n, [0.0] * n, [0.0] * n
    for batch in range(3 * n + steps):
        own = 0.0
        for i in range(n):
            if batch == 3 * i:
                came[i], own = at, own + 20
            elif 3 * i < batch <= 3 * i + steps:
                own += float(kv) * (batch - 3 * i)
        at += (5 + own) / 1000
        for i in range(n):
            first[i] = at if batch == 3 * i else first[i]
            last[i] = at if batch == 3 * i + steps else last[i]
    since = np.array(came)
    instance = Instance(since, [1] * n, [steps + 1] * n, kv_capacity=10**6, time_unit="second")
    none = np.full(n, np.inf)
    limits = {"slo_ttft": np.array(first) - since, "slo_latency": np.array(last) - since}
    return slo_prices.Ask(instance, cost, {**limits, "slo_tpot": none, "slo_gap": none}).demand(), n


@pytest.mark.parametrize(("n", "steps"), [(1, 40), (3, 40), (8, 60)])
def test_the_cadence_is_counted_once(n: int, steps: int) -> None:
    # All batches decode but the first ones. So nothing is left out but their fixed costs, and that
    # requests which come later could have all their steps in batches of others.
    demand, n = in_step(n, steps)
    generator = np.random.default_rng(0)
    assert not contradicts(demand, n, generator)
    # With fixed costs that are 3 or 6 tenths more, not all can be in time.
    assert contradicts(demand._replace(fixed=demand.fixed * 13 // 10), n, generator)
    assert contradicts(demand._replace(fixed=demand.fixed * 8 // 5), n, generator)


def test_the_largest_step_pays_and_not_the_mean_one() -> None:
    # Steps of 1 to 8 ms in batches of 5 ms more, at a rate of 2 and prices of 2, and of 1 on the
    # last 13 ms, in which the last step may be done. There it is charged (2 - 1) 8 ms beyond its
    # work, and its batch costs 5 ms beyond that. A mean step of 4.5 ms would be charged less. A ms
    # is 10^9 ticks, and rate and prices are both scaled by 2^20.
    demand, _ = in_step(1, 8, "1")
    last = int(demand.last[0])
    edges = np.array([demand.begin[0], last - 13 * 10**9, last])
    prices = Prices(edges, np.array([2 << 20, 1 << 20]), np.array([2 << 20]), np.array([0]))
    with pytest.raises(Rejected, match="charged more than it costs"):
        max_in_time(demand, prices)
    mean = (demand.low + demand.high) // 2
    assert max_in_time(demand._replace(low=mean, high=mean), prices) == 1


def late_ones(instance: Instance, slos: dict[str, float]) -> int | None:
    """Return how few requests are late in rounds, over all starts, None if all of them are."""
    if min(slos.get("slo_tpot", 1), slos.get("slo_gap", 1)) < 1:
        return None  # a run without pauses has one round per token
    first, last = slos.get("slo_ttft", 99), slos.get("slo_latency", 99)

    def late(arrival: int, output: int, start: int) -> int:
        return int(start + 1 - arrival > first or start + output - arrival > last)

    brute_force.OBJECTIVES["late"] = (late, add)
    try:
        return int(brute_force.brute_force(instance, "late")[0])
    finally:
        del brute_force.OBJECTIVES["late"]


def most_priced(problem: Problem) -> int:
    """Return at most how many requests are in time by prices."""
    return slo_prices.most_in_time(BoundTask.of(problem), NO_LIMIT)[0]


def check_all(seed: int, count: int) -> int:
    """Compare with exhaustive search in rounds and in seconds; return how often it is tight."""
    generator, tight = np.random.default_rng(seed), 0
    for k in range(count):
        if k % 2 == 0:
            instance, cost = tiny_rounds(generator), None
            slos = slos_for(generator, 1.0)
            late = late_ones(instance, slos)
            if late is None:
                continue
            served = instance.n - late
        else:
            instance, cost = tiny(generator)
            if instance.n > 2 or int(instance.output_tokens.sum()) > 5 or instance.kv_capacity > 6:
                continue
            unit = cost.layers / 1000 * sum(float(v) for v in cost.coefficients.values())
            slos = slos_for(generator, unit)
            served = most_by_search(instance, cost, slos)
        most = most_priced(Problem(instance, cost, **slos))
        assert served <= most, (instance.to_dict(), cost and dict(cost.coefficients), slos)
        tight += served == most
    return tight


def test_nobody_serves_more_in_exhaustive_search() -> None:
    """Seed 3, 60 draws, of which in more than 20 the bound is what the search finds."""
    assert check_all(3, 60) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30, 40))
def test_nobody_serves_more_by_the_hundred(seed: int) -> None:
    check_all(seed, 700)


def test_a_whole_request_is_late_where_a_part_of_one_does_not_fit() -> None:
    # Three of 10 tokens, 20 ms each, come together with 55 ms, and three more a second later.
    cost = BatchCost("work", 1, {"token": "2"})
    instance = Instance(
        [0.0] * 3 + [1.0] * 3, [10] * 6, [1] * 6, kv_capacity=10**4, time_unit="second"
    )
    # Two of three fit into 55 ms, and 3/4 of the third. Shares: 2.75 of 3, twice, 5.5 and so 5.
    # Whole ones: two, twice.
    problem = Problem(instance, cost, slo_ttft=0.055)
    assert most_within(instance, cost, {"slo_ttft": 0.055}) == 5
    assert most_priced(problem) == 4


def test_what_can_be_served_is_not_monotone_and_intervals_know_it() -> None:
    # 0.6 s a batch whatever it holds, four requests of one token within 1 s. Together all are in
    # time; 0.45 s apart three are, and 0.55 s apart four again. So no proof may exclude a rate at
    # which they come faster because it excludes one at which they come more slowly.
    cost = BatchCost("whole", 1, {"base": "600"})
    for apart, served in ((0.0, 4), (0.45, 3), (0.55, 4)):
        instance = Instance(
            np.arange(4) * apart, [1] * 4, [1] * 4, kv_capacity=100, time_unit="second"
        )
        assert most_by_search(instance, cost, {"slo_ttft": 1.0}) <= served
        assert most_priced(Problem(instance, cost, slo_ttft=1.0)) >= served


def test_intervals_contain_no_rate_at_which_a_schedule_is_in_time() -> None:
    """At rate 1 a schedule has all n requests just in time, so what excludes n in time begins
    above 1."""
    generator, found = np.random.default_rng(2), 0
    for _ in range(25):
        instance, cost, limits = judged_case(generator, 12, 1)
        if instance.n < 3 or not instance.arrivals_differ:
            continue
        ask = slo_prices.Ask(instance, cost, limits)
        for high in (1.1, 1.5, 4.0):
            interval = ask.below(high, instance.n, NO_LIMIT)
            if interval is not None:
                found += 1
                assert 1.0 < interval.low < interval.high == high
    assert found > 1  # of 75: intervals were found


def sealed(certificate: dict[str, Any]) -> dict[str, Any]:
    """Return a certificate with the digest of what it says."""
    return {**certificate, "sha256": digest(certificate)}


def forged(generator: np.random.Generator, leaf: dict[str, Any]) -> dict[str, Any]:
    """Return a leaf in which some numbers are changed, but not what it is about."""
    leaf = json.loads(json.dumps(leaf))
    for _ in range(int(generator.integers(1, 4))):
        name = str(generator.choice(["edges", "price", "rate", "extra", "stretches", "rates"]))
        column = leaf[name]
        if name == "rates":
            leaf[name] = [str(generator.choice(["1", "0.5", "0.999"])), "1"]
        elif name == "stretches":
            begin, end = sorted(generator.integers(0, max(leaf["edges"][-1], 1), 2).tolist())
            column.append([begin, end + 1, int(generator.integers(1, 10**12))])
        else:
            at = int(generator.integers(len(column)))
            times = float(generator.choice([0, 0.5, 0.99, 1.01, 1.1, 2, 10]))
            column[at] = min(int(column[at] * times), (1 << 60) - 1)
            if generator.random() < 0.2:
                leaf[name] = [min(int(x * times), (1 << 30) - 1) for x in column]
    return leaf


def check_forged(seed: int, count: int, each: int = 20) -> int:
    """Forge proofs that one request less is in time than a schedule has; return how many."""
    generator, refused = np.random.default_rng(seed), 0
    while refused < count:
        instance, cost, limits = judged_case(generator, 20, 1)
        demand = slo_prices.Ask(instance, cost, limits).demand()
        found = slo_prices.find(demand, instance.n, instance.n, NO_LIMIT)
        if found is None or not any(np.isfinite(x).any() for x in limits.values()):
            continue
        leaf = slo_prices_leaf(found.prices, limits)
        honest = certify(instance, cost, "slo_attainment", leaf)
        assert check_certificate(instance, honest) == honest["value"] == instance.n
        for _ in range(each):
            wrong = {**honest, "tree": forged(generator, leaf), "value": instance.n - 1}
            with pytest.raises(Rejected):
                check_certificate(instance, sealed(wrong))
            refused += 1
    return refused


def test_forged_certificates_are_refused() -> None:
    """Seed 1; 60 forgeries are made, and each is refused (`check_forged`)."""
    assert check_forged(1, 60) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50, 55))
def test_forged_certificates_by_the_thousand(seed: int) -> None:
    assert check_forged(seed, 2000) >= 2000


def test_a_certificate_says_how_many_and_within_what(tmp_path: Path) -> None:
    # Three of 20 ms each within 55 ms, twice: two of each three.
    (tmp_path / "work.toml").write_text(to_toml(BatchCost("work", 1, {"token": "2"})))
    crowds = Instance([0.0] * 3 + [1.0] * 3, [10] * 6, [1] * 6, kv_capacity=99, time_unit="second")
    write_instance(crowds, tmp_path / "crowds.json")
    files = [str(tmp_path / name) for name in ("crowds.json", "proof.json")]
    on = ("--cost-model", str(tmp_path / "work.toml"))
    more = ("--objective", "slo_attainment", "--slo-ttft", "55ms", "--time-limit", "5")
    made = invoke("bound", files[0], *on, *more, "--certificate-out", files[1])
    assert made.exit_code == 0, made.stderr
    assert "SLO attainment of any schedule <= 0.6666667" in made.stdout
    read = invoke("verify", *files, *on)
    assert read.exit_code == 0, read.stderr
    assert "slo_attainment 0.6666667 or less" in read.stdout
    assert "within slo_ttft 0.055" in read.stdout
    proof = json.loads(Path(files[1]).read_text())
    proof["value"] -= 1
    Path(files[1]).write_text(json.dumps(sealed(proof)))
    one_line_error(invoke("verify", *files, *on), 5)


def test_a_certificate_is_asked_of_the_bound_that_has_one_however_short_the_time() -> None:
    instance, model = read_instance("demo"), load_cost_model("llama2-7b-a100-infermax")
    asked = Problem(instance, model, "slo_attainment", slo_ttft=1.0, slo_tpot=0.05)
    found = bound(asked, certify=True, time_limit_s=0.01)
    assert found.certificate is not None
    assert check_certificate(asked.instance, found.certificate) <= asked.instance.n


def test_a_certificate_of_shared_prefixes_and_of_an_interval_of_rates() -> None:
    instance = generate("prefix-trees", n=40, rate=300.0, seed=1)
    cost = load_cost_model("llama2-7b-a100-infermax")
    limits = all_limits(instance, {"slo_ttft": 0.1, "slo_tpot": 0.03})
    ask = slo_prices.Ask(instance, cost, limits)
    # Rates around 1 at which fewer are in time than three more than are proved at 1.
    interval = ask.below(1.01, ask.between(0, NO_LIMIT).most + 3, NO_LIMIT)
    assert interval is not None
    assert interval.low < 1 < interval.high
    leaf = slo_prices_leaf(interval.prices, limits, (interval.low, interval.high))
    proof = certify(instance, cost, "slo_attainment", {"within": 0, "tree": leaf})
    assert check_certificate(instance, proof) < ask.between(0, NO_LIMIT).most + 3
    wrong = {**proof, "tree": {"within": 1, "tree": leaf}}
    with pytest.raises(Rejected, match="within"):
        check_certificate(instance, sealed(wrong))


@pytest.mark.parametrize("rates", [("1000.0", "1000.0"), ("0.5", "0.999"), ("1.001", "2.0")])
def test_a_certificate_of_other_rates_than_the_instances_is_refused(rates: tuple[str, str]) -> None:
    # 40 requests 2 s apart are all in time, and at a thousand times the rate most are late.
    cost = load_cost_model("llama2-7b-a100-infermax")
    instance = Instance(
        np.arange(40) * 2.0, [1000] * 40, [5] * 40, kv_capacity=20_000, time_unit="second"
    )
    limits = all_limits(instance, {"slo_ttft": 1.0})
    demand = slo_prices.Ask(instance, cost, limits).demand(1000.0)
    found = slo_prices.find(demand, 40, 0, NO_LIMIT)
    assert found is not None
    leaf = slo_prices_leaf(found.prices, limits)
    with pytest.raises(OptschedError, match=r"rates:.*1"):
        certify(instance, cost, "slo_attainment", {**leaf, "rates": list(rates)})


def far(seconds: float, **slos: list[float]) -> Instance:
    """Return one request of 100 tokens, and 39 that come so much later."""
    return Instance(
        np.append(0.0, np.full(39, seconds)), [100] * 40, [3] * 40, kv_capacity=20_000,
        time_unit="second", **slos,
    )  # fmt: skip


def proved(instance: Instance, cost: BatchCost, leaf: dict[str, Any], ticks: int) -> int:
    """Return what a leaf proves of an instance, with so many ticks a second."""
    return proved_ticks(instance, {
        "objective": "slo_attainment", "cost_model": cost_model_dict(cost), "claim": "bound",
        "ticks_per_second": ticks, "tree": leaf,
    }, Steps(lambda: False))  # fmt: skip


def test_windows_beyond_the_range_of_ticks_have_no_end() -> None:
    # 8.6e18 ticks and a limit beyond: their sum is no 64-bit number. Nobody is in the stretch, so
    # nothing is proved of the 40.
    leaf = {
        "relaxation": "slo-prices", "limits": {"slo_tpot": "1.0"}, "rates": ["1.0", "1.0"],
        "edges": [0, 1], "price": [0], "rate": [0] * 40, "extra": [0] * 40,
        "stretches": [[0, 1, 10**6]],
    }  # fmt: skip
    cost = load_cost_model("llama2-7b-a100-infermax")
    for seconds in (0.0, 0.9, 1.1, 1.2, 2.0, 8.6, 9.3, 1e6, 1e12):
        assert proved(far(seconds), cost, leaf, 10**18) == 40
    # Work beyond the range counts as none.
    slow = BatchCost("slow", 1, {"base": "1e6", "token": "1e6"})
    assert proved(far(0.0), slow, {**leaf, "limits": {"slo_tpot": "1e6"}}, 10**18) == 40


def test_arrivals_at_slow_rates_are_as_exact_as_others() -> None:
    # Nine prompts, 1 ms apart, are within 0.9 s at a thousandth of the rate. In ticks of 10 ms they
    # would all come at once if they were rounded first.
    cost = BatchCost("half", 1, {"base": "400"})
    instance = Instance(np.arange(9) * 0.001, [9] * 9, [1] * 9, kv_capacity=99, time_unit="second")
    leaf = {
        "relaxation": "slo-prices", "limits": {"slo_ttft": "0.9"}, "rates": ["0.001", "1"],
        "edges": [-2, 94], "price": [1], "rate": [0] * 9, "extra": [0] * 9, "stretches": [],
    }  # fmt: skip
    assert proved(instance, cost, leaf, 100) == 9
    # 1 ms at that rate is 1 s, 100 ticks; and 0.75 s are 7.5 ticks, rounded down.
    assert ticks_since([0.0, 0.001, 0.002], 100, Fraction(1, 1000)) == [0, 100, 200]
    assert ticks_since([5.0, 5.75], 10) == [0, 7]


@pytest.mark.parametrize("seconds", [1e5, 1.2e6, 1.2e7, 1e9, 1e12])
def test_arrivals_far_apart_have_bounds_too(seconds: float) -> None:
    # 39 of 20 ms of work each come at once, of which at most 5 fit into 0.1 s.
    cost, limits = BatchCost("work", 1, {"token": "0.2"}), {"slo_ttft": 0.1}
    instance = far(seconds)
    problem = Problem(instance, cost, **limits, objective="slo_attainment")
    if seconds < 1e9:  # float64 says when they come
        found = bound(problem, time_limit_s=1.0)
        assert found.bound is not None
        assert 6 / 40 <= found.bound <= 7 / 40  # the early one and 5, perhaps 6
    # From 2^60 ticks of 10^-12 s on, 1.15e6 s, windows have no end: all 40 may be in time.
    assert 6 <= most_priced(problem) <= (40 if seconds > 1e6 else 7)
    ask = slo_prices.Ask(instance, cost, all_limits(instance, limits))
    assert ask.between(0, Budget(1.0), 2.0**-20, 2.0**-20).most >= 6
    assert ask.below(2.0**-20, 6, Budget(1.0)) is None


def test_time_stamps_at_other_rates_are_rounded_and_windows_know_it() -> None:
    # 10 ms each and a limit that ends with the second, as it arrives in float64 near 1.7e9 s. Both
    # are in time at many of 40 rates, though by its exact arrival the second would be late.
    cost = BatchCost("t", 1, {"token": "0.1"})
    schedule = Schedule(
        "batches", batch_offsets=np.array([0, 1, 2]), request=np.array([0, 1]),
        tokens=np.array([100, 100]), evicted_offsets=np.array([0, 0, 0]),
        evicted=np.zeros(0, np.int64),
    )  # fmt: skip
    arrival, both = [1.7e9, 1.7e9 + 0.0075], 0
    sizes: Any = ([100, 100], [1, 1])
    for rate in (1.0 + k / 37 for k in range(40)):
        raw = Instance(arrival, *sizes, kv_capacity=1000, time_unit="second")
        limits = [0.01, 0.02 - float(scale_arrivals(raw, rate).release[1])]
        asked = Instance(arrival, *sizes, kv_capacity=1000, time_unit="second", slo_ttft=limits)
        judged = evaluate(Problem(scale_arrivals(asked, rate), cost), schedule)
        if judged.metrics["slo_attainment"] == 1:
            both += 1
            ask = slo_prices.Ask(asked, cost, all_limits(asked, None))
            assert ask.between(2, NO_LIMIT, rate, rate).most == 2, rate
            interval = ask.below(rate, 2, NO_LIMIT)
            assert interval is None or interval.low > rate
    assert both > 10


def test_limits_are_the_decimals_that_a_certificate_states() -> None:
    """The float 0.03 is not 3/100: windows end where those of the decimal do, to the tick."""
    cost = load_cost_model("llama2-7b-a100-infermax")
    instance = far(1.0)
    for text in ("0.03", "0.05", "0.1", "0.7", "1e-05", "3.3"):
        limits = all_limits(instance, {"slo_ttft": float(text), "slo_latency": 9.0})
        ask = slo_prices.Ask(instance, cost, limits)
        exact = {name: column.tolist() for name, column in limits.items()}
        exact["slo_ttft"] = [Fraction(text)] * instance.n
        since = ticks_since(instance.release_times.tolist(), TICKS_PER_SECOND)
        stated = demand_of(ask.works, exact, since, TICKS_PER_SECOND)
        assert stated.first.tolist() == ask.demand().first.tolist(), text


@pytest.mark.parametrize("seed", range(4))
def test_cells_end_where_the_last_window_does(seed: int) -> None:
    # Three days later: ticks are beyond 2**53, so edges in float64 are 32 ticks apart.
    later, generator = 3e5, np.random.default_rng(seed)
    at = np.append(0.0, later + 1 + np.sort(generator.random(200)) * 0.001)
    instance = Instance(at, [300] * 201, [100] * 201, kv_capacity=90_000, time_unit="second")
    cost = load_cost_model("llama2-7b-a100-infermax")
    limits = all_limits(instance, {"slo_ttft": 1.0, "slo_tpot": 0.02})
    demand = slo_prices.Ask(instance, cost, limits).demand()
    method = Method(demand, 201, 1, None, 1.0)
    for edges in (method.coarse, method.fine):
        assert edges[0] == demand.begin.min()
        assert edges[-1] == demand.last.max()


def test_prices_at_less_work_are_looked_for_at_less_work() -> None:
    # Of what is found at all of the work, half is charged where half of it is proved.
    cost = BatchCost("work", 1, {"token": "1"})
    crowd = Instance([0.0] * 40, [10] * 40, [1] * 40, kv_capacity=999, time_unit="second")
    limits = all_limits(crowd, {"slo_ttft": 0.1})
    demand = slo_prices.Ask(crowd, cost, limits).demand(work=Fraction(1, 2))
    # Half of 10 tokens is 5 ms, of which 20 fit into 0.1 s.
    found = slo_prices.find(demand, 40, 0, NO_LIMIT, work=0.5)
    assert found is not None
    assert found.work == 0.5
    assert found.most == max_in_time(demand, found.prices, Fraction(1, 2)) == 20


def test_a_request_without_a_pace_has_no_last_time_whatever_its_length() -> None:
    cost = BatchCost("token", 1, {"token": "0.001"})
    instance = Instance([0.0], [1], [1001], kv_capacity=10**4, time_unit="second")
    limits = all_limits(instance, {"slo_ttft": 1.0})
    none = np.zeros(1, np.int64)
    works = slo_prices.Ask(instance, cost, limits).works._replace(first=none, rest=none, chain=none)
    for steps in (1000, 10**9, 10**9 + 7):
        last = demand_of(works._replace(all=np.array([steps])), limits, [0], 1).last
        assert last.tolist() == [NEVER]
    # Without steps it is due with its first token, whose limit is 1 s, on a clock of one tick a
    # second; NEVER is far above 10.
    assert demand_of(works._replace(all=none), limits, [0], 1).last.max() < 10
