"""Runs any object with ``batch(view)`` by asking it before every batch.

The fleet is that of the compiled loops (`optsched.policies.engine.common`). Import this module
lazily: it loads numba.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from optsched.costs.batch import EMPTY, add_decode, add_prefill, batch_time
from optsched.judge import life
from optsched.judge.life import Ints, Records
from optsched.judge.replay import limits_of
from optsched.policies.base import Batch, Policy, View
from optsched.policies.engine import common, ledger
from optsched.policies.engine.common import REUSED, Columns, Worker
from optsched.policies.helpers import decode_all, evict_until_fits, kv_after
from optsched.policies.runner import Runner, beyond_limits, endless
from optsched.policies.workers import Job, MixedWorkers, Workers
from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError, OutOfTimeError, PolicyError, raised
from optsched.problem.kernel import plain
from optsched.problem.schedule import EvictMode
from optsched.workloads.predict import estimates, forecast_of

MAX_BATCHES_WITHOUT = 10_000
"""More batches than this in which no request gets further than ever before, plus ten times the
tokens of the longest one, are an endless loop."""

# Most of the time is the policy object's own. Compiling these for one more kind of arguments would
# take longer than running them in Python.
next_arrival, idle = plain(common.next_arrival), plain(common.idle)
land, pull = plain(ledger.land), plain(ledger.pull)
with_room, run_batch = map(plain, (common.with_room, common.run_batch))
add_eviction, evict = plain(common.add_eviction), plain(life.evict)


def _is_whole(value: object) -> bool:
    """Whether a user's value is an integer. `True` is one to Python, but says nothing here."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class Online(Runner):
    """A runner that asks a policy object before every batch."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.hybrid = getattr(policy, "hybrid", False)  # type: ignore[misc]
        self.chunked = getattr(policy, "chunked", False)  # type: ignore[misc]

    def warm_up(self) -> None:
        """Do nothing, since a user's object may remember what it was shown."""

    def begin(self, job: Job, workers: int) -> Workers:
        """See `Runner.begin`. Each worker asks a copy of the object.

        `Workers.advance` raises a `PolicyError` for anything but a valid batch.
        """
        copies = [_one_worker(deepcopy(self.policy), job, job.coins(w)) for w in range(workers)]
        return copies[0] if workers == 1 else MixedWorkers(job, copies)


def evict_mode_of(policy: object, job: Job) -> EvictMode:
    """Return what an eviction loses under a policy, in the time unit of its instance."""
    mode: EvictMode = getattr(policy, "evict_mode", "recompute")
    if mode not in ("restart", "recompute"):
        raise InputError(
            f"policy {job.name!r}: evict_mode: found {mode!r}; expected restart or recompute"
        )

    return "restart" if job.instance.in_rounds else mode


def _one_worker(policy: Policy, job: Job, coins: Generator) -> Workers:
    """Return one worker that asks a policy object."""
    mode = evict_mode_of(policy, job)
    requests = common.new_requests(job.instance, common.FIELDS)
    state = common.new_state((), job.instance)
    loop = _Loop(policy, job, coins, mode, requests)
    limits = limits_of(job.instance, mode, job.instance.drafts)
    return common.Compiled(job, requests, state, limits, common.Loop(loop.run))


class _Loop:
    """The loop that asks a policy object, and what the object is shown.

    The object sees columns by request. What it may not know yet is -1 until the request arrives.
    """

    s: SimpleNamespace
    """The worker's state while it runs."""

    def __init__(
        self, policy: Policy, job: Job, coins: Generator, mode: EvictMode, requests: Records
    ) -> None:
        self.policy, self.job, self.mode, self.requests = policy, job, mode, requests
        instance, n = job.instance, job.instance.n
        # Fields of the records, by request, which change as the loop goes on.
        self.release, self.move_end = requests["release"], requests["move_end"]
        self.generated, self.cached = requests["produced"], requests["cached"]
        self.decoding, self.remaining = requests["decoding"], np.full(n, -1.0)
        self.predicted, _ = estimates(instance)
        self.forecast = forecast_of(instance)
        self.place = np.zeros(n, dtype=np.int64)  # in the order in which they come
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.max_cached = np.zeros(n, dtype=np.int64)  # max tokens that each has ever had cached
        self.generator = coins
        longest = int((instance.prompt_tokens + instance.output_tokens).max())
        self.patience = MAX_BATCHES_WITHOUT + 10 * longest  # batches without any progress

        # What `show_arrivals` copies into `shown`, for each request when it comes.
        self.known = {"prompt_tokens": instance.prompt_tokens, "predicted": self.predicted}
        if instance.predicted_lower is not None and instance.predicted_upper is not None:
            self.known["predicted_lower"] = instance.predicted_lower
            self.known["predicted_upper"] = instance.predicted_upper
        if instance.weight is not None:
            self.known["weight"] = instance.weight

        self.shown: dict[str, NDArray[Any]] = {
            "arrival": np.full(n, -1.0),
            "remaining": self.remaining,
            "generated": self.generated,
            "cached": self.cached,
            "decoding": self.decoding,
            **{name: np.full(n, -1, dtype=np.int64) for name in self.known},
        }
        self.read_only = {name: column.view() for name, column in self.shown.items()}
        for column in self.read_only.values():
            column.setflags(write=False)

    def run(self, requests: Records, state: Records, w: Worker) -> Columns:
        """Ask up to a time or an event, or until all assigned are done; return the columns."""
        # Outside compiled code every look at a field of a record takes a microsecond, so the state
        # is copied into a namespace, and back at the end.
        names, self.limits = list(state.dtype.fields or ()), w.limits
        self.s = SimpleNamespace(**dict(zip(names, state[0].item(), strict=True)))
        try:
            with self.job.budget.watching(f"policy {self.job.name!r} ran"):
                return self.run_batches(w.coming, w.columns, w.until)
        finally:
            state[0] = tuple(getattr(self.s, name) for name in names)

    def run_batches(self, queue: Ints, columns: Columns, until: float) -> Columns:
        """Ask, check and run one batch after the other (see `run`)."""
        s = self.s
        # `outcome`: an event ends the call, as KV that has begun to come (`pulled`) does.
        while s.done < len(queue) and s.outcome == common.DONE and s.now < until and s.pulled == 0:
            self.job.budget.check(f"policy {self.job.name!r} ran")
            self.show_arrivals(queue)
            if s.moving > 0:
                s.running = len(self.running)
                land(self.requests, np.array(self.running), s)

            # KV that waits to move elsewhere may leave no seat. Then there is nothing to ask.
            asks = (self.running or self.waiting) and self.limits.max_running > 0
            batch = self.ask(self.policy) if asks else Batch()
            self.check(batch)
            # Between pools only requests whose KV is here can be processed now.
            if (self.move_end > 0).any() or self.requests["away"].any():
                batch = self.pull_admitted(batch)

            columns = with_room(columns, s, len(batch.tokens), len(batch.evict))
            # Most policies claim nothing, so the row of claims is added with the first one.
            if any(batch.reused.values()) and len(columns.entries) == REUSED:
                claims = np.zeros_like(columns.entries[:1])
                columns = columns._replace(entries=np.vstack([columns.entries, claims]))

            self.evict(batch.evict, columns.evicted)
            s.since_progress += 1
            if s.since_progress > self.patience:
                about, many = (self.running or self.waiting)[0], f"{self.patience} batches in a row"
                self.fail(about, f"no new token in {many}; do evictions undo what batches do?")
            if batch.tokens:
                self.process(batch, columns)
            # Nothing is processed, but the time passes of one batch in which all that run decode.
            elif batch.stall:
                sums = EMPTY
                for i in self.running:
                    sums = add_decode(sums, int(self.cached[i]))

                s.now += batch_time(self.job.cost.array, sums)
            elif batch.evict:
                continue  # asked again at once: what it evicted precedes its next batch
            elif not idle(self.requests, s, queue, until):
                # A request that is not assigned yet, or KV that has begun to come, may change that.
                if until < math.inf or s.pulled > 0:
                    break

                self.report_stuck()

        return columns

    def show_arrivals(self, queue: Ints) -> None:
        """Show the policy the requests that have come by now: arrivals, lengths, predictions."""
        while (i := next_arrival(self.requests, self.s, queue)) >= 0:
            self.place[i], self.s.since_progress = self.s.arrived, 0
            self.shown["arrival"][i] = self.release[i] + self.job.instance.first_arrival
            for name, column in self.known.items():
                self.shown[name][i] = column[i]

            self.remaining[i] = self.forecast.left(i, 0, 0)
            self.waiting.append(i)

    def pull_admitted(self, batch: Batch) -> Batch:
        """Let KV from elsewhere come to admitted requests; return the batch without these.

        What is evicted is there until the next batch begins. If this one has no tokens, that is not
        now: nobody is evicted, no KV comes, and the running requests go on (`batch`).
        """
        if any(self.move_end[i] > 0 for i in batch.evict):
            return Batch()  # KV on its way is not sent back: wait until it is there

        away, r = self.requests["away"], self.requests
        # Only requests whose KV is here can be processed now.
        tokens = {i: c for i, c in batch.tokens.items() if self.move_end[i] == 0 and not away[i]}
        # Evictions beyond `settled`, their number at the last batch, wait for the next one.
        if not tokens and away.any() and self.s.evicted + len(batch.evict) > self.s.settled:
            return self.ask(self)  # this object answers in place of the policy

        admitted = [i for i in batch.tokens if away[i]]
        for i in admitted:
            pull(r[i], self.s)

        self.start_running(admitted)
        return replace(batch, tokens=tokens)

    def batch(self, view: View) -> Batch:
        """Answer in place of the policy: those that run process a token each, while KV suffices.

        `pull_admitted` asks for this where the policy evicts and has nothing to process: what is
        evicted goes only when a batch begins.
        """
        going = [i for i in self.running if self.move_end[i] == 0]
        tokens = {i: 1 for i in decode_all(view, last=True) or going[:1] if self.move_end[i] == 0}
        tokens, evicted = evict_until_fits(view, tokens, going)
        # If not even one decode fits, or nobody decodes, the first request goes on alone.
        if not tokens and going:
            tokens, evicted = evict_until_fits(view, {going[0]: 1}, going[1:])
            tokens = {} if kv_after(view, tokens, evicted) > view.kv_capacity else tokens

        return Batch(tokens, evicted if tokens else [])

    def start_running(self, requests: Sequence[int]) -> None:
        """Move waiting requests to the running ones, which stand in the order of their arrival."""
        for i in requests:
            self.waiting.remove(i)

        self.running = sorted([*self.running, *requests], key=self.place.__getitem__)

    def max_produced(self, i: int) -> int:
        """Return the max output tokens that a request has ever produced."""
        return max(0, int(self.max_cached[i] + 1 - self.known["prompt_tokens"][i]))

    def evict(self, requests: Sequence[int], evicted: Ints) -> None:
        """Let requests lose their KV and wait behind all others."""
        for i in requests:
            self.running.remove(i)
            self.waiting.append(i)
            add_eviction(evicted, self.s, i)
            evict(self.requests[i], self.mode == "restart")
            if self.mode == "restart":
                self.remaining[i] = self.forecast.left(i, self.max_produced(i), 0)

    def process(self, batch: Batch, columns: Columns) -> None:
        """Run a batch: write it down, and let its requests produce what follows from it.

        This is `optsched.judge.life.advance` for all requests of the batch at once.
        """
        s, first, requests = self.s, self.s.entries, self.requests
        # By entry of the batch: the request, its tokens, and the cached tokens that it claims.
        ids, tokens = (np.array(list(one)) for one in (batch.tokens, batch.tokens.values()))
        claims = np.array([batch.reused.get(i, 0) for i in batch.tokens], dtype=np.int64)
        newcomers = set(self.waiting).intersection(batch.tokens)
        self.start_running([i for i in batch.tokens if i in newcomers])
        self.cached[ids] += claims
        sums = EMPTY
        for i, c in batch.tokens.items():
            cached = int(self.cached[i])
            c = int(c)
            sums = add_decode(sums, cached, c) if self.decoding[i] else add_prefill(sums, c, cached)

        s.entries += len(ids)
        s.latest = self.release[ids].max()
        columns.entries[:REUSED, first : s.entries] = ids, tokens
        columns.entries[REUSED:, first : s.entries] = claims  # nothing, where there is no such row
        duration = batch_time(self.job.cost.array, sums)
        run_batch(columns.batches, s, duration)

        # Of a decode's tokens only the accepted drafts and the next token count.
        if (drafts := self.limits.drafts) is not None:
            decoding = self.decoding[ids]
            decodes = ids[decoding]
            next_tokens = drafts.rest[drafts.first[decodes] + self.generated[decodes]]
            tokens[decoding] = np.minimum(tokens[decoding], next_tokens)
            self.generated[decodes] += tokens[decoding] - 1  # the last one is counted below

        self.cached[ids] += tokens
        # Progress is to have more cached than ever before. A batch that processes more than there
        # is does not count; the judge refuses it.
        cached_now = np.minimum(self.cached[ids], requests["prompt"][ids] + requests["output"][ids])
        if (cached_now > self.max_cached[ids]).any():
            s.since_progress, self.max_cached[ids] = 0, np.maximum(self.max_cached[ids], cached_now)

        # Whoever has its whole input cached has produced a token.
        complete = ids[self.cached[ids] == requests["prompt"][ids] + self.generated[ids]]
        self.decoding[complete] = True
        self.generated[complete] += 1
        ended = complete[self.generated[complete] == requests["output"][complete]]
        requests["finish"][ended] = s.now
        if ended.size:
            s.done += ended.size
            s.outcome = common.EVENT if s.watch else s.outcome
            self.running = [i for i in self.running if i not in set(ended.tolist())]

        for i in set(complete.tolist()).intersection(self.running):
            self.remaining[i] = self.forecast.left(i, self.max_produced(i), self.generated[i])

    def ask(self, policy: Policy) -> Batch:
        """Return a policy's answer. Whatever it raises becomes an error with its name and batch."""
        instance, prefix = self.job.instance, self.error_prefix()
        limits, seats = instance.limits, self.limits.max_running
        # Seats that are kept for KV on its way elsewhere are not shown.
        if limits.max_running not in (None, seats):
            limits = replace(limits, max_running=seats)

        view = View(
            now=instance.first_arrival + self.s.now,
            waiting=list(self.waiting),
            running=list(self.running),
            kv_capacity=self.limits.kv_capacity,
            kv_offset=instance.kv_offset,
            kv_block_tokens=instance.kv_block_tokens,
            kv_window=self.limits.kv_window,
            limits=limits,
            hybrid=instance.hybrid_batching is not False,
            chunked=instance.chunked_prefill is not False,
            evict_mode=self.mode,
            generator=self.generator,
            cost=self.job.cost,
            **self.read_only,
        )
        try:
            answer = policy.batch(view)
        except (PolicyError, OutOfTimeError):
            raise
        except (Exception, SystemExit) as error:
            raise PolicyError(f"{prefix}: raised {raised(error)}") from error

        if not isinstance(answer, Batch):
            raise PolicyError(f"{prefix}: found {answer!r}; expected a Batch")

        return answer

    def error_prefix(self) -> str:
        """Return how an error begins: the policy, and the batch that it was asked for."""
        return f"policy {self.job.name!r}: batch {self.s.batches}"

    def check(self, batch: Batch) -> None:
        """Refuse answers about requests that are not there. The judge checks all the rest."""
        present, prefix = set(self.running), self.error_prefix()
        for i in batch.evict:
            if not _is_whole(i) or i not in present:
                raise PolicyError(
                    f"{prefix}: found an eviction of request {i!r}, which holds no KV; "
                    "expected a running request"
                )

            present.remove(i)  # nobody is evicted twice

        present.update(self.waiting, self.running)
        for i, c in batch.tokens.items():
            if not _is_whole(i) or i not in present:
                raise PolicyError(
                    f"{prefix}: found request {i!r}, which has not arrived, is done, or is "
                    "unknown; expected a waiting or running request"
                )

            if not _is_whole(c) or not 1 <= c <= MAX_TOKENS:
                raise PolicyError(
                    f"{prefix}: request {i}: found {c!r} tokens; expected an integer >= 1"
                )

        # Only a request that holds no KV when the batch begins may claim cached tokens.
        free = {*self.waiting, *batch.evict} if self.job.problem.prefixes is not None else set()
        for i, r in batch.reused.items():
            if not _is_whole(r) or i not in batch.tokens or i not in free:
                raise PolicyError(
                    f"{prefix}: request {i!r}: found a claim of {r!r} cached tokens; "
                    "expected one of a request in the batch that holds no KV and may share prefixes"
                )

    def report_stuck(self) -> None:
        """Say why nothing runs: a request that no batch may hold whole, or the policy's choice."""
        if not (present := self.waiting or self.running):  # the loop has lost a request
            self.s.outcome = common.LOST
            return

        about = present[0]
        reason = "the policy processes nothing, and no further request arrives"
        # If prefills are not split, an input that is beyond a limit is the better reason. After an
        # eviction the input has the tokens produced, too.
        for i in [] if getattr(self.policy, "chunked", False) else self.waiting:
            size = int(self.job.instance.prompt_tokens[i] + self.generated[i])
            limit = beyond_limits(self.job.problem, size)
            if limit is not None:
                about, reason = i, limit
                break

        self.fail(about, reason)

    def fail(self, request: int, reason: str) -> None:
        """Raise the `LoopError` of a policy that cannot go on, or would go on for ever."""
        raise endless(self.job, request, int(self.s.batches), float(self.s.now), reason)
