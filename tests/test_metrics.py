"""The table of metrics, and that everything which lists metrics agrees with it.

Its numbers are of one schedule of two requests, by hand.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from typer.testing import CliRunner

from optsched import Problem
from optsched.cli import app
from optsched.files.read_write import json_schema
from optsched.judge.evaluate import evaluate
from optsched.problem.instance import Instance
from optsched.problem.metrics import COMPARED, METRICS, TABLE, Times, derive
from optsched.problem.schedule import from_starts
from optsched.show.report.gather import Section
from optsched.show.report.page import _comparison

INSTANCE = Instance([0, 2], [1, 2], [3, 1], kv_capacity=6)
OF_PREFIXES = {"moves", "move_time", "prefix_hit_tokens", "prefix_hit_rate", "peak_retained_kv"} | {
    name for name in METRICS if "session" in name or "chain" in name or "weighted" in name
}
"""What only instances with shared prefixes, sessions or weights have."""
# Request 0 runs in rounds 1 to 3, and request 1, which arrives at 2, in round 4.
EVALUATION = evaluate(Problem(INSTANCE, slo_ttft=1.0), from_starts([0, 3], INSTANCE))


def test_the_judge_derives_every_metric_in_the_order_of_the_table() -> None:
    assert tuple(TABLE) == METRICS
    assert tuple(EVALUATION.metrics) == tuple(m for m in METRICS if m not in OF_PREFIXES)
    assert None not in EVALUATION.metrics.values()


def test_whole_metrics_are_integers_and_the_others_are_not() -> None:
    # Latencies 3 and 2; TTFT 1 and 2: one of two requests meets 1 round.
    assert EVALUATION.metrics["tel"] == 5
    assert EVALUATION.metrics["slo_attainment"] == 0.5
    for name, value in EVALUATION.metrics.items():
        assert type(value) is (int if TABLE[name].is_whole(INSTANCE) else float), name


def test_what_follows_from_times_is_what_needs_nothing_else() -> None:
    latency = np.array([3, 2])  # from arrivals at 0 and 2: the last completion is at 4
    ttft, tpot = np.array([1, 2]), np.array([1.0, np.nan])
    limited = EVALUATION.instance
    times = derive(Times(limited, latency, ttft, tpot))
    known = {name for name, value in times.items() if value is not None}
    assert set(times) - known == {
        "mean_queuing_delay", "p99_queuing_delay", "mean_waiting", "peak_kv", "mean_kv", "batches",
        "evictions", "p99_gap", "max_gap",
    }  # fmt: skip
    assert {name: times[name] for name in known} == {
        name: EVALUATION.metrics[name] for name in known
    }
    # Without first tokens nothing is known of TTFT and TPOT, nor of a limit on TTFT.
    bare = derive(Times(limited, latency))
    lost = {name for name in known if bare[name] is None}
    assert lost == {name for name in METRICS if re.search("ttft|tpot|slo", name)}


def test_a_percentile_is_at_its_share_of_the_way_from_the_least_to_the_largest() -> None:
    # Latencies 0, 1, ..., 100 in some order: q of them are below q. TTFTs are three times these.
    # Three TPOTs are known, 0, 2 and 4: p99 is at place 0.99 * 2 = 1.98.
    latency = (np.arange(101) * 37) % 101
    many = Instance([0] * 101, [1] * 101, [2] * 101, kv_capacity=3)
    tpot = np.full(101, np.nan)
    tpot[:3] = 4.0, 0.0, 2.0
    found = derive(Times(many, latency, 3 * latency, tpot))
    assert {q: found[f"p{q}_latency"] for q in (50, 90, 99)} == {50: 50, 90: 90, 99: 99}
    assert {q: found[f"p{q}_ttft"] for q in (50, 90, 99)} == {50: 150, 90: 270, 99: 297}
    assert (found["p99_tpot"], found["max_tpot"]) == (pytest.approx(2 * 1.98), 4.0)


def test_times_per_token_of_requests_of_one_token_are_unknown() -> None:
    times = Times(INSTANCE, np.array([1, 1]), np.array([1, 1]), np.full(2, np.nan))
    assert derive(times)["mean_tpot"] is None


@pytest.mark.parametrize("form", ["result", "comparison"])
def test_the_schema_of_files_has_the_metrics_of_the_table(form: str) -> None:
    fields = json_schema(form)["$defs"]["MetricsFile"]["properties"]
    assert tuple(fields) == METRICS
    for name, metric in TABLE.items():
        assert fields[name].get("description", "") == metric.meaning
        kinds = {option["type"] for option in fields[name]["anyOf"]}
        assert kinds == {"integer" if metric.unit == "count" else "number", "null"}


@pytest.mark.parametrize(
    ("name", "rounds", "seconds"),
    [
        ("tel", "TEL [rounds]", "TEL [s]"),
        ("mean_tpot", "mean TPOT [rounds/token]", "mean TPOT [s/token]"),
        ("tps", "output tokens [tokens/round]", "output tokens [tokens/s]"),
        ("slo_goodput", "SLO goodput [requests/round]", "SLO goodput [requests/s]"),
        ("peak_kv", "peak KV [tokens]", "peak KV [tokens]"),
        ("evictions", "evictions", "evictions"),
    ],
)
def test_units_follow_the_unit_of_time(name: str, rounds: str, seconds: str) -> None:
    assert TABLE[name].header("round", " ") == rounds
    assert TABLE[name].header("second", " ") == seconds


def test_the_command_line_shows_words_and_units_of_the_table() -> None:
    words = ["simulate", "tiny", "--policy", "mc-sf", "--slo-ttft", "5"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    for metric in (TABLE[name] for name in METRICS if name not in OF_PREFIXES):
        unit = re.escape(metric.unit_words("round"))
        pattern = re.compile(rf"{re.escape(metric.words)}\s+[\d.]+\s*{unit}")
        assert any(pattern.fullmatch(line) for line in lines), metric.name


def test_comparisons_show_the_metrics_of_the_table_everywhere() -> None:
    """The terminal and the headers of the page have the words and units of the table."""
    shown = ("tel", *COMPARED)
    wide = CliRunner().invoke(
        app, ["compare", "tiny", "--policy", "mc-sf", "--no-bound"], env={"COLUMNS": "200"}
    )
    page = _comparison(
        Section("0" * 64, "one", instance=INSTANCE), {"file": "x", "policies": [], "verdicts": {}}
    )
    headers = [(header["text"], header["unit"]) for header in page["headers"]]
    for name in shown:
        assert TABLE[name].words in wide.stdout
        assert (TABLE[name].words, TABLE[name].unit_words("round")) in headers
