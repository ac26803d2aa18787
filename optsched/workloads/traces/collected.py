"""Collection of a trace's usable rows or of a random sample, with counts of the others."""

import math
import sys
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Block, Source
from optsched.workloads.traces.plausible import impossible_times


class Rows:
    """The usable requests of a trace, or a random sample of them, with counts of the others.

    Every request draws a random key, and a sample keeps those with the smallest keys. So it does
    not depend on how rows are cut into blocks, and never holds much more than twice its size.

    `failed`, `empty`, `contrary`, `backwards`, `usable`: rows that failed, have no tokens, have
    impossible times, are earlier than the one before them, or can be used.
    """

    def __init__(self, source: Source, sample: int | None, rng: np.random.Generator) -> None:
        self.source, self.window, self.findings = source, source.window, source.findings
        self.failed = self.empty = self.contrary = self.backwards = self.usable = 0
        self.first_dropped = sys.maxsize
        self.first_backwards: int | None = None
        self.arrivals = True
        # Without a sample no number of requests is above this, so that none is thinned out.
        self._size = sys.maxsize if sample is None else sample
        self._rng = None if sample is None else rng
        self._parts: list[Block] = []
        self._keys: list[NDArray[np.float64]] = []  # of the requests in each part
        self._max_key = math.inf  # none above it can still be in the sample
        self._last_ns: int | None = None  # arrival of the last row before a block

    @property
    def dropped(self) -> int:
        """Number of rows that were left out."""
        return self.failed + self.empty + self.findings.unreadable

    @property
    def first_dropped_line(self) -> int | None:
        """Line of the first row that was left out, if there is one."""
        return min(self.first_dropped, self.findings.first_line) if self.dropped else None

    @property
    def _held(self) -> int:
        return sum(len(part.line) for part in self._parts)

    def collect(self, blocks: Iterable[Block], progress: Callable[[int], None] | None) -> None:
        """Collect the rows of every block."""
        for block in blocks:
            block = self._usable(block)
            self._check_order(block)
            if self._rng is not None:  # a sample: no key from `_max_key` on can still be in it
                keys = self._rng.random(len(block.line))
                possible = keys < self._max_key
                block = block.pick(possible)
                self._keys.append(keys[possible])

            self._parts.append(block)
            self._thin(2 * self._size + 65_536)  # seldom, since it joins all parts
            if progress is not None:
                progress(self.window.taken)

        self._thin(self._size)

    def _usable(self, block: Block) -> Block:
        """Return the rows of a block that can be used, and count the others."""
        failed = np.zeros(len(block.line), dtype=bool) if block.failed is None else block.failed
        good = (block.prompt_tokens > 0) & (block.output_tokens > 0) & ~failed
        if not good.all():
            i = int(np.argmin(good))  # the first that is not good, for the words
            line, found = int(block.line[i]), "a failed request"
            if not failed[i]:
                tokens = f"{block.prompt_tokens[i]} prompt and {block.output_tokens[i]} output"
                found = f"{tokens} tokens: zero or negative tokens"

            self.findings.check(line, f"found {found}; expected 1 or more prompt and output tokens")
            self.first_dropped = min(self.first_dropped, line)
            self.failed += int(failed.sum())
            self.empty += int((~good & ~failed).sum())
            block = block.pick(good)

        impossible = impossible_times(block)
        for i, words in impossible.items():
            self.findings.skip(int(block.line[i]), words)

        self.contrary += len(impossible)
        self.usable += len(block.line) - len(impossible)
        return block.pick(~np.isin(np.arange(len(block.line)), list(impossible)))

    def _check_order(self, block: Block) -> None:
        """Count rows that are earlier than the one before them, and tell if there are no times."""
        if block.time_ns is None:
            self.arrivals = False
            if not self.source.drawn:
                self.findings.odd(
                    "the trace has no arrivals: all requests arrive at 0; rate=R (--rate R) draws "
                    "Poisson arrivals of R requests a second, or inf says so"
                )
        elif not self.source.drawn and len(block.time_ns):
            # `_last_ns`: the arrival of the last row of the blocks before.
            before = block.time_ns[0] if self._last_ns is None else self._last_ns
            back = np.diff(block.time_ns, prepend=before) < 0
            self._last_ns = int(block.time_ns[-1])
            if back.any():
                line = int(block.line[np.argmax(back)])
                self.findings.check(
                    line,
                    "found a time before that of the row above; expected rows in the order of "
                    "arrivals",
                )
                self.first_backwards = self.first_backwards or line
                self.backwards += int(back.sum())

    def _thin(self, limit: int) -> None:
        """Keep as many requests as the sample has, if more than a limit are held."""
        if self._held <= limit:
            return

        # Those of the smallest keys stay, in the order of the file.
        keys = np.concatenate(self._keys)
        keep = np.sort(np.argpartition(keys, self._size - 1)[: self._size])
        self._parts = [Block.join(self._parts).pick(keep)]
        self._keys = [keys[keep]]
        self._max_key = float(keys[keep].max())

    def kept(self) -> Block:
        """Return the collected requests in the order of the file, or raise why there are none.

        Where most rows have impossible times, the times of the others are not trusted either.
        """
        # The error of the first row that cannot be read, and the number of requests collected.
        first, held = self.findings.first, self._held
        if first is not None and (not held or self.contrary > self.usable):
            raise first
        if held:
            return Block.join(self._parts)

        offset, taken, seen = self.window.offset, self.window.taken, self.window.seen
        if offset and seen and not taken:
            raise InputError(
                f"{self.source.path}: offset: found {offset}; expected at most {seen - 1}, since "
                f"the file has {seen} rows"
            )

        after = f" after the first {offset}" if offset else ""
        lost = f", {self.dropped} of them failed or without tokens" if self.dropped else ""
        raise InputError(
            f"{self.source.path}: found no requests in {taken} rows{after}{lost}; expected rows "
            "with 1 or more prompt and output tokens"
        )

    def notes(self) -> list[str]:
        """Return in words how many rows were dropped or sorted, and what is odd."""
        notes, first = list[str](), self.findings.first
        if self.dropped:
            kinds = {
                "failed": self.failed,
                "with zero or negative tokens": self.empty,
                "unreadable": self.findings.unreadable,
            }
            words = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
            words = f"dropped {self.dropped} of {self.window.taken} rows ({words})"
            notes.append(f"{words}, the first in line {self.first_dropped_line}")

        if first is not None:
            shown = str(first).removeprefix(f"{self.source.path}: ")
            notes.append(f"the first unreadable row: {shown}")

        if self.backwards:
            words = f"{self.backwards} rows, the first in line {self.first_backwards}"
            notes.append(f"time goes backwards at {words}: sorted by arrival")

        return [*notes, *self.findings.notes()]
