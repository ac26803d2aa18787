"""A KV capacity that nobody chose is told, and a cost model's machine can set it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from command_line import invoke, one_line_error

from optsched import Problem
from optsched.bounds import lower_bound
from optsched.costs.cost import BatchCost
from optsched.costs.model_file import to_toml
from optsched.costs.table import CostTable, Grid
from optsched.files.read_write import read_instance
from optsched.problem.instance import DEFAULT_KV_CAPACITY, Instance


def model(folder: Path, capacity: int | None) -> Path:
    """Write a cost model whose machine holds so many tokens, or does not say how many (None)."""
    file = folder / "machine.toml"
    cost = BatchCost("machine", 1, {"token": "0.01", "base": "1"}, kv_capacity_tokens=capacity)
    file.write_text(to_toml(cost), encoding="utf-8")
    return file


def trace(folder: Path) -> Path:
    """Write a trace of two requests."""
    file = folder / "trace.csv"
    file.write_text("arrival,prompt_tokens,output_tokens\n0,10,5\n1,20,6\n")
    return file


def test_import_says_that_the_capacity_is_a_default_and_commands_warn(tmp_path: Path) -> None:
    # The import takes 100,000 tokens; the machine of the cost model holds 467,296.
    out = tmp_path / "i.json"
    done = invoke("import", "csv", trace(tmp_path), "-o", out)
    assert "note: no KV capacity is given, so it is 100000 tokens" in done.stderr
    words = ("simulate", out, "--cost-model", model(tmp_path, 467_296), "--policy", "vllm")
    done = invoke(*words)
    assert done.exit_code == 0
    with pytest.warns(UserWarning, match=r"100000.*tokens"):
        Problem(out, words[3])  # the file of the cost model


def test_a_tabulated_model_says_so_once_and_not_for_each_of_its_minorants() -> None:
    """The model has three minorants, each a cost model with which the bound is computed."""
    grid = Grid({"tokens": [1, 4000]}, [1.0, 9.0])
    table = CostTable([grid], [{"token": "0.002"}, {"base": "1"}, {"token": "0.001"}])
    machine = BatchCost("tables", 1, {"base": "1"}, 467_296, table=table)
    instance = Instance([0.0, 1.0], [10, 20], [5, 6], DEFAULT_KV_CAPACITY, "second")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lower_bound(Problem(instance, machine))
    said = {str(one.message) for one in caught}
    assert len([words for words in said if "is the default" in words]) == 1


@pytest.mark.parametrize(
    ("held", "own", "warns"),  # KV of the instance, KV of the machine (None: it does not say)
    [
        (DEFAULT_KV_CAPACITY, 467_296, True),
        (DEFAULT_KV_CAPACITY, 54_419, True),
        (DEFAULT_KV_CAPACITY, 100_000, False),
        (DEFAULT_KV_CAPACITY, None, False),
        (4000, 467_296, False),  # somebody chose it
    ],
)
def test_only_a_default_that_is_not_the_machine_s_is_warned_of(
    tmp_path: Path, held: int, own: int | None, warns: bool
) -> None:
    instance = Instance([0.0], [1], [1], kv_capacity=held, time_unit="second")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Problem(instance, model(tmp_path, own))
    assert bool(caught) == warns
    assert all(f"holds {own};" in str(one.message) for one in caught)


@pytest.mark.parametrize(("block", "tokens"), [(1, 467_296), (100, 467_200)])
def test_import_takes_the_capacity_of_a_cost_model(tmp_path: Path, block: int, tokens: int) -> None:
    # Blocks of 100 tokens leave the last 96 of 467,296 out.
    out = tmp_path / "i.json"
    words = ("import", "csv", trace(tmp_path), "--cost-model", model(tmp_path, 467_296))
    done = invoke(*words, "--kv-block-tokens", block, "-o", out)
    assert done.exit_code == 0
    assert done.stderr == ""
    assert read_instance(out).kv_capacity == tokens
    assert "--kv-capacity: found 5 beside --cost-model" in one_line_error(
        invoke(*words, "--kv-capacity", 5)
    )
    model(tmp_path, None)
    assert "--cost-model: found no KV capacity in 'machine'" in one_line_error(invoke(*words))


def test_an_instance_for_another_machine_has_its_capacity(tmp_path: Path) -> None:
    """The machine holds 467,296 tokens, any number other than the default of 100,000."""
    # `generate` and `export` with a cost model take its KV; a second number beside it is refused.
    machine, old, new = model(tmp_path, 467_296), tmp_path / "old.json", tmp_path / "new.json"
    made = ("generate", "lognormal", "--set", "n=3", "-o", old)
    assert invoke(*made, "--cost-model", machine).exit_code == 0
    assert read_instance(old).kv_capacity == 467_296
    words = ("export", "tiny-seconds", "--format", "json", "--cost-model", machine, "-o", new)
    assert invoke(*words).exit_code == 0
    assert read_instance(new).kv_capacity == 467_296
    assert read_instance(new).n == read_instance("tiny-seconds").n
    twice = invoke(*made, "--set", "kv_capacity=9", "--cost-model", machine)
    assert "--set kv_capacity: found 9 beside --cost-model" in one_line_error(twice)
