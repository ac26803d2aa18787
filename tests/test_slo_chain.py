"""A chain of intervals proves that all rates from one on are impossible, and no forged one does."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import invoke, one_line_error
from test_capacity import stream
from test_slo_prices import NO_LIMIT, judged_case, sealed

import optsched
from optsched import BatchCost, Instance, Problem, generate, verify, write_instance
from optsched.analysis.capacity_answer import Capacity
from optsched.bounds import slo_prices
from optsched.bounds.checker import check_certificate
from optsched.bounds.checker.parts import Rejected
from optsched.problem.errors import UsageError
from optsched.problem.limits import all_limits

MODEL = "llama2-7b-a100-infermax"


def proved(problem: Problem, attainment: float = 0.9, **more: Any) -> Capacity:
    """Ask for the largest rate of fcfs, with no time for the search and with a certificate."""
    asked: dict[str, Any] = {"attainment": attainment, "search_s": 0.0, "certify": True, **more}
    return optsched.capacity(problem, ["fcfs"], **asked)


@pytest.fixture(scope="module")
def found() -> Capacity:
    """Return what is proved of 80 requests, of which 72 must be in time."""
    return proved(Problem(stream(80), MODEL, slo_ttft=1.0, slo_tpot=0.05))


def chain_of(certificate: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a certificate, from the lowest rate on."""
    return certificate["tree"]["chain"]


def test_a_chain_reaches_from_the_impossible_rate_to_all_larger_ones(found: Capacity) -> None:
    chain = chain_of(found.certificate)
    rates = [part["leaf"]["rates"] for part in chain]
    assert [low for low, _ in rates[1:]] == [high for _, high in rates[:-1]]
    assert rates[-1][1] is None
    assert float(found.certificate["tree"]["from"]) == found.bound
    assert found.certificate["value"] == 71  # of 80, of which 72 are needed
    assert verify(Problem(found.instance, MODEL), found.certificate) == found.bound


def test_below_it_a_chain_says_what_the_picture_does(found: Capacity) -> None:
    """72 of 80 are 0.9: parts that leave more than 71 exclude no rate. They are points of the
    curve."""
    below = [part for part in chain_of(found.certificate) if part["most"] > 71]
    assert len(below) > 1
    curve = dict(found.bound_points)
    for part in below:
        assert curve[float(part["leaf"]["rates"][0])] <= part["most"] / 80


def wrong_ones() -> dict[str, Callable[[dict[str, Any]], object]]:
    """Return changes of the tree of a certificate, none of which leaves a proof."""

    def lower(tree: dict[str, Any]) -> None:
        tree["from"] = repr(0.99 * float(tree["chain"][0]["leaf"]["rates"][0]))

    def last_end(tree: dict[str, Any]) -> None:
        tree["chain"][-1]["leaf"]["rates"][1] = "1e3"

    def longer(tree: dict[str, Any]) -> None:
        del tree["chain"][-1]
        tree["chain"][-1]["leaf"]["rates"][1] = None

    def looser(tree: dict[str, Any]) -> None:
        tree["chain"][-1]["leaf"]["limits"] = {"slo_ttft": "0.5", "slo_tpot": "0.05"}

    return {
        "it begins at a rate below all parts": lower,
        "a part is missing": lambda tree: tree["chain"].pop(-2),
        "the last part has an end": last_end,
        "there are no parts": lambda tree: tree["chain"].clear(),
        "an interval is taken for all larger rates": longer,
        "one part is of other limits": looser,
        "a part states fewer": lambda tree: tree["chain"][-1].update(most=1),
        "there is no such minorant": lambda tree: tree["chain"][0].update(minorant=1),
    }


@pytest.mark.parametrize("change", wrong_ones())
def test_a_forged_chain_is_refused(found: Capacity, change: str) -> None:
    forged = json.loads(json.dumps(found.certificate))
    wrong_ones()[change](forged["tree"])
    with pytest.raises(Rejected):
        check_certificate(found.instance, sealed(forged))


@pytest.mark.parametrize("name", ["price", "rate", "extra", "edges"])
def test_other_prices_prove_no_larger_rates(found: Capacity, name: str) -> None:
    # The part for all larger rates is said to begin at 0.4 of its rate, which no prices may prove.
    generator = np.random.default_rng(3)
    for _ in range(20):
        forged = json.loads(json.dumps(found.certificate))
        leaf = chain_of(forged)[-1]["leaf"]
        leaf["rates"][0] = repr(0.4 * float(leaf["rates"][0]))
        column, at = leaf[name], int(generator.integers(len(leaf[name])))
        column[at] = int(column[at] * generator.choice([0, 0.5, 1.1, 2]))
        with pytest.raises(Rejected):
            check_certificate(found.instance, sealed(forged))


def contradicted_onwards(seed: int, count: int) -> int:
    """Check that all rates from one on are excluded at none that a schedule has; count proofs."""
    generator, proofs = np.random.default_rng(seed), 0
    for _ in range(count):
        instance, cost, limits = judged_case(generator, 12, 1)
        if not instance.arrivals_differ:
            continue
        ask = slo_prices.Ask(instance, cost, limits)
        for rate in (0.2, 0.5, 0.9, 1.0):
            assert ask.onwards(rate, instance.n, NO_LIMIT) is None, rate
        proofs += ask.onwards(4.0, instance.n, NO_LIMIT) is not None
    return proofs


def test_no_schedule_is_at_a_rate_that_is_excluded_with_all_larger_ones() -> None:
    """Seed 4, 40 cases, of which two at least have a proof, or nothing would be said."""
    assert contradicted_onwards(4, 40) > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 44))
def test_the_same_by_the_hundred(seed: int) -> None:
    assert contradicted_onwards(seed, 500) > 1


def test_windows_at_one_rate_say_nothing_of_larger_ones() -> None:
    # 0.6 s a batch whatever it holds, and four requests of one token, each within 1 s. Apart by
    # 0.45 s only three are in time, and together all four. So only the windows from the first
    # arrival on hold for all rates, and they leave all four.
    cost = BatchCost("whole", 1, {"base": "599", "token": "1"})
    instance = Instance(np.arange(4) * 0.45, [1] * 4, [1] * 4, kv_capacity=100, time_unit="second")
    ask = slo_prices.Ask(instance, cost, all_limits(instance, {"slo_ttft": 1.0}))
    assert ask.onwards(1.0, 4, NO_LIMIT) is None
    # With own work of 0.6 s, from the rate of 1 on, arrivals lie 0.45 * 3 s apart at most. With the
    # last one's SLO these are 2.35 s, which hold three such works and not four: at most 3.
    cost = BatchCost("own", 1, {"token": "600"})
    ask = slo_prices.Ask(instance, cost, all_limits(instance, {"slo_ttft": 1.0}))
    everybody = ask.onwards(1.0, 4, NO_LIMIT)
    assert everybody is not None
    assert (everybody.high, everybody.most) == (inf, 3)


def test_a_table_has_a_chain_over_its_minorants() -> None:
    problem = Problem(stream(60, 8.0), "llama-3.1-8b-h100-torch", slo_ttft=0.5, slo_tpot=0.03)
    found = proved(problem)
    assert found.certificate is not None, found.certificate_missing
    assert "table" in found.certificate["cost_model"]
    assert verify(problem, found.certificate) >= found.bound


def test_shared_prefixes_have_a_chain() -> None:
    instance = generate("prefix-trees", n=40, rate=300.0, seed=1)
    problem = Problem(instance, MODEL, slo_ttft=0.1, slo_tpot=0.03)
    found = proved(problem)
    assert found.certificate is not None, found.certificate_missing
    assert verify(problem, found.certificate) >= found.bound


def test_the_command_writes_a_chain_and_verify_reads_it(tmp_path: Path) -> None:
    write_instance(stream(60), tmp_path / "stream.json")
    file, proof = str(tmp_path / "stream.json"), str(tmp_path / "proof.json")
    slos = ("--slo-ttft", "1s", "--slo-tpot", "50ms", "--attainment", 0.9)
    made = invoke("capacity", file, MODEL, *slos, "--search", 0, "--policy", "fcfs",
                  "--certificate-out", proof)  # fmt: skip
    assert made.exit_code == 0, made.stderr
    # 0.9 * 60 = 54 are needed, so 53 are one too few.
    said = f"{proof}: at most 53 of 60 requests are within slo_ttft 1.0, slo_tpot 0.05 at any rate"
    assert said in made.stdout
    read = invoke("verify", file, proof, "--cost-model", MODEL)
    assert read.exit_code == 0, read.stderr
    assert "valid certificate: at most 53 of 60 requests are within" in read.stdout
    report = invoke("report", file, proof, "-o", tmp_path / "proof.html")
    assert report.exit_code == 0, report.stderr
    assert "at most 53 of 60 requests" in (tmp_path / "proof.html").read_text()

    data = json.loads(Path(proof).read_text())
    data["tree"]["from"] = "0.5"
    Path(proof).write_text(json.dumps(sealed(data)))
    one_line_error(invoke("verify", file, proof, "--cost-model", MODEL), 5)


@pytest.mark.parametrize("more", [{"fewest": True}, {"workers": 2}])
def test_what_has_no_chain_is_said_before_anything_runs(more: dict[str, Any]) -> None:
    fleet = optsched.Fleet.of(more.pop("workers", 1), MODEL)
    with pytest.raises(UsageError, match="expected one machine in seconds, and a rate"):
        proved(Problem(stream(20), fleet, slo_ttft=1.0), **more)
