"""Runs of one policy: each begins anew, and each draws coins of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from command_line import run

import optsched
from instances import small
from optsched import Fleet, Problem
from optsched.analysis.compare import compare
from optsched.analysis.ratio import ratios, worst_case
from optsched.policies import Batch, View, runner_of
from optsched.policies.engine.simulate import simulate
from optsched.policies.routers import Routed
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate
from optsched.workloads.predict import predict

# --- a policy object begins anew in every run ----------------------------------------------------

# Policies that remember what they have done, so that a second run of one object would differ.
COUNTERS = """
from optsched import Batch, Rules
from optsched.policies import Runner


class Counts:
    '''Serves one after the other; the next is as far down the line as it has served requests.'''

    clairvoyant = False

    def __init__(self):
        self.served = 0

    def batch(self, view):
        if view.running:
            return Batch({i: 1 for i in view.running})
        i = view.waiting[self.served % len(view.waiting)]
        self.served += 1
        return Batch({i: view.rest(i)})


class Remembers:
    '''Serves the last one that it has not served before, or else the first.'''

    clairvoyant = False

    def __init__(self):
        self.seen = set()

    def batch(self, view):
        if view.running:
            return Batch({i: 1 for i in view.running})
        i = next((i for i in reversed(view.waiting) if i not in self.seen), view.waiting[0])
        self.seen.add(i)
        return Batch({i: view.rest(i)})


class Alternates(Runner):
    '''Runs first come first served, and the shortest first in every second run.'''

    def __init__(self):
        self.runs = 0

    def run(self, job):
        self.runs += 1
        return Rules(order="arrival" if self.runs % 2 else "output").run(job)


made = Alternates()
"""


# Three requests at 0 that do not fit together, so that the order is what counts.
CASES = [Instance([0] * 3, [5] * 3, outputs, kv_capacity=9) for outputs in ([1, 2, 4], [4, 1, 2])]


def counters(folder: Path) -> dict[str, Any]:
    """Return the objects of `COUNTERS`, and write its file."""
    file = folder / "counters.py"
    file.write_text(COUNTERS)
    space: dict[str, Any] = {}
    exec(compile(COUNTERS, str(file), "exec"), space)
    return space


STATEFUL = ["Counts", "Remembers", "Alternates"]


@pytest.mark.parametrize("name", STATEFUL)
def test_an_object_and_its_file_have_the_same_ratios(name: str, tmp_path: Path) -> None:
    thing, spec = counters(tmp_path)[name](), f"{tmp_path}/counters.py:{name}"
    study = ratios({"object": thing, "file": spec}, CASES, "h-sf", seeds=4)
    as_object, as_file = ([row.value for row in study.of(label)] for label in ("object", "file"))
    assert as_object == as_file
    # Four runs of a policy without coins are one: their mean is the latency of each.
    once = ratios({"once": thing}, CASES, "h-sf")
    assert [row.value for row in once.rows] == as_object


@pytest.mark.parametrize("name", STATEFUL)
def test_a_run_does_not_see_what_others_left(name: str, tmp_path: Path) -> None:
    """Requests run one at a time, and an object that went on counting would take them in another
    order."""
    thing, instance = counters(tmp_path)[name](), CASES[1]

    def tel() -> float:
        return optsched.run(instance, thing).metrics["tel"]

    first = tel()
    before = dict(vars(thing))
    assert compare(instance, {"a": thing, "b": thing}, bound=False).rows[0].value == first
    assert compare(instance, {"a": thing, "b": thing}, bound=False).rows[1].value == first
    worst_case(thing, budget_s=0.3, n=3, kv_capacity=20, progress=False)
    assert tel() == first
    assert vars(thing) == before


def test_every_worker_has_an_object_of_its_own(tmp_path: Path) -> None:
    # Each worker has two requests, and begins with the first: 3 rounds, then 1.
    spec = f"{tmp_path}/counters.py:Counts:workers=2,router=round-robin"
    things = counters(tmp_path)
    four = Instance([0] * 4, [1] * 4, [3, 3, 1, 1], kv_capacity=9)
    assert optsched.run(four, spec).evaluation.finish.tolist() == [3, 3, 4, 4]
    routed = Routed(runner_of(things["Counts"]()), router="round-robin")
    assert optsched.run(Problem(four, Fleet.of(2)), routed).evaluation.finish.tolist() == [
        3,
        3,
        4,
        4,
    ]


def test_an_object_in_a_file_begins_anew_too(tmp_path: Path) -> None:
    counters(tmp_path)
    instance, spec = CASES[1], f"{tmp_path}/counters.py:made"
    runs = [optsched.run(instance, spec).metrics["tel"] for _ in range(3)]
    assert runs == [optsched.run(instance, "fcfs").metrics["tel"]] * 3


def test_an_object_that_cannot_be_copied_says_so() -> None:
    """A lock cannot be copied. Who says how to be copied may share what it has."""

    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def batch(self, view: View) -> Batch:
            i = (view.running or view.waiting)[0]
            return Batch({i: view.rest(i)})

    class Shared(Locked):
        def __deepcopy__(self, memo: dict) -> Locked:
            return self

    with pytest.raises(InputError, match="'Locked'"):
        simulate(small(0), Locked())

    assert simulate(small(0), Shared()).worker is None


# --- every use of a seed has coins of its own ----------------------------------------------------


class Draws:
    """Serves one after the other, and tells its first coins."""

    told: ClassVar[list[float]] = []

    def __init__(self) -> None:
        self.first = True

    def batch(self, view: View) -> Batch:
        if self.first:
            Draws.told.append(float(view.generator.random()))
            self.first = False

        i = (view.running or view.waiting)[0]
        return Batch({i: view.rest(i)})


def guess(instance: Instance, generator: np.random.Generator) -> np.ndarray:
    """Predict the true lengths, and tell the first coins."""
    Draws.told.append(float(generator.random()))
    return instance.output_tokens


def test_no_two_uses_of_seeds_share_their_coins() -> None:
    instance, Draws.told[:] = small(0), []
    for seed in range(4):
        Draws.told.append(float(np.random.default_rng(seed).random()))  # of `generate`
        simulate(instance, Draws(), seed=seed, predictor=guess)
    # Four seeds: of `generate`, of the policy and of the predictor.
    assert len(Draws.told) == len(set(Draws.told)) == 12

    # Two workers: the first has the coins of one worker, the second has others.
    Draws.told.clear()
    simulate(instance, Draws())
    (alone,) = Draws.told
    two = Problem(instance, Fleet.of(2))
    simulate(two, Routed(runner_of(Draws()), router="round-robin"))
    assert Draws.told[1] == alone != Draws.told[2]
    simulate(two, Draws())
    assert sorted(Draws.told[3:]) == sorted(Draws.told[1:3])


@pytest.mark.parametrize("study", ["ratios", "worst_case"])
def test_no_two_runs_of_a_study_share_their_coins(study: str) -> None:
    Draws.told.clear()
    if study == "ratios":
        ratios(Draws(), [small(k) for k in range(5)], "h-sf", seeds=4, seed=7)
        ratios(Draws(), [small(k) for k in range(5)], "h-sf", seeds=4, seed=8)
        # Two studies of five instances, with four runs on each.
        assert len(set(Draws.told)) == len(Draws.told) == 2 * 5 * 4
    else:
        asked = {"n": 3, "kv_capacity": 20, "seeds": 2, "progress": False}
        found = worst_case(Draws(), "offline", 0.3, **asked)
        # Two runs of every instance in the search, by the same coins, and two of the answer by
        # others.
        assert len(set(Draws.told)) == 4
        assert found.low >= 1


def test_no_two_runs_of_the_command_share_their_coins(tmp_path: Path, monkeypatch) -> None:
    # Before, run 1 of the instance of seed 3 was run 0 of that of seed 4.
    (tmp_path / "tells.py").write_text(
        "from optsched import Batch\n"
        "class Tells:\n"
        "    told = False\n"
        "    def batch(self, view):\n"
        "        if not self.told:\n"
        "            self.told = True\n"
        "            with open('coins.txt', 'a') as file:\n"
        "                print(view.generator.random(), file=file)\n"
        "        i = (view.running or view.waiting)[0]\n"
        "        return Batch({i: view.rest(i)})\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--set", "n=2", "--reference", "h-sf", "--trials", 4, "--runs", 3, "--seed", 3]
    run("ratios", "--policy", "tells.py:Tells", *words)
    coins = [float(line) for line in Path("coins.txt").read_text().split()]
    coins += [float(np.random.default_rng(seed).random()) for seed in range(3, 7)]
    # Three runs on each of four instances, and the four instances themselves.
    assert len(set(coins)) == len(coins) == 4 * 3 + 4


def test_orders_by_coins_do_not_follow_the_lengths() -> None:
    # No two of these requests fit together, so that `a-random` alone says who comes when. With one
    # stream for both, places and lengths were correlated: 0.76 for request 0 and output 1.
    places, outputs = [], []
    alone = {"prompt_min": 6, "prompt_max": 6, "output_max": 5, "kv_capacity": 11}
    for seed in range(300):
        instance = generate("uniform", seed=seed, n=4, **alone)
        finish = optsched.run(instance, "a-random", seed=seed).evaluation.finish
        places.append(np.argsort(np.argsort(finish)))
        outputs.append(instance.output_tokens)

    both = np.corrcoef(np.array(places).T, np.array(outputs).T)[:4, 4:]
    assert np.abs(both).max() < 0.25  # above 4 standard errors, 4 / sqrt(300) = 0.23


def test_predictions_and_instances_of_a_seed_stay_what_they_were() -> None:
    # Instances keep the stream of the plain seed, predictions the first child of it.
    instance = generate("uniform", seed=5, n=3)
    rng = np.random.default_rng(5)
    assert instance.prompt_tokens.tolist() == rng.integers(1, 6, 3).tolist()
    told = predict(instance, lambda one, generator: generator.integers(1, 9, one.n), seed=5)
    child = np.random.default_rng(np.random.SeedSequence(5, spawn_key=(1,)))
    assert told.predicted.tolist() == child.integers(1, 9, 3).tolist()
