"""Scores of policies: what they are, that they repeat, and that bad policies cost a row only."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, one_line_error, run

import optsched
from optsched.analysis import library
from optsched.analysis.score import Row, Score, score
from optsched.files.library import shipped_folder
from optsched.files.schemas import check_shape
from optsched.problem.errors import InputError, UsageError

# Policies that work, hang, eat memory, end, raise once three wait, replace the judge, pause,
# overfill.
POLICIES = """
import os
from optsched import Batch, Rules

def small(): return Rules(order="volume", admission="lookahead")

class OneByOne:
    def batch(self, view):
        chosen = (view.running or view.waiting)[0]
        return Batch({chosen: view.rest(chosen)})

class Hangs:
    def batch(self, view):
        while True:
            pass

class Eats:
    def batch(self, view):
        self.memory = bytearray(1 << 40)

class Ends:
    def batch(self, view):
        os._exit(3)

class Raises(OneByOne):
    def batch(self, view):
        if len(view.waiting) > 2:
            raise KeyError("three wait")
        return super().batch(view)

class Liar(OneByOne):
    def __init__(self):
        import optsched.judge.evaluate as judge, optsched.analysis.score as score
        judge.evaluate = score.evaluate = None  # the judge works elsewhere

class Pauses(OneByOne):
    turn = 0
    def batch(self, view):
        self.turn += 1
        return Batch(stall=True) if view.running and self.turn % 2 else super().batch(view)

class Overfull:
    def batch(self, view):
        return Batch({i: view.rest(i) for i in [*view.running, *view.waiting]})
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with `POLICIES`."""
    path = tmp_path / "mine.py"
    path.write_text(POLICIES, encoding="utf-8")
    return path


def row(**more: Any) -> Row:
    """Return a row: value 80 beside fcfs 100, best known 70 and bound 60, if nothing else is
    said."""
    known = {"bound": 60.0, "best_known": 70.0, "fcfs": 100.0}
    return Row("one", "some", "tel", **{"value": 80.0, **known, **more})


@pytest.mark.parametrize(
    ("value", "captured"),
    [
        # The optimum is in [60, 70]: of 30 to 40 that fcfs loses, 20 are gained.
        (80.0, (20 / 40, 20 / 30)),
        (100.0, (0.0, 0.0)),
        (120.0, (-20 / 30, -20 / 40)),
        # Better than the best known: the optimum is in [60, 65].
        (65.0, (35 / 40, 1.0)),
        (60.0, (1.0, 1.0)),
        (None, None),
    ],
)
def test_the_captured_share_is_an_interval(
    value: float | None, captured: tuple[float, float] | None
) -> None:
    assert row(value=value).captured == captured


def test_nothing_is_captured_where_fcfs_may_be_optimal() -> None:
    assert row(value=100.0, best_known=100.0).captured is None  # which is the value of fcfs


def test_a_score_is_a_geometric_mean_and_has_a_floor() -> None:
    rows = row(), row(value=40.0, fcfs=50.0, bound=20.0, best_known=40.0)
    # Over fcfs, of 100 and 50: values of 80 and 40, bounds of 60 and 20, and best known ones of 70
    # and 40.
    found = Score("mine", 0, "2026.1", rows)
    assert found.value == pytest.approx(math.sqrt(0.8 * 0.8))
    assert found.bound == pytest.approx(math.sqrt(0.6 * 0.4))
    assert found.best_known == pytest.approx(math.sqrt(0.7 * 0.8))
    assert found.reached == pytest.approx(found.bound / 0.8)
    failed = Score("mine", 0, "2026.1", (*rows, row(value=None)))
    assert (failed.value, failed.reached) == (None, 0.0)


def test_a_policy_in_a_file_has_the_value_that_it_has_elsewhere(file: Path) -> None:
    found = score(f"{file}:small", ["tiny"])
    data = library.read_library()["instances"]
    for one in found.rows:
        instance = library.load(one.instance)
        for policy, value in ((f"{file}:small", one.value), ("fcfs", one.fcfs)):
            judged = optsched.run(instance, policy).evaluation
            assert judged.metrics["tel"] == value
        entry = data[one.instance]
        assert (one.bound, one.best_known) == (entry["bound"]["value"], entry["best"]["value"])

    assert found.value is not None
    assert found.bound <= found.best_known <= found.value < 1  # 1 is fcfs


def test_a_policy_is_named_from_the_folder_of_the_caller(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score(f"{file}:small", ["tiny-n4"])  # its host is kept, and begins elsewhere
    monkeypatch.chdir(file.parent)
    assert score(f"{file.name}:small", ["tiny-n4"]).value is not None


def test_a_changed_file_is_read_anew_and_equal_runs_give_equal_bytes(file: Path) -> None:
    """`small` goes by volume, and in the changed file by arrival."""
    one, two = (json.dumps(score(f"{file}:small", ["tiny", "csp"]).to_dict()) for _ in range(2))
    assert one == two
    file.write_text(POLICIES.replace('"volume"', '"arrival"'), encoding="utf-8")
    third = score(f"{file}:small", ["tiny", "csp"])
    assert json.dumps(third.to_dict()) != one
    assert all(row.wall_s > 0 for row in third.rows)
    assert "wall_s" in third.to_dict(times=True)["instances"][0]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("Hangs", "no schedule within 0.4 s"),
        ("Eats", "raised MemoryError()"),
        ("Ends", "its process ended without a schedule"),
        ("Raises", "raised KeyError('three wait')"),
        ("Nobody", "Nobody"),
        ("Overfull", "kv_capacity"),
        ("Pauses", "it pauses running requests"),  # and so the bound says nothing of it
    ],
)
def test_a_policy_that_fails_costs_rows_and_says_why(file: Path, policy: str, words: str) -> None:
    """`POLICIES` says what each of them does; it has no Nobody."""
    names = ["tiny-n4", "tiny-n8"]
    limits = {"time_limit_s": 0.4 if policy == "Hangs" else 10.0}
    found = score(f"{file}:{policy}", names, **limits)
    assert [one.value for one in found.rows] == [None, None]
    assert (found.value, found.reached) == (None, 0.0)
    for one in found.rows:
        assert one.failure is not None
        assert words in one.failure["error"]

    good = score(f"{file}:OneByOne", names)
    assert None not in [one.value for one in good.rows]


def test_a_failure_shows_on_a_few_requests(file: Path) -> None:
    (one,) = score(f"{file}:Raises", ["tiny-n8"]).rows
    assert one.failure is not None
    assert one.failure["first_requests"] == 4  # of 1, 2, 4 the first with more than two waiting


def test_a_policy_cannot_reach_the_judge(file: Path) -> None:
    honest, liar = (
        score(f"{file}:{name}", ["tiny-n8"]).rows[0].value for name in ("OneByOne", "Liar")
    )
    assert honest == liar


def test_instances_without_a_bound_are_not_scored() -> None:
    with pytest.raises(UsageError, match="'slo-chat'"):
        score("fcfs", ["slo"])
    with pytest.raises(InputError, match="'nothing' is unknown"):
        score("fcfs", ["nothing"])


def test_the_command_prints_a_table_and_json(file: Path, tmp_path: Path) -> None:
    words = ("score", f"{file}:small", "--library", "tiny-n8", "--library", "tiny-n10")
    said = run(*words, "--json", tmp_path / "score.json")
    assert "tiny-n8" in said
    assert "no policy is below the floor" in said
    data = json.loads((tmp_path / "score.json").read_text())
    check_shape("score", data)
    assert data["combined_score"] == pytest.approx(data["floor"] / data["score"])
    assert [one["instance"] for one in data["instances"]] == ["tiny-n8", "tiny-n10"]
    one_line_error(invoke("score", "fcfs", "--library", "nothing"))


# Policies that attack what asks them: pipes, signals, pickles, memory, and processes left behind.
HOSTILE = """
import gc, json, os, pickle, signal, socket, sys, threading, time
from pathlib import Path
from optsched import Batch, Instance, Rules
from optsched.policies import admit, decode_all, evict_until_fits

HERE = Path(__file__).parent

class InOrder:
    clairvoyant = False
    def key(self, view, i):
        return i
    def batch(self, view):
        tokens, evicted = evict_until_fits(view, decode_all(view))
        line = sorted(view.waiting, key=lambda i: self.key(view, i))
        return Batch(admit(view, tokens, line, evicted), evicted)

def everywhere(data):
    for number in range(3, 64):
        try:
            os.write(number, data)
        except OSError:
            pass

class Part(InOrder):
    def batch(self, view):
        everywhere(b"\\0\\0\\1\\0x")
        time.sleep(1000)

class HalfALine(InOrder):
    def batch(self, view):
        everywhere(json.dumps({"tokens": [[0, 1]]})[:-3].encode())
        time.sleep(1000)

class Announces(InOrder):
    def batch(self, view):
        everywhere(b"\\x7f" + 7 * b"\\xff")
        time.sleep(1000)

class Stops(InOrder):
    def batch(self, view):
        everywhere(b"{")
        os.kill(0, signal.SIGSTOP)  # all of its group

class StopsItsHost(InOrder):
    def batch(self, view):
        os.kill(os.getppid(), signal.SIGSTOP)
        return super().batch(view)

class NeverEnds(InOrder):
    def batch(self, view):
        while True:
            everywhere(b"x" * 4096)

class Garbage(InOrder):
    def batch(self, view):
        everywhere(bytes(range(256)))
        return super().batch(view)

class Nested(InOrder):
    def batch(self, view):
        everywhere(b"[" * 30_000 + b"\\n")
        return super().batch(view)

class NoBatch(InOrder):
    def batch(self, view):
        everywhere(b'{"tokens": 3}\\n')
        return super().batch(view)

class Evil:
    def __deepcopy__(self, memo):
        return self  # a policy's process copies what it runs
    def __reduce__(self):
        return os.open, (str(HERE / "touched"), os.O_CREAT)

class Pickles(InOrder):
    def batch(self, view):
        everywhere(pickle.dumps(Evil()) + b"\\n")
        return super().batch(view)

class PicklesToSockets(InOrder):
    def batch(self, view):
        for one in gc.get_objects():
            if isinstance(one, socket.socket):
                one.sendall(pickle.dumps((Evil(), None, 0.0)))
        raise SystemExit

class EvilTokens(InOrder):
    def batch(self, view):
        return Batch({Evil(): 1})

class EvilBatch(Batch, Evil):
    pass

class ReturnsEvil(InOrder):
    def batch(self, view):
        return EvilBatch(dict.fromkeys(view.waiting, Evil()))

def evil_rules():
    return Rules(order=Evil())

def lengths_of(objects):
    return [one.output_tokens for one in objects if isinstance(one, Instance) and one.n > 1]

class Searches(InOrder):
    found = None
    def key(self, view, i):
        if self.found is None:
            self.found = lengths_of(self.search())
        return [*[-column[i] for column in self.found], i]

class FromMemory(Searches):
    def search(self):
        return gc.get_objects()

class FromFrames(Searches):
    def search(self):
        frame, found = sys._getframe(), []
        while frame is not None:
            for one in list(frame.f_locals.values()):
                found += [one, *getattr(one, "__dict__", {}).values()]
            frame = frame.f_back
        return found

class FromTuples(Searches):
    def search(self):
        return [part for one in gc.get_objects() if isinstance(one, tuple) for part in one]

class FromView(InOrder):
    def key(self, view, i):
        return view.predicted[i]

class FromRemaining(InOrder):
    def key(self, view, i):
        return max(view.remaining)

class FromAlone(InOrder):
    def key(self, view, i):
        return view.alone(i)

def note():
    with (HERE / "pids").open("a") as file:
        file.write(f"{os.getpid()}\\n")

def spin():
    note()
    while True:
        pass

class Spins(InOrder):
    def batch(self, view):
        spin()

class Ignores(InOrder):
    def batch(self, view):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        spin()

class Forks(InOrder):
    def batch(self, view):
        note()
        for _ in range(2):
            if os.fork() == 0:
                os.setsid()
                if os.fork() > 0:
                    os._exit(0)  # so that init would adopt the other
                spin()
        time.sleep(1000)

class ForksAndAnswers(InOrder):
    def batch(self, view):
        if os.fork() == 0:
            os.setpgid(0, 0)
            spin()
        return super().batch(view)
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Return a file with `HOSTILE`."""
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE, encoding="utf-8")
    return path


TOO_LATE, NO_JSON = "no schedule within 1 s", "expected an object of JSON"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("Part", TOO_LATE),
        ("HalfALine", TOO_LATE),
        ("Announces", TOO_LATE),
        ("Stops", TOO_LATE),
        ("NeverEnds", "its process sent more than"),
        ("Garbage", NO_JSON),
        ("Nested", NO_JSON),
        ("NoBatch", "an object that is no batch"),
    ],
)
def test_what_a_policy_writes_to_its_descriptors_costs_rows_only(
    hostile: Path, policy: str, words: str
) -> None:
    """`HOSTILE` has the policies: they write part of an answer, its length, or garbage into
    every pipe that they can have, stop their processes, or never end."""
    names = ["tiny-n4", "tiny-n8"]
    found = score(f"{hostile}:{policy}", names, time_limit_s=1.0)
    for one in found.rows:
        assert one.value is None
        assert one.failure is not None
        assert words in one.failure["error"]

    assert score(f"{hostile}:InOrder", names).value is not None


def test_a_policy_that_stops_its_host_costs_the_host_only(hostile: Path) -> None:
    stops, fine = (
        score(f"{hostile}:{name}", ["tiny-n4"]).value for name in ("StopsItsHost", "InOrder")
    )
    assert stops == fine


@pytest.mark.parametrize(
    "policy", ["Pickles", "PicklesToSockets", "EvilTokens", "ReturnsEvil", "evil_rules"]
)
def test_nothing_that_a_policy_sends_is_run(hostile: Path, policy: str) -> None:
    found = score(f"{hostile}:{policy}", ["tiny-n4", "tiny-n8"])
    assert [one.value for one in found.rows] == [None, None]
    assert not (hostile.parent / "touched").exists()


def test_a_policy_without_lengths_finds_none_in_memory(hostile: Path) -> None:
    """Three policies look for an instance with true lengths among all objects, in frames and in
    tuples, and would serve the longest first. Their values are those of `InOrder`: they find
    none."""
    honest, *others = (
        [one.value for one in score(f"{hostile}:{name}", ["tiny"]).rows]
        for name in ("InOrder", "FromMemory", "FromFrames", "FromTuples")
    )
    assert None not in honest
    assert others == [honest] * 3


@pytest.mark.parametrize("policy", ["FromView", "FromRemaining", "FromAlone"])
def test_a_policy_that_says_it_needs_no_lengths_has_none_in_its_views(
    hostile: Path, policy: str
) -> None:
    """The policies read `predicted`, `remaining` and `alone`, which would be true lengths. Each
    says clairvoyant = False."""
    (one,) = score(f"{hostile}:{policy}", ["tiny-n8"]).rows
    assert one.failure is not None
    assert "output lengths are hidden, as the policy says clairvoyant = False" in str(one.failure)
    # Predictions that are not the truth are there.
    noisy = f"{hostile}:{policy}:predictor=noisy,predictor.mae=0"
    assert score(noisy, ["tiny-n8"]).value is not None


# A policy that counts and draws, and one that looks at true or predicted lengths.
STATEFUL = """
from optsched import Batch
from optsched.policies import admit, decode_all, evict_until_fits

class Counts:
    clairvoyant = False
    evict_mode = "recompute"
    def __init__(self, seats: int = 4):
        self.turn, self.seats, self.seen = 0, seats, {}
    def batch(self, view):
        self.turn += 1
        for i in view.waiting:
            self.seen.setdefault(i, (self.turn * 7919 + 31 * i) % 13)
        if len(view.running) > 1 and view.generator.random() < 0.1:
            return Batch({}, {view.running[-1]})
        tokens, evicted = evict_until_fits(view, decode_all(view))
        line = sorted(view.waiting, key=self.seen.get)
        return Batch(admit(view, tokens, line, evicted, max_running=self.seats), evicted)

class Knows:
    def batch(self, view):
        out = sorted(view.running, key=lambda i: view.remaining[i])
        tokens, evicted = evict_until_fits(view, decode_all(view), out)
        line = sorted(view.waiting, key=lambda i: (view.predicted[i], view.alone(i)))
        return Batch(admit(view, tokens, line, evicted), evicted)
"""


@pytest.mark.parametrize(
    "policy",
    [
        "Counts:seats=2",
        "Knows:predictor=noisy,predictor.mae=2",
        *(
            pytest.param(policy, marks=pytest.mark.whole)
            for policy in ("Counts", "Counts:predictor=noisy,predictor.mae=2", "Knows")
        ),
    ],
)
def test_an_object_runs_as_in_the_same_process(tmp_path: Path, policy: str) -> None:
    """A score asks policies in a process of their own, and `run` asks them here with the same
    seed."""
    path = tmp_path / "stateful.py"
    path.write_text(STATEFUL, encoding="utf-8")
    spec, names = f"{path}:{policy}", ["tiny", "csp-b8-o8-i1", "prefix-half"]
    for one in score(spec, names, seed=3, time_limit_s=1000).rows:
        instance = library.load(one.instance)
        cost = library.read_library()["instances"][one.instance]["cost_model"]
        found = optsched.run(optsched.Problem(instance, cost), spec, seed=3)
        assert one.value == found.metrics[one.objective]


def endings() -> list[Any]:
    """Return policies with how their score is ended; all but the hardest are of the whole."""
    pairs = product(("Spins", "Ignores", "Forks"), (signal.SIGTERM, signal.SIGKILL, signal.SIGINT))
    hardest = "Forks", signal.SIGKILL
    return [pytest.param(*p, marks=() if p == hardest else pytest.mark.whole) for p in pairs]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends processes with their parents")
@pytest.mark.parametrize(("policy", "how"), endings())
def test_nothing_outlives_a_score_that_is_ended(
    hostile: Path, policy: str, how: signal.Signals
) -> None:
    """Spins never answers, Ignores ignores what asks a process to end, and Forks leaves two more
    in sessions of their own. All that have noted themselves are gone when the command has
    ended."""
    words = [sys.executable, "-m", "optsched", "score", f"{hostile}:{policy}"]
    words += ["--library", "tiny-n4", "--time-limit", "600"]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    noted = pids(hostile, 3 if policy == "Forks" else 1)
    process.send_signal(how)
    process.wait(60)
    all_end(noted)


@pytest.mark.parametrize("policy", ["Forks", "ForksAndAnswers", "Spins"])
def test_nothing_outlives_a_score_in_a_pool(hostile: Path, policy: str) -> None:
    score(f"{hostile}:{policy}", ["tiny-n4"], time_limit_s=2.0)
    all_end(pids(hostile, 1))


def pids(hostile: Path, count: int) -> list[int]:
    """Return the processes that a policy has noted, once there are so many."""
    file = hostile.parent / "pids"
    while not file.exists() or file.read_text().count("\n") < count:
        time.sleep(0.05)
    return [int(line) for line in file.read_text().split()]


def all_end(processes: list[int]) -> None:
    """Wait until no process runs any more."""
    for one in processes:
        while runs(one):
            time.sleep(0.05)


def runs(process: int) -> bool:
    """Return whether a process runs and is no zombie."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_scores_may_be_about_one_objective() -> None:
    found = score("fcfs", ["csp", "tiny"], objective="makespan")
    assert {row.objective for row in found.rows} == {"makespan"}
    # fcfs over fcfs.
    assert found.value == 1
    with pytest.raises(UsageError, match=r"score:.*'p99_ttft'"):
        score("fcfs", objective="p99_ttft")


def evaluator(folder: Path) -> Any:
    """Load a task's evaluator as OpenEvolve does: a module from a file."""
    spec = importlib.util.spec_from_file_location("evaluation_module", folder / "evaluator.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_task_for_loops_that_evolve_code_has_a_floor_and_a_counterexample(
    file: Path, tmp_path: Path
) -> None:
    names = ["--library", "tiny-n8", "--library", "tiny-n10"]
    run("score", f"{file}:OneByOne", *names, "--task-out", tmp_path / "task")
    task = evaluator(tmp_path / "task")
    # The task begins with the policy that was scored, so both have one score.
    one, again = (
        ThreadPoolExecutor(1).submit(task.evaluate, str(path)).result()  # as OpenEvolve calls it
        for path in (tmp_path / "task" / "initial_program.py", file)
    )
    assert one == again
    assert 0 < one["combined_score"] == one["floor"] / one["score"] < 1
    found = score(f"{file}:OneByOne", ["tiny-n8", "tiny-n10"])
    assert (one["score"], one["floor"], one["failed"]) == (found.value, found.bound, 0)
    told = json.loads(one["counterexample"])
    far = max(found.rows, key=lambda row: row.value / row.best_known)
    assert (told["instance"], told["value"], told["failure"]) == (far.instance, far.value, None)


def test_a_task_says_on_which_requests_a_program_fails(file: Path, tmp_path: Path) -> None:
    score(f"{file}:Raises", ["tiny-n8"]).write_task(tmp_path / "task")
    task = evaluator(tmp_path / "task")
    failed = task.evaluate(str(file))
    assert (failed["combined_score"], failed.get("score"), failed["failed"]) == (0, None, 1)
    told = json.loads(failed["counterexample"])
    # Of 1, 2, 4 first requests four are the first of which more than two wait.
    whole = library.load("tiny-n8").to_dict()["requests"]
    assert told["requests"]["arrival"] == whole["arrival"][:4]
    assert "three wait" in told["failure"]["error"]
    (tmp_path / "empty.py").write_text("x = (", encoding="utf-8")
    assert task.evaluate(str(tmp_path / "empty.py"))["combined_score"] == 0


def test_the_shipped_task_begins_with_a_program_that_works() -> None:
    folder = shipped_folder() / "evolve"
    task = evaluator(folder)
    assert set(task.TASK) == {"scheduler", "library", "time_limit_s"}
    task.TASK["library"] = ["tiny-n8"]
    found = task.evaluate(str(folder / "initial_program.py"))
    assert found["failed"] == 0
    assert found["floor"] <= found["score"] <= 1  # it passes over who does not fit, unlike fcfs
