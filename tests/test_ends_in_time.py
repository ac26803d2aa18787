"""Loops that may last for ever look at the clock: bounds under rough tables, shared prefixes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optsched import BatchCost, Instance, Problem, bound, generate, write_instance
from optsched.bounds import list_bounds
from optsched.bounds.checker.batches import batches_of
from optsched.bounds.checker.charges import TERMS, refuse, witnesses
from optsched.bounds.checker.parts import Budget, Rejected
from optsched.bounds.checker.prefixes import Shared
from optsched.costs.model_file import to_toml
from optsched.costs.table import CostTable, Grid
from optsched.problem.errors import OutOfTimeError

# No command here takes nearly as long, on a busy machine either: those that never end are killed.
CAP_S = 400


def rough(seed: int) -> tuple[Instance, BatchCost]:
    """Return few requests on a huge machine, and tables that rise and fall and end long before."""
    rng = np.random.default_rng(seed)

    def axis(first: float, count: int) -> list[float]:
        return [first, *(first + np.cumsum(rng.uniform(1, 5, count - 1))).tolist()]

    many: Any = {
        "prefill_tokens": axis(0.5, 4), "prefill_kv": axis(0.5, 4),
        "decode_requests": [0.0, 1.0], "decode_kv": axis(0.0, 6),
    }  # fmt: skip
    values = rng.choice([0.0, 1.0, 2.0, 3.0], (4, 4, 2, 6))
    for d in range(values.ndim):  # no axis falls at its end, so that times beyond are positive
        along = np.moveaxis(values, d, 0)
        along[-1] = np.maximum(along[-1], along[-2])

    rising: Any = ({"decode_requests": [0, 1]}, [0, 1]), ({"prefill_tokens": [0, 1]}, [0, 1])
    skew: Any = {"decode_requests": [0, 1, 2]}, [0, 1, 0.5]
    grids = [Grid(*some) for some in (*rising, (many, values))]
    table = CostTable(grids, [{"base": "0.01"}], Grid(*skew))
    columns = (column[: 1 + seed % 2] for column in ([0.0, 0.0], [4, 9], [1, 7]))
    instance = Instance(*columns, 1_000_000, time_unit="second", kv_accounting="cached")
    return instance, BatchCost("rough", 1, {"base": "1"}, table=table)


# Seeds of which the scan for the shortest batch alone takes more than 60 million steps.
LONG = [185, 348, 1385]


@pytest.mark.parametrize("seed", LONG)
def test_a_scan_of_batches_asks_whether_to_go_on_within_counted_steps(seed: int) -> None:
    batches, asked = batches_of(*rough(seed)), 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked == 4:  # at the fourth look
            raise OutOfTimeError("enough")

    with pytest.raises(OutOfTimeError):
        witnesses(batches, np.eye(1, TERMS), check=check)
    # The checker counts the same steps, and ends with too many, or with a batch that it found.
    with pytest.raises(Rejected):
        refuse(batches, 1e-9 * np.eye(1, TERMS), np.inf, Budget(100_000))


def files(folder: Path, seed: int) -> list[str]:
    """Write a rough case, and return the words that name it."""
    instance, cost = rough(seed)
    write_instance(instance, folder / "few.json")
    (folder / "rough.toml").write_text(to_toml(cost))
    return [str(folder / "few.json"), "--cost-model", str(folder / "rough.toml")]


@pytest.mark.parametrize(
    "seed", [LONG[0], *(pytest.param(seed, marks=pytest.mark.whole) for seed in LONG[1:])]
)
def test_bounds_under_rough_tables_end(seed: int, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "optsched", "bound", *files(tmp_path, seed)]
    ended = subprocess.run(
        [*words, "--time-limit", "1"], capture_output=True, text=True, timeout=CAP_S, check=True
    )
    assert "total latency of any schedule >= " in ended.stdout


@pytest.mark.parametrize("seed", LONG)
def test_a_request_to_stop_ends_a_scan_of_batches(seed: int) -> None:
    # Ctrl-C sets the event. Without looks at it the call lasts for ever.
    instance, cost = rough(seed)
    stop = threading.Event()
    timer = threading.Timer(1.0, stop.set)
    timer.start()
    bound(Problem(instance, cost), method="classes", time_limit_s=1e9, stop=stop)
    assert stop.is_set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(x.name for x in list_bounds().values() if x.time_unit == "second")
)
@pytest.mark.parametrize("kind", ["rough", "prefixed", "plain", "huge"])
def test_every_bound_ends_on_what_is_large_or_rough(kind: str, name: str, tmp_path: Path) -> None:
    one = list_bounds()[name]
    goal = "tel" if "tel" in one.objectives else one.objectives[0]
    asked = ["--method", name, "--objective", goal, "--time-limit", "5"]
    asked += ["--slo-ttft", "10"] if goal.startswith("slo") else []
    words = [str(tmp_path / "few.json"), "--cost-model", "llama2-7b-a100-infermax"]
    if kind == "rough":
        words = files(tmp_path, LONG[0])
    elif kind == "huge":
        some = Instance([0.0, 1.0], [10**6, 10**9], [10**6, 1], 10**12, time_unit="second")
        write_instance(some, tmp_path / "few.json")
    else:
        maker = "prefix-trees" if kind == "prefixed" else "lognormal"
        more = {} if kind == "prefixed" else {"time_unit": "second", "rate": 10}
        large = generate(maker, n=100_000, kv_capacity=100_000, seed=1, **more)
        write_instance(large, tmp_path / "few.json")

    ended = subprocess.run(
        [sys.executable, "-m", "optsched", "bound", *words, *asked],
        capture_output=True, text=True, timeout=CAP_S, check=False,
    )  # fmt: skip
    # A bound, a refusal, or nothing within the limits.
    assert ended.returncode in (0, 2, 4), ended.stderr


def charges_made(monkeypatch: pytest.MonkeyPatch, n: int, **asked: Any) -> list[int]:
    """Return the times D for which charges are made in one call of `bound`."""
    made = list[int]()
    whole = Shared.charges

    def counted(self: Shared, within: int) -> Any:
        made.append(within)
        return whole(self, within)

    monkeypatch.setattr(Shared, "charges", counted)
    instance = generate("prefix-trees", n=n, kv_capacity=100_000, seed=3)
    problem = Problem(instance, "llama2-7b-a100-infermax", asked.pop("objective", "tel"))
    bound(problem, certify=False, **asked)
    return made


def test_charges_of_shared_prefixes_are_made_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ({"method": "work"}, {"objective": "mean_ttft"}, {"method": "busy-time"}):
        # The work bound tries six times D (0.3 s to 1000 s, and 0), and none of them twice.
        made = charges_made(monkeypatch, 60, time_limit_s=1, **asked)
        assert len(made) == len(set(made)) == 6


def test_of_many_requests_no_charges_are_compared_without_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert charges_made(monkeypatch, 6_000, time_limit_s=0, method="work") == [0]
