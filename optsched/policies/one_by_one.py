"""One request after another from a cache that keeps every block, in orders that know prefixes.

Prefills with shared prefixes, all there at once and with room for every block, are the problem
1 | outtree | sum w C: a block is a job without weight, a request is one behind its blocks, and no
job runs before those above it. Horn 1972 solves it in n log n: the job with the largest weight per
time runs right behind its predecessor in some best order, so that both become one job.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np

from optsched.costs.batch import (
    EMPTY,
    LAYERS,
    PREFILL_CROSS,
    PREFILL_KV,
    PREFILL_REQUEST,
    PREFILL_SQUARE,
    PREFILL_TOKEN,
    TOKEN,
    add_decode,
    add_prefill,
    batch_time,
)
from optsched.costs.cost import BatchCost, CostModel
from optsched.policies import policy
from optsched.policies.base import Job, Runner
from optsched.problem.columns import MAX_TOKENS, check_choice
from optsched.problem.instance import Instance, whole_blocks
from optsched.problem.prefixes import Prefixes
from optsched.problem.schedule import Schedule, from_batches

By = Literal["horn", "prefix", "uncached", "prompt", "arrival"]
"""Whom the machine serves next."""
_FINDING = ("prefix", "uncached")


class Price(NamedTuple):
    """What prefills take at least, in seconds: the tokens from a to b take
    ``token (b - a) + square (b^2 - a^2)``, each claimed token ``kv``, and a request ``request``."""

    token: float
    square: float
    kv: float
    request: float

    def work(self, a: int, b: int) -> float:
        """Return the seconds of the tokens from a to b."""
        return self.token * (b - a) + self.square * (b * b - a * a)


def price_of(cost: CostModel) -> Price:
    """Return the price of prefills under a cost model, or under the linear model in its place.

    A chunk of c tokens over m has the terms ``square c^2 + cross c m``, which are at least
    ``min(square, cross / 2)`` times ``(m + c)^2 - m^2``, and exactly this where cross is twice
    square. With ``kv`` at most ``token``, a claim is never dearer than the work that it saves.
    """
    if not isinstance(cost, BatchCost):
        return Price(0.0, 0.0, 0.0, 0.0)  # a round takes as long whatever is in it

    array = cost.array
    second = float(array[LAYERS]) / 1000.0
    token = float(array[TOKEN] + array[PREFILL_TOKEN]) * second
    square = float(min(array[PREFILL_SQUARE], array[PREFILL_CROSS] / 2)) * second
    kv = min(float(array[PREFILL_KV]) * second, token)
    return Price(token, square, kv, float(array[PREFILL_REQUEST]) * second)


def prefixes_of(instance: Instance) -> Prefixes:
    """Return an instance's shared prefixes; without any, nobody shares a block."""
    if instance.prefixes is not None:
        return instance.prefixes

    sizes = instance.prompt_tokens + instance.output_tokens
    return Prefixes(np.full(instance.n, -1), np.zeros(instance.n, np.int64), sizes, 1)


def lacks_room(instance: Instance) -> str | None:
    """Return in words that a cache of every block does not fit, or None if it does."""
    prefixes = prefixes_of(instance)
    rest = whole_blocks(prefixes.block + instance.kv_offset, instance.kv_block_tokens)
    need = prefixes.distinct_blocks * prefixes.block + int(rest)
    if need <= instance.kv_capacity:
        return None

    return f"kv_capacity: found {instance.kv_capacity}; expected {need}, to keep every block"


class Cache:
    """The blocks that have been computed; of each request's sequence they are the first ones.

    `claimable` is how many blocks a request can claim at most, and `shared` how many of them some
    other request has, too. A name is an owner and a depth (`optsched.problem.prefixes`).
    """

    def __init__(self, instance: Instance) -> None:
        prefixes = prefixes_of(instance)
        self.block, self.prompt = prefixes.block, instance.prompt_tokens.tolist()
        self.first, self.above = prefixes.first.tolist(), prefixes.above.tolist()
        claimable = (instance.prompt_tokens - 1) // prefixes.block
        self.claimable = claimable.tolist()
        self.shared = np.minimum(claimable, prefixes.public).tolist()
        self.known = [0] * instance.n

    def parts(self, i: int, blocks: int) -> Iterator[tuple[int, int, int]]:
        """Yield the owners of a request's first blocks and the range of each, the last first."""
        owner = i
        while blocks > 0:
            low = self.first[owner]
            if low < blocks:
                yield owner, low, blocks
                blocks = low

            owner = self.above[owner]

    def name(self, i: int, blocks: int) -> tuple[int, int]:
        """Return the name of the last of a request's first blocks; none has the owner -1."""
        return next(((owner, high) for owner, _, high in self.parts(i, blocks)), (-1, 0))

    def hit(self, i: int) -> int:
        """Return how many blocks a request can claim."""
        for owner, low, high in self.parts(i, self.claimable[i]):
            if self.known[owner] > low:
                return min(self.known[owner], high)

        return 0

    def add(self, i: int, blocks: int) -> list[int]:
        """Note that a request's first blocks are computed, and return owners of new ones."""
        grown = {o: high for o, _, high in self.parts(i, blocks) if self.known[o] < high}
        for owner, high in grown.items():
            self.known[owner] = high

        return list(grown)


class Jobs(NamedTuple):
    """Jobs in the order of a tree: the job before each or -1, its seconds, its request or -1."""

    before: list[int]
    seconds: list[float]
    request: list[int]


class Chains:
    """The blocks that requests share, cut into chains: all of a chain have the same users.

    Chains are in the order of a tree. `before` is the chain before each or -1, `low` and `high` its
    first and last depth, and `end` the chain on which each request hangs or -1. The blocks whose
    names are ``free`` are chains of their own that take no time.
    """

    def __init__(self, cache: Cache, free: frozenset[tuple[int, int]] = frozenset()) -> None:
        n = len(cache.prompt)
        ends = [cache.name(i, cache.shared[i]) for i in range(n)]
        hangs = [cache.name(i, cache.first[i]) for i in range(n)]
        cuts = {*ends, *hangs, *((owner, d) for owner, depth in free for d in (depth - 1, depth))}
        self.names = sorted((o, d) for o, d in cuts if o >= 0 and d > cache.first[o])
        place = {name: k for k, name in enumerate(self.names)}
        self.end = [place.get(name, -1) for name in ends]
        self.before, self.low, self.free = list[int](), list[int](), free

        for k, (owner, _) in enumerate(self.names):
            follows = k > 0 and self.names[k - 1][0] == owner
            self.before.append(k - 1 if follows else place.get(hangs[owner], -1))
            self.low.append(self.names[k - 1][1] if follows else cache.first[owner])


def jobs_of(cache: Cache, chains: Chains, who: Iterable[int], price: Price) -> Jobs:
    """Return the jobs of some requests: blocks that are not computed yet, and the requests.

    A chain is one job. A request's job has what is behind the blocks that it shares, and what the
    claim of these costs.
    """
    used, who = set[int](), list(who)
    for i in who:
        k = chains.end[i]
        while k >= 0 and k not in used:
            used.add(k)
            k = chains.before[k]

    jobs, place = Jobs([], [], []), {-1: -1}
    for k in sorted(used):
        owner, high = chains.names[k]
        new = max(chains.low[k], min(cache.known[owner], high))
        seconds = price.work(new * cache.block, high * cache.block)
        seconds -= price.kv * (high - new) * cache.block
        place[k] = len(jobs.before)
        jobs.before.append(place[chains.before[k]])
        jobs.seconds.append(0.0 if (owner, high) in chains.free else max(seconds, 0.0))
        jobs.request.append(-1)

    for i in who:
        claimed = cache.shared[i] * cache.block
        jobs.before.append(place[chains.end[i]])
        own = price.work(claimed, cache.prompt[i]) + price.kv * claimed
        jobs.seconds.append(own + price.request)
        jobs.request.append(i)

    return jobs


def horn(jobs: Jobs) -> tuple[list[int], float]:
    """Return the requests in the order of the least sum of completions, and this sum in seconds.

    Requests have the weight 1 and blocks 0. The composite of least time per weight is moved right
    behind the one that has its predecessor, until all are in one behind a root without time.
    """
    root = len(jobs.before)
    before = [root if k < 0 else k for k in jobs.before]
    time, weight = [*jobs.seconds, 0.0], [float(i >= 0) for i in [*jobs.request, -1]]
    composite, last, behind = list(range(root + 1)), list(range(root + 1)), [-1] * (root + 1)

    def rank(k: int) -> float:
        if weight[k]:
            return time[k] / weight[k]

        return math.inf if time[k] else 0.0

    def composite_of(k: int) -> int:
        while composite[k] != k:
            composite[k] = composite[composite[k]]
            k = composite[k]

        return k

    heap = [(rank(k), k) for k in range(root)]
    heapify(heap)
    while heap:
        found, k = heappop(heap)
        if composite[k] != k or found != rank(k):
            continue  # it is part of another one, or has grown

        into = composite_of(before[k])
        composite[k], behind[last[into]], last[into] = into, k, last[k]
        time[into] += time[k]
        weight[into] += weight[k]
        if into != root:
            heappush(heap, (rank(into), into))

    order, clock, total, k = list[int](), 0.0, 0.0, behind[root]
    while k >= 0:
        clock += jobs.seconds[k]
        if jobs.request[k] >= 0:
            order.append(jobs.request[k])
            total += clock

        k = behind[k]

    return order, total


@dataclass(kw_only=True, eq=False)
class OneByOne(Runner):
    """One request after another, each to its end, with every block that was ever computed.

    ``by`` says whom the machine takes of those that wait: `horn` as above, anew when others have
    come; the most tokens found (`prefix`, as SGLang's `lpm`); the fewest tokens that are not found
    (`uncached`); the shortest prompt; or the first to arrive. Output lengths are not used. A prompt
    beyond a limit on a batch's tokens is split.
    """

    hybrid: ClassVar[bool] = False
    chunked: ClassVar[bool] = True

    by: By = "horn"

    def __post_init__(self) -> None:
        check_choice(self.by, "by", get_args(By))

    def uses_lengths(self, instance: Instance) -> bool:
        """See `Runner.uses_lengths`."""
        return False

    def allows(self, instance: Instance) -> str | None:
        """See `Runner.allows`. It needs shared prefixes, seconds, and room for every block."""
        if instance.in_rounds:
            return "it needs an instance in seconds, since reuse saves no rounds"
        if instance.prefixes is None:
            return "it needs an instance with shared prefixes"
        if instance.sessions is not None:
            return "it needs all arrivals in advance"

        return lacks_room(instance)

    def run(self, job: Job) -> Schedule:
        """See `Runner.run`."""
        instance, cache = job.instance, Cache(job.instance)
        release, outputs = instance.release.tolist(), instance.output_tokens.tolist()
        coming = np.lexsort((np.arange(instance.n), instance.release)).tolist()
        line, now, arrived = _Line(cache, self.by, price_of(job.cost), coming), 0.0, 0
        limits = instance.limits
        longest = min(
            limits.max_batch_tokens or MAX_TOKENS, limits.max_prefill_tokens or MAX_TOKENS
        )
        rows: list[tuple[int, int, int]] = []

        for done in range(instance.n):
            job.budget.check(f"policy {job.name!r} ran")
            now = max(now, release[coming[done]]) if arrived == done else now
            while arrived < instance.n and release[coming[arrived]] <= now:
                arrived += 1

            i = line.next(arrived)
            claimed = cached = cache.hit(i) * cache.block
            while cached < cache.prompt[i] + outputs[i] - 1:
                c = min(longest, cache.prompt[i] - cached)
                sums = add_prefill(EMPTY, c, cached) if c > 0 else add_decode(EMPTY, cached)
                rows.append((i, max(c, 1), claimed))
                now += batch_time(job.cost.array, sums)
                cached, claimed = cached + max(c, 1), 0

            line.computed(cache.add(i, cached // cache.block))

        request, tokens, reused = np.array(rows, dtype=np.int64).T
        return from_batches(
            np.arange(len(rows) + 1),
            request,
            tokens,
            reused=None if instance.prefixes is None else reused,
            instance=job.problem,
            cost_model_sha256=job.sha256,
        )


class _Line:
    """The requests that wait, with a key that changes with the cache and with new ones."""

    def __init__(self, cache: Cache, by: By, price: Price, coming: list[int]) -> None:
        self.cache, self.by, self.price, self.coming = cache, by, price, coming
        self.place = np.argsort(coming)
        self.key = np.full(len(coming), np.inf)  # of those that wait, in the order of arrival
        self.here, self.users = 0, defaultdict[int, list[int]](list)  # of an owner's blocks
        if by == "horn":
            self.chains = Chains(cache)

    def rank(self, i: int) -> None:
        found = self.cache.hit(i) * self.cache.block if self.by in _FINDING else 0
        alone = self.cache.prompt[i] if self.by in ("prompt", "uncached") else 0
        self.key[self.place[i]] = alone - found

    def next(self, arrived: int) -> int:
        """Return whom the machine serves next, when so many have arrived."""
        fresh, self.here = self.coming[self.here : arrived], arrived
        if self.by == "horn" and fresh:
            self.key[arrived - len(fresh) : arrived] = 0
            waiting = [self.coming[k] for k in np.flatnonzero(self.key[:arrived] < np.inf)]
            order, _ = horn(jobs_of(self.cache, self.chains, waiting, self.price))
            self.key[self.place[order]] = np.arange(len(order))
        elif self.by != "horn":
            for i in fresh:
                self.rank(i)
                for owner, _, _ in self.cache.parts(i, self.cache.shared[i]):
                    self.users[owner].append(i)

        first = int(np.argmin(self.key[:arrived]))
        self.key[first] = np.inf
        return self.coming[first]

    def computed(self, owners: Iterable[int]) -> None:
        """Rank those anew who share blocks of owners that have been computed."""
        if self.by in _FINDING:
            for i in {i for owner in owners for i in self.users[owner]}:
                if self.key[self.place[i]] < np.inf:
                    self.rank(i)


@policy("horn", "prefills one by one in Horn's order, best if all are there; every block is kept")
def horn_policy() -> OneByOne:
    """Return the runner that takes the next request by `horn`."""
    return OneByOne()


@policy("one-by-one", "prefills one by one: by=arrival, prompt, uncached or prefix; blocks kept")
def one_by_one(*, by: By = "arrival") -> OneByOne:
    """Return the runner with an order."""
    return OneByOne(by=by)
