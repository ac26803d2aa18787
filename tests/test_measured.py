"""What a real server took: vLLM's benchmark files, measured times beside an instance, compare.

Most tests import BENCH, a benchmark of three requests, with changes.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import invoke, one_line_error

import optsched
from optsched.analysis.twin import first_of
from optsched.files.read_write import json_schema
from optsched.problem.errors import InputError, UsageError
from optsched.workloads.traces import read_trace_report

# Three requests that arrive at 0, 0.5 and 0.25 s. The first has 3 tokens: latency
# 0.05 + 0.02 + 0.03 = 0.1 s; the second 2: 0.07 + 0.04 = 0.11 s; the third 1: 0.06 s.
BENCH: dict[str, Any] = {
    "model_id": "m", "request_rate": 4.0, "completed": 3,
    "input_lens": [300, 500, 400], "output_lens": [3, 2, 1], "start_times": [100.0, 100.5, 100.25],
    "ttfts": [0.05, 0.07, 0.06], "itls": [[0.02, 0.03], [0.04], []], "errors": ["", "", ""],
    "generated_texts": ["a b c", "d e", "f"],
}  # fmt: skip
COST = "llama2-7b-a100-infermax"


def put(folder, data, name="bench.json"):
    """Write a text as it is, or anything else as JSON."""
    file = folder / name
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return file


def bench(folder, **changes):
    """Import BENCH with changes; `...` leaves a field out."""
    data = {k: v for k, v in {**BENCH, **changes}.items() if v is not ...}
    return read_trace_report("vllm", put(folder, data))


def test_a_name_that_a_terminal_would_obey_is_refused() -> None:
    with pytest.raises(InputError, match="name:"):
        optsched.Measured([1.0], name="x\x1b[2J")


@pytest.mark.parametrize("column", [3, None, True, 1e308, {"a": 1}, "x"])
def test_a_column_that_is_no_list_is_named(column: Any) -> None:
    with pytest.raises(InputError, match="latency:"):
        optsched.Measured(column)
    with pytest.raises(InputError, match="latency:"):
        optsched.Measured(column, errors={0: "late"})


def test_a_vllm_benchmark_gives_requests_and_their_measured_times(tmp_path):
    instance, report = bench(tmp_path)
    assert instance.arrival.tolist() == [0.0, 0.25, 0.5]  # sorted: the third came at 100.25
    assert instance.prompt_tokens.tolist() == [300, 400, 500]
    assert instance.output_tokens.tolist() == [3, 1, 2]
    assert report.measured.ttft.tolist() == [0.05, 0.06, 0.07]
    # 0.05 + 0.02 + 0.03, 0.06 alone, and 0.07 + 0.04.
    assert report.measured.latency.tolist() == pytest.approx([0.1, 0.06, 0.11], abs=1e-12)
    assert report.measured.instance_sha256 == instance.sha256
    assert report.backwards == 1


def test_a_list_of_latencies_comes_before_the_sum_of_steps(tmp_path):
    _, report = bench(tmp_path, latencies=[0.2, 0.3, 0.4])
    assert report.measured.latency.tolist() == [0.2, 0.4, 0.3]  # by arrival: the third came second


def test_failed_requests_are_dropped_with_their_times(tmp_path):
    # The second of the file fails, which had come last (500 tokens); then the third (400).
    instance, report = bench(tmp_path, output_lens=[3, 0, 1], errors=["", "timeout", ""])
    assert instance.prompt_tokens.tolist() == [300, 400]
    assert (report.dropped, report.failed, report.first_dropped_line) == (1, 1, 2)
    assert report.measured.latency.tolist() == pytest.approx([0.1, 0.06])
    instance, report = bench(tmp_path, errors=["", "", "broken"])
    assert instance.prompt_tokens.tolist() == [300, 500]


def test_a_benchmark_of_a_server_that_speculates_gives_the_drafts_accepted(tmp_path):
    # Of 2 drafts a step accepts the first in 80 %, and both in 50 %: 1 + 0.8 + 0.5 tokens a step,
    # 1.3 of them drafts. Shares of accepted drafts are at most 1 and never rise.
    rates = {"spec_decode_per_position_acceptance_rates": [0.8, 0.5]}
    lengths = {"input_lens": [300] * 3, "output_lens": [4001, 4001, 1]}
    instance, report = bench(
        tmp_path, **lengths, itls=..., errors=..., latencies=[9.0] * 3, **rates
    )
    assert instance.num_speculative_tokens == 2
    steps = np.concatenate(instance.accepted)
    # Some 8,000 / 2.3 steps of 0, 1 or 2 drafts: a standard error of 0.78 / sqrt(3480) = 0.013, of
    # which 0.05 is nearly four.
    assert steps.mean() == pytest.approx(1.3, abs=0.05)
    assert any("with 2 drafts a step, accepted as recorded" in note for note in report.notes)
    report.measured.check(instance)
    first, times = first_of(instance, report.measured, 2)
    assert (first.accepted, times.latency.tolist()) == (instance.accepted[:2], [9.0, 9.0])
    with pytest.raises(InputError, match="expected 1 falling shares"):
        bench(tmp_path, spec_decode_per_position_acceptance_rates=[1.5])


def test_a_benchmark_without_start_times_has_no_arrivals_to_compare_at(tmp_path):
    instance, report = bench(tmp_path, start_times=...)
    assert instance.arrival.tolist() == [0.0, 0.0, 0.0]
    assert report.arrivals is False
    assert report.measured is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict.fromkeys(("input_lens", "output_lens", "ttfts", "itls"), ...),
            "input_lens: found no lists of requests; expected a benchmark run with "
            "--save-result and --save-detailed (vLLM) or --output-details (SGLang), which writes",
        ),
        ({"ttfts": ...}, "expected the list ttfts; found model_id, request_rate"),
        ({"ttfts": [0.1]}, "ttfts: found 1 entries; expected 3, as many as input_lens has"),
        ({"ttfts": "no"}, "ttfts: found 'no'; expected a list"),
        ({"input_lens": 5}, "input_lens: found '5'; expected a list"),
    ],
)
def test_a_benchmark_that_lacks_something_says_what(tmp_path, changes, words):
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        bench(tmp_path, **changes)
    assert str(caught.value).startswith(str(tmp_path / "bench.json"))


@pytest.mark.parametrize("lacking", [{"ttfts", "itls"}, {"itls"}, {"ttfts"}])
@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_lengths_alone_are_enough_where_arrivals_are_drawn(tmp_path, form, lacking):
    # Without times, a benchmark can be imported with arrivals of a rate, and not without one.
    run = {**BENCH, "start_times": None, "errors": None, **dict.fromkeys(lacking)}
    file, out = tmp_path / "lens.json", tmp_path / "out.json"
    file.write_text(json.dumps({name: value for name, value in run.items() if value is not None}))
    words = ("import", form, file, "-o", out)
    assert invoke(*words, "--rate", 2).exit_code == 0
    assert optsched.read_instance(out).prompt_tokens.tolist() == BENCH["input_lens"]
    error = one_line_error(invoke(*words))
    assert "--save-detailed (vLLM) or --output-details (SGLang), which writes them" in error
    assert "--rate R" in error


def test_latencies_alone_are_enough_too(tmp_path):
    # Latencies of whole requests, with neither first tokens nor gaps between tokens.
    run = {name: BENCH[name] for name in ("input_lens", "output_lens")}
    file, out = tmp_path / "rust.json", tmp_path / "out.json"
    file.write_text(json.dumps({**run, "latencies": [0.2, 0.3, 0.4], "request_rate": "inf"}))
    measured = tmp_path / "m.json"
    assert invoke("import", "vllm", file, "-o", out, "--measured-out", measured).exit_code == 0
    assert json.loads(measured.read_text())["latency"] == [0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    ("changes", "words"),  # of BENCH; the second request is line 2
    [
        ({"ttfts": [0.1, "x", 0.1]}, "line 2: ttfts: found 'x'; expected a number of seconds"),
        ({"ttfts": [0.1, None, 0.1]}, "line 2: ttfts: found 'null'; expected a number of seconds"),
        ({"itls": [[], [-1.0], []]}, "line 2: itls: found [-1.0]; expected a list of times, each"),
        ({"itls": [[], [1.0, -1.0], []]}, "line 2: itls: found [1.0, -1.0]; expected a list of"),
        ({"itls": [[], 3, []]}, "line 2: itls: found 3; expected a list of times, each 0 or more"),
        ({"input_lens": [1, 2.5, 3]}, "line 2: input_lens: found '2.5'; expected an integer"),
        ({"output_lens": [1, True, 3]}, "line 2: output_lens: found 'true'; expected an integer"),
        ({"start_times": [0, 1e300, 3]}, "line 2: start_times: found '1e+300'; expected at most"),
        ({"latencies": [0.2, 0.01, 0.4]}, "line 2: ttft: found 0.07 s; expected at most its lat"),
        (
            {"latencies": [0.2, 0.0, 0.4], "ttfts": [0, 0, 0]},
            "line 2: latency: found a latency of 0 s; expected more than 0 and at most a day",
        ),
    ],
)
def test_a_request_with_impossible_values_is_skipped_and_named(tmp_path, changes, words):
    instance, report = bench(tmp_path, **changes)
    assert (instance.n, report.unreadable, len(report.measured.latency)) == (2, 1, 2)
    assert words in " ".join(report.notes)
    with pytest.raises(InputError, match=re.escape(words)):
        read_trace_report("vllm", tmp_path / "bench.json", strict=True)


def test_what_is_not_the_whole_trace_as_it_was_has_no_measured_times(tmp_path):
    """Options that leave requests out, change arrivals or make rounds of seconds."""
    file = put(tmp_path, BENCH)
    for options in (
        {"limit": 3}, {"offset": 1}, {"sample": 3}, {"rate": 2.0}, {"rate_scale": 2.0},
        {"round_seconds": 0.1, "kv_capacity": 600},
    ):  # fmt: skip
        assert read_trace_report("vllm", file, **options)[1].measured is None, options
    assert read_trace_report("vllm", file)[1].measured is not None


def test_measured_times_survive_a_file(tmp_path):
    _, report = bench(tmp_path)
    for measured in (report.measured, optsched.Measured([1.0, 2.5], name="mine")):
        optsched.write_measured(measured, tmp_path / "m.json.gz")
        again = optsched.read_measured(tmp_path / "m.json.gz")
        assert again.to_dict() == measured.to_dict()
    assert again.ttft is None
    data = json.loads(json.dumps(report.measured.to_dict()))
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(data, json_schema("measured"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**data, "latency": []}, json_schema("measured"))


@pytest.mark.parametrize(
    ("changes", "words"),  # of latencies of 0.2, 0.3 and 0.4 s with TTFTs of 0.1 s
    [
        ({"latency": [0.1, -1.0, 0.1]}, "latency: request 1: found -1.0"),
        ({"latency": [0.1, 0, 0.1]}, "latency: request 1: found 0; expected a time > 0"),
        ({"latency": [0.1, None, 0.1]}, "latency: request 1: found None; expected a number"),
        ({"latency": [0.2, 1771000000.5, 0.2]}, "latency: request 1: found 1771000000.5; expected"),
        ({"latency": [0.1]}, "ttft: found 3 values; expected 1, as many as latency has"),
        ({"latency": ...}, "latency: found nothing; expected this field of the format"),
        ({"ttft": [0.1, 0.5, 0.1]}, "ttft: request 1: found 0.5; expected at most its latency 0.3"),
        ({"speed": 1}, "speed: unknown field; known here are format, version, name"),
        ({"version": 2}, "version: found 2; expected 1, the version of measured files that"),
    ],
)
def test_a_malformed_file_of_measured_times_is_named(tmp_path, changes, words):
    data = {
        "format": "optsched-measured", "version": 1, "ttft": [0.1, 0.1, 0.1],
        "latency": [0.2, 0.3, 0.4], **changes,
    }  # fmt: skip
    file = put(tmp_path, {k: v for k, v in data.items() if v is not ...}, "m.json")
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        optsched.read_measured(file)
    assert str(caught.value).startswith(str(file))


def test_a_measured_server_is_a_row_with_its_metrics_and_ratios(tmp_path):
    instance, report = bench(tmp_path)
    found = optsched.compare(
        optsched.Problem(instance, COST, slo_ttft=0.065, slo_tpot=0.03),
        ["vllm"],
        measured=report.measured,
        time_limit_s=2.0,
    )
    # A row of its own, with the metrics that times alone give: of KV nothing is known.
    policy, server = found.rows
    assert (server.policy, server.measured, policy.measured) == ("measured", True, False)
    metrics = server.metrics
    # Latencies 0.1, 0.06, 0.11; TTFT 0.05, 0.06, 0.07; TPOT 0.05 / 2, none, 0.04 / 1.
    assert metrics["tel"] == pytest.approx(0.27)
    assert metrics["mean_latency"] == pytest.approx(0.09)  # 0.27 / 3
    assert metrics["mean_ttft"] == pytest.approx(0.06)  # 0.18 / 3
    assert metrics["mean_tpot"] == pytest.approx(0.0325)  # (0.025 + 0.04) / 2
    assert metrics["makespan"] == pytest.approx(0.61)  # the last arrives at 0.5, and takes 0.11
    assert metrics["tps"] == pytest.approx(6 / 0.61)  # 3 + 1 + 2 output tokens
    assert metrics["slo_attainment"] == pytest.approx(2 / 3)  # the last is late and slow
    assert metrics["peak_kv"] is None
    # Its ratios are to what is proved and to the best schedule, never to itself.
    assert server.ratio_to_bound == pytest.approx(0.27 / found.bound)
    assert server.ratio_to_best_known == pytest.approx(0.27 / found.value)
    assert found.found_by != "measured"
    entry = found.to_dict()["policies"][1]
    assert (entry["measured"], entry["metrics"]["peak_kv"]) == (True, None)


def test_a_server_is_judged_like_a_schedule_of_the_same_times():
    instance = optsched.generate("uniform", seed=3, n=30, time_unit="second", kv_capacity=200)
    evaluation = optsched.run(
        optsched.Problem(instance, COST, slo_ttft=0.5, slo_tpot=0.01), "vllm"
    ).evaluation
    measured = optsched.Measured(evaluation.latency, evaluation.ttft)
    found = optsched.compare(
        optsched.Problem(instance, COST, slo_ttft=0.5, slo_tpot=0.01),
        ["vllm"],
        measured=measured,
        bound=False,
    )
    policy, server = (row.metrics for row in found.rows)
    for name, value in server.items():
        assert value is None or value == pytest.approx(policy[name], rel=1e-9), name
    assert {name for name, value in server.items() if value is None} >= {
        "peak_kv", "mean_kv", "batches", "evictions"
    }  # fmt: skip
    assert server["slo_goodput"] == policy["slo_goodput"] is not None


def test_the_table_of_requests_is_read_back_with_its_times(tmp_path, monkeypatch):
    """What `simulate --requests-out` writes is the instance and measured times beside it."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path, BENCH)
    instance, _ = bench(tmp_path)
    optsched.write_instance(instance, "i.json")
    words = ("simulate", "i.json", "--policy", "vllm", "--cost-model", COST)
    result = invoke(*words, "--requests-out", "requests.csv")
    assert result.exit_code == 0, result.stderr
    again, report = read_trace_report("csv", "requests.csv")
    evaluation = optsched.run(optsched.Problem(instance, COST), "vllm").evaluation
    assert again.sha256 == instance.sha256
    assert report.measured.latency == pytest.approx(evaluation.latency, abs=1e-9)
    assert report.measured.ttft == pytest.approx(evaluation.ttft, abs=1e-9)


def test_a_server_that_beats_the_bound_has_another_cost_model(tmp_path):
    # Three latencies of 0.1 ms, 0.3 ms in all.
    instance, _ = bench(tmp_path)
    fast = optsched.Measured(np.full(3, 1e-4), name="fast")
    found = optsched.compare(
        optsched.Problem(instance, COST, slo_ttft=1.0), ["vllm"], measured=fast, time_limit_s=2.0
    )
    server = found.rows[1]
    assert server.ratio_to_bound < 1
    assert server.notes[-1].startswith("it beats the bound: the cost model or the KV capacity")
    assert found.value > 3e-4  # no schedule takes so little
    assert server.metrics["mean_ttft"] is None
    assert server.metrics["slo_attainment"] is None  # without times to the first token


def test_measured_times_belong_to_what_was_sent_whatever_the_server_s_settings(tmp_path):
    """KV, limits and predictions may change; arrivals, prompts and outputs may not."""
    instance, report = bench(tmp_path)
    optsched.files.measured.write_measured(report.measured, tmp_path / "m.json")
    own = optsched.files.measured.read_measured(tmp_path / "m.json")
    limits = optsched.Limits(max_running=2)
    own.check(replace(instance, kv_capacity=5000, limits=limits, predicted=[1, 1, 1]))
    for column in ("arrival", "output_tokens", "prompt_tokens"):
        with pytest.raises(InputError, match="is another instance's"):
            own.check(replace(instance, **{column: [1, 2, 4]}))

    old = replace(own, requests_sha256=None)  # a file from before there was that digest
    old.check(instance)
    with pytest.raises(InputError, match="instance_sha"):
        old.check(replace(instance, kv_capacity=5000))
    replace(old, instance_sha256=None).check(replace(instance, kv_capacity=5000))


@pytest.mark.parametrize(("factor", "told"), [(1.05, False), (3.0, True)])
def test_a_comparison_says_how_far_off_the_twin_of_the_server_is(tmp_path, factor, told):
    """The server took 1.05 or 3 times what the twin takes, which is 5 or 67 % below it; beyond
    30 % ratios are said to mean nothing."""
    instance, _ = bench(tmp_path)
    cost = optsched.load_cost_model(COST)
    took = optsched.run(optsched.Problem(instance, cost), "vllm-v1").evaluation.latency
    found = optsched.compare(
        optsched.Problem(instance, cost),
        ["vllm-v1"],
        measured=optsched.Measured(took * factor),
        bound=False,
        time_limit_s=2.0,
    )
    note = found.rows[-1].notes[-1]
    assert f"vllm-v1, has a mean latency {100 / factor - 100:+.0f} % off" in note
    assert ("the ratios say nothing about this server" in note) is told


def test_measured_times_of_another_instance_are_refused(tmp_path):
    # Four requests instead of three; two times for three requests; an instance in rounds.
    instance, report = bench(tmp_path)
    other = instance.subset([0, 1, 2, 0])
    with pytest.raises(InputError, match=r"measured:.*instance_sha"):
        optsched.compare(optsched.Problem(other, COST), ["vllm"], measured=report.measured)
    with pytest.raises(InputError, match=r"measured:.*2.*3.*'bench'"):
        optsched.compare(optsched.Problem(instance, COST), measured=optsched.Measured([1.0, 1.0]))
    with pytest.raises(UsageError, match="measured:"):
        optsched.compare(optsched.read_instance("tiny"), measured=report.measured)


def test_the_command_line_shows_a_measured_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path, BENCH)
    result = invoke("import", "vllm", "bench.json", "-o", "i.json", "--measured-out", "m.json")
    assert result.exit_code == 0, result.stderr
    words = ("compare", "i.json", "--cost-model", COST, "--policy", "vllm", "--measured", "m.json")
    result = invoke(*words, "--time-limit", "2", "--json", "c.json")
    assert result.exit_code == 0, result.stderr
    # The total latency: 0.1 + 0.11 + 0.06 s.
    assert re.search(r"^measured +measured +0\.270", result.stdout, re.MULTILINE)
    assert "measured: its ratios hold if the cost model and the KV capacity" in result.stdout
    assert json.loads(Path("c.json").read_text())["policies"][1]["measured"] is True
    # The times are of another instance than `tiny`.
    one_line_error(invoke("compare", "tiny", "--measured", "m.json"))


def test_measured_out_without_measured_times_writes_nothing(tmp_path, monkeypatch):
    # --limit leaves requests out, so that the times of the others are of another load.
    monkeypatch.chdir(tmp_path)
    put(tmp_path, BENCH)
    words = ("import", "vllm", "bench.json", "--limit", "2", "-o", "i.json")
    line = one_line_error(invoke(*words, "--measured-out", "m.json"))
    assert "--measured-out: found no measured times: found a trace changed by limit; exp" in line
    assert not Path("i.json").exists()
    assert not Path("m.json").exists()


def test_times_of_sessions_count_from_when_their_calls_were_released() -> None:
    # Call 1 is released at 1 + 2 + 0.5, call 2 when both have ended: at 3.5 + 4 + 1. Session of 3.
    agents = optsched.Instance(
        [1, None, None, 1.25], [3] * 4, [2] * 4, 100, "second",
        after=[None, 0, [0, 1], None], delay=[None, 0.5, 1, None],
    )  # fmt: skip
    times = optsched.Measured(latency=[2, 4, 3, 0.5], ttft=[1, 1, 1, 0.25])
    assert times.released(agents).tolist() == [0, 2.5, 7.5, 0.25]
    found = optsched.compare(
        optsched.Problem(agents, COST), ["fcfs"], measured=times, bound=False, time_limit_s=0
    )
    (row,) = [row for row in found.rows if row.measured]
    # The first session takes 7.5 + 3 = 10.5, the second 0.5.
    assert row.metrics["mean_session_completion"] == (10.5 + 0.5) / 2
    assert row.metrics["makespan"] == 11.5  # 1, the first arrival, + 10.5
    assert row.metrics["mean_latency"] == 9.5 / 4  # 2 + 4 + 3 + 0.5
