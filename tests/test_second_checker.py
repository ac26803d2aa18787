"""The checker in JavaScript (docs/site/check.js) says what the first one says."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweeps import parts
from test_batch_bounds import prices, tiny
from test_certificate import corrupted, sealed
from test_dual import random_instance

import optsched
from optsched import Instance, bound, solve
from optsched.bounds.certificate import certify
from optsched.bounds.checker.check import check_certificate
from optsched.bounds.checker.parts import Budget, Rejected, TooLarge
from optsched.bounds.checker.seconds import proved_ticks
from optsched.bounds.leaves import busy_time_leaf, work_leaf
from optsched.files.library import library_folder
from optsched.files.read_write import read_json

ROOT = Path(__file__).resolve().parent.parent
SECOND = ROOT / "docs" / "site" / "check.js"
NODE = shutil.which("node") or ""
pytestmark = pytest.mark.skipif(not NODE, reason="needs node")

ENTRIES = {k: e for k, e in optsched.library.read_library()["instances"].items() if e.get("bound")}
OTHERS = "this checker does not cover"
"""What the second checker says of leaves, machines and fields that it does not know."""
# What is said of a certificate that is too large for a checker.
LARGE = "for this checker"
# Entries of the library that are checked soon, of each kind.
QUICK = {"tiny-n4", "worst-fcfs", "jaillet-2-n1000", "csp-b4-o4-i64", "long-fast", "chat-x0.25"}
# A program for node: of each line with an instance and a certificate, what is proved, or why not.
EACH = """
const { check } = require(process.argv[1]);
for (const line of require("fs").readFileSync(0, "utf8").trim().split("\\n")) {
  try { console.log(check(...JSON.parse(line)).proved.toString()); } catch (error) {
    if (error.name !== "Error") throw error;
    console.log(`refused: ${error.message}`);
  }
}
"""
Claim = tuple[Instance, dict[str, Any]]


def second(claims: list[Claim]) -> list[str]:
    """Return what the second checker proves by each certificate, or why it refuses it."""
    lines = [json.dumps([json.dumps(i.to_dict()), json.dumps(c)]) for i, c in claims]
    found = subprocess.run(
        [NODE, "--max-old-space-size=4096", "-e", EACH, str(SECOND)],
        input="\n".join(lines), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return found.stdout.splitlines()


def of_library(name: str) -> Claim:
    """Return an instance of the library and the certificate of its bound."""
    certificate = read_json(library_folder(None) / ENTRIES[name]["bound"]["file"])
    return optsched.library.load(name), certificate


def leaves(certificate: dict[str, Any]) -> set[str]:
    """Return the relaxations in a certificate."""
    tree = certificate["tree"]
    some = tree.get("sum") or tree.get("max") or [{"tree": tree.get("tree", tree)}]
    return {one["tree"].get("relaxation") for one in some}


@pytest.mark.parametrize(
    "name",
    [pytest.param(k, marks=[] if k in QUICK else pytest.mark.slow) for k in ENTRIES],
)
def test_it_proves_the_values_of_the_library_or_names_what_it_does_not_cover(name: str) -> None:
    """Beside each certificate stands one that claims more by a hundred-millionth and 1, which is
    refused."""
    instance, certificate = of_library(name)
    more = {**certificate, "value": int(certificate["value"] * (1 + 1e-8)) + 1}
    said, refused = second([(instance, certificate), (instance, sealed(more))])
    known = {"prices", "pairs", "lengths", "ramp", "work", "busy-time"}
    if leaves(certificate) <= known and "pools" not in certificate:
        assert 0 <= int(said) / certificate["value"] - 1 < 1e-8 or said.endswith(LARGE)
        assert refused.startswith(("refused: value", "refused: ramp"))
    else:
        assert said.startswith(f"refused: tree: {OTHERS}") or "pools" in certificate


def certificates(rng: np.random.Generator) -> Iterator[Claim]:
    """Yield certificates of all leaves that it covers, of two small instances."""
    instance = random_instance(rng)
    for method in ("dual", "pairs", "lengths", "ramp"):
        found = bound(instance, method=method, time_limit_s=1)
        if found.certificate:
            yield instance, found.certificate

    yield instance, solve(instance, certify=True, time_limit_s=5).certificate

    served, cost = tiny(rng)
    for objective in ("tel", "mean_ttft", "makespan"):
        yield served, certify(served, cost, objective, work_leaf())
    for cells in list(prices(rng, served, cost))[:2]:
        yield served, certify(served, cost, "tel", busy_time_leaf(*cells))


def forged(rng: np.random.Generator, good: Claim, count: int) -> Iterator[Claim]:
    """Yield a certificate changed somewhere, as it is, with a new digest, claiming what fits."""
    instance, certificate = good
    for _ in range(count):
        bad = corrupted(rng, certificate)
        yield instance, bad
        yield instance, sealed(bad)
        value = first(instance, sealed({**bad, "value": 0}))
        if "expected" in value and value.split("expected ")[1].split(",")[0].lstrip("-").isdigit():
            proved = int(value.split("expected ")[1].split(",")[0])
            yield instance, sealed({**bad, "value": proved})
            yield instance, sealed({**bad, "value": proved + 1 + abs(proved) // 10**6})


def first(instance: Instance, certificate: dict[str, Any]) -> str:
    """Return what the first checker proves, or why it refuses."""
    try:
        return str(check_certificate(instance, certificate))
    except TooLarge:
        return LARGE
    except Rejected as error:
        return f"refused: {error}"


def judged(instance: Instance, certificate: dict[str, Any], said: str) -> bool:
    """Hold both checkers' answers together, and return whether both gave one."""
    mine = first(instance, certificate)
    if OTHERS in said or said.endswith(LARGE) or mine == LARGE:
        return False

    if instance.in_rounds or said.startswith("refused"):
        same = said == mine or (said.startswith("refused") and mine.startswith("refused"))
        assert same, (mine, said, instance.to_dict(), certificate)
        return True

    # In seconds it rounds less, and takes any value up to its own.
    assert certificate["sha256"] == sealed(certificate)["sha256"]
    proved = proved_ticks(instance, certificate, Budget())
    assert proved <= int(said) <= proved + 1e-8 * abs(proved) + 10**6
    assert certificate["value"] <= int(said)
    return True


@pytest.mark.parametrize("seeds", parts(2, 13))
def test_it_agrees_on_forgeries(seeds: range) -> None:
    """`judged` holds both checkers' words together. So that this means something, both must have
    answered most claims, and have accepted and refused a tenth of them at least."""
    claims = list[Claim]()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        for good in certificates(rng):
            claims += [good, *forged(rng, good, 10 if len(seeds) < 5 else 50)]

    said = second(claims)
    both = sum(judged(*claim, words) for claim, words in zip(claims, said, strict=True))
    accepted = sum(not words.startswith("refused") for words in said)
    print(f"claims {len(claims)}, both answered {both}, accepted {accepted}")
    assert both > 0.6 * len(claims) > 100
    assert 0.1 * both < accepted < 0.9 * both


def test_the_command_says_what_is_proved_and_ends_with_5_if_nothing_is() -> None:
    """The certificate is of the online case, whose optimum is 109 rounds, and not of the offline
    one."""
    files = [ROOT / "instances" / f"worst-mc-sf-{kind}.json" for kind in ("online", "offline")]
    proof = ROOT / "instances" / "certificates" / files[0].name
    one, other = (
        subprocess.run([NODE, SECOND, proof, file], capture_output=True, text=True)
        for file in files
    )
    assert (one.returncode, one.stdout) == (0, "accepted: the optimum is 109 rounds (tel)\n")
    assert (other.returncode, other.stdout[:25]) == (5, "refused: instance_sha256:")
