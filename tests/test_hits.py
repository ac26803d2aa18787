"""What caches find under a schedule's pattern, held against all choices of what to retain."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from itertools import combinations, permutations
from random import Random

import pytest
from command_line import answer, invoke, one_line_error, run
from sharing_cases import random_claims, sharing_instance
from slow_judge import _block_of, _in_blocks, _names, sequences_of

from optsched import Instance, Problem, evaluate
from optsched.analysis.hits import prefix_hits
from optsched.costs.cost import BatchCost
from optsched.costs.model_file import to_toml
from optsched.files.read_write import write_instance, write_schedule
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, OptschedError

COST = BatchCost("tokens", 1, {"token": "1"})


def batches_of(instance: Instance, schedule):
    """Yield what each batch holds, its room in blocks, what each request reaches, and who leaves.

    A name is all tokens up to its end. Of what is reached comes whether it can be found. Then come
    the names that are held when the batch begins, and those that were left since the last one.
    """
    block, sequences = _block_of(instance), sequences_of(instance)
    prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    cached, produced = [0] * instance.n, [0] * instance.n
    done: list[int] = []

    def leave(i: int) -> list:
        mine, cached[i] = _names(sequences[i], cached[i], block), 0
        still = set().union(*(_names(sequences[q], c, block) for q, c in enumerate(cached)))
        return sorted(mine - still, key=len, reverse=True)

    for j in range(schedule.batches):
        gone = [name for i in done for name in leave(i)]
        for p in range(schedule.evicted_offsets[j], schedule.evicted_offsets[j + 1]):
            i = int(schedule.evicted[p])
            gone += leave(i)
            produced[i] = 0 if schedule.evict_mode == "restart" else produced[i]
        others = set().union(*(_names(sequences[i], cached[i], block) for i in range(instance.n)))
        reached, done = [], []
        for p in range(schedule.batch_offsets[j], schedule.batch_offsets[j + 1]):
            i = int(schedule.request[p])
            before = _names(sequences[i], cached[i], block)
            size = prompt[i] + produced[i]
            cached[i] += int(schedule.reused[p]) + int(schedule.tokens[p])
            new = _names(sequences[i], cached[i], block) - before
            reached.append([(name, len(name) < size) for name in sorted(new, key=len)])
            if cached[i] == size:
                produced[i] += 1
                done += [i] * (produced[i] == output[i])
        held = set().union(*(_names(sequences[i], cached[i], block) for i in range(instance.n)))
        used = block * len(held) + sum(
            _in_blocks(c + instance.kv_offset, instance) - c // block * block for c in cached if c
        )
        yield held, (instance.kv_capacity - used) // block, reached, others, gone


def found_in(reached, present) -> int:
    """Return the blocks that requests find in a batch: of each, those from its first one on.

    Of those that have a block in common, one computes it: the best choice counts.
    """
    computed = {name for row in reached for name, can in row if not can}

    def total(rows) -> int:
        seen, found = set(computed), 0
        for row in rows:
            hits = [can and (name in present or name in seen) for name, can in row]
            found += len(hits) if all(hits) else hits.index(False)
            seen |= {name for name, _ in row}
        return found

    return max(total(rows) for rows in permutations(reached))


def best_retention(instance: Instance, schedule) -> int | None:
    """Return the most blocks found over all choices of what to retain; None if there are many."""
    rows = list(batches_of(instance, schedule))
    useful = {n for _, _, reached, *_ in rows for row in reached for n, can in row if can}
    if len(useful) > 6:
        return None
    states, before = {frozenset(): 0}, set()
    for held, room, reached, others, _ in rows:
        after: dict = {}
        for kept, value in states.items():
            value += found_in(reached, others | kept | before)
            pool = sorted((kept | before) & useful - held)
            for size in range(min(room, len(pool)) + 1):
                for some in combinations(pool, size):
                    key = frozenset(some)
                    after[key] = max(after.get(key, 0), value)
        states, before = after, held
    return max(states.values())


def least_recent(instance: Instance, schedule) -> int:
    """Return the blocks found by a cache that evicts what was held the longest ago."""
    kept: OrderedDict = OrderedDict()
    total = 0
    for held, room, reached, others, gone in batches_of(instance, schedule):
        kept |= dict.fromkeys(gone)
        total += found_in(reached, others | set(kept))
        for name in held & set(kept):
            del kept[name]
        while len(kept) > room:
            kept.popitem(last=False)
    return total


def cases(seeds: range):
    for seed in seeds:
        rng, apart = Random(seed), seed % 2
        instance = sharing_instance(rng, most=7 if apart else 4, time_unit="second")
        if apart and instance.prefix_parent is not None:
            schedule = simulate(Problem(instance, COST), "one-by-one")
        else:
            schedule = random_claims(rng, instance, wrong=0)
        if schedule.worker is not None:
            continue
        try:
            used = evaluate(Problem(instance, COST), schedule).batch_kv
        except OptschedError:
            continue
        yield seed, rng, instance, schedule, int(used.max())


def check_best(seeds: range) -> None:
    tight = tried = lost = 0
    for seed, rng, instance, schedule, peak in cases(seeds):
        hits = prefix_hits(Problem(instance, COST), schedule)
        block = instance.prefixes.block
        infinite = hits.infinite()
        assert hits.own.tokens == schedule.reused.sum()
        lowest = int(hits.held.max())
        for capacity in sorted({peak, lowest, rng.randint(lowest, peak + block)}):
            best, lru = hits.best(capacity), hits.lru(capacity)
            smaller = replace(instance, kv_capacity=capacity)
            most = best_retention(smaller, schedule)
            assert lru.tokens == block * least_recent(smaller, schedule), (seed, capacity)
            if most is not None:
                assert best.tokens == block * most, (seed, capacity)
                tried += 1
                tight += best.tokens < infinite.tokens
            assert lru.tokens <= best.tokens <= infinite.tokens
            lost += lru.tokens < best.tokens
            if capacity >= peak:
                assert best.tokens >= hits.own.tokens
    assert tried > len(seeds) / 4
    assert tight > len(seeds) / 150
    assert lost > len(seeds) / 500


def test_the_best_cache_finds_what_the_best_of_all_choices_does():
    check_best(range(400))


@pytest.mark.slow
def test_the_best_cache_of_many_schedules():
    check_best(range(1000, 12_000))


def conversation() -> Instance:
    """Return three turns of a conversation, and another request between them that needs room."""
    return Instance(
        [0.0, 1.0, 2.0],
        [8, 40, 20],
        [1, 1, 1],
        kv_capacity=64,
        time_unit="second",
        kv_accounting="cached",
        prefix_parent=[None, None, 0],
        prefix_tokens=[0, 0, 8],
        prefix_block_tokens=4,
    )


def test_the_words_and_numbers_of_a_conversation(tmp_path, capsys):
    instance = conversation()
    hits = prefix_hits(Problem(instance, COST), simulate(Problem(instance, COST), "fcfs"))
    assert hits.infinite().tokens == 8
    assert hits.best(48).tokens == hits.lru(48).tokens == 8
    assert hits.best(47).tokens == 4  # beside 40 tokens one block fits
    assert hits.best(40).tokens == 0
    assert hits.own.tokens == 0
    assert hits.best(47).seconds == pytest.approx(0.004)
    with pytest.raises(InputError, match="kv_capacity: found 39; expected at least 40"):
        hits.best(39)
    write_instance(replace(instance, kv_capacity=47), tmp_path / "i.json")
    (tmp_path / "c.toml").write_text(to_toml(COST))
    words = ("hits", tmp_path / "i.json", "--cost-model", tmp_path / "c.toml")
    out = run(*words, "--kv-capacity", "40", "--bytes-per-token", 2**27)
    assert "of 8 tokens 4 are lost since the working set does not fit, and 4 since the" in out
    assert "a GiB more than 40 tokens saves of the prefills: best 0.008 s, lru 0.008 s" in out
    data = answer(*words)
    assert data["format"] == "optsched-hits"
    assert data["caches"][0]["best"] == {"tokens": 4, "seconds": pytest.approx(0.004)}


def test_a_report_says_where_hits_go(tmp_path):
    instance = conversation()
    write_instance(instance, tmp_path / "i.json")
    write_schedule(
        simulate(Problem(instance, "llama2-7b-a100-infermax"), "fcfs"), tmp_path / "s.json"
    )
    run("report", tmp_path / "i.json", tmp_path / "s.json", "-o", tmp_path / "r.html",
        "--cost-model", "llama2-7b-a100-infermax")  # fmt: skip
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Where the prefix hits go" in page
    assert "the working set does not fit" in page


def test_what_has_no_hits_is_one_line(tmp_path):
    assert one_line_error(invoke("hits", "tiny")).startswith(
        "error: prefixes: found none; expected"
    )
    instance = conversation()
    two = simulate(Problem(instance, COST), "fcfs:workers=2,router=round-robin")
    with pytest.raises(InputError, match="expected batches on one"):
        prefix_hits(Problem(instance, COST), two)
