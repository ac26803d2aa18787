"""Schedulers: by hand, compiled against readable, never rejected, never seeing the future."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from readable_rules import Readable
from slow_judge import TIMED, batches, random_instance
from sweeps import parts

from optsched import Problem, run
from optsched.analysis.compare import compare
from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import evaluate
from optsched.policies import PolicyInfo, Rules, allows, is_clairvoyant, list_policies, make_policy
from optsched.policies.base import Batch, View
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, LoopError, OptschedError, PolicyError, UsageError
from optsched.problem.forecast import Forecast
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import COLUMNS, Schedule

LINEAR = BatchCost("linear", 1, {"token": "1000", "base": "1000"})
"""A batch of c tokens takes c + 1 seconds."""

MODULE = importlib.import_module("optsched.policies.engine.online")

VALUES = {
    "eviction_free": ["true"],
    "max_running": ["2"],
    "max_prefill_tokens": ["3", "9"],
    "alpha": ["0.05", "0.4"],
    "beta": ["0.5", "1"],
    "window": ["2"],
    "batch_size": ["2"],
    "c": ["0.3", "1"],
    "keep": ["true"],
    "refine": ["false"],
    "max_batch_tokens": ["3"],
    "max_num_seqs": ["2"],
    "max_num_batched_tokens": ["3"],
    "long_prefill_token_threshold": ["2"],
    "watermark": ["0.1"],
    "scheduler_reserve_full_isl": ["false"],
    "prefill_schedule_interval": ["3"],
    "policy": ["priority"],
    "hold": ["1", "1.5", "9"],
    "gate": ["0.05", "3"],
    "piece": ["1", "2.5"],
    "gather": ["2"],
    "by_slack": ["true"],
    "late_last": ["true", "false"],
    "factor": ["3"],
    "staggered": ["false"],
}
"""Values to try for parameters of this name, whichever policy has them."""


def variants(name: str, info: PolicyInfo) -> list[str]:
    """Return a policy as it is, and with other values of each of its parameters."""
    return [name] + [
        f"{name}:{key}={value}" for key in info.parameters for value in VALUES.get(key, [])
    ]


# All policies with all `variants`, and those that are rules, which have a readable twin.
SPECS = [spec for name, info in list_policies().items() for spec in variants(name, info)]
RULES_SPECS = [spec for spec in SPECS if isinstance(make_policy(spec)[0], Rules)]


def drawn(specs: list[str], whole: int) -> list[Any]:
    """Return specifications with the numbers of their random cases, in two parts as `parts` does.

    Each has ten in the first part, or five beside another value of one parameter.
    """
    found = []
    for spec in specs:
        quick, rest = parts(5 if ":" in spec else 10, whole)
        for part in (quick, rest):
            found.append(pytest.param(spec, *part.values, id=f"{spec}-{part.id}", marks=part.marks))
    return found


def random_predictions(rng: Random, instance: Instance) -> Instance:
    """Return the instance with no predictions, wrong ones, intervals, or a forecast."""
    outputs = instance.output_tokens.tolist()
    kind = rng.randrange(4)
    if kind == 0:
        return instance
    if kind == 1:
        return replace(instance, predicted=[max(1, o + rng.randint(-3, 3)) for o in outputs])
    if kind == 2:
        return replace(instance, forecast=random_forecast(rng, outputs))
    return replace(
        instance,
        predicted_lower=[rng.randint(1, o) for o in outputs],
        predicted_upper=[o + rng.randint(0, 4) for o in outputs],
    )


def random_forecast(rng: Random, outputs: list[int]) -> Forecast:
    """Return what is predicted every 1 to 3 tokens, for up to 9 tokens more than there are."""
    every = rng.randint(1, 3)
    left = [
        [max(0, o - k + rng.randint(-3, 3)) for k in range(0, o + rng.randint(0, 9), every)]
        for o in outputs
    ]
    offsets = np.cumsum([0, *map(len, left)])
    return Forecast(every, offsets, np.concatenate(left).astype(float))


def random_cases(seed: int, count: int) -> list[Instance]:
    """Return random instances with predictions of some kind and SLOs."""
    rng = Random(seed)
    return [due(random_predictions(rng, random_instance(rng, most=8))) for _ in range(count)]


def due(instance: Instance) -> Instance:
    """Return the instance with SLOs on TTFT and TPOT of most requests, of the order of batches."""
    rng = Random(instance.sha256)
    batch = 1.0 if instance.in_rounds else TIMED.layers * 0.05
    limits = [rng.choice([1.0, 2.0, 4.0, 9.0, 30.0, None]) for _ in range(instance.n)]
    paces = [rng.choice([0.9, 1.0, 1.3, 2.0, 5.0, None]) for _ in range(instance.n)]
    return replace(
        instance,
        slo_ttft=[None if x is None else x * batch for x in limits],
        slo_tpot=[None if x is None else x * batch for x in paces],
    )


def cost_of(instance: Instance) -> BatchCost | None:
    """Return what a batch costs: nothing is named in rounds, and `TIMED` in seconds."""
    return None if instance.in_rounds else TIMED


def run_or_error(instance: Instance, policy, seed: int = 0) -> Schedule | OptschedError:
    """Return a policy's schedule, or why there is none."""
    try:
        return simulate(Problem(instance, cost_of(instance)), policy, seed=seed)
    except OptschedError as error:
        return error


def same(one: Schedule, two: Schedule) -> bool:
    """Return whether two schedules are equal in all columns."""
    if one.evict_mode != two.evict_mode or (one.start is None) != (two.start is None):
        return False
    names = (*COLUMNS, "start") if one.start is not None else COLUMNS
    return all(np.array_equal(getattr(one, k), getattr(two, k)) for k in names)


def rows_of(schedule: Schedule) -> list[dict[int, int]]:
    """Return the batches as {request: tokens}."""
    offsets = schedule.batch_offsets
    return [
        dict(zip(schedule.request[a:b].tolist(), schedule.tokens[a:b].tolist(), strict=True))
        for a, b in pairwise(offsets.tolist())
    ]


def evicted_of(schedule: Schedule) -> dict[int, list[int]]:
    """Return who is evicted before which batch."""
    offsets = schedule.evicted_offsets.tolist()
    return {
        j: schedule.evicted[a:b].tolist() for j, (a, b) in enumerate(pairwise(offsets)) if b > a
    }


# --- the compiled engine and its twin ---------------------------------------------------------


@pytest.mark.parametrize(("spec", "numbers"), drawn(RULES_SPECS, 40))
def test_the_compiled_engine_decides_as_the_readable_twin(
    spec: str, numbers: range, monkeypatch
) -> None:
    monkeypatch.setattr(MODULE, "MAX_BATCHES_WITHOUT", 300)
    rules = make_policy(spec)[0]
    assert isinstance(rules, Rules)
    rng = Random(f"{spec} {numbers.start}")
    finished = 0
    seed = 20_000 + len(spec) + 1000 * numbers.start
    for number, instance in zip(numbers, random_cases(seed, len(numbers)), strict=True):
        mine = rules
        if number % 3 == 0 and rules.max_batch_tokens is not None:
            # The shipped C of 4096 would never bind here.
            mine = replace(rules, max_batch_tokens=rng.randint(3, 12))
        fast = run_or_error(instance, mine, seed=number)
        slow = run_or_error(instance, Readable(mine, instance), seed=number)
        if isinstance(slow, LoopError) and mine.beta < 1:
            continue  # the engine is more patient with draws than the limit set above
        if isinstance(fast, OptschedError) or isinstance(slow, OptschedError):
            assert type(fast) is type(slow) is LoopError, (fast, slow, instance.to_dict())
            continue
        assert same(fast, slow), (spec, mine, instance.to_dict(), rows_of(fast), rows_of(slow))
        finished += 1
    assert finished >= len(numbers) // 3  # the others end in a loop


@pytest.mark.parametrize(("spec", "numbers"), drawn(SPECS, 60))
def test_no_policy_makes_a_schedule_that_the_judge_rejects(
    spec: str, numbers: range, monkeypatch
) -> None:
    monkeypatch.setattr(MODULE, "MAX_BATCHES_WITHOUT", 3000)
    finished = 0
    seed = 30_000 + len(spec) + 1000 * numbers.start
    for number, instance in zip(numbers, random_cases(seed, len(numbers)), strict=True):
        if allows(spec, instance) is not None:
            continue
        found = run_or_error(instance, spec, seed=number)
        if isinstance(found, (LoopError, UsageError)):
            continue
        assert isinstance(found, Schedule), (spec, found, instance.to_dict())
        evaluate(Problem(instance, cost_of(instance)), found)
        finished += 1
    assert finished >= -(-len(numbers) // 6)  # a sixth at least was judged


@pytest.mark.parametrize(
    ("spec", "numbers"), drawn([s for s in SPECS if not s.startswith("alpha-")], 40)
)
def test_a_policy_ends_on_an_instance_without_limits_of_its_own(spec: str, numbers: range) -> None:
    # In seconds: each refill produces a token. In rounds, where evictions lose all progress,
    # two requests may evict each other for ever (vllm-hy does).
    rng = Random(40_000 + numbers.start)
    for number in numbers:
        instance = random_predictions(rng, random_instance(rng, unit="second", most=8))
        free = replace(instance, limits=Limits(), hybrid_batching=None, chunked_prefill=None)
        if allows(spec, free) is not None:
            continue  # it decides by SLOs, and there are none
        try:
            found = simulate(Problem(free, cost_of(free)), spec, seed=number)
        except UsageError:
            continue  # made for the other time unit
        evaluate(Problem(free, cost_of(free)), found)


@pytest.mark.parametrize("spec", [s for s in SPECS if "eviction_free=true" in s])
def test_eviction_free_never_evicts_with_the_oracle(spec: str) -> None:
    """All know true lengths. SLOs stand there for the policies that refuse an instance without
    them; runs that end in another error are left out, but 20 of 60 must end well."""
    rng = Random(5)
    finished = 0
    for _ in range(60):
        instance = random_instance(rng, most=8)
        due = replace(instance, slo_ttft=[9.0] * instance.n, slo_tpot=[1.0] * instance.n)
        found = run_or_error(due, spec)
        if isinstance(found, Schedule):
            assert not len(found.evicted), instance.to_dict()
            finished += 1
    assert finished >= 20  # or the claim would be of nearly nothing


@pytest.mark.parametrize("spec", ["mc-sf", "mc-benchmark"])
def test_lookahead_with_true_lengths_never_evicts(spec: str) -> None:
    rng = Random(6)
    for _ in range(60):
        instance = random_instance(rng, most=8, limits=Limits(), hybrid_batching=None)
        assert not len(simulate(Problem(instance, cost_of(instance)), spec).evicted)


# --- nothing is known ahead ---------------------------------------------------------------------


def finishing_batch(instance: Instance, schedule: Schedule, changed: list[int]) -> int:
    """Return the first batch in which one of the requests finishes."""
    judged = evaluate(Problem(instance, cost_of(instance)), schedule)
    return int(np.searchsorted(judged.batch_end, judged.finish[changed].min()))


@pytest.mark.parametrize(("spec", "numbers"), drawn(SPECS, 60))
def test_hidden_lengths_change_no_decision_before_they_show(
    spec: str, numbers: range, monkeypatch
) -> None:
    monkeypatch.setattr(MODULE, "MAX_BATCHES_WITHOUT", 3000)  # loops end soon
    made, info = make_policy(spec)
    rng = Random(f"{spec} {numbers.start}")
    compared = 0
    for number in numbers:
        instance = due(random_instance(rng, most=8))
        if allows(spec, instance) is not None:
            continue
        # What policies are told stays; the truth changes for a request or two. Schedulers that
        # need no lengths must not look at them when there are no predictions, either.
        if is_clairvoyant(made, info, instance) or number % 2:
            guess = [max(1, o + rng.randint(-2, 2)) for o in instance.output_tokens.tolist()]
            instance = replace(instance, predicted=guess)
        changed = rng.sample(range(instance.n), min(2, instance.n))
        outputs = instance.output_tokens.copy()
        for i in changed:
            most = instance.kv_capacity - instance.prompt_tokens[i] + 1 - instance.kv_offset
            outputs[i] = rng.randint(1, int(min(most, 10)))
        other = replace(instance, output_tokens=outputs)
        changed = np.flatnonzero(outputs != instance.output_tokens).tolist()
        one, two = (run_or_error(case, spec, seed=number) for case in (instance, other))
        if not changed or not isinstance(one, Schedule) or not isinstance(two, Schedule):
            continue
        # The batch in which the first of them finishes was still decided without knowing.
        last = 1 + min(
            finishing_batch(instance, one, changed), finishing_batch(other, two, changed)
        )
        story = (spec, changed, instance.to_dict(), other.to_dict())
        assert rows_of(one)[:last] == rows_of(two)[:last], story
        head = [{j: e for j, e in evicted_of(s).items() if j < last} for s in (one, two)]
        assert head[0] == head[1], story
        compared += 1
    assert compared >= -(-len(numbers) // 8)  # an eighth at least was compared


class Spy:
    """Serves one waiting request after the other and keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list[dict] = []

    def __deepcopy__(self, memo: dict) -> Spy:
        return self  # every run is told to one object

    def batch(self, view: View) -> Batch:
        columns = ("arrival", "prompt_tokens", "predicted", "generated", "cached")
        self.seen.append(
            {k: getattr(view, k).tolist() for k in columns}
            | {"now": view.now, "waiting": view.waiting, "running": view.running}
        )
        i = (view.running or view.waiting)[0]
        return Batch({i: view.rest(i)})


def test_the_view_hides_requests_that_have_not_arrived() -> None:
    instance = Instance([0, 5], [3, 2], [2, 1], kv_capacity=9, predicted=[7, 1])
    spy = Spy()
    simulate(instance, spy)
    first, second, third = spy.seen
    assert first == {
        # What has not arrived is -1. Of 9 tokens the prompt of 3 leaves 6 for a forecast.
        "arrival": [0, -1], "prompt_tokens": [3, -1], "predicted": [6, -1],  # 7 could not fit
        "generated": [0, 0], "cached": [0, 0], "now": 0, "waiting": [0], "running": [],
    }  # fmt: skip
    assert (second["now"], second["running"], second["generated"]) == (1, [0], [1, 0])
    assert second["cached"] == [3, 0]
    assert (third["now"], third["waiting"], third["prompt_tokens"]) == (5, [1], [3, 2])


def test_the_view_names_no_true_length_and_cannot_be_written() -> None:
    assert not [name for name in View.__dataclass_fields__ if "output" in name]

    class Vandal:
        def batch(self, view: View) -> Batch:
            view.generated[0] = 99
            return Batch()

    with pytest.raises(PolicyError, match="read-only"):
        simulate(Instance([0], [1], [1], kv_capacity=2), Vandal())


def test_changing_the_lists_of_a_view_changes_nothing() -> None:
    class Careless(Spy):
        def batch(self, view: View) -> Batch:
            answer = super().batch(view)
            view.waiting.clear()
            view.running.clear()
            return answer

    instance = Instance([0, 0], [3, 2], [2, 1], kv_capacity=9)
    assert same(simulate(instance, Careless()), simulate(instance, Spy()))


# --- users' own policies ------------------------------------------------------------------------

# A file of a user: what may be named in it, and what may not.
USER_FILE = '''
from optsched.policies.base import Batch, Rules

class OneByOne:
    """Serves one request after the other."""
    def __init__(self, *, last: bool = False, label="none"):
        self.last = last
        self.label = label
    def batch(self, view):
        i = (view.running or view.waiting)[-1 if self.last else 0]
        return Batch({i: view.rest(i)})

def shortest_prompt(*, max_running: int | None = None) -> Rules:
    return Rules(order="prompt", max_running=max_running)

def bad_alpha() -> Rules:
    return Rules(alpha=2.0)

number = 3

def plain(view):
    return Batch()
'''


def test_a_policy_in_a_users_file_runs_with_its_parameters(tmp_path) -> None:
    """`USER_FILE` has a class, two functions that return rules (one of them bad), a number, and a
    function that takes a view."""
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    instance = Instance([0, 0], [3, 2], [2, 1], kv_capacity=40)
    # What it defines runs, takes parameters and says what it is.
    assert rows_of(simulate(instance, f"{file}:OneByOne")) == [{0: 3}, {0: 1}, {1: 2}]
    assert rows_of(simulate(instance, f"{file}:OneByOne:last=true")) == [{1: 2}, {0: 3}, {0: 1}]
    rows = rows_of(simulate(instance, f"{file}:shortest_prompt:max_running=1"))
    assert rows == [{1: 2}, {0: 3}, {0: 1}]
    assert make_policy(f"{file}:OneByOne:label=x")[0].label == "x"  # without annotation: a text
    assert make_policy(f"{file}:OneByOne")[1].summary == "Serves one request after the other."
    # All else is refused by name; an error in the file itself is told, too.
    for spec, text in (
        (f"{file}:Nothing", "no class or function 'Nothing'.*it defines OneByOne, shortest_prompt"),
        (f"{file}:plain", "parameter 'view': found nothing; .* a function returns the policy"),
        ("mine:OneByOne", "found 'OneByOne'; expected key=value, or mine.py:OneByOne of a file"),
        (str(file), "found no class; expected .*mine.py:CLASS; it defines OneByOne, shortest"),
        (f"{file}:number", "no class or function 'number'"),
        (f"{file}:bad_alpha", "alpha: found 2.0"),
        (f"{tmp_path}/absent.py:A", "no such file"),
    ):
        with pytest.raises(InputError, match=text):
            simulate(instance, spec)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(InputError, match="ZeroDivisionError"):
        simulate(instance, f"{tmp_path}/broken.py:A")


def test_a_users_file_imports_from_its_own_folder_and_from_no_other(tmp_path) -> None:
    # Both folders have a module of the same name, and one of them is changed later.
    text = "import beside\nfrom optsched import Rules\nmine = Rules(max_running=beside.SEATS)\n"
    for name, seats in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(text)
        (tmp_path / name / "beside.py").write_text(f"SEATS = {seats}\n")

    path = list(sys.path)
    for name, seats in (("one", 1), ("two", 2)):
        assert make_policy(f"{tmp_path / name}/mine.py:mine")[0].max_running == seats
    (tmp_path / "one" / "beside.py").write_text("SEATS = 333\n")
    (tmp_path / "one" / "mine.py").write_text(text + "# the second version\n")
    assert make_policy(f"{tmp_path / 'one'}/mine.py:mine")[0].max_running == 333
    assert sys.path == path
    assert "beside" not in sys.modules
    (tmp_path / "two" / "mine.py").write_text("import beside, not_there\n")
    with pytest.raises(InputError, match=r"not_there.*mine.py.*line 1"):
        make_policy(f"{tmp_path / 'two'}/mine.py:mine")
    assert sys.path == path


def test_a_function_is_no_policy_object() -> None:
    instance = Instance([0], [3], [1], kv_capacity=40)
    for call in (simulate, compare):
        with pytest.raises(InputError, match=r"found function .*expected.* an object with batch"):
            call(instance, lambda view: Batch())


class Answers:
    """Gives the answers listed, one per batch."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)

    def batch(self, view: View):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (
            [Batch({7: 1})],
            "batch 0: found request 7, which has not arrived, is done, or is",
        ),
        ([Batch({-1: 1})], "batch 0: found request -1, which has not arrived"),
        ([Batch({1: 2})], "batch 0: found request 1, which has not arrived"),
        ([Batch({0: 3}), Batch({0: 1}), Batch({0: 1})], "batch 2: found request 0, .* is done"),
        ([Batch({0: 0})], "batch 0: request 0: found 0 tokens; expected an integer >= 1"),
        ([Batch({0: 1.5})], "batch 0: request 0: found 1.5 tokens"),
        ([Batch({0: True})], "batch 0: request 0: found True tokens"),
        ([Batch({}, evict=[0])], "batch 0: found an eviction of request 0, which holds no KV"),
        ([Batch({0: 3}), Batch({}, evict=[0, 0])], "batch 1: found an eviction of request 0"),
        ([None], "batch 0: found None; expected a Batch"),
        ([{0: 3}], "batch 0: found {0: 3}"),
        ([Batch({0: 3}), ValueError("oh")], r"batch 1: raised ValueError\('oh'\)"),
        ([Batch({0.0: 3})], "batch 0: found request 0.0, which"),
        ([Batch({0: 3}), Batch({}, evict=[0.0])], "batch 1: found an eviction of request 0.0"),
        ([Batch({0: 3}), Batch({}, evict=[[0]])], r"batch 1: found an eviction of request \[0\]"),
    ],
)
def test_a_policy_that_breaks_the_rules_is_named_with_batch_and_request(answers, text) -> None:
    instance = Instance([0, 9], [3, 2], [2, 1], kv_capacity=40)
    with pytest.raises(PolicyError, match=f"policy 'Answers': {text}"):
        simulate(instance, Answers(*answers))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("evict", None, "evict: found None; expected a list of requests, empty for none"),
        ("evict", 3, "evict: found 3; expected a list"),
        ("tokens", None, "tokens: found None; expected a dict of tokens by request"),
        ("tokens", [0], r"tokens: found \[0\]; expected a dict"),
        ("reused", None, "reused: found None; expected a dict"),
    ],
)
def test_a_batch_of_other_kinds_is_refused_where_it_is_made(name, value, text) -> None:
    with pytest.raises(InputError, match=text):
        Batch(**{name: value})
    assert Batch({0: 1}, evict=np.array([1])).evict.tolist() == [1]


# --- endless loops ------------------------------------------------------------------------------


def test_alpha_protection_with_a_small_alpha_is_caught_in_its_loop() -> None:
    # Two requests s = 1, o = 8 together need 2 (1 + 5) = 12 > 10 in their fifth round, are
    # cleared, and start again together for ever.
    instance = Instance([0, 0], [1, 1], [8, 8], kv_capacity=10)
    for spec in ("alpha-protection:alpha=0", "alpha-beta:alpha=0,beta=1"):
        with pytest.raises(LoopError, match=r"endless loop at batch \d+ .*, request [01]"):
            simulate(instance, spec)
    # One cleared at a time, by chance, they both end.
    found = simulate(instance, "alpha-beta:alpha=0,beta=0.5", seed=3)
    assert evaluate(instance, found).metrics["evictions"] >= 1


def test_a_protected_share_that_no_request_fits_is_no_endless_loop() -> None:
    # (1 - 0.9) 10 = 1 token is never enough for s + 1 = 3.
    instance = Instance([0], [2], [1], kv_capacity=10)
    with pytest.raises(LoopError, match="it can never be admitted"):
        simulate(instance, "alpha-protection:alpha=0.9")


@pytest.mark.parametrize(
    "spec", ["nested-wait", "nested-wait:gather=1", "rank-input:watermark=0.5"]
)
def test_a_request_that_needs_the_protected_share_runs_alone(spec: str) -> None:
    # 9 tokens of prompt and the first of the output fill the KV of 10: the other one waits.
    schedule = simulate(Instance([0, 0], [9, 1], [1, 1], kv_capacity=10), spec)
    assert np.diff(schedule.batch_offsets).tolist() == [1, 1]


@pytest.mark.parametrize(
    "batch", [Batch(), Batch(stall=True), Batch(evict=())], ids=["idle", "stall", "nothing"]
)
def test_a_policy_that_never_processes_anything_is_stopped(batch: Batch) -> None:
    class Idle:
        def batch(self, view: View) -> Batch:
            return batch

    far = 10**9
    for unit, cost in (("round", None), ("second", LINEAR)):
        instance = Instance([0, far, 2 * far], [1] * 3, [1] * 3, kv_capacity=9, time_unit=unit)
        with pytest.raises(LoopError, match="'Idle'"):
            simulate(Problem(instance, cost), Idle())


def test_a_policy_that_only_evicts_is_asked_again_at_the_same_time() -> None:
    class TwoSteps:
        """Evicts request 0 after its first token, and starts all over when asked again."""

        evicted = False

        def batch(self, view: View) -> Batch:
            if view.now == 2 and not self.evicted:
                self.evicted = True
                return Batch(evict=[0])
            chosen = (view.running or view.waiting)[0]
            return Batch({chosen: view.rest(chosen)})

    instance = Instance([0], [1], [2], kv_capacity=9, time_unit="second")
    schedule = simulate(Problem(instance, LINEAR), TwoSteps())
    # Prefill of 1 token until 2 s; then a refill of 1 + 1 tokens yields the second: 3 s more.
    assert schedule.evicted.tolist() == [0]
    assert evaluate(Problem(instance, LINEAR), schedule).finish.tolist() == [5.0]


class Sisyphus:
    """Evicts all before each batch, or gives each more and more tokens than there are."""

    def __init__(self, *, evicts: bool) -> None:
        self.asked, self.evicts = 0, evicts

    def __deepcopy__(self, memo: dict) -> Sisyphus:
        return self  # every run is told to one object

    def batch(self, view: View) -> Batch:
        self.asked += 1
        return Batch({0: 1}, evict=view.running) if self.evicts else Batch({0: 2})


@pytest.mark.parametrize("evicts", [True, False])
def test_a_policy_that_processes_for_ever_is_stopped_soon(evicts) -> None:
    policy = Sisyphus(evicts=evicts)
    # MAX_BATCHES_WITHOUT and ten for each token of the longest request: 10,000 + 10 (1 + 2). At
    # most three batches get further than before.
    with pytest.raises(LoopError, match="10030"):
        simulate(Instance([0], [1], [2], kv_capacity=9), policy)
    assert 10030 < policy.asked < 10040


def test_who_evicts_often_but_gets_further_each_time_is_no_endless_loop(monkeypatch) -> None:
    # It evicts request 0 with k tokens and lets it get to k + 1, for each k: 1 + 2 + ... + 80
    # batches, which are more than 20 + 10 (1 + 80) = 830 in all and fewer in a row.
    monkeypatch.setattr(MODULE, "MAX_BATCHES_WITHOUT", 20)

    class Further:
        goal = 1

        def batch(self, view: View) -> Batch:
            if view.running and view.generated[0] == self.goal:
                self.goal += 1
                return Batch({0: 1}, evict=[0])
            return Batch({0: 1})

    instance = Instance([0], [1], [80], kv_capacity=99)
    found = run(instance, Further()).evaluation
    assert found.metrics["evictions"] == 79  # with 1, 2, ..., 79 tokens
    assert found.metrics["makespan"] == sum(range(1, 81))


@pytest.mark.parametrize("spec", ["fcfs", "mc-sf", "vllm", "sarathi", "alpha-protection"])
def test_arrivals_a_billion_apart_are_no_wait(spec: str) -> None:
    far = 10**9
    for unit, cost in (("round", None), ("second", LINEAR)):
        instance = Instance([0, far, 2 * far], [1] * 3, [2] * 3, kv_capacity=9, time_unit=unit)
        found = run(Problem(instance, cost), spec).evaluation
        # 2 rounds, or prompts of 2 s and decodes of 2 s.
        assert found.latency.tolist() == ([2, 2, 2] if unit == "round" else [4.0, 4.0, 4.0])


def test_the_same_seed_gives_the_same_schedule() -> None:
    """Of five other seeds one at least gives another."""
    instance = Instance([0] * 6, [1] * 6, [9] * 6, kv_capacity=20)
    spec = "alpha-beta:alpha=0.1,beta=0.4"
    one, again = (simulate(instance, spec, seed=4) for _ in range(2))
    assert same(one, again)
    others = [simulate(instance, spec, seed=seed) for seed in range(5, 10)]
    assert not all(same(one, other) for other in others)


# --- by hand ------------------------------------------------------------------------------------


def test_mc_sf_runs_equal_requests_in_waves() -> None:
    # s = 2, o = 3 peak at 5, two fit into 10; one more beside them would find 10 + 2 at the
    # completion of both.
    instance = Instance([0] * 5, [2] * 5, [3] * 5, kv_capacity=10)
    found = run(instance, "mc-sf").evaluation
    assert found.finish.tolist() == [3, 3, 6, 6, 9]
    assert found.metrics["tel"] == 27  # 3 + 3 + 6 + 6 + 9
    assert found.outside_reason is None


def test_mc_sf_by_hand_looks_at_every_completion() -> None:
    # M = 6. A: s 1, o 4 from 0 holds 2, 3, 4, 5 at 1..4. At 1 come B (o 1) and C (o 2), s 1.
    # At 1: B fits (round 2: 3 + 2); C beside them does not (3 + 2 + 2).
    # At 2: C fits into round 3 (4 + 2) but not into A's last, 4 (5 + 3). At 3: round 4, 5 + 2.
    # So C starts at 4 and completes at 6.
    instance = Instance([0, 1, 1], [1, 1, 1], [4, 1, 2], kv_capacity=6)
    found = run(instance, "mc-sf").evaluation
    assert found.finish.tolist() == [4, 2, 6]
    assert found.metrics["tel"] == 4 + 1 + 5


def test_mc_sf_stops_at_the_first_that_does_not_fit() -> None:
    # M = 10. Ascending outputs: X (s 1, o 5; peak 6), Y (s 8, o 1; 9), Z (s 1, o 6; 7), given
    # as Z, X, Y: Y first (9 at round 1); X would be 2 more; so Z waits too. At 1: X and Z peak
    # at 6 + 6 in round 6 > 10: X, then Z alone from 6.
    instance = Instance([0] * 3, [1, 1, 8], [6, 5, 1], kv_capacity=10)
    assert run(instance, "mc-sf").evaluation.finish.tolist() == [9, 6, 1]


def test_mc_benchmark_goes_by_arrival_where_mc_sf_goes_by_output() -> None:
    # M = 6. X: s 1, o 5 (2 at round 1); Y: s 4, o 1 (5 at round 1): one of them first.
    instance = Instance([0, 0], [1, 4], [5, 1], kv_capacity=6)
    by_output = run(instance, "mc-sf").evaluation
    by_arrival = run(instance, "mc-benchmark").evaluation
    # Y until 1 and X for 5 more, or X until 5 and Y for 1 more.
    assert by_output.finish.tolist() == [6, 1]
    assert by_arrival.finish.tolist() == [5, 6]


def test_mc_sf_never_exceeds_kv_capacity_when_predictions_are_short() -> None:
    # M = 8; A and B: s 1, o 6, predicted 2. Both run from 0 (3 + 3 at round 2) and hold 4 + 4 in
    # round 3. Round 4 would hold 10: both are cleared at 3, their estimates raised to 3 + 1.
    # A again from 3; beside its last (5) B fits from 5 (3 in round 7). Round 8 would hold 6 + 4:
    # cleared at 7, A's estimate is 5. B joins A at 11, is cleared with it at 12 (7 + 3 in round
    # 13). Now A is known to need 6, to which B's 2 never fit within 8: A 12-18, B 18-24.
    instance = Instance([0, 0], [1, 1], [6, 6], kv_capacity=8, predicted=[2, 2])
    schedule = simulate(instance, "mc-sf")
    found = evaluate(instance, schedule)
    assert found.finish.tolist() == [18, 24]
    assert {j: sorted(gone) for j, gone in evicted_of(schedule).items()} == {
        3: [0, 1], 7: [0, 1], 12: [0, 1],
    }  # fmt: skip
    assert found.metrics["peak_kv"] == 8


def test_vllm_evicts_the_latest_arrival_by_hand_in_seconds() -> None:
    # s 3, o 4, M = 8 cached; batches of c tokens take c + 1 s. Prefill first: A [0, 4], B [4, 8];
    # both decode [8, 11] and hold 4 + 4. The next decode of A needs a ninth: B goes, with two
    # tokens. B's input of 5 does not fit beside A's 5; A ends at 15; B refills 5 by 21, and ends.
    instance = Instance(
        [0.0, 0.5], [3, 3], [4, 4],
        kv_capacity=8, time_unit="second", kv_accounting="cached",
    )  # fmt: skip
    schedule = simulate(Problem(instance, LINEAR), "vllm")
    expected = [{0: 3}, {1: 3}, {0: 1, 1: 1}, {0: 1}, {0: 1}, {1: 5}, {1: 1}]
    assert rows_of(schedule) == expected
    assert evicted_of(schedule) == {3: [1]}
    found = evaluate(Problem(instance, LINEAR), schedule)
    assert found.finish.tolist() == [15.0, 23.0]
    assert found.first_token.tolist() == [4.0, 8.0]


def test_sarathi_chunks_prefills_beside_decodes_by_hand() -> None:
    # P = 4 counts decodes. A: s 3, o 3; B: s 6, o 2. 3 + 1; 1 + 3; 1 + 2 (all that is left); 1.
    instance = Instance([0.0, 0.0], [3, 6], [3, 2], kv_capacity=99, time_unit="second")
    schedule = simulate(Problem(instance, LINEAR), "sarathi:max_prefill_tokens=4")
    assert rows_of(schedule) == [{0: 3, 1: 1}, {0: 1, 1: 3}, {0: 1, 1: 2}, {1: 1}]


def test_fcfs_mixes_phases_in_order_of_arrival_by_hand() -> None:
    instance = Instance([0.0, 1.0], [3, 2], [2, 2], kv_capacity=99, time_unit="second")
    schedule = simulate(Problem(instance, LINEAR), "fcfs")
    assert rows_of(schedule) == [{0: 3}, {0: 1, 1: 2}, {1: 1}]
    # A batch of c tokens takes c + 1 s: [0, 4], [4, 8], [8, 10].
    assert evaluate(Problem(instance, LINEAR), schedule).finish.tolist() == [8.0, 10.0]


def test_a_prompt_beyond_the_schedulers_p_runs_alone() -> None:
    """With P = 4 a prompt of 6 has a batch to itself, first in line or second. With 8 both share
    one."""
    instance = Instance([0.0, 0.0], [6, 2], [1, 1], kv_capacity=99, time_unit="second")
    assert rows_of(simulate(Problem(instance, LINEAR), "vllm:max_prefill_tokens=4")) == [
        {0: 6},
        {1: 2},
    ]
    assert rows_of(simulate(Problem(instance, LINEAR), "vllm:max_prefill_tokens=8")) == [
        {0: 6, 1: 2}
    ]
    behind = Instance([0.0, 0.0], [2, 6], [1, 1], kv_capacity=99, time_unit="second")
    assert rows_of(simulate(Problem(behind, LINEAR), "vllm:max_prefill_tokens=4")) == [
        {0: 2},
        {1: 6},
    ]


def test_the_instances_own_limit_is_hard_for_a_long_prompt() -> None:
    """The instance allows 5 prefill tokens, which a prompt of 6 exceeds unless it is split."""
    instance = Instance([0], [6], [1], kv_capacity=99, limits=Limits(None, 5))
    assert "prompt_tokens 6 exceeds max_prefill_tokens 5" in str(allows("vllm", instance))
    with pytest.raises(PolicyError, match=r"'vllm'.*request 0.*prompt_tokens 6.*max_prefill"):
        simulate(instance, "vllm")
    assert allows("sarathi", instance) is None
    assert rows_of(simulate(instance, "sarathi")) == [{0: 5}, {0: 1}]


def test_switches_that_the_instance_forbids_are_off() -> None:
    shape = {"kv_capacity": 99, "time_unit": "second"}
    # Sarathi has 512 tokens for prefills in a batch, and would split the prompt of 600.
    whole = Instance([0.0], [600], [1], **{**shape, "kv_capacity": 999}, chunked_prefill=False)
    assert rows_of(simulate(Problem(whole, LINEAR), "sarathi")) == [{0: 600}]
    apart = Instance([0.0, 1.0], [3, 2], [2, 2], **shape, hybrid_batching=False)
    rows = rows_of(simulate(Problem(apart, LINEAR), "fcfs"))
    assert rows == [{0: 3}, {0: 1}, {1: 2}, {1: 1}]


def test_evictions_in_rounds_are_restarts() -> None:
    instance = Instance([0, 0], [3, 3], [4, 4], kv_capacity=8, kv_accounting="cached")
    schedule = simulate(instance, "vllm")
    assert schedule.evict_mode == "restart"
    # They hold 4 + 4 after two rounds. B goes, returns beside A's 5 with 3 (prefill first), goes
    # again for A's last token, and starts from nothing.
    rows = [{0: 3, 1: 3}, {0: 1, 1: 1}, {0: 1}, {1: 3}, {0: 1}, {1: 3}, {1: 1}, {1: 1}, {1: 1}]
    assert rows_of(schedule) == rows
    expected = batches(instance, *rows, evict={2: [1], 4: [1]}, evict_mode="restart")
    assert same(schedule, expected)


# --- specifications -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("mc-fs", "policy 'mc-fs' is unknown; did you mean 'mc-sf'\\? known are .*mc-sf"),
        ("", "policy '' is unknown"),
        ("mc-benchmark:x=1", "parameter 'x' is unknown; known are none"),
        ("vllm:p=1", "parameter 'p' is unknown; known are eviction_free, max_running"),
        ("vllm:max_running=two", "max_running: found 'two'; expected an integer"),
        ("vllm:max_running=1.5", "max_running: found '1.5'; expected an integer"),
        ("vllm:max_running=0", "max_running: found 0; expected an integer >= 1"),
        ("vllm:eviction_free=1", "eviction_free: found '1'; expected true or false"),
        ("alpha-protection:alpha=x", "alpha: found 'x'; expected a number"),
        ("alpha-protection:alpha=nan", "alpha: found 'nan'; expected a number"),
        ("vllm:watermark=2", "watermark: found 2.0; expected 0 <= watermark < 1"),
        ("alpha-protection:alpha=1", "alpha: found 1.0; expected 0 <= alpha < 1"),
        ("alpha-beta:beta=0", "beta: found 0.0; expected 0 < beta <= 1"),
        ("alpha-beta:beta=0.1,beta=0.2", "found 'beta' twice"),
        ("alpha-beta:beta", "found 'beta'; expected key=value"),
    ],
)
def test_a_bad_specification_says_what_would_be_right(spec: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        make_policy(spec)


def test_an_optional_parameter_may_be_none() -> None:
    assert make_policy("fcfs:max_running=none")[0] == make_policy("fcfs")[0]


def test_a_cost_model_must_fit_the_time_unit() -> None:
    with pytest.raises(UsageError):
        simulate(Problem(Instance([0], [1], [1], kv_capacity=2), LINEAR), "fcfs")
    with pytest.raises(UsageError):
        simulate(Instance([0], [1], [1], kv_capacity=2, time_unit="second"), "fcfs")


@pytest.mark.parametrize(
    "fields",
    [
        {"alpha": 1.0}, {"alpha": -0.1}, {"beta": 0.0}, {"max_running": 0},
        {"groups": ("running", "running")}, {"chunked": True, "overflow": "clear"},
        {"groups": ("running", "running_decode", "waiting")},
    ],
)  # fmt: skip
def test_rules_that_make_no_sense_are_refused_at_construction(fields) -> None:
    with pytest.raises(InputError):
        Rules(**fields)
