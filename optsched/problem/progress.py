"""Progress of long work: a line on standard error that is rewritten in place, and then gone."""

from __future__ import annotations

import math
import shutil
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optsched.problem.budget import Progress


def number(value: float | None) -> str:
    """Return a number for a sentence: integers as they are, others with seven digits."""
    if value is None:
        return "unknown"
    if isinstance(value, int) or float(value).is_integer():
        return str(int(value))

    return f"{value:.7g}"


def percent(share: float | None) -> str:
    """Return a share in percent for a sentence."""
    return "unknown" if share is None else f"{100 * share:.2f} %"


class LiveLine:
    """A line on a terminal. Elsewhere nothing is shown, or a line of text now and then.

    `every_s`: seconds between lines where standard error is not a terminal.
    """

    def __init__(self, wanted: bool = True, every_s: float = math.inf) -> None:
        self._wanted, self._on = wanted, wanted and sys.stderr.isatty()
        self._every_s = every_s
        # When a text was shown last. A terminal shows the first one at once.
        self._last_s = -math.inf if self._on else time.monotonic()
        self.done = self.of = 0
        self._done_before, self._began_s = 0, 0.0  # done when `show_count` was first called

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

    def show(self, text: str) -> None:
        """Replace the line, at most ten times a second."""
        now_s = time.monotonic()
        if self._on and now_s - self._last_s >= 0.1:
            self._last_s = now_s
            width = shutil.get_terminal_size().columns
            # Go to the beginning of the line and erase it. A text as wide as the terminal wraps.
            sys.stderr.write("\r\x1b[2K" + text[: width - 1])
            sys.stderr.flush()
        elif self._wanted and not self._on and now_s - self._last_s >= self._every_s:
            self._last_s = now_s
            print(text, file=sys.stderr, flush=True)

    def show_count(self, done: int, of: int, what: str) -> None:
        """Show how many have finished, the rate, and the time left. One call precedes all work."""
        now_s = time.monotonic()
        is_first_call = self.of == 0
        self.done, self.of = done, of

        if is_first_call:
            self._done_before, self._began_s = done, now_s
            if not self._on:  # only a terminal shows that nothing is done yet
                return

        pace, elapsed_s = "", now_s - self._began_s
        if done > self._done_before and elapsed_s > 0:
            rate = (done - self._done_before) / elapsed_s
            left_s = round((of - done) / rate)
            speed = f"{rate:.3g}/s" if rate >= 0.1 else f"{60 * rate:.3g}/min"
            pace = f", {speed}, {left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d} left"

        self.show(f"{done} of {of} {what}{pace}")

    def show_download(self, name: str, done: int, total: int) -> None:
        """Show how many bytes of a file have arrived. A total of 0 means that it is unknown."""
        of = f" of {total / 1e6:.1f}" if total else ""
        self.show(f"{name}: {done / 1e6:.1f}{of} MB")

    def show_progress(self, state: Progress) -> None:
        """Show progress: what begins, or time, incumbent, bound and gap."""
        if state.doing:
            self.show(state.doing)
            return

        gap = None
        if state.incumbent and state.bound is not None:
            gap = (state.incumbent - state.bound) / abs(state.incumbent)

        self.show(
            f"{state.elapsed_s:7.1f} s  incumbent {number(state.incumbent)}  "
            f"bound {number(state.bound)}  gap {percent(gap)}"
        )
