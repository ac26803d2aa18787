"""Commands end as elsewhere without standard streams, with warnings as errors, and so on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run

from optsched.files.outputs import file_name
from optsched.files.read_write import write_json

RUN = f"{sys.executable} -m optsched"
STRICT = f"{sys.executable} -W error -m optsched"
ASCII = "LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0"
# Lines of the shell; `{}` stands for the words of a command. `>&-` closes standard output.
ENVIRONMENTS = {
    "no output": f"{RUN} {{}} >&-",
    "no error": f"{RUN} {{}} 2>&-",
    "neither": f"{RUN} {{}} >&- 2>&-",
    "nothing open": f"{RUN} {{}} <&- >&- 2>&-",
    "warnings as errors": f"{STRICT} {{}}",
    "warnings as errors for all": f"PYTHONWARNINGS=error {RUN} {{}}",
    "no UTF-8": f"{ASCII} {RUN} {{}}",
    "no home": f"HOME=/dev/null/home {RUN} {{}}",
}
# Words and the exit status. Each runs in a folder of its own, whose files are compared.
COMMANDS = {
    "models": 0,
    "simulate tiny --policy mc-sf --json found.json --schedule-out plan.json": 0,
    "simulate nosuch --policy mc-sf --json found.json": 2,
    "export tiny --format lp -o tiny.lp": 0,
}


def shell(line: str, folder: Path, **more: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of the shell in a folder."""
    environment = {**os.environ, **more}
    return subprocess.run(
        ["sh", "-c", line], cwd=folder, env=environment, capture_output=True, timeout=300
    )


@pytest.mark.whole  # a process for each
@pytest.mark.parametrize("environment", sorted(ENVIRONMENTS))
def test_status_and_files_are_those_of_any_environment(environment: str, tmp_path: Path) -> None:
    for k, (words, status) in enumerate(COMMANDS.items()):
        usual, here = tmp_path / f"usual-{k}", tmp_path / f"here-{k}"
        usual.mkdir()
        here.mkdir()
        plain = shell(f"{RUN} {words}", usual)
        found = shell(ENVIRONMENTS[environment].format(words), here)
        assert (plain.returncode, found.returncode) == (status, status), (words, found.stderr)
        assert {one.name for one in here.iterdir()} == {one.name for one in usual.iterdir()}
        assert b"internal error" not in found.stderr


@pytest.mark.whole
def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    """Five commands read and write files of such names, and an error shows the name as it is."""
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / f"{name}.json").write_bytes((Path("instances") / "tiny.json").read_bytes())
    for words in (
        f"simulate {name}.json --policy mc-sf --json -",
        f"compare {name}.json --policy mc-sf --no-bound --schedules-out {name}.d --json {name}.out",
        f"solve {name}.json --schedule-out {name}.best",
        f"compare tiny --policy mc-sf --no-bound --json {name}.of-tiny",
        f"report {name}.of-tiny -o {name}.html",
    ):
        found = shell(f"{RUN} {words}", tmp_path)
        assert found.returncode == 0, found.stderr
    refused = shell(f"{RUN} solve no-{name}.json", tmp_path)
    assert refused.returncode == 2  # no such file
    assert b"no-caf\xe9.json: no such file" in refused.stderr
    assert (tmp_path / f"{name}.d/mc-sf.json").is_file()


# The solver's name, a script in place of its program (or none), and a word of the error.
BROKEN = {
    "a space in TMPDIR": ("PULP_CBC_CMD", None, "TMPDIR"),
    "a solver that crashes": ("GLPK_CMD", "#!/bin/sh\nexit 3\n", "GLPK_CMD"),
    "a solver without an answer": ("GLPK_CMD", "#!/bin/sh\nexit 0\n", "GLPK_CMD"),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_solver_of_pulp_that_fails_is_one_line_and_leaves_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver, script, word = BROKEN[case]
    folder = tmp_path / "t m p"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder) if script is None else None)
    if script is not None:
        (tmp_path / "glpsol").write_text(script)
        (tmp_path / "glpsol").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    two = {
        "format": "optsched-instance",
        "version": 1,
        "time_unit": "second",
        "kv_capacity": 60,
        "kv_accounting": "cached",
    }
    rows = {"arrival": [0.0, 0.0], "prompt_tokens": [20, 11], "output_tokens": [3, 2]}
    write_json({**two, "requests": rows}, tmp_path / "two.json")
    words = run(
        "solve", tmp_path / "two.json", "--cost-model", "llama2-7b-a100-infermax-paper",
        "--method", "pulp-bigm", "--objective", "makespan", "--pulp-solver", solver, status=2,
    )  # fmt: skip
    assert "error: solver: found that" in words
    assert word in words
    assert list(folder.iterdir()) == []


def test_every_policy_has_a_file_of_its_own_that_is_not_hidden() -> None:
    taken = {"best"}
    # The policy as it is written, and its file: without folders, leading dots and what is no ASCII,
    # and with a number where the name is taken, as "best" is at first.
    names = {
        "mc-sf": "mc-sf",
        "mc-sf:predictor=noisy,predictor.mae=2": "mc-sf_predictor=noisy,predictor.mae=2",
        "../x.py:Mine": "x.py_Mine",
        "/tmp/.hidden/x.py:Mine": "x.py_Mine-2",
        "./é.py:Mine": "py_Mine",
        "ü.py:Mine": "py_Mine-2",
        "best": "best-2",
        "…": "policy",
    }
    assert {words: file_name(words, taken) for words in names} == names
    assert len(file_name("x" * 300, taken)) == 100  # names are cut at 100 characters
