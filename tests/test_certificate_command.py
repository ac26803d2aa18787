"""Every promise of docs/howto/certificate.md as a command: what is certified, and the reasons else.

Each case is written by `bound --certificate-out` and accepted by `verify`; one more than its value,
sealed anew, is refused, and so is the file for another instance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, one_line_error, run
from test_certificate import sealed

from optsched import Instance
from optsched.files.read_write import write_instance

LINEAR = "llama2-7b-a100-infermax"
TABLED = """
format = "optsched-cost-model"
version = 1
unit = "ms_per_layer"
layers = 1
[coefficients]
base = 1.0
[[table.minorants]]
base = 0.3
token = 0.01
[[table.minorants]]
token = 0.05
[[table.grids]]
axes = { tokens = [0.0, 4.0, 8.0] }
values = [1.0, 1.2, 3.0]
"""
PLAIN: dict[str, Any] = {
    "arrival": [0.0, 0.001, 0.05], "prompt_tokens": [4, 3, 6], "output_tokens": [2, 2, 3],
}  # fmt: skip
PREFIXED = PLAIN | {
    "prefix_parent": [None, 0, 0], "prefix_tokens": [0, 2, 4], "prefix_block_tokens": 2,
}  # fmt: skip
SESSIONS = PLAIN | {
    "arrival": [0, None, 0], "after": [None, 0, None], "delay": [None, 1, None],
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": PLAIN, "blocks": PLAIN | {"kv_block_tokens": 4}, "prefixed": PREFIXED,
    "sessions": SESSIONS,
    "both": SESSIONS | {k: v for k, v in PREFIXED.items() if "prefix" in k},
}  # fmt: skip
CASES = [
    # (unit, kind, cost model, method, objective, further words)
    ("round", "plain", None, "dual", "tel", ""),
    ("round", "plain", None, "ramp", "tel", ""),
    ("round", "blocks", None, "auto", "tel", ""),
    ("round", "sessions", None, "sessions", "tel", ""),
    ("round", "both", None, "auto", "session_completion", ""),
    ("round", "sessions", None, "auto", "mean_session_completion", ""),
    ("second", "plain", LINEAR, "auto", "tel", ""),
    ("second", "plain", LINEAR, "work", "tel", ""),
    ("second", "plain", LINEAR, "busy-time", "tel", ""),
    ("second", "plain", LINEAR, "classes", "tel", ""),
    ("second", "plain", LINEAR, "shares", "tel", ""),
    ("second", "plain", LINEAR, "clock", "tel", ""),
    ("second", "plain", LINEAR, "pieces", "tel", ""),
    ("second", "blocks", LINEAR, "auto", "mean_ttft", ""),
    ("second", "blocks", LINEAR, "auto", "makespan", ""),
    ("second", "plain", "tabled", "classes", "tel", ""),
    ("second", "blocks", "tabled", "classes", "tel", ""),
    ("second", "plain", "tabled", "auto", "tel", ""),
    ("second", "plain", "tabled", "work", "tel", ""),
    ("second", "plain", "tabled", "shares", "tel", ""),
    ("second", "plain", "tabled", "auto", "mean_ttft", ""),
    ("second", "plain", "tabled", "auto", "makespan", ""),
    ("second", "prefixed", LINEAR, "work", "tel", ""),
    ("second", "prefixed", LINEAR, "busy-time", "tel", ""),
    ("second", "prefixed", LINEAR, "shares", "tel", ""),
    ("second", "prefixed", LINEAR, "pieces", "tel", ""),
    ("second", "prefixed", LINEAR, "auto", "mean_ttft", ""),
    ("second", "prefixed", LINEAR, "auto", "makespan", ""),
    ("second", "prefixed", "tabled", "auto", "tel", ""),
    ("second", "sessions", LINEAR, "auto", "session_completion", ""),
    ("second", "sessions", LINEAR, "auto", "mean_session_completion", ""),
    ("second", "both", LINEAR, "auto", "tel", ""),
    ("second", "sessions", "tabled", "auto", "tel", ""),
    ("second", "sessions", "tabled", "auto", "makespan", ""),
    ("second", "plain", LINEAR, "auto", "tel", "--pools 2p1d"),
    ("second", "plain", LINEAR, "auto", "mean_ttft", "--pools 2p1d --link latency=1ms"),
    ("second", "plain", LINEAR, "auto", "tel", "--pools 2m"),
    ("second", "plain", "tabled", "auto", "tel", "--pools 1p1d"),
    ("second", "sessions", LINEAR, "auto", "session_completion", "--pools 2m"),
]


def written(folder: Path, unit: str, kind: str, cost: str | None = None) -> list[str]:
    """Write an instance and its cost model, and return the words that name both."""
    columns = dict(KINDS[kind])
    if unit == "round":  # the same columns, with arrivals in whole rounds
        columns["arrival"] = [x and int(100 * x) for x in columns["arrival"]]

    instance = Instance(**columns, kv_capacity=100, kv_accounting="cached", time_unit=unit)
    write_instance(instance, folder / "instance.json")
    (folder / "tabled.toml").write_text(TABLED)
    model = str(folder / "tabled.toml") if cost == "tabled" else cost
    return [str(folder / "instance.json"), *([] if model is None else ["--cost-model", model])]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:5])) + case[5])
def test_what_the_page_promises_is_written_accepted_and_not_believed_changed(
    case: tuple[Any, ...], tmp_path: Path
) -> None:
    unit, kind, cost, method, objective, more = case
    file, *priced = written(tmp_path, unit, kind, cost)
    proof, on = tmp_path / "proof.json", [*priced, *more.split()]
    limit = 30 if method == "classes" else 1  # which ends much sooner
    asked = ["--method", method, "--objective", objective, "--time-limit", limit]
    said = run("bound", file, *on, *asked, "--certificate-out", proof)
    assert f"{proof}: certificate of " in said
    assert "valid certificate" in run("verify", file, proof, *on)

    found = json.loads(proof.read_text())
    if method == "classes" and cost == "tabled":
        assert list(found["cost_model"]) == ["layers", "table"]
    # One more than the value is not proved, nor is anything of another objective.
    for wrong in ({**found, "value": found["value"] + 1}, {**found, "objective": "max_gap"}):
        proof.write_text(json.dumps(sealed(wrong)))
        one_line_error(invoke("verify", file, proof, *on), 5)
    proof.write_text(json.dumps(found))
    # Another instance takes the place of the file, and the certificate is not of that one.
    written(tmp_path, unit, "blocks" if kind != "blocks" else "plain")
    one_line_error(invoke("verify", file, proof, *on), 5)


@pytest.mark.parametrize("objective", ["tel", "makespan", "mean_ttft"])
def test_solve_writes_a_certificate_of_an_optimum_in_seconds(
    objective: str, tmp_path: Path
) -> None:
    """`solve` writes it by the method that proves it, `verify` takes it, and refuses one tick
    more."""
    columns = PLAIN | {"arrival": [0.0, 0.0, 0.0], "output_tokens": [9, 2, 3]}
    instance = Instance(
        **columns, kv_capacity=14, kv_accounting="cached", time_unit="second", chunked_prefill=False
    )
    file, proof = tmp_path / "instance.json", tmp_path / "proof.json"
    write_instance(instance, file)
    on = [file, "--cost-model", LINEAR]
    said = run("solve", *on, "--objective", objective, "--certificate-out", proof)
    assert "optimal: " in said
    assert f"{proof}: certificate of " in said
    assert "valid certificate" in run("verify", *on[:1], proof, *on[1:])
    found = json.loads(proof.read_text())
    known = ("work", "labels") if objective == "makespan" else ("labels",)
    assert found["tree"]["relaxation"] in known
    proof.write_text(json.dumps(sealed({**found, "value": found["value"] + 1})))
    one_line_error(invoke("verify", *on[:1], proof, *on[1:]), 5)


@pytest.mark.parametrize(
    ("unit", "words", "reason"),
    [
        ("round", "--method srpt", "found the bound 'srpt', which has no certificate"),
        ("second", "--objective p99_latency", "found the objective p99_latency in seconds"),
        ("second", "--objective slo_goodput --slo-ttft 1", "found the objective slo_goodput"),
    ],
)
def test_what_has_no_certificate_is_refused_with_the_reason(
    unit: str, words: str, reason: str, tmp_path: Path
) -> None:
    file, *priced = written(tmp_path, unit, "plain", None if unit == "round" else LINEAR)
    asked = [*words.split(), "--certificate-out", str(tmp_path / "proof.json")]
    assert reason in one_line_error(invoke("bound", file, *priced, *asked))


def test_a_bound_whose_time_was_too_short_for_a_certificate_says_so(tmp_path: Path) -> None:
    file, *priced = written(tmp_path, "second", "plain", "tabled")
    proof = tmp_path / "proof.json"
    asked = ["--method", "classes", "--time-limit", 0, "--certificate-out", proof]
    said = run("bound", file, *priced, *asked)
    assert "certificate: none, since the bound 'classes' found none in its time" in said
    assert not proof.exists()


def test_where_the_best_proof_is_refused_the_next_one_is_written(tmp_path: Path) -> None:
    # One minorant has a coefficient of three digits in its exponent, which the checker does not
    # read, and is far below 1e-9 of any time; its base is the larger one, so its bounds are better.
    file, *priced = written(tmp_path, "second", "plain", "tabled")
    text = TABLED.replace("base = 0.3\n", "base = 0.3\ndecode_kv = 1e-120\n")
    (tmp_path / "tabled.toml").write_text(text)
    proof = tmp_path / "proof.json"
    said = run("bound", file, *priced, "--time-limit", 0, "--certificate-out", proof)
    assert f"{proof}: certificate of " in said
    assert json.loads(proof.read_text())["cost_model"]["coefficients"] == {"token": "0.05"}
    assert "valid certificate" in run("verify", file, proof, *priced)
