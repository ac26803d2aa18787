"""Where a schedule's prefix hits go: to memory that is too small, or to what its cache evicts.

A schedule's *pattern* is which blocks its requests hold after each batch. A block that a request
comes to hold can be found if somebody has held it before. Nobody holds it in the batches between:
there it must be retained, and takes a block of the room that the pattern leaves. A cache is a
choice of what to retain. Whatever it finds need not be computed, which changes no pattern.

**Best cache.** Every interval of batches between two holds of a block is worth one block, and after
batch j at most c_j blocks fit beside those that are held. Going through the batches, let the
interval that ends last go wherever too many are open. That keeps the most intervals. For let b be
the first batch in which more than c_b of the kept ones are open. Any choice that fits lacks one of
them. If it has the one that ends last, exchange this for one that it lacks: both are open in b, so
after b the exchanged one is open in no batch in which the other was not, and before b all of them
fit. So some best choice lacks the one that ends last, and the same holds for what remains. To let
it go is to evict the block whose next use is farthest. A deeper block has no earlier use than those
before it, and goes first where both are used in one batch, so that a look-up finds a beginning.

**What it bounds.** No cache finds more in schedules of this pattern, whatever it evicts by. That
holds for the claims of the schedule itself: the judge has held them to the same room. It says
nothing about other orders, and nothing about latency. A block counts where a request reaches it.
Engines look up once, before the first chunk; where prefills are split they would hold more, sooner.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.judge.evaluate import evaluate
from optsched.policies.one_by_one import Cache, price_of
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, check_columns
from optsched.workloads.problem import Problem, as_problem


class Use(NamedTuple):
    """A block that a request comes to hold in a batch, and that nobody holds in the one before.

    Attributes
    ----------
    batch, since : int
        The batch, and the last one in which somebody held the block.
    name : tuple of int
        The block's owner and depth.
    counts : bool
        Whether it can be found there. If not, somebody computes it.
    """

    batch: int
    since: int
    name: tuple[int, int]
    counts: bool


class Found(NamedTuple):
    """What a cache finds.

    Attributes
    ----------
    tokens : int
        Input tokens found.
    seconds : float
        Prefill work of these tokens under the cost model (`optsched.policies.one_by_one.Price`).
    """

    tokens: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Hits:
    """What caches find under the pattern of a schedule.

    Parameters
    ----------
    instance : Instance
    asked : int
        Input tokens of all requests, again after each eviction.
    own : Found
        What the schedule itself claims.
    always : Found
        What every cache finds: blocks that others hold or compute in the same batch.
    uses : list of Use
        In the order of batches.
    left : list
        For each block that the last of its holders leaves, the batch and its name, in the order in
        which vLLM frees them: a request's last block first.
    held : ndarray of int64, shape (batches,)
        KV tokens that requests hold after each batch.
    block_seconds : ndarray of float64
        Seconds that a block saves, by its depth.
    """

    instance: Instance
    asked: int
    own: Found
    always: Found
    uses: list[Use]
    left: list[tuple[int, tuple[int, int]]]
    held: NDArray[np.int64]
    block_seconds: NDArray[np.float64]

    def _found(self, names: Iterable[tuple[int, int]]) -> Found:
        depths = [depth for _, depth in names]
        tokens = len(depths) * self.instance.prefixes.block  # type: ignore[union-attr]
        seconds = float(self.block_seconds[depths].sum())
        return Found(self.always.tokens + tokens, self.always.seconds + seconds)

    def _room(self, kv_capacity: int | None) -> list[int]:
        """Return how many blocks fit beside those that are held, by batch."""
        capacity = self.instance.kv_capacity if kv_capacity is None else kv_capacity
        if capacity < self.held.max():
            raise InputError(
                f"kv_capacity: found {capacity}; expected at least {self.held.max()}, which the "
                "requests of the schedule hold"
            )

        return ((capacity - self.held) // self.instance.prefixes.block).tolist()  # type: ignore[union-attr]

    def infinite(self) -> Found:
        """Return what a cache without limit finds."""
        return self._found(use.name for use in self.uses if use.counts)

    def best(self, kv_capacity: int | None = None) -> Found:
        """Return what the best cache finds, which evicts by next use; see the module's proof.

        Parameters
        ----------
        kv_capacity : int, optional
            M in tokens; None: the instance's.
        """
        opens = defaultdict[int, list[Use]](list)
        for use in self.uses:
            if use.counts:
                opens[use.since + 1].append(use)

        ending, count = Counter[int](), 0
        gone, last_first = set[Use](), list[tuple[int, int, Use]]()  # of a batch, the deepest first
        for batch, room in enumerate(self._room(kv_capacity)):
            for use in opens[batch]:
                heappush(last_first, (-use.batch, -use.name[1], use))
                ending[use.batch] += 1
                count += 1

            count -= ending[batch]
            while count > room:
                use = heappop(last_first)[2]
                gone.add(use)
                ending[use.batch] -= 1
                count -= 1

        kept = (use.name for use in self.uses if use.counts and use not in gone)
        return self._found(kept)

    def lru(self, kv_capacity: int | None = None) -> Found:
        """Return what a cache finds that evicts what was held the longest ago, last blocks first.

        Parameters
        ----------
        kv_capacity : int, optional
            M in tokens; None: the instance's.
        """
        kept, found = dict[tuple[int, int], None](), list[tuple[int, int]]()
        uses, left = iter([*self.uses, None]), iter([*self.left, None])
        use, leaves = next(uses), next(left)
        for batch, room in enumerate(self._room(kv_capacity)):
            while leaves is not None and leaves[0] < batch:
                kept[leaves[1]] = None
                leaves = next(left)

            while use is not None and use.batch == batch:
                if use.name in kept:
                    del kept[use.name]
                    found += [use.name] * use.counts

                use = next(uses)

            while len(kept) > room:
                del kept[next(iter(kept))]

        return self._found(found)

    def to_dict(self, capacities: Iterable[int], more: int | None = None) -> dict[str, Any]:
        """Return plain values: what is asked for, claimed, and found with each KV capacity.

        Parameters
        ----------
        capacities : iterable of int
        more : int, optional
            Tokens of a GiB of KV: then each capacity has the seconds that a GiB more saves.
        """
        caches = []
        for capacity in capacities:
            one = {"best": self.best(capacity), "lru": self.lru(capacity)}
            caches.append({"kv_capacity": capacity, **{k: f._asdict() for k, f in one.items()}})
            if more is not None:
                then = {"best": self.best(capacity + more), "lru": self.lru(capacity + more)}
                caches[-1]["gib_s"] = {k: then[k].seconds - f.seconds for k, f in one.items()}

        own, infinite = self.own._asdict(), self.infinite()._asdict()
        return {"asked_tokens": self.asked, "own": own, "infinite": infinite, "caches": caches}

    def cells(self, found: Found) -> tuple[int, float, float]:
        """Return the tokens, their share of those asked for, and the seconds.

        Parameters
        ----------
        found : Found
        """
        return found.tokens, found.tokens / self.asked, found.seconds

    def verdict(self) -> str:
        """Return in words what is lost to the memory, and what to the schedule's own cache."""
        infinite, best, own = self.infinite().tokens, self.best().tokens, self.own.tokens
        return (
            f"of {infinite} tokens {infinite - best} are lost since the working set does not fit, "
            f"and {best - own} since the cache did not keep them"
        )


def on_other_workers(instance: Instance, schedule: Schedule) -> tuple[int, int]:
    """Return how many input tokens stand in an earlier request, too, and how many elsewhere.

    Parameters
    ----------
    instance : Instance
        It has shared prefixes.
    schedule : Schedule
        Of several workers. What an earlier request left on another one, no cache finds.
    """
    shared = instance.prefixes
    if shared is None or schedule.worker is None:
        raise InputError("prefixes: found none, or one worker; expected both to be several")

    offsets, request, *_ = check_columns(schedule)
    at = np.zeros(instance.n, dtype=np.int64)
    at[request] = np.repeat(schedule.worker, np.diff(offsets))
    tokens = shared.block * shared.first  # 0 where there is no parent
    away = at != at[shared.parent]
    return int(tokens.sum()), int(tokens[away].sum())


def prefix_hits(problem: Problem | Instance | str | Path, schedule: Schedule) -> Hits:
    """Return what caches find under the pattern of a schedule of batches on one worker.

    Parameters
    ----------
    problem : Problem
        Its instance has shared prefixes. Or such an instance in rounds, its file or its name.
    schedule : Schedule

    Raises
    ------
    InputError
        The instance has no shared prefixes, or the schedule is none of batches on one worker.
    ViolationError
        The judge refuses the schedule.
    """
    problem = as_problem(problem)
    instance = problem.instance
    if instance.prefixes is None:
        raise InputError("prefixes: found none; expected an instance with shared prefixes")

    judged = evaluate(problem, schedule)
    if schedule.kind != "batches" or judged.workers > 1 or judged.reuse is None:
        raise InputError("schedule: found several workers or starts; expected batches on one")

    cache, price, block = Cache(instance), price_of(problem.cost_model), instance.prefixes.block
    longest = int((instance.prompt_tokens + instance.output_tokens).max()) // block
    ends = block * np.arange(longest + 2)
    saved = np.array([0.0, *(price.work(a, a + block) - price.kv * block for a in ends[:-1])])
    claimed = [] if schedule.reused is None else schedule.reused[schedule.reused > 0].tolist()
    depths = [d for r in claimed for d in range(1, r // block + 1)]
    own = Found(sum(claimed), float(saved[depths].sum()))
    always, uses, left = _pattern(instance, schedule, cache)
    free = Found(block * len(always), float(saved[always].sum()))
    held = judged.batch_kv - judged.reuse.batch_retained
    asked = int(judged.reuse.asked.sum())

    return Hits(instance, asked, own, free, uses, left, held, saved)


def _pattern(
    instance: Instance, schedule: Schedule, cache: Cache
) -> tuple[list[int], list[Use], list[tuple[int, tuple[int, int]]]]:
    """Return the depths of blocks that are always found, the uses, and who is left when."""
    offsets, request, tokens, evicted_offsets, evicted = (
        column.tolist() for column in check_columns(schedule)
    )
    claims = np.zeros(len(request), int) if schedule.reused is None else schedule.reused
    block, prompt, output = cache.block, cache.prompt, instance.output_tokens.tolist()
    cached, produced = [0] * instance.n, [0] * instance.n
    holders, since = Counter[tuple[int, int]](), dict[tuple[int, int], int]()
    always, uses = list[int](), list[Use]()
    left: list[tuple[int, tuple[int, int]]] = []

    def names(i: int, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield the names of blocks of a request, the last first."""
        for owner, first, last in cache.parts(i, high):
            for depth in range(last, max(first, low), -1):
                yield owner, depth

    def leave(i: int, batch: int) -> None:
        for name in names(i, 0, cached[i] // block):
            holders[name] -= 1
            if not holders[name]:
                since[name] = batch
                left.append((batch, name))

        cached[i] = 0

    for batch in range(len(offsets) - 1):
        for i in evicted[evicted_offsets[batch] : evicted_offsets[batch + 1]]:
            leave(i, batch - 1)
            produced[i] *= schedule.evict_mode == "recompute"

        reached: dict[tuple[int, int], list[bool]] = defaultdict(list)
        mine = range(offsets[batch], offsets[batch + 1])
        for p in mine:
            i = request[p]
            before, size = cached[i], prompt[i] + produced[i]
            cached[i] += int(claims[p]) + tokens[p]
            if before // block < cached[i] // block:
                for name in names(i, before // block, cached[i] // block):
                    reached[name].append(name[1] * block < size)

        for name, can in reached.items():
            if not holders[name] and name in since:
                uses.append(Use(batch, since[name], name, all(can)))

            alone = not holders[name] and all(can)  # then one of them computes it, or has it kept
            always += [name[1]] * (sum(can) - alone)
            holders[name] += len(can)

        for p in mine:
            i = request[p]
            if cached[i] == prompt[i] + produced[i]:
                produced[i] += 1
                if produced[i] == output[i]:
                    leave(i, batch)

    return always, uses, left
