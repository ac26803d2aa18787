"""Exported programs: rows may be added, and any solver finds the optimum."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from command_line import answer, run

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
    # A row for each round says that at most so many start in it. `least` tries all starts.
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


@pytest.mark.parametrize("name", ["six-tokens", "four-tokens", "two-alike"])
def test_the_exported_big_m_program_has_the_optimum_of_the_csp(name: str, tmp_path: Path) -> None:
    # Prompts, outputs and M: two peaks of 3 + 3 - 1 = 5 do not fit in 6; two of 2 fit in 9, and two
    # alike of 3 + 2 - 1 = 4 in 8.
    sizes = {"six-tokens": ([3, 3], [3, 3], 6), "four-tokens": ([1, 2], [2, 1], 9)}
    prompts, outputs, held = sizes.get(name, ([3, 3], [2, 2], 8))
    file, model = tmp_path / "i.json", tmp_path / "model.lp"
    together = {"time_unit": "second", "kv_accounting": "cached", "chunked_prefill": False}
    write_instance(Instance([0.0, 0.0], prompts, outputs, held, **together), file)
    run("export", file, "--format", "lp", "--cost-model", COST, "-o", model)
    highs = model_of(model)
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.run()
    solved = answer("solve", file, "--cost-model", COST, "--objective", "makespan")
    assert solved["status"] == "optimal"
    found_ms = highs.getInfo().objective_function_value
    assert found_ms == pytest.approx(1000 * solved["objective"], rel=1e-6)


def test_an_exported_file_says_what_its_names_mean(tmp_path: Path) -> None:
    write_instance(ROUNDS["gap"], tmp_path / "i.json")
    for ending, mark in (("lp", "\\"), ("mps", "*")):
        run("export", tmp_path / "i.json", "--format", ending, "-o", tmp_path / f"m.{ending}")
        lines = (tmp_path / f"m.{ending}").read_text().splitlines()
        assert lines[0].startswith(f"{mark} x_I_K = 1")
        assert "rows may be added" in lines[1]
        assert any("x_3_40" in line for line in lines)  # request 3 starts in round 40
