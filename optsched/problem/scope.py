"""For which schedules a bound or an optimum holds: as data, and in the words that are printed."""

from dataclasses import dataclass
from typing import Any

KINDS = {
    "evictions": "evictions",
    "pauses": "pauses",
    "split_prefills": "split prefills",
    "own_rows": "what the rows of your model rule out",
}
"""What schedules may do that some formulations leave out, with its words. A request pauses if it
holds KV while batches run without it."""


@dataclass(frozen=True)
class Scope:
    """The schedules on some workers, as of the instance, that do nothing of some `KINDS`.

    `pools`: what the workers are in words, where they have roles. `drafts`: what decode steps are
    granted, in words, where they verify drafts (`Instance.granted`).
    """

    workers: int = 1
    without: frozenset[str] = frozenset()
    pools: str = ""
    drafts: str = ""

    @property
    def limitation(self) -> str:
        """What the schedules do without, such as ``"without pauses"``. Empty if without nothing."""
        missing = " or ".join(words for name, words in KINDS.items() if name in self.without)
        return f"without {missing}" if missing else ""

    @property
    def schedules(self) -> str:
        """The schedules in words, such as ``"any schedule without pauses"``."""
        return f"any schedule {self.limitation}".rstrip()

    @property
    def machines(self) -> str:
        """The workers in words, such as ``"on 2 workers"``."""
        where = "one worker" if self.workers == 1 else f"{self.workers} workers"
        if self.pools:
            where = f"pools of {self.pools}"

        return f"on {where} {self.drafts}".rstrip()

    def __str__(self) -> str:
        return f"{self.schedules}{',' if self.without else ''} {self.machines}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that result files carry."""
        return {"workers": self.workers, "without": sorted(self.without), "words": str(self)}


ONE_WORKER = Scope()
"""Every schedule on one worker: what certificates, and all bounds of `optsched.bounds`, hold for
unless several workers are asked for."""
