"""What `optsched.policies` has for policies that answer batch by batch.

Numbers are of one view, `view`, by hand.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from slow_judge import TIMED, random_instance

from optsched import Problem, run
from optsched.costs.cost import BatchCost, UnitCost
from optsched.judge.evaluate import evaluate
from optsched.policies import (
    Batch,
    View,
    admit,
    decode_all,
    evict_until_fits,
    fits,
    fits_to_the_end,
    kv_after,
)
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import LoopError, PolicyError
from optsched.problem.instance import Instance, Limits

COST = BatchCost("some", 3, {"base": "20", "token": "2", "decode_kv": "0.5", "prefill_square": "1"})
# Of requests 0 to 4: prompts, tokens produced, tokens cached, and predicted tokens left.
RUNNING, WAITING = [0, 1, 2], [3, 4]
PROMPT = np.array([4, 3, 5, 2, 6])
GENERATED = np.array([2, 1, 0, 0, 0])
CACHED = np.array([5, 3, 2, 0, 0])
LEFT = np.array([1.0, 3.0, 2.5, 4.0, 1.0])


def view(capacity: int = 20, *, hybrid: bool = True, offset: int = 0, **limits: int) -> View:
    """Return a view: 0 and 1 decode, 2 is amid a prefill (2 of 5 tokens cached), 3 and 4 wait.

    0, 1 and 2 hold 5 + 3 + 2 = 10 tokens, and ``offset`` each.
    """
    return View(
        now=9.0, waiting=list(WAITING), running=list(RUNNING), arrival=np.arange(5.0),
        prompt_tokens=PROMPT, predicted=GENERATED + 3, remaining=LEFT, generated=GENERATED,
        cached=CACHED, decoding=np.array([True, True, False, False, False]), kv_capacity=capacity,
        kv_offset=offset, limits=Limits(**limits), hybrid=hybrid, chunked=True,
        evict_mode="recompute", generator=np.random.default_rng(0), cost=UnitCost(),
    )  # fmt: skip


def test_everybody_who_decodes_gets_a_token() -> None:
    assert decode_all(view()) == {0: 1, 1: 1}  # 2 has not cached its input
    assert decode_all(view(max_batch_tokens=1)) == {0: 1}


def test_a_request_alone_takes_as_long_as_the_judge_says() -> None:
    # In rounds one per token: request 1 produces 1 + 3.
    assert view().alone(1) == 4
    for i, (s, o) in enumerate(zip(PROMPT, GENERATED + 3, strict=True)):
        one = Instance([0], [s], [o], kv_capacity=99, time_unit="second")
        judged = run(Problem(one, COST), "fcfs").evaluation
        assert replace(view(), cost=COST).alone(i) == pytest.approx(judged.metrics["makespan"])


def test_kv_at_the_end_of_a_batch_is_what_is_held_and_what_is_processed() -> None:
    # Held 5 + 3 + 2 = 10, processed 1 + 1, and the prompt of 3.
    assert kv_after(view(), {0: 1, 1: 1, 3: 2}) == 10 + 2 + 2
    # One more for each of the four that hold KV then.
    assert kv_after(view(offset=1), {0: 1, 1: 1, 3: 2}) == 14 + 4
    # Without 0: 3 + 2 held, 1 processed. Refilled in the same batch: 6 tokens of input.
    assert kv_after(view(), {1: 1}, [0]) == 6
    assert kv_after(view(offset=1), {0: 6, 1: 1}, [0]) == 5 + 7 + 3


@pytest.mark.parametrize(
    ("limits", "tokens", "answer"),
    [
        ({"capacity": 14}, {0: 1, 1: 1, 3: 2}, True),  # 14 tokens of KV, as above
        ({"capacity": 13}, {0: 1, 1: 1, 3: 2}, False),
        ({"max_batch_tokens": 4}, {0: 1, 1: 1, 3: 2}, True),  # 1 + 1 + 2 tokens
        ({"max_batch_tokens": 3}, {0: 1, 1: 1, 3: 2}, False),
        ({"max_prefill_tokens": 5}, {0: 1, 2: 3, 3: 2}, True),  # prefills of 3 + 2
        ({"max_prefill_tokens": 4}, {0: 1, 2: 3, 3: 2}, False),
        ({"max_running": 4}, {3: 2}, True),  # 0, 1, 2 hold their KV, and 3 begins
        ({"max_running": 3}, {3: 2}, False),
        ({"hybrid": False}, {0: 1, 1: 1}, True),
        ({"hybrid": False}, {2: 3, 3: 2}, True),
        ({"hybrid": False}, {0: 1, 3: 2}, False),  # a decode and a prefill
    ],
)
def test_a_batch_fits_if_it_keeps_every_limit(limits, tokens, answer: bool) -> None:
    assert fits(view(**limits), tokens) is answer


def test_an_evicted_request_makes_room_and_decodes_no_more() -> None:
    # Without 1: 5 + 2 held, 1 + 2 processed.
    assert fits(view(10, max_running=3), {0: 1, 3: 2}, [1])
    assert not fits(view(9, max_running=3), {0: 1, 3: 2}, [1])
    # Refilled in the same batch it prefills its 3 + 1 tokens.
    assert not fits(view(hybrid=False), {0: 1, 1: 4}, [1])


def test_the_latest_arrivals_are_evicted_until_the_batch_fits() -> None:
    # 10 held and 2 processed; without request 2: 8 + 2; without 1 and 2: 5 + 1.
    assert evict_until_fits(view(12), {0: 1, 1: 1}) == ({0: 1, 1: 1}, [])
    assert evict_until_fits(view(11), {0: 1, 1: 1}) == ({0: 1, 1: 1}, [2])
    assert evict_until_fits(view(9), {0: 1, 1: 1}) == ({0: 1}, [2, 1])
    # Those who hold most go first: without 0, 5 held and 1 processed.
    by_kv = sorted(RUNNING, key=CACHED.__getitem__)
    assert evict_until_fits(view(9), {0: 1, 1: 1}, by_kv) == ({1: 1}, [0])
    assert evict_until_fits(view(9), {0: 1, 1: 1}, []) == ({0: 1, 1: 1}, [])  # nobody may go


def test_those_in_line_are_admitted_up_to_the_first_that_does_not_fit() -> None:
    # 12 with the decodes; 3 takes 2 and 4 takes 6: 20 together.
    decodes = {0: 1, 1: 1}
    assert admit(view(20), decodes, WAITING) == {0: 1, 1: 1, 3: 2, 4: 6}
    assert admit(view(19), decodes, WAITING) == {0: 1, 1: 1, 3: 2}
    assert admit(view(17), decodes, [4, 3]) == decodes  # 4 does not fit, and 3 stands behind it
    # Without request 2, which held 2: 10 + 2 + 6.
    assert admit(view(18), decodes, WAITING, [2]) == {0: 1, 1: 1, 3: 2, 4: 6}
    assert decodes == {0: 1, 1: 1}


def test_a_limit_of_the_policys_own_counts_those_that_run_or_begin() -> None:
    # Three run and 3 begins: four. One is evicted, and 4 joins as the fourth.
    assert admit(view(20), {}, WAITING, max_running=3) == {}
    assert admit(view(20), {}, WAITING, max_running=4) == {3: 2}
    assert admit(view(20), {3: 2}, [4], [2], max_running=4) == {3: 2, 4: 6}
    assert admit(view(20), {3: 2}, [4], max_running=4) == {3: 2}


def test_kv_to_the_end_is_largest_where_a_request_produces_its_last_token() -> None:
    # Inputs of 6, 4 and 2 tokens, 1, 3 and 4 left: after batch 1 they hold 6 + 4 + 2 = 12, after
    # batch 3 (4 + 2) + (2 + 2) = 10, after batch 4 2 + 3 = 5.
    assert fits_to_the_end(view(12), [0, 1, 3])
    assert not fits_to_the_end(view(11), [0, 1, 3])
    assert fits_to_the_end(view(10), [1, 3])
    assert not fits_to_the_end(view(9), [1, 3])
    assert fits_to_the_end(view(12, offset=1), [1, 3])  # one more for each of the two
    # 2.5 tokens left are 3 batches: 5 + 2 after the third.
    assert fits_to_the_end(view(7), [2])
    assert not fits_to_the_end(view(6), [2])


class FirstCome:
    """First come, first served, in three lines."""

    clairvoyant = False

    def batch(self, view: View) -> Batch:
        tokens, evicted = evict_until_fits(view, decode_all(view))
        line = sorted(view.waiting, key=lambda i: (view.arrival[i], i))
        return Batch(admit(view, tokens, line, evicted), evicted)


def test_an_input_that_no_batch_may_hold_is_named() -> None:
    # Request 1 stands behind request 0, whose 5 tokens are more than a batch of 4 may have.
    instance = Instance([0, 0], [5, 2], [1, 1], kv_capacity=9, limits=Limits(max_batch_tokens=4))
    with pytest.raises(LoopError, match=r"request 0.*5.*tokens.*max_batch_"):
        simulate(instance, FirstCome())
    with pytest.raises(PolicyError, match=r"request 0.*prompt_tokens 5.*max_batch_tokens 4"):
        simulate(instance, "fcfs")


def test_three_lines_are_fcfs_in_seconds() -> None:
    """`FirstCome`, asked batch by batch, decides as the compiled fcfs, evictions included."""
    rng = Random(11)
    evicted = same = 0
    for _ in range(150):
        instance = random_instance(rng, unit="second")
        try:
            compiled = simulate(Problem(instance, TIMED), "fcfs")
        except LoopError:
            with pytest.raises(LoopError):  # an input that a limit rules out
                simulate(Problem(instance, TIMED), FirstCome())
            continue
        mine = simulate(Problem(instance, TIMED), FirstCome())
        story = (instance.to_dict(), compiled.to_dict(), mine.to_dict())
        assert as_sets(mine) == as_sets(compiled), story
        evaluate(Problem(instance, TIMED), mine)
        same += 1
        evicted += len(mine.evicted) > 0
    assert same > 100  # of 150; the others are ruled out by a limit
    assert evicted > 10  # evictions are among what is compared


def as_sets(schedule) -> list[tuple[set, set]]:
    """Return each batch's (request, tokens) and evictions, in no order."""
    found = []
    for j in range(schedule.batches):
        low, high = schedule.batch_offsets[j : j + 2]
        pairs = zip(schedule.request[low:high], schedule.tokens[low:high], strict=True)
        low, high = schedule.evicted_offsets[j : j + 2]
        found.append(({(int(i), int(c)) for i, c in pairs}, set(schedule.evicted[low:high])))
    return found


# --- a loop of a user's own ---------------------------------------------------------------------

# It serves the last request first, one at a time: a prefill, and a batch for each further token.
RUNNER = '''
from optsched.policies import Runner
from optsched.problem.schedule import from_batches

class Backwards(Runner):
    """One request after the other, from the last."""

    clairvoyant = False
    hybrid = True

    def run(self, job):
        prompt, output = job.instance.prompt_tokens, job.instance.output_tokens
        rows = [
            (i, tokens)
            for i in reversed(range(len(prompt)))
            for tokens in [prompt[i]] + [1] * (output[i] - 1)
        ]
        return from_batches(
            range(len(rows) + 1), [i for i, _ in rows], [c for _, c in rows],
            instance=job.problem, evict_mode="restart", cost_model_sha256=job.cost.sha256,
        )

READY = Backwards()
'''


@pytest.mark.parametrize("attribute", ["Backwards", "READY"])
def test_a_users_runner_brings_its_own_loop(tmp_path, attribute: str) -> None:
    from optsched.policies import lengths_note, make_policy, runner_of

    (tmp_path / "mine.py").write_text(RUNNER)
    instance = Instance([0, 0], [3, 2], [2, 1], kv_capacity=9, hybrid_batching=False)
    spec = f"{tmp_path}/mine.py:{attribute}"
    schedule = simulate(instance, spec)
    # From the last: 1, of one token, takes a round, then 0 two.
    assert evaluate(instance, schedule).finish.tolist() == [3, 1]
    made, info = make_policy(spec)
    # It says that it is not clairvoyant, so nothing is noted of lengths. It has
    # hybrid batches, which the instance switches off.
    assert lengths_note(made, info, instance) is None
    assert runner_of(made).switched_off(instance) == ("hybrid batching is off by the instance",)
