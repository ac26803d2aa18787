"""`splits`: intervals and verdicts of each split into prefill and decode machines."""

from __future__ import annotations

import json
import threading
from itertools import product
from pathlib import Path

import pytest
from command_line import invoke as run, one_line_error
from test_pools_bounds import LINK, MODEL, stream

from optsched import Instance, Problem, bound, splits, write_instance
from optsched.bounds.pools import verify_pools
from optsched.costs.fleet import Fleet
from optsched.files.schemas import check_shape
from optsched.problem.budget import Progress
from optsched.problem.errors import InputError, UsageError


def test_bounds_lie_below_what_is_found_and_decide_the_verdicts() -> None:
    found = splits(
        Problem(stream(), Fleet.of(3, MODEL, link=LINK), slo_ttft=0.3, slo_tpot=0.05),
        ["vllm"],
        certify=True,
    )
    # Every split of three machines has a row; percentiles have no bound.
    assert [row.pools for row in found.rows] == ["1p2d", "2p1d", "3m"]
    spread = ("p99_ttft", "p90_latency")
    assert found.metrics == ("mean_latency", "mean_ttft", "slo_goodput", *spread)
    for row, name in product(found.rows, spread):  # the best value of the policies, and no bound
        assert name in row.found.keys() - row.bounds.keys()
        assert found.verdict(row, name) == ("best" if row is found.best(name) else "possible")

    for row in found.rows:
        # Bounds hold, of times (the first two metrics) from below and of goodput from above.
        assert row.errors == []
        assert all(row.bounds[name] <= row.found[name] for name in found.metrics[:2])
        assert row.bounds["slo_goodput"] >= row.found["slo_goodput"]
        pools = Fleet.of(row.pools, MODEL, link=LINK)
        proved = verify_pools(stream(), row.certificates["mean_ttft"], pools)
        assert proved <= row.found["mean_ttft"]

    # A split is worse where its bound is above the best value found.
    best = found.best("mean_ttft")
    assert best is not None
    assert found.verdict(best, "mean_ttft") == "best"
    # A single prefill machine has more work of prefills than time: it is struck out.
    assert "1p2d" in found.worse("mean_ttft")
    for row in found.rows:
        worse = row.bounds["mean_latency"] > found.best("mean_latency").found["mean_latency"]
        assert worse == (row.pools in found.worse("mean_latency"))


def test_a_stop_keeps_the_splits_that_have_run() -> None:
    stop, seen = threading.Event(), list[str]()

    def progress(state: Progress) -> None:
        seen.append(state.doing)
        if len(seen) == 2:
            stop.set()

    found = splits(Problem(stream(), Fleet.of(4, MODEL)), [], progress=progress, stop=stop)
    assert found.interrupted
    # The mixed machines run first and are shown last; 1p3d was the first split.
    assert [row.pools for row in found.rows] == ["1p3d", "4m"]
    assert "mean_latency" in found.rows[-1].bounds


def test_the_command_writes_a_table_a_file_a_picture_and_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_instance(stream(), "stream.json")
    words = ("stream.json", "--workers", 2, "--policy", "vllm", "--cost-model", MODEL)
    shown = run(
        "splits", *words, "--link", LINK, "--json", "found.json", "--certificates-out", "proofs"
    )
    # A row per split, printed and in the file.
    assert shown.exit_code == 0, shown.stderr
    assert "1p1d" in shown.stdout
    data = json.loads(Path("found.json").read_text(encoding="utf-8"))
    check_shape("splits", data)
    assert [row["pools"] for row in data["splits"]] == ["1p1d", "2m"]
    # Pictures, and a report with one for each metric.
    assert run("plot", "found.json", "--kind", "mean_ttft", "-o", "ttft.png").exit_code == 0
    assert run("plot", "found.json", "--kind", "p99_ttft", "-o", "p99.svg").exit_code == 0
    assert run("report", "stream.json", "found.json", "-o", "found.html").exit_code == 0
    page = Path("found.html").read_text()
    assert "Splits (found.json)" in page
    assert "mean_ttft: verdict" in page
    assert page.count("<svg") >= len(data["metrics"])  # a picture for each, beside the instance's
    # A certificate that `verify` accepts, for these pools.
    check = ("verify", "stream.json", "proofs/1p1d-mean_ttft.json", "--cost-model", MODEL)
    shown = run(*check, "--pools", "1p1d", "--link", LINK)
    assert shown.exit_code == 0, shown.stderr
    assert "on pools of 1 prefill, 1 decode" in shown.stdout
    # What it is about is said by who checks, and not by the file: a slow link would prove anything.
    # Status 2 is a question without a link, and 5 a certificate of other pools.
    assert run(*check).exit_code == 2
    assert run(*check, "--pools", "1p1d", "--link", "latency=9s").exit_code == 5
    assert run(*check, "--pools", "2p1d", "--link", LINK).exit_code == 5


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--workers", 1), "workers: found 1; expected an integer from 2 to 64"),
        (("--link", "speed=1"), "link 'speed=1'"),
        (("--policy", "nope"), "policy 'nope' is unknown"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_instance(stream(), "stream.json")
    shown = run("splits", "stream.json", "--cost-model", MODEL, *more)
    assert words in one_line_error(shown, 2)


def test_the_bound_of_pools_has_a_certificate_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is above 0, no more than `vllm` reaches, and rejected (status 5) for other pools."""
    monkeypatch.chdir(tmp_path)
    write_instance(stream(), "stream.json")
    given = ("--cost-model", MODEL, "--pools", "1p1d", "--link", LINK)
    asked = ("--certificate-out", "proof.json", "--time-limit", "1", *given)
    shown = run("bound", "stream.json", *asked).stdout
    assert "on pools of 1 prefill, 1 decode" in shown
    found = run("simulate", "stream.json", "--policy", "vllm", "--json", "-", *given)
    tel = json.loads(found.stdout)["metrics"]["tel"]
    pools = Fleet.of("1p1d", MODEL, link=LINK)
    proof = json.loads(Path("proof.json").read_text())
    assert 0 < verify_pools(stream(), proof, pools) <= tel
    assert "tel" in run("verify", "stream.json", "proof.json", *given).stdout
    other = ("--pools", "2m", "--cost-model", MODEL)
    assert run("verify", "stream.json", "proof.json", *other).exit_code == 5


def test_a_bound_of_pools_without_a_certificate_says_so() -> None:
    found = bound(
        Problem(stream(), Fleet.of("1p1d", MODEL, link=LINK), "slo_attainment:slo_ttft=1"),
        time_limit_s=1,
    )
    assert found.bound is not None
    assert found.bound > 0
    assert found.certificate is None
    assert "carries" in str(found.certificate_missing)


def test_splits_refuse_rounds_and_sessions() -> None:
    with pytest.raises(InputError, match=r"'round'.*'second'"):
        splits(Problem(Instance([0, 1], [2, 2], [2, 2], kv_capacity=9), Fleet.of(8)))
    chained = Instance(
        [0.0, None], [5, 5], [2, 2], kv_capacity=100, time_unit="second", after=[[], [0]]
    )
    with pytest.raises(UsageError, match="not proved for after"):
        splits(Problem(chained, Fleet.of(8, MODEL)))
