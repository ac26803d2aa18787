"""Certificates: what is true passes, nothing else does, however it was changed."""

from __future__ import annotations

import copy
import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brute_force import brute_force_tel
from test_dual import random_instance, random_prices
from typer.testing import CliRunner

from optsched.bounds.certificate import make_certificate, verify_certificate
from optsched.bounds.checker import (
    check as checker,
    check_certificate,
    schedule_value,
)
from optsched.bounds.checker.parts import (
    Budget as Steps,
    Limits as LevelLimits,
    Rejected,
    TooLarge,
    columns_of,
)
from optsched.bounds.checker.ramp import check_ramp
from optsched.bounds.checker.replay import Compiled
from optsched.bounds.dual import Prices, dual_value
from optsched.bounds.leaves import prices_leaf
from optsched.bounds.memory_prices import best_prices
from optsched.cli import app
from optsched.files.read_write import read_instance, write_instance, write_json
from optsched.optimize.ramp.jobs import ramp_leaf
from optsched.optimize.ramp.prove import prove_all
from optsched.optimize.search.anytime import explore
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import UsageError, ViolationError
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import from_starts
from optsched.workloads.generate import generate

INSTANCES = Path(__file__).resolve().parent.parent / "instances"


def claim(instance: Instance, prices: Prices) -> dict[str, Any]:
    """Return the certificate of what prices prove, as the dual bound makes it."""
    return make_certificate(
        instance,
        prices_leaf(prices),
        value=dual_value(instance, prices),
        denominator=prices.denominator,
    )


def sealed(certificate: dict[str, Any]) -> dict[str, Any]:
    """The certificate with its digest recomputed, as a forger would."""
    return {**certificate, "sha256": checker.digest(certificate)}


def test_what_was_made_passes_and_what_it_proves_is_below_the_optimum() -> None:
    rng = np.random.default_rng(1)
    for _ in range(400):
        instance, prices = random_instance(rng), random_prices(rng)
        certificate = json.loads(json.dumps(claim(instance, prices)))
        value = check_certificate(instance, certificate)
        assert value == certificate["value"] == dual_value(instance, prices)
        assert value <= brute_force_tel(instance)[0]


@pytest.mark.parametrize("name", ["worst-mc-sf-online", "worst-mc-sf-offline"])
def test_shipped_certificates_prove_the_optimum_of_shipped_instances(name: str) -> None:
    """They claim the optimum that the instance's file states, and `verify` accepts them."""
    file, proof = INSTANCES / f"{name}.json", INSTANCES / "certificates" / f"{name}.json"
    instance = read_instance(file)
    certificate = json.loads(proof.read_text(encoding="utf-8"))
    assert certificate["claim"] == "optimal"
    assert certificate["value"] == instance.known["optimum"]
    accepted = CliRunner().invoke(app, ["verify", str(file), str(proof)])
    assert accepted.exit_code == 0
    assert f"tel {instance.known['optimum']} rounds is optimal" in accepted.stdout


def leaf_value(
    instance: Instance,
    rounds: list[int],
    prices: list[int],
    denominator: int,
    low: int,
    high: int | None,
    i: int,
) -> int:
    """A leaf's bound with request i (-1: none) restricted to low..high, by the definition."""
    end = max(int(instance.arrival.max() + instance.output_tokens.sum()) + 45, rounds[-1])
    price = [0] * (end + 60)
    for begin, p in zip(rounds, prices, strict=True):
        price[begin:] = [p] * (len(price) - begin)
    total = -instance.kv_capacity * sum(price)
    for j in range(instance.n):
        a, o = int(instance.arrival[j]), int(instance.output_tokens[j])
        q = int(instance.prompt_tokens[j]) + instance.kv_offset - 1
        first, last = (low, end if high is None else high) if j == i else (a, end)
        total += min(
            denominator * (k + o - a) + sum(price[k + t] * (q + t) for t in range(1, o + 1))
            for k in range(first, last + 1)
        )
    return -(-total // denominator)


def test_optimality_needs_a_schedule_of_the_value_and_within_the_limits() -> None:
    instance = Instance([0] * 3, [1] * 3, [1] * 3, kv_capacity=2)
    found = explore(instance, Budget(20), certify=True)
    certificate = found.certificate()
    assert certificate["claim"] == "optimal"
    assert check_certificate(instance, certificate) == 6  # 1 + 2 + 3
    # A completion at 4 makes 7; two at once hold 2 + 2 > 2; one start is missing; then a start
    # before the arrival, a float, and a truth value.
    for starts in ([0, 1, 3], [0, 0, 1], [0, 1], [0, 1, -1], [0, 1, 2.0], [0, 1, True]):
        bad = copy.deepcopy(certificate)
        bad["schedule"]["starts"] = starts
        with pytest.raises(Rejected, match="schedule"):
            check_certificate(instance, sealed(bad))
    batches = simulate(instance, "mc-sf")
    with pytest.raises(UsageError, match="starts"):
        make_certificate(instance, certificate["tree"], value=6, schedule=batches)


def test_the_checkers_judge_agrees_with_the_judge() -> None:
    from optsched.judge.evaluate import evaluate
    from optsched.problem.errors import OptschedError

    rng = np.random.default_rng(4)
    accepted = 0
    for _ in range(1500):
        plain = random_instance(rng, 4)
        limits = {
            "max_batch_tokens": int(rng.integers(5, 12)),
            "max_prefill_tokens": int(rng.integers(5, 12)),
            "max_running": int(rng.integers(1, 4)),
        }
        chosen = {k: v for k, v in limits.items() if rng.random() < 0.3}
        instance = Instance(
            plain.arrival,
            plain.prompt_tokens,
            plain.output_tokens,
            kv_capacity=plain.kv_capacity,
            kv_accounting=plain.kv_accounting,
            limits=Limits(**chosen),
            hybrid_batching=False if rng.random() < 0.3 else None,
        )
        schedule = from_starts(plain.arrival + rng.integers(0, 9, plain.n), instance)
        try:
            expected = evaluate(instance, schedule).metrics["tel"]
        except OptschedError:
            expected = None
        data = {k: v for k, v in schedule.to_dict().items() if k != "evict_mode"}
        try:
            value = schedule_value(columns_of(instance), data, instance.sha256)
        except Rejected:
            value = None
        assert value == expected
        accepted += value is not None
    # Both good and broken schedules were many of the 1,500.
    assert 300 < accepted < 1400


def corrupted(rng: np.random.Generator, certificate: dict[str, Any]) -> dict[str, Any]:
    """One digit, number, word, type, size, entry or field changed, anywhere in the file."""
    bad = json.loads(json.dumps(certificate))
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(bad)
    node, key = places[int(rng.integers(len(places)))]
    kind = int(rng.integers(5))
    value = node[key]
    if kind == 4 and isinstance(value, list):
        times = int(rng.choice([2, 3, 1000]))
        node[key] = [value * times, value[:-1], value[::-1], [value]][int(rng.integers(4))]
    elif kind == 0 or value is None or isinstance(value, bool):
        del node[key]
    elif isinstance(value, int) and kind < 3:
        huge = [2**31, 2**53, 2**63, 2**64, 2**100, 2**101, 10**300, 10**400]
        far = huge[int(rng.integers(len(huge)))] * int(rng.choice([-1, 1]))
        near = int(rng.choice([-1, 1, 10, -10, 1000]))
        node[key] = [value + near, value + far, far, value * far][int(rng.integers(4))]
    elif isinstance(value, int):
        node[key] = (str(value), float(value), bool(value))[int(rng.integers(3))]
    elif isinstance(value, str) and value:
        at = int(rng.integers(len(value)))
        node[key] = value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :]
    else:
        node[key] = [] if kind == 1 else None if kind == 2 else 7
    return bad


def still_true(instance: Instance, certificate: dict[str, Any]) -> bool:
    """Whether a certificate that passed is one: by the definition, in integers of any size."""
    leaf = certificate["tree"]
    pieces = list(zip(leaf["from_round"], leaf["price"], strict=True))
    while len(pieces) > 1 and pieces[-2][1] == 0:  # they only say again that the price is 0
        pieces.pop()
    if len(pieces) == 1:
        pieces = [(1, 0)]
    rounds, price = [t for t, _ in pieces], [p for _, p in pieces]
    return (
        rounds[-1] < 10_000
        and leaf_value(instance, rounds, price, certificate["denominator"], 0, None, -1)
        == certificate["value"]
    )


def test_ten_thousand_corruptions_are_rejected() -> None:
    rng = np.random.default_rng(7)
    rejected = passed = 0
    while rejected < 10_000:
        instance = random_instance(rng)
        prices, _ = best_prices(instance, time_limit_s=0.0)
        good = claim(instance, prices)
        found = explore(instance, Budget(0.0))
        if found.objective == found.proved and rng.random() < 0.5:
            good = found.certificate()
        assert check_certificate(instance, good) == good["value"]
        for _ in range(60):
            bad = corrupted(rng, good)
            if bad == good:
                continue
            with pytest.raises(Rejected):
                check_certificate(instance, bad)
            rejected += 1
            try:
                forged = sealed(bad)
                check_certificate(instance, forged)
            except Rejected:
                rejected += 1
            else:
                # A price, a start or the denominator changed so that the claim is still true.
                assert still_true(instance, forged), json.dumps(forged)
                passed += 1
    assert passed < rejected / 10  # forgeries that are true are few


def test_another_instance_is_rejected() -> None:
    rng = np.random.default_rng(8)
    instance = random_instance(rng)
    certificate = claim(instance, random_prices(rng))
    other = Instance(
        instance.arrival + 1,
        instance.prompt_tokens,
        instance.output_tokens,
        kv_capacity=instance.kv_capacity,
    )
    with pytest.raises(ViolationError, match="instance_sha256"):
        verify_certificate(other, certificate)
    seconds = Instance([0.0], [1], [1], kv_capacity=2, time_unit="second")
    with pytest.raises(Rejected):
        check_certificate(seconds, certificate)
    with pytest.raises(UsageError, match="rounds"):
        make_certificate(seconds, certificate["tree"], value=1)


def test_prices_that_would_wrap_around_are_computed_with_integers_of_any_size() -> None:
    # One request, s = o = 2, M = 4, price p = 10**30 over D = 10**30 in round 1 only: it starts
    # at 0 for 2 + 3 = 5 or at 1 for 3, so min f = 3, less M * 1 = 4: the bound is -1.
    instance = Instance([0], [2], [2], kv_capacity=4)
    for scale in (1, 10**6, 10**17, 10**30):
        leaf = {"relaxation": "prices", "from_round": [1, 2], "price": [scale, 0]}
        good = make_certificate(instance, leaf, value=-1, denominator=scale)
        assert check_certificate(instance, good) == -1
        bad = make_certificate(instance, leaf, value=0, denominator=scale)
        with pytest.raises(Rejected, match="-1, which is proved"):
            check_certificate(instance, bad)
    # Wrapping 64 bits once would make this price look like 0.
    leaf = {"relaxation": "prices", "from_round": [1, 2], "price": [2**64, 0]}
    # min f = 3, less M * 2**64 = 2**66.
    assert check_certificate(instance, make_certificate(instance, leaf, value=3 - 2**66)) < 0


def test_arrivals_far_apart_take_no_memory() -> None:
    far = 10**9
    instance = Instance(np.arange(50) * far, [3] * 50, [7] * 50, kv_capacity=10)
    prices, value = best_prices(instance, time_limit_s=0.2)
    # 50 requests of 7 rounds each.
    assert check_certificate(instance, claim(instance, prices)) == value == 350


def test_the_checker_shares_no_code_with_what_it_checks() -> None:
    files = sorted(Path(checker.__file__).parent.rglob("*.py"))
    assert len(files) > 5  # the loop is not empty
    for file in files:
        lines = file.read_text().splitlines()
        imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
        allowed = {"from optsched.problem.kernel import njit"}  # numba's, and nothing else
        if file.name == "classes.py":  # it reads a cost model that is stated as a file states it
            allowed |= {"from optsched.costs.cost import BatchCost"}
            allowed |= {"from optsched.costs.table import table_from_dict"}

        if file.name == "sessions.py":  # it walks along the forest that an instance states
            allowed |= {"from optsched.problem.sessions import Sessions"}

        own = [line for line in imports if "optsched" in line and line not in allowed]
        assert all("from optsched.bounds.checker" in line for line in own), file.name


def test_an_unknown_relaxation_or_a_broken_ramp_is_rejected() -> None:
    instance = Instance([0], [1], [1], kv_capacity=2)
    for leaf in ({"relaxation": "magic"}, {"relaxation": "ramp"}, {}, {"relaxation": ["ramp"]}):
        with pytest.raises(Rejected):
            check_certificate(instance, make_certificate(instance, leaf, value=1))


# Six requests at once: their peaks are 3 to 9, and M = 10.
SIX = Instance([0] * 6, [4, 1, 4, 4, 2, 1], [1, 8, 2, 1, 6, 2], kv_capacity=10)
"""Two requests rarely fit at once; the sum of outputs is 20."""


def ramp(instance: Instance, value: int, unit: int = 1, **level: Any) -> dict[str, Any]:
    """A leaf of one period and one level, with exact floors and multipliers 0 unless given."""
    floors = (instance.prompt_tokens + instance.kv_offset).tolist()
    first = {"floors": floors, "counters": [], "multipliers": [0] * instance.n, **level}
    period = {"value": value, "denominator": unit, "clock": 0, "levels": [first]}
    return {"relaxation": "ramp", "periods": [period]}


def proved_by_ramp(instance: Instance) -> tuple[int, dict[str, Any]]:
    """The optimum, and a leaf that proves it."""
    proofs = prove_all(instance)
    leaf = ramp_leaf([(p.jobs, p.bound, p.denominator, p.clock, p.levels) for p in proofs])
    return sum(p.bound for p in proofs), leaf


def test_a_ramp_with_a_huge_denominator_or_multiplier_proves_no_more_than_the_optimum() -> None:
    # Costs of 2**100 and more were once taken for "no path is left", which proves any value.
    optimum = brute_force_tel(SIX)[0]
    for size in (2**31, 2**63, 2**64, 2**100, 2**101, 2**200, 10**300):
        huge = {"multipliers": [size] * 6}, {"multipliers": [-size] * 6}
        uneven = [{"multipliers": [0, sign * size, 0, 0, 0, 0]} for sign in (1, -1)]
        for unit, level in ((size, {}), *((1, m) for m in (*huge, *uneven)), (size, huge[1])):
            for claimed in (optimum + 1, 10**6, size):
                leaf = ramp(SIX, claimed, unit, **level)
                with pytest.raises(Rejected, match=r"is proved|too many digits"):
                    check_certificate(SIX, make_certificate(SIX, leaf, value=claimed))
    found = explore(SIX, Budget(1.0))
    # A schedule that starts all a round later is true, but not optimal: its value is not proved.
    waiting = found.schedule.starts + 1
    late = from_starts(waiting, SIX)
    value = int((waiting + SIX.output_tokens).sum())
    leaf = ramp(SIX, value, 2**101)
    with pytest.raises(Rejected, match="is proved"):
        check_certificate(SIX, make_certificate(SIX, leaf, value=value, schedule=late))


def test_a_true_ramp_stays_true_in_units_of_any_size() -> None:
    """Multipliers and denominator times the same number prove the optimum as before, and no
    more."""
    optimum, leaf = proved_by_ramp(SIX)
    assert optimum == brute_force_tel(SIX)[0]
    for times in (1, 2**40, 2**100, 2**101, 10**200):
        scaled = copy.deepcopy(leaf)
        (period,) = scaled["periods"]
        assert period["levels"]
        period["denominator"] *= times
        for level in period["levels"]:
            level["multipliers"] = [times * m for m in level["multipliers"]]
        good = make_certificate(SIX, scaled, value=optimum)
        assert check_certificate(SIX, good) == optimum
        for claimed in (optimum + 1, 10**6):
            period["value"] = claimed
            with pytest.raises(Rejected, match=f"{optimum}, which is proved"):
                check_certificate(SIX, make_certificate(SIX, scaled, value=claimed))


def test_further_levels_of_a_true_ramp_prove_the_optimum_and_no_more() -> None:
    # The multipliers of the last level say of the best schedule that it costs the optimum. A leaf
    # that claims 1 more drops what costs more than the optimum, and so that schedule stays.
    rng = np.random.default_rng(12)
    for instance in (SIX, *(random_instance(rng, 4) for _ in range(10))):
        optimum, leaf = proved_by_ramp(instance)
        for period in leaf["periods"]:
            period["levels"] += 2 * copy.deepcopy(period["levels"][-1:])
        good = make_certificate(instance, leaf, value=optimum)
        assert check_certificate(instance, good) == optimum == brute_force_tel(instance)[0]
        for period in leaf["periods"]:
            period["value"] += 1
            with pytest.raises(Rejected, match=f"{optimum}, which is proved|found a schedule"):
                check_certificate(instance, make_certificate(instance, leaf, value=optimum + 1))
            period["value"] -= 1


def test_corrupted_ramps_never_prove_more_than_the_optimum() -> None:
    rng = np.random.default_rng(11)
    rejected = passed = 0
    for turn in range(60):
        instance = random_instance(rng, 4)
        optimum, leaf = proved_by_ramp(instance)
        good = make_certificate(instance, leaf, value=optimum)
        assert check_certificate(instance, good) == optimum == brute_force_tel(instance)[0]
        for _ in range(50):
            bad = corrupted(rng, leaf)
            if turn % 2 and isinstance(periods := bad.get("periods"), list):
                for period in periods:  # a forger claims more at the same time
                    if isinstance(period, dict):
                        period["value"] = 10**6
            for claimed in (optimum + 1, 10**6, 10**6 * len(leaf["periods"])):
                with pytest.raises(Rejected):
                    check_certificate(instance, make_certificate(instance, bad, value=claimed))
                rejected += 1
            try:
                check_certificate(instance, make_certificate(instance, bad, value=optimum))
            except Rejected:
                rejected += 1
            else:
                passed += 1
    # 60 x 50 changes with three claims above the optimum each are 9,000; some do not even prove the
    # optimum. Others are harmless, as a multiplier may be changed in a valid proof.
    assert rejected > 9000
    assert passed > 100


def test_what_a_check_would_take_is_refused_in_one_line() -> None:
    one = Instance([0], [1], [3], kv_capacity=10)
    leaf = ramp(one, 3)
    good = leaf["periods"][0]
    level = good["levels"][0]
    assert check_certificate(one, make_certificate(one, leaf, value=3)) == 3
    # The request completes in round 3 or later: no later round needs a clock.
    for change, words in (
        ({"clock": 2_499_998}, "clock: found 2499998 rounds; expected at most 3"),
        ({"clock": 10**300}, "expected at most 3"),
        ({"levels": [level] * 1001}, "at most 1000"),
        ({"denominator": 10**400}, "more than 1024 bits"),
        ({"levels": [{**level, "multipliers": [-(10**400)]}]}, "more than 1024 bits"),
        ({"levels": [{**level, "multipliers": [0.0]}]}, "found 0.0; expected an integer"),
        ({"levels": [{**level, "multipliers": [False]}]}, "found False; expected an integer"),
        ({"levels": [{**level, "floors": None, "counters": [[0]]}]}, r"counters: found \[\[0\]\]"),
        ({"levels": "many"}, "levels"),
    ):
        wrong = {**leaf, "periods": [{**good, **change}]}
        with pytest.raises(Rejected, match=words) as refusal:
            check_certificate(one, make_certificate(one, wrong, value=3))
        assert "\n" not in str(refusal.value)
    # One long run: its states are 20,000 weights, more than are allowed here.
    long = Instance([0], [1], [20_000], kv_capacity=30_000)
    # Twelve outputs that differ: many sets of requests may run in a round.
    wide = Instance([0] * 12, [1] * 12, range(5, 17), kv_capacity=60)
    for limits, instance in (
        (LevelLimits(nodes=1000), long),
        (LevelLimits(arcs=1000), long),
        (LevelLimits(cells=10**5), long),
        (LevelLimits(nodes=10_000), wide),
        (LevelLimits(arcs=10_000), wide),
        (LevelLimits(cells=10**5), wide),
    ):
        words = r"a level of more than \d+ (nodes|arcs|cells); too large to check"
        replays = partial(Compiled, limits=limits)
        with pytest.raises(TooLarge, match=words):
            check_ramp(columns_of(instance), ramp(instance, 10**7), replays=replays)


def test_steps_are_counted_over_the_whole_certificate() -> None:
    # One period, with a clock of 12 rounds (its longest output), is cheap enough, and 200 are not.
    # So are few prices, and not 4,000.
    def periods(times: int) -> Instance:
        arrival = np.repeat(np.arange(times) * 10**4, 8)
        return Instance(arrival, [1] * 8 * times, [*range(5, 13)] * times, kv_capacity=30)

    one, many = periods(1), periods(200)
    leaf = ramp(one, 10**6)
    leaf["periods"][0]["clock"] = 12
    free = [prices_leaf(Prices(np.arange(1, k + 1), np.zeros(k, int), 1)) for k in (1, 4000)]
    proved = check_ramp(columns_of(one), leaf)
    assert check_ramp(columns_of(one), leaf, Steps(10**6)) == proved
    with pytest.raises(TooLarge, match="more than 1000000 steps"):
        check_ramp(columns_of(many), {**leaf, "periods": leaf["periods"] * 200}, Steps(10**6))
    outputs = int(one.output_tokens.sum())
    few, more = (make_certificate(one, prices, value=outputs) for prices in free)
    # One price takes less than 3,000 steps, and 4,000 prices more.
    assert check_certificate(one, few, Steps(3000)) == outputs
    with pytest.raises(Rejected, match="steps; too large to check"):
        check_certificate(one, more, Steps(3000))


@pytest.mark.parametrize("scale", [1, 10**17])
def test_a_search_through_prices_that_runs_out_of_steps_is_refused_wherever_it_stops(
    scale: int,
) -> None:
    # A claim of 10 above what is proved: with the minima of the last requests left out, the sum
    # would be smaller or larger, and no count of steps may let it through.
    instance = Instance(np.arange(6), [2] * 6, [3] * 6, kv_capacity=9)
    prices = Prices(np.arange(1, 30), np.append(np.arange(28) % 3, 0) * scale, scale)
    good = claim(instance, prices)
    stopped = 0
    for steps in range(0, 9000, 21):
        try:
            assert check_certificate(instance, good, Steps(steps)) == good["value"]
        except TooLarge:
            stopped += 1
    assert 0 < stopped < 9000 // 21  # some counts of steps are too few, some enough
    with pytest.raises(Rejected, match="is proved"):
        check_certificate(instance, sealed({**good, "value": good["value"] + 10}))


def test_a_tree_of_branches_is_refused_by_name() -> None:
    # No program wrote one.
    leaf = prices_leaf(Prices(np.array([1]), np.array([0]), 1))
    children = [{"from": 0, "to": None, "tree": leaf}]
    tree = {"branch": 0, "children": children}
    with pytest.raises(Rejected, match="found a branch, which nothing writes any more"):
        check_certificate(SIX, make_certificate(SIX, tree, value=20))


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("maximum recursion depth")])
def test_a_check_without_room_says_nothing_of_the_claim(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise error

    instance = Instance([0], [1], [3], kv_capacity=4)
    certificate = make_certificate(instance, ramp(instance, 3), value=3)
    monkeypatch.setattr(checker, "_prove_leaf", full)
    with pytest.raises(ViolationError, match=f"no room to check it .{type(error).__name__}") as no:
        verify_certificate(instance, certificate)
    assert no.value.rule == "certificate_size"


@pytest.mark.parametrize(
    "value", [10**5000, {1, 2}, float("nan"), [[]], None], ids=lambda v: type(v).__name__
)
def test_whatever_is_no_certificate_is_rejected(value: Any) -> None:
    good = make_certificate(SIX, ramp(SIX, 20), value=20)
    for field in good:
        with pytest.raises(Rejected):
            check_certificate(SIX, {**good, field: value})
    with pytest.raises(Rejected):
        check_certificate(SIX, value)


def test_the_command_refuses_forgeries_and_large_files_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optsched.problem import text_files

    path = tmp_path / "six.json"
    write_instance(SIX, path)
    # Multipliers are 0, over a denominator of 2**101; far more is claimed than is true.
    forged = make_certificate(SIX, ramp(SIX, 10**6, 2**101), value=10**6)
    (tmp_path / "forged.json").write_text(json.dumps(forged))
    slow = make_certificate(SIX, ramp(SIX, 10**6), value=10**6)
    # A clock of a million rounds, far more than six requests take.
    slow["tree"]["periods"][0]["clock"] = 10**6
    (tmp_path / "slow.json").write_text(json.dumps(sealed(slow)))
    blanks = gzip.compress(b" " * 2**20)  # a kilobyte each
    (tmp_path / "blanks.json.gz").write_bytes(blanks * 4)
    (tmp_path / "plain.json").write_bytes(b" " * 2**22)
    monkeypatch.setattr(text_files, "MAX_BYTES", 2**21)
    for name, code, words in (
        ("forged.json", 5, "is proved"),
        ("slow.json", 5, "clock: found 1000000 rounds"),
        ("blanks.json.gz", 2, "found too much JSON; expected at most 2 MiB"),
        ("plain.json", 2, "found more than 2 MiB; expected a file"),
    ):
        result = CliRunner().invoke(app, ["verify", str(path), str(tmp_path / name)])
        assert result.exit_code == code, result
        (line,) = result.output.splitlines()
        assert name in line
        assert words in line


def test_command_line_writes_and_verifies(tmp_path: Path) -> None:
    runner = CliRunner()
    instance = generate("jaillet-model-2", seed=3, n=6)
    path, out = tmp_path / "i.json", tmp_path / "c.json"
    write_instance(instance, path)
    words = ["bound", str(path), "--time-limit", "0.5", "--certificate-out", str(out)]
    assert runner.invoke(app, words).exit_code == 0
    assert runner.invoke(app, ["verify", str(path), str(out)]).exit_code == 0
    certificate = json.loads(out.read_text())
    certificate["value"] += 1
    write_json(sealed(certificate), out)
    result = runner.invoke(app, ["verify", str(path), str(out)])
    assert result.exit_code == 5, result.output  # one more is not proved


@pytest.mark.slow
def test_certificates_of_ten_thousand_requests_are_verified() -> None:
    for rate in (2.0, 4.0):
        instance = generate("lognormal", n=10_000, rate=rate, time_unit="round")
        found = explore(instance, Budget(30), search=False)
        assert check_certificate(instance, found.certificate()) == found.proved


def test_prices_without_any_time_are_free_and_prove_the_sum_of_outputs() -> None:
    instance = Instance([0, 0, 0], [3, 3, 3], [7, 5, 2], kv_capacity=10)
    prices, value = best_prices(instance, time_limit_s=0)
    # 7 + 5 + 2 = 14.
    assert value >= 14
    assert check_certificate(instance, claim(instance, prices)) == value
