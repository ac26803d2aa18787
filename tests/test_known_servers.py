"""`diagnose` on runs of servers whose truth is known, which are no part of the package.

They are simulated servers whose step times are known formulas or public tables; what a change of
them gains is another simulation.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
from command_line import answer
from known_servers import SERVERS, Server, corner, published


class Row(NamedTuple):
    """A change, its true gain, and what `diagnose` says.

    Gains are shares of the loss. `sign`: both gain or both lose; `inside`: the truth lies in what
    is said, from `low` to `high`, or 2 % beside it.
    """

    what: str
    true: float
    gain: float
    low: float
    high: float

    @property
    def sign(self) -> bool:
        return (self.true > 0) == (self.gain > 0)

    @property
    def inside(self) -> bool:
        return self.low - 0.02 <= self.true <= self.high + 0.02


def rows_of(server: Server, folder: Path) -> tuple[list[Row], dict[str, object]]:
    """Return what is predicted and true of each change that a server has.

    A server (known_servers.py) writes the benchmark of a run that it simulates. The truth is
    another run of it with the change made.
    """
    server.write(folder / "bench.json")
    words = ["diagnose", folder / "bench.json", "--gpu", server.gpu, "--model", "llama3-8b",
             "--max-num-seqs", server.seats, "--max-num-batched-tokens", server.tokens,
             "--kv-capacity", server.kv]  # fmt: skip
    for name, value in server.slos.items():
        words += [f"--{name.replace('_', '-')}", value]

    found = answer(*words)
    shares = found["gains_of"] != "mean latency"
    loss, rows = server.loss(shares), []
    for one in found["changes"]:
        changed = server.changed(one["what"])
        if changed is not None:
            true = (loss - changed.loss(shares)) / loss
            rows.append(Row(one["what"], true, one["gain"], one["low"], one["high"]))

    return rows, found


def test_fewer_tokens_a_batch_are_not_advised_against_where_they_help(tmp_path: Path) -> None:
    # The corner is at 300 tokens: a chunk of 512 beside decodes takes a quarter of one of 2048, and
    # the sum of both parts, which is no such server's step, would say that it takes half.
    server = Server("few", corner(3.0), n=40, rate=5.0, slos={"slo_ttft": 1.5, "slo_tpot": 0.0304})
    rows, found = rows_of(server, tmp_path)
    by_name = {row.what: row for row in rows}
    # `true` and `gain` are shares: both changes take away more than half of what is lost.
    for what in ("max_num_batched_tokens=512", "long_prefill_token_threshold=256"):
        assert by_name[what].true > 0.5
        assert by_name[what].gain > 0.5

    large = [row for row in rows if abs(row.true) > 0.05]  # gains and losses above 5 %
    assert all(row.sign for row in large)
    assert sum(row.inside for row in rows) >= 0.9 * len(rows)  # as of all servers below
    first = found["first"]["what"].partition("=")[0]  # type: ignore[index]
    assert first in ("max_num_batched_tokens", "long_prefill_token_threshold")


@pytest.mark.whole
def test_of_all_servers_signs_are_right_and_the_truth_is_inside(tmp_path: Path) -> None:
    """The sign of 95 % of the gains above 5 %, and 90 % of all truths inside."""
    data, rows = os.environ.get("OPTSCHED_DATA"), list[Row]()
    tables = [] if data is None else [published(Path(data) / "llmservingsim")]
    for server in (*SERVERS, *tables):
        rows += rows_of(server, tmp_path)[0]

    large = [row for row in rows if abs(row.true) > 0.05]
    assert len(large) > 80  # so that 95 % of them say something
    assert sum(row.sign for row in large) >= 0.95 * len(large)
    assert sum(row.inside for row in rows) >= 0.9 * len(rows)
