"""Prefills that pause: in one line by what is left, behind a gate, in pieces, in cheap batches.

Batches are computed by hand: nearly always one of c tokens takes c + 1 seconds (LINEAR).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from optsched_studies import trace_policies
from test_table import tabulated

import optsched
from optsched import Problem
from optsched.costs.cost import BatchCost
from optsched.policies import Rules, make_policy
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance

LINEAR = BatchCost("linear", 1, {"token": "1000", "base": "1000"})
"""A batch of c tokens takes c + 1 seconds, and a decode step of one request 2 seconds."""

# Decodes first, then prefills, begun or not, in the order of the prompt tokens that are left.
PAUSING = Rules(order="prompt", groups=("running_decode", "prefill"), chunked=True)


def seconds(*columns: list, capacity: int = 1000, **more: list) -> Instance:
    return Instance(*columns, capacity, time_unit="second", kv_accounting="cached", **more)


def run(instance: Instance, policy: str | Rules, cost: BatchCost = LINEAR) -> list[dict[int, int]]:
    """Return the tokens of every request in every batch."""
    schedule = simulate(Problem(instance, cost), policy)
    entries = list(zip(schedule.request.tolist(), schedule.tokens.tolist(), strict=True))
    return [dict(entries[a:b]) for a, b in pairwise(schedule.batch_offsets.tolist())]


def test_a_long_prefill_pauses_for_a_short_one() -> None:
    # Four tokens a batch. After the first 8 of 12 tokens are left, which take 9 s alone, so the
    # short prompt of 5 goes first (6 s, then 2 s for its last token), though it came later.
    instance = seconds([0, 1], [12, 5], [1, 1])
    rules = replace(PAUSING, max_batch_tokens=4)
    assert run(instance, rules) == [{0: 4}, {1: 4}, {1: 1, 0: 3}, {0: 4}, {0: 1}]
    # One of 9 tokens takes 10 s and waits for the one that has begun.
    assert run(seconds([0, 1], [12, 9], [1, 1]), rules)[:4] == [{0: 4}, {0: 4}, {0: 4}, {1: 4}]
    # In other groups what has begun goes first in any case.
    begun = replace(rules, groups=("running_decode", "running_prefill", "waiting"))
    assert run(instance, begun) == [{0: 4}, {0: 4}, {0: 4}, {1: 4}, {1: 1}]


def test_by_work_what_is_left_includes_the_decodes_to_come() -> None:
    # 8 tokens are left of the long prompt: 9 s. The short one takes 3 s, but its decodes, one
    # second each without the fixed costs of their batches, another 7 s: 10 s.
    rules = replace(PAUSING, order="work", max_batch_tokens=4)
    assert run(seconds([0, 1], [12, 2], [1, 8]), rules)[:2] == [{0: 4}, {0: 4}]
    # With 6 decodes the two are equal, and what has begun stays; with 5 the short one goes first.
    assert run(seconds([0, 1], [12, 2], [1, 7]), rules)[:2] == [{0: 4}, {0: 4}]
    assert run(seconds([0, 1], [12, 2], [1, 6]), rules)[:2] == [{0: 4}, {1: 2, 0: 2}]


@pytest.mark.parametrize(
    ("decodes", "prompts", "beside"),
    [
        # A decode that has 4 tokens left takes D = 8 s; one prefill waits: w <= 8.
        (1, [7], True),
        (1, [8], False),
        # Two prefills wait for one decode: w <= 16.
        (1, [15, 15], True),
        (1, [16, 16], False),
        # Two decodes: two prefills are as one for one, and one is not less: w <= 8.
        (2, [7], True),
        (2, [8], False),
        (2, [8, 8], False),
        # Three prefills for two decodes: w <= 12.
        (2, [11, 11, 11], True),
        (2, [12, 12, 12], False),
    ],
)
def test_the_gate_by_predicted_lengths(decodes: int, prompts: list[int], beside: bool) -> None:
    # A prefill of p tokens takes w = p + 1 seconds, and is let in up to the w of its case.
    # Those that decode come at 0, all others during the prefills of these.
    long = len(prompts)
    instance = seconds(
        [0] * decodes + [1] * long, [1] * decodes + prompts, [5] * decodes + [1] * long
    )
    second = run(instance, "spf-work")[1]
    assert {i: second[i] for i in range(decodes)} == dict.fromkeys(range(decodes), 1)
    assert (len(second) > decodes) == beside
    # Twice the gate lets a prefill of twice the time in, and 0.4 of it none of these: w is at most
    # 3.2, 6.4 or 4.8 then.
    double = [2 * p + 1 for p in prompts]  # 2 (p + 1) seconds
    twice = replace(instance, prompt_tokens=[1] * decodes + double)
    assert (len(run(twice, "spf-work:gate=2")[1]) > decodes) == beside
    assert len(run(instance, "spf-work:gate=0.4")[1]) == decodes


def test_the_gate_by_what_was_seen() -> None:
    # Nobody has finished: the mean is the tokens so far, 1, 2, 3, and D twice as many seconds.
    # At half the gate a prefill of 3 s runs once the first request has 3 tokens, at 6 s.
    instance = seconds([0, 1], [1, 2], [9, 1])
    assert run(instance, "spf")[:4] == [{0: 1}, {0: 1}, {0: 1}, {0: 1, 1: 2}]
    # A request of 4 tokens has finished at 8 s, another has one at 10 s: 5 tokens of one request.
    # A prefill of 5 s runs at once, one of 6 s a step later.
    for prompt, batch in ((4, 5), (5, 6)):
        rows = run(seconds([0, 8, 9], [1, 1, prompt], [4, 9, 1]), "spf")
        assert [2 in row for row in rows].index(True) == batch


def test_a_patient_prefill_waits_for_those_that_end_soon() -> None:
    # Request 0 runs for 2 s, then 1 and 2 are prefilled for 3 s. At 5 s they have 1 and 9 tokens
    # left, of 3 s each, 5 on average, and N = 3. The gate is 5 * 2 = 10 s; but the first of k = 2
    # ends in 3 s, so that a prefill beyond 3 * 3 / 2 = 4.5 s waits for it.
    for prompt, waits in ((3, False), (4, True)):
        instance = seconds([0, 0.5, 0.5, 3], [1, 1, 1, prompt], [1, 2, 10, 1])
        beside = [{1: 1, 2: 1, 3: prompt}, {2: 1}]
        alone = [{1: 1, 2: 1}, {2: 1, 3: prompt}]
        assert run(instance, "spf-work")[2:4] == beside
        assert run(instance, "patient-work")[2:4] == (alone if waits else beside)


def test_a_patient_policy_admits_a_prompt_of_nearly_all_the_kv_alone() -> None:
    # A tenth of 20 is kept free, but for the only one: 20 tokens of prompt fill the KV.
    assert run(seconds([0, 0], [20, 3], [1, 1], capacity=20), "patient") == [{1: 3}, {0: 20}]


def test_patient_prefills_share_the_fixed_cost_of_their_batch() -> None:
    # 16 decode. A batch with prefills takes 50 s more, so two should share it: no more than 16 / 8.
    # They come at 200 and 500 s; `began` is the batch in which each of the two begins.
    cost = BatchCost("setup", 1, {"token": "1000", "base": "1000", "prefill_base": "50000"})
    instance = seconds(
        [0, *[1] * 16, 200, 500], [1] * 17 + [2, 2], [1, *[200] * 16, 1, 1], capacity=9999
    )
    began = {
        policy: [[i in row for row in run(instance, policy, cost)].index(True) for i in (17, 18)]
        for policy in ("spf-work", "patient-work")
    }
    assert began["spf-work"][0] < began["spf-work"][1]
    assert began["patient-work"][0] == began["patient-work"][1]


def test_a_piece_ends_where_its_batch_has_taken_its_time() -> None:
    # Three decode steps are 6 s, 5 tokens, of which a decode takes one.
    alone = seconds([0], [12], [1])
    assert run(alone, "spf:piece=3") == [{0: 5}, {0: 5}, {0: 2}]
    beside = seconds([0, 1], [1, 9], [4, 1])
    expected = [{0: 1}, {0: 1, 1: 4}, {0: 1, 1: 4}, {0: 1, 1: 1}]
    assert run(beside, "spf:gate=1000,piece=3") == expected
    # Less than the time of a token: one goes on all the same.
    assert run(seconds([0], [3], [1]), "spf:piece=0.25") == [{0: 1}] * 3


def test_cheap_tokens_take_half_the_price_of_the_largest_batch() -> None:
    # 1 and 100 tokens take 20 ms, 200 take 120, which is 0.6 ms a token. The 99 beyond the first
    # cost nothing; the 199 cost 100 ms, more than 199 * 0.3 = 59.7.
    cost = tabulated()
    assert cost.cheap_tokens == 100
    assert run(seconds([0], [150], [1]), "spf:cheap=true", cost) == [{0: 100}, {0: 50}]
    assert run(seconds([0], [150], [1]), "spf", cost) == [{0: 150}]
    # The machine's own limit stays, and a linear model has no tile.
    fewer = "spf:cheap=true,max_batch_tokens=80"
    assert run(seconds([0], [150], [1]), fewer, cost) == [{0: 80}, {0: 70}]
    assert LINEAR.cheap_tokens is None
    assert run(seconds([0], [150], [1]), "spf:cheap=true") == [{0: 150}]


def test_look_ahead_follows_a_prefill_that_stands_still() -> None:
    """The projection counts a prefill from where it is, not from its first batch."""
    # Two tokens a batch: the prefill of 6 ends at 9 s, and its KV is 7 and 8 in the two batches
    # after that, until 13 s. A projection from its first batch on has it gone at 9 s, where the
    # other request, of 1, 2 and 3 tokens, seems to fit; 8 + 2 > 8 in the second batch.
    instance = seconds([0, 1], [6, 1], [3, 3], capacity=8)
    rules = Rules(
        admission="lookahead",
        chunked=True,
        max_batch_tokens=2,
        groups=("running_decode", "running_prefill", "waiting"),
        evict_mode="recompute",
    )
    assert run(instance, rules) == [{0: 2}, {0: 2}, {0: 2}, {0: 1}, {0: 1}, {1: 1}, {1: 1}, {1: 1}]
    # With room for 8 + 2 it runs beside.
    roomy = replace(instance, kv_capacity=10)
    assert run(roomy, rules)[3:] == [{0: 1, 1: 1}, {0: 1, 1: 1}, {1: 1}]


def test_neither_evicts_where_kv_is_ample() -> None:
    """KV for 1,000 tokens. Of the two policies `spf-work` alone uses predicted lengths."""
    instance = seconds([0, 0, 1, 2], [9, 3, 1, 5], [2, 4, 3, 1])
    for policy in ("spf", "spf-work"):
        result = optsched.run(Problem(instance, LINEAR), policy).evaluation
        assert result.metrics["evictions"] == 0
    assert make_policy("spf-work")[0].uses_predictions
    assert not make_policy("spf")[0].uses_predictions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": ("prefill",)}, "groups: found .*only 'running_decode' before it"),
        ({"groups": ("running_decode", "prefill", "waiting")}, "groups: found"),
        ({"chunked": False}, "groups: found .*chunked prefill"),
        ({"chunked": False, "overflow": "clear"}, "groups: found .*overflow='evict_latest'"),
        ({"promote": True}, "expected .*no promote"),
        ({"ties": "random"}, "ties: found 'random'; .*other than 'evict_latest'"),
        ({"gate": 0.0}, "gate: found 0.0; expected gate > 0"),
        ({"patient": True, "groups": ("running",)}, "patient: found True; .*with 'prefill'"),
        ({"gather": 0}, "gather: found 0; expected an integer >= 1"),
        ({"gate": 1.0, "groups": ("running", "waiting")}, "gate: found 1.0; .*with 'prefill'"),
        ({"piece": 0.0}, "piece: found 0.0; expected piece > 0"),
        (
            {"piece": 2.0, "groups": ("running", "waiting"), "chunked": False},
            "piece: found 2.0; .*chunked prefill",
        ),
    ],
)
def test_rules_that_do_not_go_together_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(PAUSING, **fields)


def test_the_study_of_traces_compares_policies_that_know_as_much() -> None:
    # spf knows no lengths: 2.0 over fcfs's 1.9 is beyond 1.02. spf-work knows them: it is the best.
    def row(policy: str, value: float | None, clairvoyant: bool) -> dict:
        return {
            "trace": "weka", "load": 0.5, "policy": policy, "mean_latency": value,
            "clairvoyant": clairvoyant,
        }  # fmt: skip

    rows = [row("fcfs", 1.9, False), row("spf", 2.0, False), row("spf-work", 1.5, True)]
    rows += [row("mc-sf", 1.6, True), row("vllm", None, False)]
    first, second = trace_policies.summarize(rows)
    assert first.what == "weka, load 0.5: mean latency of spf over that of fcfs"
    assert first.ours == pytest.approx(2.0 / 1.9)
    assert (first.verdict, second.ours, second.verdict) == (False, 1.0, True)


def test_the_study_of_traces_says_what_it_needs(monkeypatch) -> None:
    # A trace of no known name; one that is known, without a folder of traces (OPTSCHED_DATA).
    monkeypatch.delenv("OPTSCHED_DATA", raising=False)
    settings = {**trace_policies.EXPERIMENT.parameters, "policies": ["spf"], "loads": [0.5]}
    with pytest.raises(InputError, match=r"traces:.*'other'"):
        next(trace_policies.trials({**settings, "traces": ["other"]}, 0))
    (trial,) = trace_policies.trials({**settings, "traces": ["azure-code"]}, 0)
    assert "expected a folder with traces" in trace_policies.run(trial)["error"]
