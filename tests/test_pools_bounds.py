"""Bounds for pools: against all schedules of few requests, and certificates against forgers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from exhaustive_pools import Best, Case

from optsched import (
    BatchCost,
    Instance,
    Link,
    Machine,
    Problem,
    bound,
    compare,
    evaluate,
    generate,
    run,
)
from optsched.bounds import lower_bound
from optsched.bounds.base import BoundTask, Proof
from optsched.bounds.certificate import verify_certificate
from optsched.bounds.checker.check import digest
from optsched.bounds.checker.parts import Budget as Steps
from optsched.bounds.checker.seconds import proved_ticks
from optsched.bounds.leaves import work_leaf
from optsched.bounds.pools import certify_pools, pools_bound, verify_pools
from optsched.costs.fleet import Fleet
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import UsageError, ViolationError
from optsched.problem.objective import parse_objective

ROLES = {"p": "prefill", "d": "decode", "m": "mixed"}
NAMES = (
    "base", "token", "decode_base", "prefill_base", "decode_request", "decode_kv",
    "prefill_token", "prefill_request", "prefill_square", "prefill_cross", "prefill_kv",
)  # fmt: skip
LARGE = 1000
"""A KV capacity that holds everybody."""


def tiny(generator: np.random.Generator) -> tuple[Case, Instance, Fleet]:
    """Return two to four requests on two or three machines."""
    roles = str(generator.choice(["pd", "ppd", "pdd", "mm", "mmm", "pd", "pdm"]))
    n = int(generator.integers(2, 5 if len(roles) == 2 else 4))
    prompt = generator.integers(1, 5, n)
    output = generator.integers(1, 3 if n == 4 else 4, n)
    scale = 10.0 ** generator.integers(-4, 0, len(NAMES))
    values = np.round(
        generator.random(len(NAMES)) * scale * (generator.random(len(NAMES)) < 0.7), 6
    )
    cost = dict(zip(NAMES, values.tolist(), strict=True))
    cost["base"] += 0.001
    texts = {name: repr(1000 * value) for name, value in cost.items() if value}
    # Texts are what is meant, to the last digit.
    cost = {name: float(texts.get(name, 0)) / 1000 for name in cost}
    arrival = np.round(generator.random(n) * generator.choice([0.0, 0.01, 0.3]), 4)
    link = Link(
        float(generator.choice([0.0, 0.01])), float(generator.choice([0.0, 0.002])),
        bool(generator.random() < 0.3),
    )  # fmt: skip
    case = Case(
        tuple(arrival.tolist()), tuple(prompt.tolist()), tuple(output.tolist()), roles, cost,
        link.latency_s, link.seconds_per_token, link.recompute_last,
    )  # fmt: skip
    instance = Instance(
        arrival, prompt, output, kv_capacity=LARGE, time_unit="second", kv_accounting="cached",
    )  # fmt: skip
    model = BatchCost("tiny", 1, texts)
    machines = [Machine(cost_model=model, kv_capacity=LARGE, role=ROLES[role]) for role in roles]  # type: ignore[arg-type]
    return case, instance, Fleet(machines, link)


def task_of(instance: Instance, pools: Fleet, objective: str) -> BoundTask:
    return BoundTask(instance, pools, parse_objective(objective))


def check_many(seed: int, count: int, factor: float = 1.0) -> tuple[int, int, int]:
    """Return on how many instances bounds exceed the optimum, meet it, and are certified.

    `Best` tries all schedules of the few requests. A `factor` above 1 makes bounds too large.
    """
    generator = np.random.default_rng(seed)
    wrong = met = certified = 0
    for _ in range(count):
        case, instance, pools = tiny(generator)
        sums = {"tel": Best(case, "tel").best, "mean_ttft": Best(case, "ttft").best}
        exceeded = False
        for name, best in sums.items():
            proof = pools_bound(task_of(instance, pools, name), Budget(0.05))
            value = proof.value * (instance.n if name == "mean_ttft" else 1) * factor
            exceeded |= value > best * (1 + 1e-9) + 1e-12
            met += value >= best * (1 - 1e-6)
            if generator.random() < 0.3:
                proved = certify_pools(instance, name, proof.tree or {})["value"] * 1e-12
                exceeded |= proved * factor > best * (1 + 1e-9) + 1e-12
                certified += proved >= value / factor * (1 - 1e-6)

        slos = tuple((generator.random(2) * (0.3, 0.05) + 0.002).tolist())
        late = Best(case, "late", slos).best
        share, _ = lower_bound(
            Problem(instance, pools, f"slo_attainment:slo_ttft={slos[0]},slo_tpot={slos[1]}")
        )
        exceeded |= round(share * instance.n) < instance.n - late
        wrong += exceeded
    return wrong, met, certified


def test_no_bound_for_pools_exceeds_the_best_of_all_schedules() -> None:
    """Of 30 instances (seed 1) none has a bound that is too large; several are met exactly."""
    wrong, met, certified = check_many(1, 30)
    assert wrong == 0
    assert met > 5
    assert certified > 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_no_bound_for_pools_exceeds_the_best_on_two_thousand(seed: int) -> None:
    assert check_many(seed, 500)[0] == 0


def test_a_bound_that_is_one_percent_too_large_is_noticed() -> None:
    assert check_many(1, 10, 1.01)[0] > 0  # bounds times 1.01


def stream(n: int = 40) -> Instance:
    """Return random requests, 20 a second, with KV enough for all."""
    generator = np.random.default_rng(5)
    return Instance(
        np.cumsum(generator.exponential(1 / 20, n)), generator.integers(50, 1500, n),
        generator.integers(1, 60, n), kv_capacity=60_000, time_unit="second", name="stream",
    )  # fmt: skip


MODEL = "llama2-7b-a100-infermax"
LINK = "latency=1ms,bandwidth=25GB/s,model=llama2-7b"


def proved(text: str, objective: str, link: str = LINK) -> tuple[dict[str, Any], Proof]:
    """Return the certificate of a bound on `stream`, searched for a second, and its proof."""
    instance, pools = stream(), Fleet.of(text, MODEL, link=link)
    proof = pools_bound(task_of(instance, pools, objective), Budget(1.0))
    return certify_pools(instance, objective, proof.tree or {}), proof


@pytest.mark.parametrize("text", ["2p2d", "1p3d", "3p1d", "4m", "1m"])
@pytest.mark.parametrize("objective", ["tel", "mean_ttft"])
def test_a_certificate_proves_what_the_bound_says(text: str, objective: str) -> None:
    """The checker, without the prover's search, proves the same value for these pools."""
    for link in (LINK, f"{LINK},recompute_last=true"):
        certificate, proof = proved(text, objective, link)
        value = verify_pools(stream(), certificate, Fleet.of(text, MODEL, link=link))
        assert value == pytest.approx(proof.value, rel=1e-6)
        # The first digit of `text` counts the machines of the first pool.
        assert certificate["pools"][next(iter(certificate["pools"]))]["machines"] == int(text[0])


def test_a_certificate_about_pools_is_none_about_one_worker() -> None:
    """Nor is it one about three prefill machines and one to decode."""
    certificate, _ = proved("2p2d", "tel")
    with pytest.raises(ViolationError, match="expected one about one worker"):
        verify_certificate(stream(), certificate)
    others = Fleet.of("3p1d", MODEL, link=LINK)
    with pytest.raises(ViolationError, match="pools:"):
        verify_pools(stream(), certificate, others)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to every number, text and truth value."""
    if isinstance(value, dict):
        return [one for key in value for one in places(value[key], (*path, key))]
    if isinstance(value, list):
        return [one for key in range(len(value)) for one in places(value[key], (*path, key))]
    return [path]


def corrupted(generator: np.random.Generator, certificate: dict[str, Any]) -> dict[str, Any]:
    """Return the certificate with something changed, and sealed again."""
    forged = copy.deepcopy(certificate)
    kind = generator.random()
    known = places(forged) if kind < 0.3 else places(forged["pools"], ("pools",))
    if 0.5 < kind < 0.7:
        known = [("value",), ("tree", "first"), ("tree", "width"), ("ticks_per_second",)]
    path = known[int(generator.integers(len(known)))]
    at = forged
    for key in path[:-1]:
        at = at[key]
    old = at.get(path[-1], 0) if isinstance(at, dict) else at[path[-1]]
    new: Any = None
    if isinstance(old, bool):
        new = not old
    elif isinstance(old, int):
        step = int(generator.choice([1, -1, 1 + abs(old), 7, 1 << 40]))
        new = old + step if generator.random() < 0.8 else [str(old), 1.5 * old, None][step % 3]
    elif path[-1] in ("sha256", "instance_sha256") or not str(old)[:1].isdigit():
        new = f"{old}x"
    else:
        new = [f"{2 * float(old) + 1e-6:.9f}", "-1", "x", 3][int(generator.integers(4))]
    at[path[-1]] = new
    if generator.random() < 0.1:
        del at[path[-1]]
    if path[-1] != "sha256":
        forged["sha256"] = digest(forged)
    return forged


def check_corruptions(seed: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    ways = [("2p2d", "tel"), ("3p1d", "tel"), ("2p2d", "mean_ttft"), ("4m", "tel")]
    known, accepted = [proved(*way)[0] for way in ways], []
    pools = [Fleet.of(text, MODEL, link=LINK) for text, _ in ways]
    for k in range(count):
        forged = corrupted(generator, known[k % len(known)])
        if forged == known[k % len(known)]:
            continue
        try:
            verify_pools(stream(), forged, pools[k % len(known)])
        except ViolationError:
            continue
        accepted.append(forged)
    assert accepted == []


def test_no_corrupted_certificate_is_accepted() -> None:
    """Seed 1, 150 certificates."""
    check_corruptions(1, 150)


@pytest.mark.slow
def test_none_of_ten_thousand_corrupted_certificates_is_accepted() -> None:
    check_corruptions(2, 10_000)


def alone(prompt: int, **slos: Any) -> tuple[Instance, Fleet]:
    """One request of two output tokens, a move of 1 s, and batches of 20 ms and 1 ms a token."""
    instance = Instance([0.0], [prompt], [2], 100, time_unit="second", **slos)
    cost = BatchCost("plain", 1, {"base": "20", "token": "1"})
    machines = [
        Machine(cost_model=cost, kv_capacity=100, role=role) for role in ("prefill", "decode")
    ]
    return instance, Fleet(machines, Link(latency_s=1.0, recompute_last=True))


@pytest.mark.parametrize(
    ("prompt", "proved", "served"),  # seconds: a batch of 20 ms and 1 ms a token, a move of 1 s
    [
        (1, 0.021, 0.021),  # nothing is computed again, so the first token is that of the prefill
        # The second of its tokens is, in a batch behind the move, which the bound leaves out.
        (2, 0.022 + 1, 0.022 + 1 + 0.021),
    ],
)
def test_a_first_token_waits_for_the_move_where_it_is_made_behind_it(
    prompt: int, proved: float, served: float
) -> None:
    instance, pools = alone(prompt)
    schedule = simulate(Problem(instance, pools), "vllm")
    assert evaluate(Problem(instance, pools), schedule).metrics["mean_ttft"] == pytest.approx(
        served
    )
    proof = pools_bound(task_of(instance, pools, "mean_ttft"), Budget(0.2))
    assert proof.tree is not None
    assert proof.value == pytest.approx(proved)
    certificate = certify_pools(instance, "mean_ttft", proof.tree)
    assert verify_pools(instance, certificate, pools) == pytest.approx(proved)


def test_arrivals_between_two_ticks_cost_pools_a_tick_each() -> None:
    # As for one machine (tests/test_certificate_seconds.py): eight prefills of 1 s, one at a time,
    # are there after 1, ..., 8 s less seven times 9.9 ms, and the clock has ticks of 10 ms.
    instance = Instance([0.0, *[0.0099] * 7], [100] * 8, [1] * 8, 101, time_unit="second")
    cost = BatchCost("ten", 1, {"token": "10"})
    pools = Fleet(
        [Machine(cost_model=cost, kv_capacity=101, role=role) for role in ("prefill", "decode")],
        Link(),
    )
    for objective in ("mean_ttft", "tel"):
        made = certify_pools(instance, objective, {"leaf": work_leaf(), "pools": pools})
        slow = made | {"ticks_per_second": 100}
        # 100 + ... + 800 = 3600 ticks, less arrivals of 7 x 0.99 = 6.93; up to 8 less are proved.
        assert 3592 <= proved_ticks(instance, slow, Steps()) <= 3600 - 6.93


@pytest.mark.parametrize(("slo", "most"), [(0.0209, 0), (0.0211, 1)])
def test_a_limit_on_tpot_below_a_step_alone_serves_nobody(slo: float, most: int) -> None:
    # A step takes 21 ms, and no other limit says so: the prefill and the move may take for ever.
    instance, pools = alone(3)
    problem = Problem(instance, pools, f"slo_attainment:slo_tpot={slo}")
    assert lower_bound(problem) == (most, "slo-pools")


def test_what_no_bound_for_pools_is_proved_for_is_refused() -> None:
    pools = Fleet.of("1p1d", MODEL)
    sessions = Instance(
        [0.0, None], [5, 5], [2, 2], kv_capacity=100, time_unit="second", after=[[], [0]]
    )
    with pytest.raises(UsageError, match="not proved for after"):
        lower_bound(Problem(sessions, pools), method="pools")
    slow = Machine(cost_model=MODEL, kv_capacity=60_000, role="decode")
    fast = Machine(cost_model=MODEL, kv_capacity=50_000, role="decode")
    mixed = Fleet(
        [Machine(cost_model=MODEL, kv_capacity=60_000, role="prefill"), slow, fast], Link()
    )
    # A request may decode at first on the one and then on the other, where each is fast.
    with pytest.raises(UsageError, match="not proved for other_machines"):
        lower_bound(Problem(stream(), mixed), method="pools")


def test_different_machines_in_a_stage_are_compared_without_a_bound() -> None:
    # Of two unequal machines the mixed one prefills and decodes, so both are in one stage.
    fleet = Fleet(
        [
            Machine(cost_model=MODEL, kv_capacity=60_000),
            Machine(cost_model="llama-3.1-8b-h100-torch", kv_capacity=60_000, role="prefill"),
        ],
        Link(),
    )
    found = compare(Problem(stream(12), fleet), ["vllm"], time_limit_s=0.5)
    assert found.bound is None
    assert "other_machines" in " ".join(found.notes)


def test_a_tabulated_cost_model_is_bounded_under_its_minorants() -> None:
    """The bound is below the total latency of `vllm`, and more than three tenths of it."""
    pools = Fleet.of("1p1d", "llama-3.1-8b-h100-torch", link="latency=1ms,token=2us")
    bound, name = lower_bound(Problem(stream(12), pools), time_limit_s=2.0)
    assert name == "pools"
    tel = run(Problem(stream(12), pools), "vllm").metrics["tel"]
    assert bound is not None
    assert 0.3 * tel < bound <= tel


@pytest.mark.parametrize("roles", ["1p1d", "2m", "2p1d"])
def test_pools_bring_their_cost_model(roles: str) -> None:
    """No cost model is named: the bound is computed with that of the machines."""
    instance = generate("lognormal", n=5, kv_capacity=2000, time_unit="second", rate=5, seed=1)
    small, large = (
        bound(
            Problem(instance, Fleet.of(roles, model)),
            method="pools",
            time_limit_s=0,
            certify=False,
        )
        for model in ("llama2-7b-a100-infermax", "llama-70b-tp4-a100-infermax")
    )
    assert small.cost_model.name == "llama2-7b-a100-infermax"
    assert small.bound is not None
    assert large.bound is not None
    # A model of ten times the weights on four GPUs takes longer for every batch.
    assert small.bound < large.bound
