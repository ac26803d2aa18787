"""Claims of shared prefixes: the judge against rules, brute force, an engine and a slow judge."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from sharing_cases import LruEngine, any_retention, engine_instance, random_claims, sharing_instance
from slow_judge import TIMED, slow_judge

from optsched import Problem, evaluate, from_batches, from_starts, timeline
from optsched.files.read_write import read_schedule, write_schedule
from optsched.problem.errors import InputError, ViolationError
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import in_parts
from optsched.show.perfetto import trace_events
from optsched.show.plot import plot_kv

THREE = Instance(
    [0, 0, 0], [10, 10, 10], [1, 1, 1], 20,
    kv_accounting="cached", prefix_parent=[None, 0, 1], prefix_tokens=[0, 8, 4],
    prefix_block_tokens=4,
)  # fmt: skip
"""Request 1 has the first two blocks of request 0, and request 2 the first."""


def rows(instance, *batches, reused, **options):
    """Return the schedule of batches of {request: tokens}, in rounds."""
    offsets = np.cumsum([0, *map(len, batches)])
    request = [i for batch in batches for i in batch]
    tokens = [c for batch in batches for c in batch.values()]
    options = {"evict_mode": "restart", **options}
    return from_batches(offsets, request, tokens, instance=instance, reused=reused, **options)


def test_claims_save_work_and_shared_blocks_count_once():
    """`THREE` has prompts of 10 and blocks of 4; request 1 may claim two blocks of 0, and 2 one."""
    judged = evaluate(THREE, rows(THREE, {0: 10}, {1: 2}, {2: 6}, reused=[0, 8, 4]))
    # One batch after the other: each holds one prompt of 10, claimed or computed.
    assert judged.batch_kv.tolist() == [10, 10, 10]
    assert judged.reuse.batch_retained.tolist() == [0, 0, 0]
    assert judged.reuse.reused.tolist() == [0, 8, 4]
    assert judged.metrics["prefix_hit_tokens"] == 12  # 8 + 4 of 3 x 10 tokens
    assert judged.metrics["prefix_hit_rate"] == 12 / 30

    # In one batch: blocks 0 and 1 of 4 tokens once, then 2, 2 and 6 tokens: 18.
    judged = evaluate(THREE, rows(THREE, {2: 6, 1: 2, 0: 10}, reused=[4, 8, 0]))
    assert judged.batch_kv.tolist() == [18]
    assert judged.reuse.batch_shared.tolist() == [8]
    # Computed by each for itself, they still are held once.
    judged = evaluate(THREE, rows(THREE, {2: 10, 1: 10, 0: 10}, reused=[0, 0, 0]))
    assert judged.batch_kv.tolist() == [18]


def test_what_is_claimed_later_is_retained_until_then():
    # Blocks 0 and 1 are kept over batch 1, which holds block 0: only block 1 is kept in addition.
    judged = evaluate(THREE, rows(THREE, {0: 10}, {2: 6}, {1: 2}, reused=[0, 4, 8]))
    assert judged.batch_kv.tolist() == [10, 10 + 4, 10]
    assert judged.reuse.batch_retained.tolist() == [0, 4, 0]
    assert judged.metrics["peak_retained_kv"] == 4
    tight = replace(THREE, kv_capacity=13)
    with pytest.raises(ViolationError, match=r"batch 1.*retains 14.*tokens") as error:
        evaluate(tight, rows(tight, {0: 10}, {2: 6}, {1: 2}, reused=[0, 4, 8]))
    assert error.value.rule == "kv_capacity"
    evaluate(tight, rows(tight, {0: 10}, {2: 6}, {1: 6}, reused=[0, 4, 4]))


@pytest.mark.parametrize(
    ("reused", "words"),
    [
        ([0, 6, 0], "batch 1, request 1: claims 6 tokens; expected whole blocks of 4"),
        ([0, -4, 0], "batch 1, request 1: claims -4 tokens; expected whole blocks of 4"),
        (
            [0, 12, 0],
            "batch 1, request 1: claims 12 tokens; expected at most 9, its input less one",
        ),
        ([4, 0, 0], "batch 0, request 0: claims 4 tokens, but all behind the first 0 were never"),
        ([0, 0, 8], "batch 2, request 2: claims 8 tokens, but all behind the first 4 were never"),
    ],
)
def test_each_broken_rule_is_named(reused, words):
    """Tokens that requests 0, 1 and 2 claim: none is before 0, 1 has 8 in common with it, and 2
    has 4 with 1. The error says what is wrong."""
    tokens = [10 - max(r, 0) for r in reused]
    schedule = rows(THREE, *({i: max(c, 1)} for i, c in enumerate(tokens)), reused=reused)
    with pytest.raises(ViolationError, match=words) as error:
        evaluate(THREE, schedule)
    assert error.value.rule == "reused"
    assert slow_judge(THREE, schedule).rule == "reused"


def test_claims_with_kv_held_or_without_prefixes_are_refused():
    """`THREE` has prompts of 10 tokens in blocks of 4; the first one's is computed in two
    batches."""
    schedule = rows(THREE, {0: 4}, {0: 6}, {1: 10}, {2: 10}, reused=[0, 4, 0, 0])
    with pytest.raises(ViolationError, match="claims 4 tokens with 4 of its tokens cached"):
        evaluate(THREE, schedule)
    plain = Instance([0], [4], [1], kv_capacity=8)
    with pytest.raises(InputError, match=r"request 0.*2.*tokens"):
        evaluate(plain, rows(plain, {0: 2}, reused=[2]))
    assert evaluate(plain, rows(plain, {0: 4}, reused=[0])).reuse is None
    with pytest.raises(InputError, match=r"reused:.*2.*1"):
        rows(plain, {0: 4}, reused=[0, 0])
    with pytest.raises(InputError, match="found claims in batches to be split"):
        in_parts(schedule, THREE)


def test_parts_of_a_batch_may_hold_more_where_a_block_is_shared_once_it_is_whole():
    # Both compute the same block of 4 tokens, which is held once at the end of the batch. With 6
    # tokens in a batch one of them has 2 for itself after the first part: 4 + 2 > 5.
    two = Instance(
        [0, 0], [4, 4], [1, 1], 5,
        kv_accounting="cached", prefix_parent=[None, 0], prefix_tokens=[0, 4],
        prefix_block_tokens=4,
    )  # fmt: skip
    whole = rows(two, {0: 4, 1: 4}, reused=None)
    assert evaluate(two, whole).batch_kv.tolist() == [4]
    limited = replace(two, limits=Limits(max_batch_tokens=6))
    with pytest.raises(ViolationError, match=r"batch 0.*6.*tokens"):
        evaluate(limited, in_parts(whole, limited))


def test_an_evicted_request_finds_its_own_blocks_again():
    # 6 tokens and one produced, evicted, back with 4 of 7: 3 are computed again.
    one = Instance([0, 0], [6, 1], [3, 1], 9, kv_accounting="cached", prefix_block_tokens=2)
    options = {"evicted_offsets": [0, 0, 1, 1, 1], "evicted": [0], "evict_mode": "recompute"}
    seconds = replace(one, time_unit="second")
    schedule = rows(seconds, {0: 6}, {1: 1}, {0: 3}, {0: 1}, reused=[0, 0, 4, 0], **options)
    judged = evaluate(Problem(seconds, TIMED), schedule)
    assert judged.batch_kv.tolist() == [6, 1 + 4, 7, 8]
    assert judged.reuse.asked.tolist() == [6 + 7, 1]
    # The 4 that it claims are its own again, as the 3 that it computes.
    held = timeline(Problem(seconds, TIMED), schedule).kv_by_group()[1]
    assert held.tolist() == [[6, 0, 4 + 3, 8, 0], [0, 1, 0, 0, 0]]


def test_the_whole_input_is_never_found():
    """Of a prompt of 8 tokens 7 may be claimed, and so one block of 4."""
    whole = Instance([0, 0], [8, 8], [1, 1], 20, prefix_parent=[None, 0], prefix_tokens=[0, 8])
    whole = replace(whole, prefix_block_tokens=4)
    with pytest.raises(ViolationError, match="claims 8 tokens; expected at most 7"):
        evaluate(whole, rows(whole, {0: 8}, {1: 1}, reused=[0, 8]))
    judged = evaluate(whole, rows(whole, {0: 8}, {1: 4}, reused=[0, 4]))
    assert judged.metrics["prefix_hit_tokens"] == 4


def test_each_worker_has_its_own_cache():
    """Request 1 begins with 8 tokens of request 0, which runs on the other worker: it cannot
    claim them."""
    options = {"worker": [0, 1, 0], "start": [0, 0, 1]}
    schedule = rows(THREE, {0: 10}, {1: 2}, {2: 6}, reused=[0, 8, 4], **options)
    with pytest.raises(ViolationError, match=r"batch 1.*request 1.*8.*tokens"):
        evaluate(THREE, schedule)
    schedule = rows(THREE, {0: 10}, {1: 10}, {2: 6}, reused=[0, 0, 4], **options)
    assert evaluate(THREE, schedule).batch_kv.tolist() == [10, 10, 10]


def test_runs_of_rounds_share_blocks_too():
    tight = replace(THREE, kv_capacity=18)
    # All at once: blocks 0 and 1 once, 8 tokens, and 2, 2 and 6 of their own: 18.
    judged = evaluate(tight, from_starts([0, 0, 0], tight))
    assert judged.kind == "starts"
    assert judged.metrics["peak_kv"] == 18
    with pytest.raises(ViolationError, match="holds 18 KV tokens"):
        evaluate(
            replace(THREE, kv_capacity=17), from_starts([0, 0, 0], replace(THREE, kv_capacity=17))
        )


def test_timelines_and_traces_tell_private_shared_and_retained_kv():
    schedule = rows(THREE, {0: 10}, {2: 6}, {1: 2}, reused=[0, 4, 8])
    found = timeline(THREE, schedule)
    # In round 1 request 2 holds the first block of request 0, and the second, 4 tokens, is kept
    # until request 1 claims both in round 2.
    times, kinds = found.kv_by_kind()
    assert times.tolist() == [0, 1, 2, 3]
    assert kinds["private"].tolist() == [10, 10, 10, 0]
    assert kinds["retained"].tolist() == [0, 4, 0, 0]
    assert found.batch_kv_left.tolist() == [0, 4, 0]
    events = list(trace_events(found))
    kept = [e["args"]["value"] for e in events if e["name"] == "KV retained [tokens]"]
    assert kept == [0, 4, 0]
    together = timeline(THREE, rows(THREE, {2: 6, 1: 2, 0: 10}, reused=[4, 8, 0]))
    assert together.kv_by_kind()[1]["shared"].tolist() == [8, 0]
    labels = plot_kv(found).get_legend_handles_labels()[1]
    assert {"private", "shared", "retained"} <= set(labels)


def test_files_keep_claims(tmp_path):
    schedule = rows(THREE, {0: 10}, {1: 2}, {2: 6}, reused=[0, 8, 4])
    for columns in ("json", "parquet"):
        write_schedule(schedule, tmp_path / "s.json", columns=columns)
        again = read_schedule(tmp_path / "s.json", THREE)
        assert again.reused.tolist() == [0, 8, 4]
    assert "reused" not in from_starts([0, 0, 0], THREE).to_dict()


def judged_alike(seed: int) -> tuple[bool, int, int]:
    """Judge a random schedule by both judges and by brute force; return what was found."""
    rng = Random(seed)
    instance = sharing_instance(rng)
    schedule = random_claims(rng, instance)
    costs = (
        {} if instance.in_rounds else {"layers": TIMED.layers, "coefficients": TIMED.coefficients}
    )
    roomy = slow_judge(instance, schedule, **costs)
    if roomy.kv and roomy.rule in (None, "unfinished"):
        least = instance.kv_block_tokens * -(
            -int(instance.peak_tokens.max()) // instance.kv_block_tokens
        )
        most = max(roomy.kv.values())
        instance = replace(instance, kv_capacity=max(least, most - rng.choice([0, 0, 0, 1, 2])))
        schedule = replace(schedule, instance_sha256=instance.sha256)

    slow = slow_judge(instance, schedule, **costs)
    error = None
    try:
        judged = evaluate(Problem(instance, None if instance.in_rounds else TIMED), schedule)
    except ViolationError as found:
        error = found

    if error is not None:
        assert error.rule in slow.broken, (seed, error, slow.broken)
        whom = [i for _, i in slow.broken[error.rule]]
        assert error.rule == "unfinished" or error.request in whom, (seed, error, slow.broken)
        if error.rule == "kv_capacity":
            assert slow.broken[error.rule][0][0] == error.batch, seed
            assert any_retention(instance, schedule) is not True, seed
        return False, 0, 0

    assert slow.rule is None, (seed, slow.broken)
    assert judged.batch_kv.tolist() == list(slow.kv.values()), seed
    assert any_retention(instance, schedule) is not False, seed
    kept = int(judged.reuse.batch_retained.sum())
    return True, int(judged.reuse.reused.sum()), kept


@pytest.mark.parametrize(
    "seeds", [range(300), pytest.param(range(300, 30_000), marks=pytest.mark.slow)]
)
def test_both_judges_and_every_retention_agree(seeds):
    """`judged_alike` holds the judge, the slow judge and brute force over what is kept together.
    So that this means something, schedules must be good and bad, claim, and retain."""
    found = np.array([judged_alike(seed) for seed in seeds])
    good, claimed, kept = found.T
    assert 0.3 < good.mean() < 0.9
    assert (claimed > 0).mean() > 0.2
    assert (kept > 0).mean() > 0.03


@pytest.mark.parametrize(
    "seeds", [range(200), pytest.param(range(200, 30_000), marks=pytest.mark.slow)]
)
def test_every_run_of_an_lru_engine_is_accepted(seeds):
    """`LruEngine` of the tests has a pool of blocks, finds them again, preempts, and frees the
    least recently used; the judge knows none of that, and must find nothing wrong."""
    hits = evictions = 0
    for seed in seeds:
        rng = Random(seed)
        instance = engine_instance(rng)
        judged = evaluate(Problem(instance, TIMED), LruEngine(instance, rng).run())
        hits += int(judged.reuse.reused.sum())
        evictions += judged.metrics["evictions"]
    assert hits > len(seeds)  # a token and more in a run
    assert evictions > len(seeds) / 5  # both occur often
