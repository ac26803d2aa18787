"""What is certified: one list for bounds and checker, and a reason where there is nothing."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from optsched_studies import vllm_measured
from test_bounds import PAIR, PaddedInstance
from test_certificate import sealed
from test_vllm_measured import folder  # noqa: F401 (a fixture)
from typer.testing import CliRunner

from optsched import (
    BatchCost,
    Fleet,
    Instance,
    Limits,
    Problem,
    bound,
    compare,
    read_instance,
    solve,
)
from optsched.bounds import list_bounds
from optsched.bounds.base import BoundTask, features_of
from optsched.bounds.certificate import CERTIFIED, certify, verify_certificate
from optsched.bounds.checker import check_certificate
from optsched.bounds.checker.fields import (
    COST_TERMS,
    DRAFT_FIELDS,
    LESS_ROOM,
    LIMITS,
    PREFIX_FIELDS,
    READ,
    SESSION_FIELDS,
    SILENT,
    WINDOW_FIELDS,
    unknown_fields,
)
from optsched.bounds.checker.parts import Rejected
from optsched.bounds.leaves import work_leaf
from optsched.cli import app
from optsched.costs.batch import COEFFICIENTS
from optsched.files.read_write import write_instance, write_json
from optsched.problem.errors import UsageError
from optsched.problem.forecast import Forecast
from optsched.problem.metrics import METRICS, TABLE

# 1 ms per token and 10 ms per batch.
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10"})
REQUIRED = {
    "arrival": [0, 1], "prompt_tokens": [2, 2], "output_tokens": [2, 2], "kv_capacity": 16,
}  # fmt: skip
OTHER: dict[str, Any] = {
    "kv_accounting": "cached", "limits": Limits(max_batch_tokens=8, max_running=2),
    "hybrid_batching": False, "chunked_prefill": False, "predicted": [1.5, 3.0],
    "predicted_lower": [1, 1], "predicted_upper": [3, 3],
    "forecast": Forecast(every=1, offsets=[0, 2, 4], remaining=[2.0, 1.0, 2.0, 1.0]),
    "slo_ttft": [1.0, None], "slo_tpot": [1.0, None], "slo_gap": [1.0, None],
    "slo_latency": [9.0, None], "name": "a name", "id": ["a", "b"], "known": {"bound": 1},
    "kv_block_tokens": 2, "clients": 3, "weight": [1, 3],
}  # fmt: skip
"""A value other than the default for each further field of an instance."""
BOTH_ENDS = {"predicted_lower": "predicted_upper", "predicted_upper": "predicted_lower"}


def an_instance(unit: str, name: str | None = None) -> Instance:
    """An instance with a further field that differs from its default."""
    names = [] if name is None else [name, BOTH_ENDS.get(name, name)]
    return Instance(**REQUIRED, time_unit=unit, **{each: OTHER[each] for each in names})


def test_every_field_of_an_instance_and_every_term_of_a_batch_is_in_one_list() -> None:
    lists = (READ, SILENT, LESS_ROOM, PREFIX_FIELDS, SESSION_FIELDS, DRAFT_FIELDS, WINDOW_FIELDS)
    assert sorted(name for names in lists for name in names) == sorted(
        one.name for one in fields(Instance)
    )
    assert {one.name for one in fields(Limits)} == LIMITS
    assert set(COST_TERMS) <= set(COEFFICIENTS)
    # What is left is certified, and `an_instance` gives each of these fields.
    certified = {one.name for one in fields(Instance)} - PREFIX_FIELDS - SESSION_FIELDS
    certified -= DRAFT_FIELDS | WINDOW_FIELDS
    assert set(REQUIRED) | set(OTHER) | {"time_unit"} == certified


@pytest.mark.parametrize("unit", ["round", "second"])
@pytest.mark.parametrize("name", sorted(OTHER))
def test_an_instance_with_any_field_is_certified(name: str, unit: str) -> None:
    instance, cost = an_instance(unit, name), None if unit == "round" else PLAIN
    found = bound(Problem(instance, cost), time_limit_s=0.2)
    assert found.certificate_missing is None
    assert found.certificate is not None
    proved = verify_certificate(instance, found.certificate, cost)
    # A certificate holds for every schedule, also where the bound leaves some out.
    value = found.bound if found.general is None else found.general[0]
    assert proved == pytest.approx(found.certified) == pytest.approx(value, rel=1e-5)


def test_what_a_bound_allows_for_is_what_its_checker_accepts() -> None:
    for one in list_bounds().values():
        if not one.certifies:
            continue
        for name in (None, *OTHER):
            instance = an_instance(one.time_unit, name)
            lacks = one.lacks(BoundTask(instance, None if instance.in_rounds else PLAIN))
            # The ramp is not proved for blocks of KV, which its checker takes: they only leave less
            # room.
            assert (not lacks or one.name == "ramp") == (not unknown_fields(instance)), name
    # A field of a later version is refused by both, by name.
    padded = PaddedInstance(**PAIR, pad_tokens=4)
    assert "pad_tokens" in features_of(padded)
    proof = bound(Instance(**PAIR), time_limit_s=1).certificate
    assert proof is not None
    with pytest.raises(Rejected, match="pad_tokens"):
        check_certificate(padded, proof)
    seconds = PaddedInstance(**PAIR, pad_tokens=4, time_unit="second")
    with pytest.raises(UsageError, match="found pad_tokens"):
        certify(seconds, PLAIN, "tel", work_leaf())


def test_coefficients_that_are_left_out_are_0() -> None:
    instance = an_instance("second")
    made = certify(instance, PLAIN, "tel", work_leaf())
    assert made["cost_model"]["coefficients"] == {"token": "1", "base": "10"}
    # Certificates of before hold every term, and stay valid. So do those with a term of 0.
    whole = copy.deepcopy(made)
    texts = dict.fromkeys((*COST_TERMS, "decode_square"), "0")
    whole["cost_model"]["coefficients"] = texts | PLAIN.coefficients
    assert verify_certificate(instance, sealed(whole), PLAIN) == verify_certificate(
        instance, made, PLAIN
    )
    new = copy.deepcopy(made)
    new["cost_model"]["coefficients"]["decode_square"] = "0.5"
    with pytest.raises(Rejected, match="decode_square"):
        check_certificate(instance, sealed(new))
    assert "decode_square" not in COST_TERMS


def parameters(name: str) -> str:
    """Return an objective's name with the SLO that it needs, if it needs one."""
    return f"{name}:slo_ttft=1" if TABLE[name].parameters else name


FEATURES = [None, "kv_block_tokens", "slo_gap", "limits", "hybrid_batching", "chunked_prefill"]


@pytest.mark.parametrize("unit", ["round", "second"])
@pytest.mark.parametrize("name", [m for m in METRICS if "session" not in m and "chain" not in m])
def test_every_objective_is_certified_or_says_why_not(name: str, unit: str) -> None:
    for feature in FEATURES:
        instance, cost = an_instance(unit, feature), None if unit == "round" else PLAIN
        if name.startswith("weighted"):
            instance = replace(instance, weight=OTHER["weight"])
        # Prices of machine time are searched for, and other leaves are at hand.
        seconds = 0.2 if name in ("slo_attainment", "weighted_latency") else 0
        found = bound(Problem(instance, cost, parameters(name)), time_limit_s=seconds)
        certified = found.certificate is not None
        assert certified == (found.certificate_missing is None)
        assert certified == (name in CERTIFIED[unit])
        if certified:
            verify_certificate(instance, found.certificate, cost)
        else:
            assert name in found.certificate_missing
        assert found.to_dict()["certificate_missing"] == found.certificate_missing


def test_each_reason_is_named() -> None:
    """Why none: a bound that has none, nobody asked, no bound is known, or the checker cannot
    read a number; other answers say something, too."""
    rounds, seconds = an_instance("round"), an_instance("second")
    by_name = bound(rounds, method="srpt", time_limit_s=0)
    assert by_name.certificate_missing == (
        "the bound 'srpt' carries none; those that do are dual, lengths, pairs, ramp"
    )
    unasked = bound(Problem(seconds, PLAIN), time_limit_s=0, certify=False)
    assert str(unasked.certificate_missing).startswith("none was asked for: ")
    unknown = bound(Problem(seconds, PLAIN, "max_gap"), time_limit_s=0)
    assert unknown.certificate_missing == "no bound on max_gap is known"
    # The checker reads exponents of two digits.
    fine = BatchCost("fine", 1, {"token": "1", "base": "10", "decode_kv": "1e-120"})
    refused = bound(Problem(seconds, fine), time_limit_s=0).certificate_missing
    assert refused is not None
    assert refused.startswith("the checker refuses it: fine: certificate: cost_model: decode_kv: ")
    for answer in (solve(rounds), compare(rounds, ["fcfs"]), solve(Problem(rounds, Fleet.of(2)))):
        data = answer.to_dict()
        assert data["certificate"] is None
        assert data["certificate_missing"]


def test_the_command_line_and_the_report_say_why_not(tmp_path: Path) -> None:
    """The reason stands in the words, in the JSON and in the report; no certificate is written."""
    instance = an_instance("second", "name")
    file, model, proof, result = (tmp_path / name for name in ("i.json", "c.toml", "p", "r.json"))
    write_instance(instance, file)
    model.write_text(
        'format = "optsched-cost-model"\nversion = 1\nunit = "ms_per_layer"\nlayers = 1\n'
        # The checker reads exponents of two digits, and refuses 1e-120.
        '[coefficients]\ntoken = "1"\nbase = "10"\ndecode_kv = "1e-120"\n'
    )
    made = CliRunner().invoke(
        app,
        ["bound", str(file), "--cost-model", str(model), "--time-limit", "0", "--certificate-out",
         str(proof), "--json", str(result)],
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert "certificate: none, since the checker refuses it: " in made.stdout
    assert "decode_kv: found '1e-120'" in made.stdout
    assert not proof.exists()
    assert "decode_kv" in json.loads(result.read_text())["certificate_missing"]
    pytest.importorskip("jinja2")
    from optsched.show.report import write_report

    write_report([file, result], tmp_path / "report.html", cost_model=str(model))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "no certificate is at hand, since the checker refuses it" in text
    assert "any schedule on one worker" in text


def test_a_run_of_vllm_with_its_blocks_and_tables_is_certified(folder: Path) -> None:  # noqa: F811
    instance, _, cost = vllm_measured.run_of(str(folder), "rtx4090-small")
    assert instance.kv_block_tokens == 16
    assert cost.table is not None
    for objective in ("tel", "mean_ttft", "makespan"):
        found = bound(Problem(instance, cost, objective), time_limit_s=0.5)
        assert found.certificate is not None, found.certificate_missing
        # A certificate over tables may lose up to a thousandth of the bound.
        assert verify_certificate(instance, found.certificate, cost) == pytest.approx(
            found.bound, rel=1e-3
        )


def test_blocks_of_the_shipped_example_need_no_other_certificate(tmp_path: Path) -> None:
    # The optimum without blocks, 33 rounds, is a bound with them, and is proved as such.
    whole = read_instance("tiny")
    blocks = Instance(
        whole.arrival, whole.prompt_tokens, whole.output_tokens, whole.kv_capacity * 2,
        kv_accounting=whole.kv_accounting, kv_block_tokens=2,
    )  # fmt: skip
    found = bound(blocks, time_limit_s=2)
    assert found.certificate is not None
    assert verify_certificate(blocks, found.certificate) == found.certified
    file, proof = tmp_path / "blocks.json", tmp_path / "proof.json"
    write_instance(blocks, file)
    write_json(found.certificate, proof)
    checked = CliRunner().invoke(app, ["verify", str(file), str(proof)])
    assert "or more in any schedule on one worker" in checked.stdout
