"""All schedules of a few requests on machines with roles: plain Python, nothing of the package.

Prompts are prefilled whole, nobody is evicted, and a machine begins a batch when something ends or
arrives. So what is found is the best of these schedules, and no bound may exceed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class Case:
    """Requests, machines (p, d or m each), coefficients in seconds, and the link between them."""

    arrival: tuple[float, ...]
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    roles: str
    cost: dict[str, float]
    latency: float
    per_token: float
    again: bool

    def moving(self, i: int) -> float:
        return self.latency + (self.prompt[i] - self.again) * self.per_token

    def batch(self, entries: list[tuple[str, int, int]]) -> float:
        """Return the time of entries: what, tokens and KV cached before."""
        c = self.cost
        prefills = [(n, kv) for what, n, kv in entries if what == "prefill"]
        decodes = [kv for what, _, kv in entries if what == "decode"]
        time = c["base"] + c["token"] * (sum(n for n, _ in prefills) + len(decodes))
        if decodes:
            time += c["decode_base"] + c["decode_request"] * len(decodes)
            time += c["decode_kv"] * sum(decodes)
        if prefills:
            time += c["prefill_base"]
        for n, kv in prefills:
            time += c["prefill_token"] * n + c["prefill_request"] + c["prefill_square"] * n * n
            time += c["prefill_cross"] * n * kv + c["prefill_kv"] * kv
        return time


class Best:
    """The least value of an objective: ``tel``, ``ttft`` (sums), or ``late`` (a count)."""

    def __init__(self, case: Case, objective: str, slos: tuple[float, float] = (0, 0)) -> None:
        self.case, self.objective, self.slos = case, objective, slos
        self.best, self.seen = float("inf"), dict[int, float]()
        n = len(case.arrival)
        # where: None until prefilled; then the machine, the time of readiness, and what is next.
        self._go(0.0, (0.0,) * len(case.roles), ((None, a, 0) for a in case.arrival), (0.0,) * n, 0)

    def _done(self, output: int, k: int) -> bool:
        return k == output or (self.objective == "ttft" and k > 0)

    def _cost(self, i: int, first: float, finish: float | None) -> float:
        a = self.case.arrival[i]
        if self.objective == "tel":
            return 0.0 if finish is None else finish - a
        if self.objective == "ttft":
            return first - a if finish is None else 0.0
        if finish is None:
            return 0.0
        steps = self.case.output[i] - 1
        late = first - a > self.slos[0] * (1 + 1e-9)
        return float(late or (steps > 0 and finish - first > self.slos[1] * steps * (1 + 1e-9)))

    def _go(
        self, now: float, free: Any, places: Any, firsts: Any, value: float, above: int = -1
    ) -> None:
        """Try all that may begin now, on machines after ``above``, and then what ends next."""
        places = tuple(places)
        if all(self._done(o, k) for (_, _, k), o in zip(places, self.case.output, strict=True)):
            self.best = min(self.best, value)
            return
        key = hash((free, places, firsts, now, above))  # the states themselves take gigabytes
        rest = self._rest(now, places, firsts)
        if value + rest >= self.best - 1e-12 or self.seen.get(key, 1e99) <= value:
            return
        self.seen[key] = value
        empty = set[str]()
        for w, until in enumerate(free):
            role, home = self.case.roles[w], any(at == w for at, _, _ in places)
            if until <= now and w > above and (home or role not in empty):
                empty |= set() if home else {role}  # one empty machine of a kind is like another
                for entries in self._batches(w, now, places):
                    self._start(now, w, entries, free, places, firsts, value)
        later = [t for t in (*free, *(at for _, at, _ in places)) if t > now]
        if later:
            self._go(min(later), free, places, firsts, value)

    def _rest(self, now: float, places: Any, firsts: Any) -> float:
        """Return what is still to come at least, if every batch takes the shortest time."""
        each, total, case = self.case.cost["base"] + self.case.cost["token"], 0.0, self.case
        for i, (_, at, k) in enumerate(places):
            steps = case.output[i] - k
            if self.objective == "tel" and steps:
                total += max(now, at) + steps * each - case.arrival[i]
            elif self.objective == "ttft" and not k:
                total += max(now, at) + each - case.arrival[i]
            elif self.objective == "late" and steps:
                first = firsts[i] if k else max(now, at) + each
                end = max(now, at) + steps * each
                total += self._cost(i, first, max(first, end))
        return total

    def _batches(self, w: int, now: float, places: Any) -> Any:
        able = [
            i for i, (at, ready, k) in enumerate(places)
            if ready <= now and not self._done(self.case.output[i], k)
            and (at == w if at is not None else self.case.roles[w] in "pm")
        ]  # fmt: skip
        for size in range(len(able), 0, -1):
            yield from combinations(able, size)

    def _start(
        self, now: float, w: int, who: Any, free: Any, places: Any, firsts: Any, value: float
    ) -> None:
        case, entries = self.case, []
        for i in who:
            at, _, k = places[i]
            prompt = case.prompt[i]
            if at is None:
                entries.append(("prefill", prompt, 0))
            elif k == 0:
                entries.append(("prefill", 1, prompt - 1))
            else:
                entries.append(("decode", 1, prompt + k - 1))
        end = now + case.batch(entries)
        frees = tuple(end if v == w else t for v, t in enumerate(free))
        ways = [(places, firsts, value)]
        for i in who:
            ways = [one for way in ways for one in self._ended(i, w, end, *way)]
        for moved, began, worth in ways:
            self._go(now, frees, moved, began, worth, w)

    def _ended(self, i: int, w: int, end: float, places: Any, firsts: Any, value: float) -> Any:
        """Yield where a request may be after a batch that ends at some time."""
        case, (at, _, k) = self.case, places[i]
        alone = case.roles[w] == "p"
        again = case.again and case.prompt[i] > 1 and case.output[i] > 1
        token = not (at is None and alone and again)
        if token:
            if k == 0:
                if self.objective == "late":  # nothing else asks for it later
                    firsts = (*firsts[:i], end, *firsts[i + 1 :])
                value += self._cost(i, end, None)
            k += 1
            if k == case.output[i]:
                value += self._cost(i, firsts[i], end)
        targets = [(w, end)]
        if at is None and alone and k < case.output[i]:
            there = end + case.moving(i)
            targets = [(d, there) for d, role in enumerate(case.roles) if role in "dm"]
        for where, ready in targets:
            yield (*places[:i], (where, ready, k), *places[i + 1 :]), firsts, value
