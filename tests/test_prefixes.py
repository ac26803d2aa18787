"""Shared prefixes in instances: lossless trees, subsets, names of blocks, files and generators."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from command_line import invoke, one_line_error

from optsched.bounds import features_of
from optsched.files.read_write import read_instance, write_instance
from optsched.problem.errors import InputError
from optsched.problem.instance import PREFIX, Instance
from optsched.problem.prefixes import tree_of
from optsched.workloads.generate import generate
from optsched.workloads.predict import predict


def common(a, b) -> int:
    """Count the tokens that two sequences share, one by one."""
    k = 0
    while k < min(len(a), len(b)) and a[k] == b[k]:
        k += 1
    return k


def random_sequences(rng: Random, n: int) -> list[tuple[int, ...]]:
    """Return sequences of few different tokens, some of which continue an earlier one."""
    found: list[tuple[int, ...]] = []
    for _ in range(n):
        start = rng.choice(found)[: rng.randint(0, 9)] if found and rng.random() < 0.7 else ()
        found.append(start + tuple(rng.choices([0, 1], k=rng.randint(2, 6))))
    return found


def of_sequences(rng: Random, found: list[tuple[int, ...]], **fixed) -> Instance:
    """Return the instance of some sequences, of which the last tokens are the output."""
    tree = tree_of(found, [len(one) for one in found])
    output = [rng.randint(1, len(one) - 1) for one in found]
    prompt = [len(one) - o for one, o in zip(found, output, strict=True)]
    columns = {
        "prefix_parent": np.where(tree.shared, tree.parent, -1),
        "prefix_tokens": tree.shared,
    }
    return Instance([0] * len(found), prompt, output, **{"kv_capacity": 40, **columns, **fixed})


def shares(instance: Instance, i: int, q: int) -> int:
    """Return what two requests share: the least of the numbers along the tree between them."""
    least = int(instance.prompt_tokens[i] + instance.output_tokens[i])
    while i != q:
        i, q = max(i, q), min(i, q)
        least, i = min(least, int(instance.prefix_tokens[i])), int(instance.prefix_parent[i])
        if i < 0:
            return 0
    return least


@pytest.mark.parametrize("seed", range(60))
def test_two_columns_hold_what_any_two_sequences_share(seed):
    """`common` counts along two sequences, and `shares` sees the two columns only, of all
    requests and of some."""
    rng = Random(seed)
    found = random_sequences(rng, rng.randint(1, 12))
    instance = of_sequences(rng, found)
    for i in range(len(found)):
        for q in range(i):
            assert shares(instance, i, q) == common(found[i], found[q])

    pick = rng.choices(range(len(found)), k=rng.randint(1, len(found)))
    part = instance.subset(pick)
    for i in range(len(pick)):
        for q in range(i):
            assert shares(part, i, q) == common(found[pick[i]], found[pick[q]])


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("block", [1, 2, 3])
def test_blocks_have_one_name_if_their_requests_share_up_to_their_end(seed, block):
    rng = Random(seed)
    found = random_sequences(rng, rng.randint(1, 10))
    prefixes = of_sequences(rng, found, prefix_block_tokens=block).prefixes
    beginnings = {one[: (d + 1) * block] for one in found for d in range(len(one) // block)}
    assert prefixes.distinct_blocks == len(beginnings)
    for i, one in enumerate(found):
        for d in range(len(one) // block):
            same = [common(one, q) >= (d + 1) * block for q in found]
            # Up the tree (`above`) to the request that has block d among its own, from `first` on.
            owner = i
            while owner >= 0 and prefixes.first[owner] > d:
                owner = prefixes.above[owner]
            assert owner == same.index(True)
            # The first `public` blocks are those that another request has, too.
            assert (d < prefixes.public[i]) >= (sum(same) > 1)


def test_everything_kept_is_the_same_instance_and_a_dropped_parent_is_stepped_over():
    columns = {"prefix_parent": [None, 0, 1, 1], "prefix_tokens": [0, 6, 9, 4]}
    instance = Instance([0, 0, 0, 0], [8, 8, 9, 9], [2, 2, 2, 2], kv_capacity=20, **columns)
    assert instance.subset(range(4)).sha256 == instance.sha256
    part = instance.subset([0, 2, 3])  # 2 shares min(9, 6) with 0, and 3 min(4, 9) with 2
    assert part.prefix_parent.tolist() == [-1, 0, 1]
    assert part.prefix_tokens.tolist() == [0, 6, 4]
    assert instance.subset(np.array([False, False, True, False])).prefix_parent.tolist() == [-1]


def test_files_keep_the_columns_and_have_none_without_them(tmp_path):
    plain = Instance([0, 1], [8, 8], [2, 2], kv_capacity=20)
    # Without the columns the digest stays what it was.
    assert plain.sha256 == "df30bd944528e69edf3bb2000672ea1b3d2f566c0608cb7924f4e7204c0f5158"
    assert not {*PREFIX, "prefix_block_tokens"} & {*plain.to_dict(), *plain.to_dict()["requests"]}

    # With them the digest is another, the file has them, and -1 says what null does.
    columns = {"prefix_parent": [None, 0], "prefix_tokens": [0, 7], "prefix_block_tokens": 4}
    instance = replace(plain, **columns)
    assert instance.sha256 != plain.sha256
    write_instance(instance, tmp_path / "one.json")
    assert json.loads((tmp_path / "one.json").read_text())["requests"]["prefix_parent"] == [None, 0]
    again = read_instance(tmp_path / "one.json")
    assert again.sha256 == instance.sha256
    assert again.prefix_parent.tolist() == [-1, 0]
    assert replace(plain, **{**columns, "prefix_parent": [-1, 0]}).sha256 == instance.sha256
    assert predict(instance, "oracle").prefix_tokens.tolist() == [0, 7]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"prefix_parent": [None, 0]}, "requests.prefix_tokens: found nothing"),
        ({"prefix_tokens": [0, 0]}, "requests.prefix_parent: found nothing"),
        ({"prefix_parent": [None], "prefix_tokens": [0]}, "found 1 values; expected 2"),
        (
            {"prefix_parent": [1, 0], "prefix_tokens": [0, 0]},
            "request 0: found 1; expected an earl",
        ),
        (
            {"prefix_parent": [None, 1], "prefix_tokens": [0, 0]},
            "request 1: found 1; expected an e",
        ),
        ({"prefix_parent": [None, 2], "prefix_tokens": [0, 0]}, "from -1 to 1"),
        ({"prefix_parent": [None, None], "prefix_tokens": [0, 1]}, "expected 0, since it has no"),
        ({"prefix_parent": [None, 0], "prefix_tokens": [0, 9]}, "expected at most 8, the prompt"),
        ({"prefix_parent": [None, 0], "prefix_tokens": [0, -1]}, "from 0 to"),
        ({"prefix_parent": 3, "prefix_tokens": [0, 1]}, "expected a list of numbers"),
        ({"prefix_block_tokens": 0}, "prefix_block_tokens"),
        (
            {"prefix_block_tokens": 6, "kv_block_tokens": 4},
            "expected a multiple of kv_block_tokens",
        ),
    ],
)
def test_impossible_trees_are_refused_by_name(columns, words):
    with pytest.raises(InputError, match=words):
        Instance([0, 1], [8, 6], [2, 2], **{"kv_capacity": 20, **columns})


def test_a_generated_tree_has_its_depth_and_reuse():
    instance = generate("prefix-trees", n=400, trees=7, depth=3, reuse=0.25, seed=3)
    parent = instance.prefix_parent.tolist()
    depth = []
    for p in parent:
        depth.append(0 if p < 0 else depth[p] + 1)
    assert max(depth) == 3
    assert parent.count(-1) == 7
    child = instance.prefix_parent >= 0
    part = instance.prefix_tokens[child] / instance.prompt_tokens[child]
    # A quarter of each prompt, rounded: of 22 tokens 6, which are 0.273.
    assert part.max() < 0.29
    # In the mean roundings cancel out, nearly.
    assert abs(part.mean() - 0.25) < 0.01
    assert generate("prefix-trees", n=5, depth=0).prefix_parent.tolist() == [-1] * 5


def test_bounds_and_exact_methods_refuse_shared_prefixes_by_name(tmp_path):
    instance = generate("prefix-trees", n=6, time_unit="round", kv_capacity=400)
    assert "prefix_parent" in features_of(instance)
    block = replace(instance, prefix_parent=None, prefix_tokens=None)
    assert "prefix_block_tokens" in features_of(block)
    write_instance(instance, tmp_path / "one.json")
    for words in (("solve",), ("bound",), ("export", "--format", "lp", "-o", tmp_path / "x.lp")):
        assert "prefix_parent" in one_line_error(
            invoke(*words[:1], tmp_path / "one.json", *words[1:])
        )
