"""Experiments survive kills, crashes, full disks and lost workers."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import survival
from survival import SURVIVAL

from optsched.cli import app
from optsched.experiments import experiments, load
from optsched.experiments.results import Outcome
from optsched.experiments.runner import run_experiment
from optsched.experiments.store import code_version, counted_files, version_of
from optsched.problem.errors import InputError, OptschedError, UsageError
from optsched.problem.processes import memory_bytes
from optsched.problem.progress import LiveLine

SCRIPT = str(Path(survival.__file__))
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the log of executions, which this process's children write too."""
    monkeypatch.setenv(survival.LOG, str(tmp_path / "log"))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path / "log"


def go(folder: Path | None = None, **settings: Any) -> Outcome:
    """Run the experiment in processes of its own, with options and parameters as they come."""
    names = ("jobs", "engine", "scheduler", "resume", "retry_failed", "trials")
    options = {name: settings.pop(name) for name in names if name in settings}
    return run_experiment(SURVIVAL, settings, isolate=True, out=folder, **options)


def same(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same results, bit for bit."""
    names = ("results.csv", "summary.json")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@contextmanager
def refused(words: str, kind: type[OptschedError] = InputError) -> Iterator[None]:
    """Check that what follows is refused in one line."""
    with pytest.raises(kind, match=words) as caught:
        yield
    assert "\n" not in str(caught.value)


def starts(log: Path) -> list[int]:
    """Return the trials that were started, in order."""
    return [int(line.split()[1]) for line in log.read_text().splitlines() if "start" in line]


def durable(folder: Path, copy: Path) -> set[int]:
    """Return the trials that a store holds, asked of a copy: looking must not repair it."""
    if not (folder / "results.sqlite").exists():
        return set()
    shutil.copytree(folder, copy)
    connection = sqlite3.connect(copy / "results.sqlite")
    tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'trials'")
    rows = connection.execute("SELECT trial FROM trials") if tables.fetchone()[0] else []
    found = {row[0] for row in rows}
    connection.close()
    return found


def start(folder: Path, *pairs: str, **options: Any) -> subprocess.Popen[str]:
    """Run the experiment as a script in a process of its own."""
    words = [sys.executable, SCRIPT, str(folder), *pairs]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)


def wait_for(process: subprocess.Popen[str], done: int) -> None:
    """Wait until a process has said that so many trials are stored."""
    assert process.stdout is not None
    for line in process.stdout:
        if int(line.split()[0]) >= done:
            return


def survive(tmp_path: Path, log: Path, size: int, kills: int, seed: int) -> None:
    """Kill a run so many times, go on, and compare with a run that nobody killed."""
    draw = random.Random(seed)
    how = f"{size - 1}:gate"  # the last trial waits, so every kill hits a run with work left
    survival.gate().touch()
    go(tmp_path / "whole", size=size, how=how)
    survival.gate().unlink()
    log.unlink()
    folder = tmp_path / "parts"
    promises = []
    allowed = 0
    left = size
    for k in range(kills):
        jobs = draw.choice((1, 2))
        allowed += jobs
        have = len(promises[-1][1]) if promises else 0
        process = start(folder, f"size={size}", f"how={how}", f"jobs={jobs}")
        if k % 5:  # else at any moment of the start
            more = draw.randint(0, max(1, left // (kills - k + 1)))
            wait_for(process, min(have + more, size - 1))
            time.sleep(draw.random() * 0.02)
        else:
            time.sleep(draw.random() * 1.5)
        process.kill()
        process.communicate()
        stored = durable(folder, tmp_path / f"copy-{k}")
        promises.append((len(starts(log)) if log.exists() else 0, stored))
        left = size - len(stored)
        assert left > 0
    survival.gate().touch()
    process = start(folder, f"size={size}", f"how={how}")
    process.communicate()
    assert process.returncode == 0
    ran = starts(log)
    # What was stored at a kill never starts again; what a kill cut short starts once more, and
    # that is one trial for each job.
    for before, stored in promises:
        assert stored.isdisjoint(ran[before:])
    assert set(ran) == set(range(size))
    assert len(ran) <= size + allowed
    assert same(folder, tmp_path / "whole")
    ends = Counter(line for line in log.read_text().splitlines() if line.startswith("end"))
    twice = sum(ends.values()) - size
    print(f"{kills} kills: {len(ran)} starts of {size} trials, {twice} killed between end and disk")


def test_kill_9_at_any_moment_changes_nothing_and_repeats_nothing(
    tmp_path: Path, log: Path
) -> None:
    survive(tmp_path, log, size=40, kills=5, seed=1)


@pytest.mark.slow
def test_fifty_kills_of_200_trials(tmp_path: Path, log: Path) -> None:
    survive(tmp_path, log, size=200, kills=50, seed=2)


def test_the_processes_of_a_killed_experiment_end_with_it(tmp_path: Path, log: Path) -> None:
    # Trial 0 waits for ten minutes, in compiled code for all that its process can tell.
    process = start(tmp_path / "out", "size=2", "how=0:wait", "jobs=2")
    wait_for(process, 1)
    task = Path(f"/proc/{process.pid}/task")
    if not task.exists():
        process.kill()
        pytest.skip("no /proc")
    children = [int(p) for t in task.iterdir() for p in (t / "children").read_text().split()]
    assert len(children) == 2
    process.kill()
    process.communicate()
    for child in children:
        while (state := stat(child)) not in ("", "Z"):
            assert state in "RSDI"
            time.sleep(0.01)


def stat(process: int) -> str:
    """Return the state of a process, "" where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def test_a_crash_costs_one_trial(tmp_path: Path, log: Path) -> None:
    """Of five trials 1 aborts, 2 ends with status 7 and 3 raises an error, as `how` says."""
    folder, how = tmp_path / "out", "1:abort,2:exit,3:raise"
    outcome = go(folder, size=5, how=how, jobs=2)
    why = [
        None,
        "its process was ended by SIGABRT, 2 times",
        "its process ended with status 7, 2 times",
        "RuntimeError: the solver fell over",
        None,
    ]
    assert [row["failed"] for row in outcome.rows] == why
    assert [row.get("tel") is None for row in outcome.rows] == [bool(words) for words in why]
    lines = (folder / "results.csv").read_text().splitlines()
    assert lines[0].endswith(",tel,share,failed")
    assert [(words or ",,")[:9] in line for words, line in zip(why, lines[1:], strict=True)] == (
        [False, True, True, True, False]
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["failed"] == [{"trial": k, "why": why[k]} for k in (1, 2, 3)]
    assert "failed" in summary["columns"]
    # They have finished, so they do not run again unless asked for.
    count = len(starts(log))
    assert count == 5 + 2  # an exception is tried once, an end of the process twice
    assert go(folder, size=5, how=how).ran == 0
    assert len(starts(log)) == count
    assert go(folder, size=5, how=how, retry_failed=True).ran == 3
    assert starts(log)[count:] == [1, 1, 2, 2, 3]


def test_a_trial_whose_process_is_killed_from_outside_runs_again(tmp_path: Path, log: Path) -> None:
    """Trial 1 is killed when it runs for the first time, as `how` says."""
    outcome = go(size=3, how="1:once")
    assert [row["failed"] for row in outcome.rows] == [None] * 3
    assert starts(log) == [0, 1, 1, 2]
    same = run_experiment(SURVIVAL, {"size": 3}).rows
    assert [row["tel"] for row in outcome.rows] == [row["tel"] for row in same]


def test_jobs_do_not_change_results(tmp_path: Path, log: Path) -> None:
    """In this process and in two others; besides results there is the wall time."""
    here = run_experiment(SURVIVAL, {"size": 6}, out=tmp_path / "here")
    go(tmp_path / "two", size=6, jobs=2)
    assert same(tmp_path / "here", tmp_path / "two")
    table = load(tmp_path / "two")
    assert table["tel"].tolist() == [row["tel"] for row in here.rows]
    assert list(table) == [*here.rows[0], "wall_s"]
    assert table["failed"].isna().all()


def test_a_folder_can_be_read_while_trials_go_on(tmp_path: Path, log: Path) -> None:
    seen: list[int] = []

    def look(done: int, of: int) -> None:
        if done:
            seen.append(len(load(tmp_path / "out")))

    run_experiment(SURVIVAL, {"size": 3}, out=tmp_path / "out", progress=look)
    assert seen == [1, 2, 3]


# Dask


needs_dask = pytest.mark.skipif(find_spec("distributed") is None, reason="no dask[distributed]")


@needs_dask
def test_a_dask_cluster_of_its_own_gives_the_same_results(tmp_path: Path, log: Path) -> None:
    go(tmp_path / "here", size=8, how="3:abort")
    go(tmp_path / "dask", size=8, how="3:abort", engine="dask", jobs=1)
    assert same(tmp_path / "here", tmp_path / "dask")


@pytest.fixture
def cluster(log: Path) -> Iterator[Any]:
    """Yield a Dask cluster of two workers."""

    import distributed

    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
    ) as cluster:
        yield cluster


@pytest.mark.slow
@needs_dask
def test_a_killed_dask_worker_costs_nothing(tmp_path: Path, log: Path, cluster: Any) -> None:
    """The two workers are killed after 3 and after 6 of 12 trials."""
    whole = run_experiment(SURVIVAL, {"size": 12, "nap": 0.05}, out=tmp_path / "whole")
    killed = []

    def kill(done: int, of: int) -> None:
        if done in (3, 6):
            worker = cluster.workers[done // 3 - 1]
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    run_experiment(
        SURVIVAL, {"size": 12, "nap": 0.05}, out=tmp_path / "dask", engine="dask",
        scheduler=cluster.scheduler_address, progress=kill,
    )  # fmt: skip
    assert len(killed) == 2
    assert whole.rows[11]["failed"] is None
    assert same(tmp_path / "whole", tmp_path / "dask")


@needs_dask
def test_a_trial_that_takes_its_dask_worker_with_it_has_failed(log: Path) -> None:
    import dask
    import distributed  # noqa: F401 - or its defaults would go with what is set here

    # Dask gives up after as many lost workers as it is told, here the first.
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        outcome = go(size=2, how="1:orphan", engine="dask", jobs=1)
    why = "the Dask workers that ran it died"
    assert [row["failed"] for row in outcome.rows] in ([None, why], [why, why])


@needs_dask
def test_a_lost_dask_scheduler_is_one_line_and_loses_nothing(
    tmp_path: Path, log: Path, cluster: Any
) -> None:
    """The cluster is closed after two of eight trials."""

    def close(done: int, of: int) -> None:
        if done == 2:
            cluster.close()

    with refused("the cluster has failed"):
        run_experiment(
            SURVIVAL, {"size": 8, "nap": 0.05}, out=tmp_path, engine="dask",
            scheduler=cluster.scheduler_address, progress=close,
        )  # fmt: skip
    assert go(tmp_path, size=8, nap=0.05).resumed >= 2


@needs_dask
def test_no_dask_scheduler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optsched.experiments.engines._CONNECT_S", 0.5)
    with refused("found no Dask scheduler at", UsageError):
        go(size=2, engine="dask", scheduler="tcp://127.0.0.1:9")


# A full disk


def test_a_disk_quota_is_one_line_and_the_rest_runs_when_there_is_space(
    tmp_path: Path, log: Path
) -> None:
    # Files of this process may not grow beyond 64 KiB: the store's log needs more for 60
    # trials. Its children write nothing.
    go(tmp_path / "whole", size=60)
    text = (
        "import resource, survival\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        f"survival.main({str(tmp_path / 'out')!r}, 'size=60')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", text], cwd=Path(SCRIPT).parent, capture_output=True, text=True
    )
    last = result.stderr.strip().splitlines()[-1]
    assert "InputError" in last
    assert "the same command goes on once the disk has space" in last
    rest = go(tmp_path / "out", size=60)
    assert 0 < rest.resumed < 60
    assert same(tmp_path / "whole", tmp_path / "out")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with room for 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("no right to mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_line_and_the_rest_runs_when_there_is_space(
    small_disk: Path, tmp_path: Path, log: Path
) -> None:
    """A disk of 1 MB is filled up when 10 of 30 trials have run, and freed again."""
    go(tmp_path / "whole", size=30)
    filler = small_disk / "filler"

    def fill(done: int, of: int) -> None:
        if done == 10:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(b"x" * 4096)

    with refused("goes on once the disk has space"):
        run_experiment(SURVIVAL, {"size": 30}, out=small_disk / "out", progress=fill)
    with refused(r"no space|the disk has space"):
        go(small_disk / "new", size=2)
    filler.unlink()
    assert 10 <= go(small_disk / "out", size=30).resumed < 30
    assert same(tmp_path / "whole", small_disk / "out")


# Bad input


def test_a_folder_belongs_to_one_experiment_its_parameters_and_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_experiment(SURVIVAL, {"size": 2}, out=tmp_path)
    with refused(r"found trials with size = 2; expected 3 \(use another --out"):
        run_experiment(SURVIVAL, {"size": 3}, out=tmp_path)
    with refused("found trials with seed = 0; expected 5"):
        run_experiment(SURVIVAL, {"size": 2}, out=tmp_path, seed=5)
    with refused("found trials of survival; expected other"):
        run_experiment(replace(SURVIVAL, name="other"), {"size": 2}, out=tmp_path)
    monkeypatch.setattr("optsched.experiments.runner.code_version", lambda: "0.2.0+abc")
    with refused(rf"of optsched {re.escape(code_version())}; expected 0\.2\.0\+abc \(use that"):
        run_experiment(SURVIVAL, {"size": 2}, out=tmp_path)
    # Nothing was lost by asking; --fresh forgets it all.
    assert run_experiment(SURVIVAL, {"size": 2}, out=tmp_path, resume=False).ran == 2
    monkeypatch.undo()
    with refused("found trials of optsched"):
        run_experiment(SURVIVAL, {"size": 2}, out=tmp_path)
    assert run_experiment(SURVIVAL, {"size": 3}, out=tmp_path, resume=False).ran == 3


def test_code_that_no_trial_runs_may_change(tmp_path: Path) -> None:
    """The version of the code is one of `counted_files`: what trials run and read."""
    files = counted_files()
    for name in (
        "judge/evaluate.py",
        "costs/devices.toml",
        "workloads/generators.toml",
        "studies/parts.py",
        "models/llama2-70b-tp2-a100-derived.toml",
    ):
        assert files[name].is_file()
    assert any(name.startswith("instances/") for name in files)
    assert not any(name.startswith(("cli/", "show/")) for name in files)
    assert version_of(files) == code_version()
    for name in ("judge/evaluate.py", "costs/devices.toml"):
        changed = tmp_path / Path(name).name
        changed.write_bytes(files[name].read_bytes() + b"\n")
        assert version_of({**files, name: changed}) != code_version()
    assert version_of({k: v for k, v in files.items() if "judge" not in k}) != code_version()


def test_trials_that_are_other_ones_now_are_refused(tmp_path: Path) -> None:
    run_experiment(SURVIVAL, {"size": 2}, out=tmp_path)
    other = replace(SURVIVAL, trials=lambda p, s: ({**t, "nap": 1} for t in survival.trials(p, s)))
    with refused("found trial 0 stored with other contents"):
        run_experiment(other, {"size": 2}, out=tmp_path)


def test_a_store_in_use_is_refused_at_once(tmp_path: Path, log: Path) -> None:
    """Trial 1 waits, so that the first process keeps the store."""
    process = start(tmp_path / "out", "size=2", "how=1:wait")
    try:
        wait_for(process, 1)
        with refused(r"results\.lock: another process is using it; wait"):
            go(tmp_path / "out", size=2, how="1:wait")
        assert len(load(tmp_path / "out")) == 1
    finally:
        process.kill()
        process.communicate()
    assert len(load(tmp_path / "out")) == 1


def test_a_store_that_another_program_keeps_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another connection has the file's lock, for which 0.2 s are waited."""
    run_experiment(SURVIVAL, {"size": 1}, out=tmp_path)
    monkeypatch.setattr("optsched.experiments.store._BUSY_S", 0.2)
    other = sqlite3.connect(tmp_path / "results.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with refused(r"results\.sqlite: another process is using it"):
        run_experiment(SURVIVAL, {"size": 1}, out=tmp_path)
    other.close()
    assert run_experiment(SURVIVAL, {"size": 1}, out=tmp_path).resumed == 1


def test_files_that_are_no_stores_are_refused_in_one_line(tmp_path: Path) -> None:
    def no_store(words: str, folder: Path) -> None:
        with refused(words):
            run_experiment(SURVIVAL, {"size": 1}, out=folder)
        with refused(words):
            load(folder)

    def database(name: str, *statements: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        with sqlite3.connect(folder / "results.sqlite") as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()
        return folder

    no_store("another program's database", database("theirs", "CREATE TABLE t (a)"))
    no_store("another program's database", database("named", "PRAGMA application_id=7"))
    run_experiment(SURVIVAL, {"size": 1}, out=tmp_path / "next")
    with sqlite3.connect(tmp_path / "next" / "results.sqlite") as connection:
        connection.execute("PRAGMA user_version=2")
    connection.close()
    no_store("a store of version 2; expected version 1", tmp_path / "next")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "results.sqlite").write_text("no database, but long enough " * 99)
    no_store("found no SQLite database", tmp_path / "text")
    run_experiment(SURVIVAL, {"size": 60}, out=tmp_path / "damaged")
    file = tmp_path / "damaged" / "results.sqlite"
    content = file.read_bytes()
    # Of pages of 4,096 bytes the second and third are zeroed; then the file ends within the second.
    assert len(content) > 12288
    file.write_bytes(content[:4096] + bytes(8192) + content[12288:])
    no_store("found damage", tmp_path / "damaged")
    file.write_bytes(content[:5000])
    no_store("found damage", tmp_path / "damaged")


def test_folders_that_cannot_be_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with refused("file: found a file; expected a folder"):
        run_experiment(SURVIVAL, {"size": 1}, out=tmp_path / "file")
    with refused("file/below: cannot be written: not a directory"):
        run_experiment(SURVIVAL, {"size": 1}, out=tmp_path / "file" / "below")
    with refused("expected the folder of an experiment"):
        load(tmp_path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with refused("cannot be written"):
        run_experiment(SURVIVAL, {"size": 1}, out=tmp_path / "closed")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"jobs": 2000}, "jobs: found 2000; expected 1 to 1024"),
        ({"scheduler": "tcp://here:1"}, "with the engine local; expected the engine dask"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], words: str) -> None:
    with refused(words, OptschedError):
        go(size=1, **options)


def test_functions_of_a_script_run_only_in_it() -> None:
    def run(trial: dict[str, Any]) -> dict[str, Any]:
        return {}

    run.__module__ = "__main__"
    with refused("expected it in a module that other processes can import", UsageError):
        run_experiment(replace(SURVIVAL, run=run), {"size": 1}, jobs=2)
    assert run_experiment(replace(SURVIVAL, run=run), {"size": 1}).ran == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_functions_that_cannot_be_pickled_run_only_here(tmp_path: Path, jobs: int) -> None:
    inner = replace(SURVIVAL, run=lambda trial: {"tel": 1})
    with refused("cannot be pickled .*expected one at the top level of a module", UsageError):
        run_experiment(inner, {"size": 1}, jobs=jobs, isolate=True, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()  # and no failed trials are stored
    assert run_experiment(inner, {"size": 1}).rows[0]["tel"] == 1


def test_a_script_needs_no_guard_against_being_imported(tmp_path: Path, log: Path) -> None:
    """The script starts two processes and has no line that asks for its own name."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import survival\nsurvival.main({str(tmp_path / 'out')!r}, 'size=2', 'jobs=2')"
    )
    place = os.pathsep.join((str(Path(SCRIPT).parent), os.environ["PYTHONPATH"]))
    environment = {**os.environ, "PYTHONPATH": place}
    subprocess.run([sys.executable, script], env=environment, check=True)
    assert sorted(starts(log)) == [0, 1]
    assert len(load(tmp_path / "out")) == 2


def test_amounts_of_memory() -> None:
    # 4 GiB = 4 x 1024^3, 0.5 GB = 5 x 10^8
    assert memory_bytes("4GiB") == 4 * 1024**3
    assert memory_bytes(" 0.5 gb ") == 500_000_000
    assert memory_bytes("2000") == 2000
    for text in ("", "GiB", "four", "-1GiB", "0", "nan", "inf GiB", "4 apples"):
        with refused("expected an amount such as 4GiB or 500MB"):
            memory_bytes(text)


# The command


def command(*words: object) -> int:
    """Run a command line in this process and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        app([str(word) for word in words])
    return int(ended.value.code or 0)


@pytest.fixture
def registered(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command line know the experiment of these tests."""
    monkeypatch.setitem(experiments(), "survival", SURVIVAL)


@pytest.mark.usefixtures("registered")
def test_the_command_names_failed_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `how` says, trial 1 aborts, and then the only trial raises an error."""
    words = ["experiment", "survival", "--set", "size=3", "--set", "how=1:abort"]
    assert command(*words, "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    assert "3 trials (0 from the store, 0 without a schedule, 1 failed)" in out
    assert err == (
        "warning: 1 of 3 trials failed, the first, trial 1: its process was ended by SIGABRT, 2 "
        "times; --retry-failed runs them again\n"
    )
    words = ["experiment", "survival", "--set", "size=1", "--set", "how=0:raise"]
    assert command(*words, "--in-process") == 1
    assert "no trial succeeded: RuntimeError" in capsys.readouterr().err
    assert command(*words, "--jobs", 2, "--in-process") == 2
    assert "expected --isolate" in capsys.readouterr().err


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_keeps_what_has_finished(tmp_path: Path, log: Path, jobs: int) -> None:
    text = (
        "import survival\n"
        "from optsched.cli import main\n"
        "from optsched.experiments import experiments\n"
        "experiments()['survival'] = survival.SURVIVAL\n"
        "main()\n"
    )
    words = ["experiment", "survival", "--out", str(tmp_path), "--jobs", str(jobs)]
    process = subprocess.Popen(
        [sys.executable, "-c", text, *words, "--set", "size=3", "--set", "how=1:wait"],
        cwd=Path(SCRIPT).parent, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    # Trial 1 waits for ever: one job has finished one trial by then, two have finished two.
    while not ((tmp_path / "results.sqlite").exists() and stored(tmp_path) == jobs):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130  # 128 + 2, the number of SIGINT
    kept = f"{jobs} of 3 trials are stored in {tmp_path}; the same command goes on"
    assert err == f"error: interrupted: {kept}\n"
    assert stored(tmp_path) == jobs


def stored(folder: Path) -> int:
    """Return how many trials a folder holds, -1 while it is being made."""
    try:
        return len(load(folder))
    except InputError:  # it is just being made
        return -1


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("optsched.problem.progress.time.monotonic", lambda: clock[0])
    with LiveLine(every_s=30) as line:
        for second, done in ((0, 10), (10, 12), (40, 20), (50, 30), (71, 40)):
            clock[0] = 100.0 + second
            line.show_count(done, 100, "trials")
    # 10 of 100 came from the store. 10 more in 40 s leave 80 for 320 s, and 30 in 71 s leave 60
    # for 142 s.
    assert capsys.readouterr().err.splitlines() == [
        "20 of 100 trials, 0.25/s, 0:05:20 left",
        "40 of 100 trials, 0.423/s, 0:02:22 left",
    ]


def test_progress_is_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        with LiveLine() as line:
            line.show_count(1, 4, "trials")
        terminal.flush()
        text = ""
        while not text.endswith("\x1b[2K"):
            text += os.read(ours, 100_000).decode()
    os.close(ours)
    assert "1 of 4 trials" in text
    assert text.endswith("\x1b[2K")  # the line is gone in the end
