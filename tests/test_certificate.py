"""Certificates: what is true passes, nothing else does, however it was changed."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brute_force import brute_force_tel
from test_dual import random_instance, random_prices
from typer.testing import CliRunner

import optsched.bounds.checker as checker
from optsched.bounds.certificate import branch, make_certificate, prices_leaf, verify_certificate
from optsched.bounds.checker import Rejected, check_certificate, columns_of, schedule_value
from optsched.bounds.dual import Prices, dual_value
from optsched.bounds.shadow import best_prices
from optsched.cli import app
from optsched.files.read_write import read_instance
from optsched.optimize.search.anytime import explore
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import UsageError, ViolationError
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import from_starts
from optsched.workloads.generate import generate

INSTANCES = Path(__file__).resolve().parent.parent / "instances"


def claim(instance: Instance, prices: Prices) -> dict[str, Any]:
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
    for _ in range(2000):
        instance, prices = random_instance(rng), random_prices(rng)
        certificate = json.loads(json.dumps(claim(instance, prices)))
        value = check_certificate(instance, certificate)
        assert value == certificate["value"] == dual_value(instance, prices)
        if rng.random() < 0.2:
            assert value <= brute_force_tel(instance)[0]


@pytest.mark.parametrize("name", ["worst-mc-sf-online", "worst-mc-sf-offline"])
def test_shipped_certificates_prove_the_optimum_of_shipped_instances(name: str) -> None:
    file, proof = INSTANCES / f"{name}.json", INSTANCES / "certificates" / f"{name}.json"
    instance = read_instance(file)
    certificate = json.loads(proof.read_text(encoding="utf-8"))
    assert certificate["claim"] == "optimal"
    assert certificate["value"] == instance.known["optimum"]
    accepted = CliRunner().invoke(app, ["verify", str(file), str(proof)])
    assert accepted.exit_code == 0
    assert f"tel {instance.known['optimum']} rounds is optimal" in accepted.stdout


def leaf_value(instance: Instance, prices: Prices, low: int, high: int | None, i: int) -> int:
    """A leaf's bound with request i restricted to low..high, by the definition."""
    end = int(instance.arrival.max() + instance.output_tokens.sum()) + 45
    price = [0] * (end + 60)
    for begin, p in zip(prices.from_round.tolist(), prices.price.tolist(), strict=True):
        price[begin:] = [p] * (len(price) - begin)
    total = -instance.kv_capacity * sum(price)
    for j in range(instance.n):
        a, o = int(instance.arrival[j]), int(instance.output_tokens[j])
        q = int(instance.prompt_tokens[j]) + instance.kv_offset - 1
        first, last = (low, end if high is None else high) if j == i else (a, end)
        total += min(
            prices.denominator * (k + o - a) + sum(price[k + t] * (q + t) for t in range(1, o + 1))
            for k in range(first, last + 1)
        )
    return -(-total // prices.denominator)


def test_a_branch_proves_the_least_of_its_leaves() -> None:
    rng = np.random.default_rng(2)
    for _ in range(400):
        instance = random_instance(rng, 4)
        i = int(rng.integers(instance.n))
        a = int(instance.arrival[i])
        denominator = int(rng.integers(1, 9))
        cuts = np.sort(rng.choice(np.arange(a + 1, a + 9), int(rng.integers(1, 4)), replace=False))
        begins = [a, *cuts.tolist()]
        ends = [*(cuts - 1).tolist(), None]
        children, values = [], []
        for low, high in zip(begins, ends, strict=True):
            prices = random_prices(rng, denominator)
            children.append((low, high, prices_leaf(prices)))
            values.append(leaf_value(instance, prices, low, high, i))
        tree = branch(i, children)
        good = make_certificate(instance, tree, value=min(values), denominator=denominator)
        assert check_certificate(instance, good) == min(values)
        assert min(values) <= brute_force_tel(instance)[0]
        for spoil in range(len(children)):
            bad = copy.deepcopy(good)
            del bad["tree"]["children"][spoil]
            with pytest.raises(Rejected, match=r"tree: request|without children"):
                check_certificate(instance, sealed(bad))


def test_nested_branches_inherit_their_ranges() -> None:
    instance = Instance([0, 0], [1, 1], [2, 2], kv_capacity=4)
    leaf = prices_leaf(Prices(np.array([1]), np.array([0]), 1))
    inner = branch(0, [(3, 3, leaf), (4, 5, leaf)])
    tree = branch(0, [(0, 2, leaf), (3, 5, inner), (6, None, leaf)])
    assert check_certificate(instance, make_certificate(instance, tree, value=4)) == 4
    for wrong in (
        branch(0, [(3, 3, leaf), (4, 6, leaf)]),  # beyond the parent's range
        branch(0, [(3, 3, leaf), (4, None, leaf)]),
        branch(0, [(3, 4, leaf)]),  # 5 is missing
        branch(0, [(2, 3, leaf), (4, 5, leaf)]),
        branch(0, [(3, 4, leaf), (4, 5, leaf)]),  # overlap
        branch(0, [(3, 2, leaf), (3, 5, leaf)]),  # empty
        branch(2, [(0, None, leaf)]),  # no such request
        branch(0, []),
    ):
        tree = branch(0, [(0, 2, leaf), (3, 5, wrong), (6, None, leaf)])
        with pytest.raises(Rejected, match="tree"):
            check_certificate(instance, make_certificate(instance, tree, value=4))


def test_optimality_needs_a_schedule_of_the_value_and_within_the_limits() -> None:
    instance = Instance([0] * 3, [1] * 3, [1] * 3, kv_capacity=2)
    found = explore(instance, time_limit_s=20, certify=True)
    certificate = found.certificate()
    assert certificate["claim"] == "optimal"
    assert check_certificate(instance, certificate) == 6  # 1 + 2 + 3
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
    assert 300 < accepted < 1400


def corrupted(rng: np.random.Generator, certificate: dict[str, Any]) -> dict[str, Any]:
    """One digit, number, word, entry or field changed, anywhere in the file."""
    bad = json.loads(json.dumps(certificate))
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(bad)
    node, key = places[int(rng.integers(len(places)))]
    kind = int(rng.integers(4))
    value = node[key]
    if kind == 0 or value is None or isinstance(value, bool):
        del node[key]
    elif isinstance(value, int):
        node[key] = value + int(rng.choice([-1, 1, 10, -10, 1000])) if kind < 3 else str(value)
    elif isinstance(value, str) and value:
        at = int(rng.integers(len(value)))
        node[key] = value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :]
    else:
        node[key] = [] if kind == 1 else None if kind == 2 else 7
    return bad


def still_true(instance: Instance, certificate: dict[str, Any]) -> bool:
    """Whether a certificate that passed is one: by the package's own exact evaluation."""
    leaf = certificate["tree"]
    prices = Prices(
        np.array(leaf["from_round"]), np.array(leaf["price"]), certificate["denominator"]
    )
    return dual_value(instance, prices) == certificate["value"]


def test_ten_thousand_corruptions_are_rejected() -> None:
    rng = np.random.default_rng(7)
    rejected = passed = 0
    while rejected < 10_000:
        instance = random_instance(rng)
        prices, _ = best_prices(instance, time_limit_s=0.0)
        good = claim(instance, prices)
        found = explore(instance, time_limit_s=0.0)
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
                # A price or a start moved so that the claim is still true, and only then.
                assert still_true(instance, forged), forged
                passed += 1
    assert passed < rejected / 10


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
        with pytest.raises(Rejected, match="-1 is proved"):
            check_certificate(instance, bad)
    # Wrapping 64 bits once would make this price look like 0.
    leaf = {"relaxation": "prices", "from_round": [1, 2], "price": [2**64, 0]}
    assert check_certificate(instance, make_certificate(instance, leaf, value=3 - 2**66)) < 0


def test_arrivals_far_apart_take_no_memory() -> None:
    far = 10**9
    instance = Instance(np.arange(50) * far, [3] * 50, [7] * 50, kv_capacity=10)
    prices, value = best_prices(instance, time_limit_s=1)
    begin = time.perf_counter()
    assert check_certificate(instance, claim(instance, prices)) == value == 350
    assert time.perf_counter() - begin < 1


def test_the_checker_shares_no_code_with_what_it_checks() -> None:
    folder = Path(checker.__file__).parent
    for file in sorted(folder.glob("checker*.py")):
        lines = file.read_text().splitlines()
        imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
        own = [line for line in imports if "optsched" in line]
        assert all("optsched.bounds.checker" in line for line in own), file.name


def test_an_unknown_relaxation_or_a_broken_ramp_is_rejected() -> None:
    instance = Instance([0], [1], [1], kv_capacity=2)
    for leaf in ({"relaxation": "magic"}, {"relaxation": "ramp"}, {}, {"relaxation": ["ramp"]}):
        with pytest.raises(Rejected):
            check_certificate(instance, make_certificate(instance, leaf, value=1))


def test_command_line_writes_and_verifies(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from optsched.cli import app
    from optsched.files.read_write import write_instance, write_json

    runner = CliRunner()
    instance = generate("jaillet-model-2", seed=3, n=12)
    path, out = tmp_path / "i.json", tmp_path / "c.json"
    write_instance(instance, path)
    words = ["bound", str(path), "--time-limit", "2", "--certificate-out", str(out)]
    assert runner.invoke(app, words).exit_code == 0
    assert runner.invoke(app, ["verify", str(path), str(out)]).exit_code == 0
    certificate = json.loads(out.read_text())
    certificate["value"] += 1
    write_json(sealed(certificate), out)
    result = runner.invoke(app, ["verify", str(path), str(out)])
    assert result.exit_code == 5 or isinstance(result.exception, ViolationError)


@pytest.mark.slow
def test_ten_thousand_requests_are_verified_within_ten_seconds() -> None:
    for rate in (2.0, 4.0):
        instance = generate("lognormal", n=10_000, rate=rate, time_unit="round")
        found = explore(instance, time_limit_s=30, search=False)
        begin = time.perf_counter()
        assert check_certificate(instance, found.certificate()) == found.proved
        assert time.perf_counter() - begin < 10


def test_prices_without_any_time_are_free_and_prove_the_sum_of_outputs() -> None:
    instance = Instance([0, 0, 0], [3, 3, 3], [7, 5, 2], kv_capacity=10)
    prices, value = best_prices(instance, time_limit_s=0)
    assert value >= 14
    assert check_certificate(instance, claim(instance, prices)) == value
