"""Exported programs: rows may be added, and the solutions of solvers are read back."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import answer, invoke, one_line_error, run

from optsched import Instance, evaluate, from_starts
from optsched.files.read_write import write_instance
from optsched.problem.errors import ViolationError

COST = "llama2-7b-a100-infermax-paper"
ROUNDS = {
    # Two prefill in a round at most: the third waits, although all three fit.
    "together": Instance([0, 0, 0], [1, 1, 1], [2, 2, 2], 12),
    # Round 0 to 7, then nothing until 40: the gap is in the names.
    "gap": Instance([0, 0, 0, 40], [1, 1, 2, 1], [2, 1, 2, 2], 12),
    "late": Instance([100, 100, 101, 101], [1, 1, 1, 1], [2, 2, 1, 1], 12),
    "narrow": Instance([0, 0, 0], [2, 2, 2], [3, 2, 1], 7),
}


def model_of(path: Path) -> Any:
    """Return HiGHS with the model of a file."""
    import highspy

    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    assert highs.readModel(str(path)) == highspy.HighsStatus.kOk
    return highs


def least(instance: Instance, prefills: int) -> int:
    """Return the least total latency with so many prefills in a round at most, over all starts.

    A request starts within 12 rounds of its arrival, more than all outputs of a case here.
    """
    best = 10**9
    spans = [range(int(a), int(a) + 12) for a in instance.release_times]
    for starts in itertools.product(*spans):
        total = sum(
            k + int(o) - int(a)
            for k, o, a in zip(starts, instance.output_tokens, instance.release_times, strict=True)
        )
        if total >= best or max(map(starts.count, starts)) > prefills:
            continue
        try:
            evaluate(instance, from_starts(starts, instance))
        except ViolationError:
            continue

        best = total

    return best


@pytest.mark.parametrize("ending", ["lp", "mps"])
@pytest.mark.parametrize("name", list(ROUNDS))
@pytest.mark.parametrize("prefills", [1, 2, 9])
def test_a_row_may_be_added_to_an_exported_program(
    name: str, ending: str, prefills: int, tmp_path: Path
) -> None:
    instance, model = ROUNDS[name], tmp_path / f"model.{ending}"
    write_instance(instance, tmp_path / "i.json")
    run("export", tmp_path / "i.json", "--format", ending, "-o", model)
    highs = model_of(model)
    columns = {highs.getColName(k)[1]: k for k in range(highs.getNumCol())}
    by_round: dict[str, list[int]] = {}
    for column, k in columns.items():
        by_round.setdefault(column.split("_")[2], []).append(k)
    for places in by_round.values():
        highs.addRow(0.0, float(prefills), len(places), places, [1.0] * len(places))

    highs.run()
    found = round(highs.getInfo().objective_function_value)
    assert found == least(instance, prefills)

    highs.writeSolution(str(tmp_path / "found.sol"), 0)
    judged = answer("evaluate", tmp_path / "i.json", tmp_path / "found.sol")
    assert judged["metrics"]["tel"] == found


@pytest.mark.parametrize("style", [0, 1])
@pytest.mark.parametrize("name", list(ROUNDS))
def test_a_solution_of_highs_is_read_back(name: str, style: int, tmp_path: Path) -> None:
    write_instance(ROUNDS[name], tmp_path / "i.json")
    run("export", tmp_path / "i.json", "--format", "lp", "-o", tmp_path / "model.lp")
    highs = model_of(tmp_path / "model.lp")
    highs.run()
    highs.writeSolution(str(tmp_path / "found.sol"), style)
    judged = answer("evaluate", tmp_path / "i.json", tmp_path / "found.sol")
    assert judged["metrics"]["tel"] == least(ROUNDS[name], 9)


@pytest.mark.parametrize("name", list(ROUNDS))
def test_a_solution_of_cbc_and_a_mip_start_are_read_back(name: str, tmp_path: Path) -> None:
    import pulp

    instance, found = ROUNDS[name], tmp_path / "found.sol"
    write_instance(instance, tmp_path / "i.json")
    run("export", tmp_path / "i.json", "--format", "mps", "-o", tmp_path / "model.mps")
    words = [pulp.PULP_CBC_CMD().path, str(tmp_path / "model.mps"), "solve", "solution", str(found)]
    subprocess.run(words, check=True, capture_output=True)
    judged = answer("evaluate", tmp_path / "i.json", found)
    assert judged["metrics"]["tel"] == least(instance, 9)

    rows = [line.split() for line in found.read_text().splitlines()[1:]]
    ones = [f"{row[1]} 1\n" for row in rows if row[1].startswith("x_") and row[2] == "1"]
    (tmp_path / "start.mst").write_text("# MIP start\n" + "".join(ones))
    assert (
        answer("evaluate", tmp_path / "i.json", tmp_path / "start.mst")["metrics"]
        == (judged["metrics"])
    )


@pytest.mark.parametrize("name", ["six-tokens", "four-tokens", "two-alike"])
def test_a_solution_of_the_big_m_program_is_read_back(name: str, tmp_path: Path) -> None:
    sizes = {"six-tokens": ([3, 3], [3, 3], 6), "four-tokens": ([1, 2], [2, 1], 9)}
    prompts, outputs, held = sizes.get(name, ([3, 3], [2, 2], 8))
    file, model = tmp_path / "i.json", tmp_path / "model.lp"
    together = {"time_unit": "second", "kv_accounting": "cached", "chunked_prefill": False}
    write_instance(Instance([0.0, 0.0], prompts, outputs, held, **together), file)
    run("export", file, "--format", "lp", "--cost-model", COST, "-o", model)
    highs = model_of(model)
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.run()
    highs.writeSolution(str(tmp_path / "found.sol"), 0)
    judged = answer("evaluate", file, tmp_path / "found.sol", "--cost-model", COST)
    solved = answer("solve", file, "--cost-model", COST, "--objective", "makespan")
    assert solved["status"] == "optimal"
    assert judged["metrics"]["makespan"] == pytest.approx(solved["objective"], rel=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Infeasible - objective value 0.0\n", "'Infeasible - objective value 0.0'"),
        ("x_0_0 1\nx_1_0 1\n", "request 2: found 0 starts"),
        ("x_0_0 1\nx_0_1 1\nx_1_0 1\nx_2_0 1\n", "request 0: found 2 starts"),
        ("x_0_0 0.5\nx_0_1 0.5\n", "x_0_0: found 0.5; expected an integer"),
        ("x_7_0 1\n", "found request 7; expected 0 to 2"),
        ("x_0_0 1e\n", "x_0_0: found '1e'; expected a number"),
    ],
)
def test_a_file_that_holds_no_solution_is_refused(text: str, words: str, tmp_path: Path) -> None:
    write_instance(ROUNDS["together"], tmp_path / "i.json")
    (tmp_path / "found.sol").write_text(text)
    error = one_line_error(invoke("evaluate", tmp_path / "i.json", tmp_path / "found.sol"))
    assert words in error


def test_an_exported_file_says_what_its_names_mean(tmp_path: Path) -> None:
    write_instance(ROUNDS["gap"], tmp_path / "i.json")
    for ending, mark in (("lp", "\\"), ("mps", "*")):
        run("export", tmp_path / "i.json", "--format", ending, "-o", tmp_path / f"m.{ending}")
        lines = (tmp_path / f"m.{ending}").read_text().splitlines()
        assert lines[0].startswith(f"{mark} x_I_K = 1")
        assert "rows may be added" in lines[1]
        assert any("x_3_40" in line for line in lines)
