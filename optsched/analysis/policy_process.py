"""A policy of a user's file in a process that holds no instance: it sees views, and sends JSON.

`PolicyHost` is a process that never has an instance. Each policy runs in a fork of it, where an
`_Answering` reads orders. `Link` asks it from the process that simulates, and `Remote` is the
policy there. What comes back is a line of JSON of bounded length, of which no code is run.

What the policy's process is sent depends on what the policy is:

- `Rules` and `Windows` are data. Their fields come back, and nothing is sent.
- An object with ``batch(view)`` is sent views. Output lengths are in them for requests that have
  arrived, and not even these if it says ``clairvoyant = False``.
- Any other `Runner` simulates for itself, so it is sent the instance, output lengths included. So
  are predictors of users' files, which make their predictions of these.
"""

import json
import operator
import os
import pickle
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import numpy as np

from optsched.files.read_write import schedule_from_dict
from optsched.policies import make_policy, predictor_of
from optsched.policies.base import Batch, Rules, Runner, Scheduler, View, Windows
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import NO_LIMIT, Budget
from optsched.problem.errors import OutOfTimeError, PolicyError, raised
from optsched.problem.instance import Instance
from optsched.problem.processes import DiedError, Process, adopt_orphans, begin_fork, end_children
from optsched.problem.schedule import Schedule
from optsched.problem.specs import is_file
from optsched.workloads.problem import Problem

MAX_BYTES = 1 << 28
"""Max bytes of an answer that holds a schedule or the fields of rules."""
# Max bytes of other answers: so many, and so many for each request. A request is named at most
# three times, with two numbers of up to twenty digits.
_SOME_BYTES, _REQUEST_BYTES = 1 << 16, 128

# Seconds after which a host that does not answer is taken for stopped, by a policy's signal.
_STOPPED_S = 5.0
# The longest wait for one answer, in seconds, where there is no time limit.
_MAX_WAIT_S = 86_400.0

# Characters of a text from the policy's process at most.
_MAX_TEXT = 2000
# Policies that are data, by what the process says of them.
_DATA = {"Rules": Rules, "Windows": Windows}
T = TypeVar("T")
# What an object says of itself, and may leave out.
_ATTRIBUTES = ("clairvoyant", "evict_mode", "hybrid", "chunked")


class LostError(PolicyError):
    """The process of a policy has ended, or what it sends cannot be read any more."""


class FailedError(PolicyError):
    """A policy failed in its process: the kind of the error, what it says, and `raised` of it."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.kind, words, self.raised = (str(answer.get(k)) for k in ("kind", "error", "raised"))
        super().__init__(words)


class PolicyHost:
    """A process that never has an instance, and whose forks run policies of users' files."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            self._number = theirs.fileno()
            self._process = Process(inherited=[self._number])

        self._process.ask(_warm_up)

    def alive(self) -> bool:
        """Return whether it has not ended."""
        return self._process.alive()

    def start(self, policy: str, memory_limit: int) -> socket.socket:
        """Start the process of a policy, and return the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            # Descriptors travel beside at least one byte, whatever it is.
            socket.send_fds(self._ours, [b"."], [theirs.fileno()])

        self._process.ask(_start, self._number, policy, memory_limit, os.getcwd())
        return ours

    def end_policy(self) -> None:
        """End the policy's process, what it has started, and a host that it has stopped.

        A stopped host would never answer, so that after a while it is ended from outside.
        """
        timer = threading.Timer(_STOPPED_S, self._process.end)
        timer.start()
        try:
            self._process.ask(end_children)
        finally:
            timer.cancel()


@lru_cache(maxsize=1)
def _host() -> PolicyHost:
    """Return the process whose forks run policies of files, which is kept."""
    return PolicyHost()


def _warm_up() -> None:
    """Load what policies use, so that their processes need not."""
    smallest = Instance(np.array([0]), np.array([1]), np.array([1]), kv_capacity=2)
    simulate(smallest, _FirstAlone())


class _FirstAlone:
    def batch(self, view: View) -> Batch:
        return Batch({view.waiting[0]: view.rest(0)})


def _start(number: int, policy: str, memory_limit: int, folder: str) -> None:
    """Start a policy's process in a folder. It answers at the connection that was just sent.

    `number`: the descriptor of the socket at which the host receives connections. `memory_limit`:
    in bytes.
    """
    adopt_orphans()
    # A copy of the descriptor is closed, as the host needs its own for further policies.
    with socket.socket(fileno=os.dup(number)) as control:
        _, (link,), *_ = socket.recv_fds(control, 1, 1)

    host = os.getpid()
    if os.fork() > 0:
        os.close(link)
        return

    # From here on this is the policy's process, which never returns to the host's code.
    try:
        begin_fork(host, memory_limit)
        os.chdir(folder)  # a policy's file is named from there, and the host is older
        os.setsid()  # a signal to its group is for itself
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # there is nothing to read from a user
        os.dup2(link, 3)
        os.closerange(4, 1 << 12)  # the host's answers and calls are not the policy's to touch
        _Answering(policy).serve(socket.socket(fileno=3))
    finally:
        os._exit(0)


class _Answering:
    """The policy's side of a `Link`: each order is the name of a method, and what it is given."""

    def __init__(self, policy: str) -> None:
        self.policy = policy

    def serve(self, link: socket.socket) -> None:
        """Answer orders, until the other side ends."""
        orders, answers = link.makefile("rb"), link.makefile("wb")
        while True:
            # Orders come from optsched itself. What goes back is JSON, which runs no code there.
            name, *arguments = pickle.load(orders)
            try:
                answer = getattr(self, name)(*arguments)
                line = json.dumps(answer, default=_plain)
            except BaseException as error:  # a policy may even raise SystemExit
                words = {"kind": type(error).__name__, "error": str(error), "raised": raised(error)}
                line = json.dumps({key: text[:_MAX_TEXT] for key, text in words.items()})

            answers.write(line.encode() + b"\n")
            answers.flush()

    def make(self) -> dict[str, Any]:
        """Make the policy anew, and say what it is."""
        policy, _ = make_policy(self.policy)
        self.made = policy
        self.shown: dict[str, Any] = {}
        for name, kind in _DATA.items():
            if type(policy) is kind:
                return {"is": name, "fields": _fields(policy)}
        if isinstance(policy, Runner):
            return {"is": "runner"}

        attributes = {name: getattr(policy, name) for name in _ATTRIBUTES if hasattr(policy, name)}
        return {"is": "object", "attributes": attributes}

    def batch(self, news: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the policy with a view, of which only what has changed is sent."""
        self.shown |= news
        for value in news.values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)  # it stands in later views as well

        answer = self.made.batch(View(**self.shown))  # type: ignore[union-attr]
        if not isinstance(answer, Batch):
            return {"found": repr(answer)[:_MAX_TEXT]}

        pairs = {name: list(getattr(answer, name).items()) for name in ("tokens", "reused")}
        return {**pairs, "evict": list(answer.evict), "stall": bool(answer.stall)}

    def run(self, problem: Problem, seed: int) -> dict[str, Any]:
        """Let the policy simulate for itself."""
        return simulate(problem, self.policy, seed=seed).to_dict()


def _fields(rules: Any) -> dict[str, Any]:
    """Return the fields of `Rules` or `Windows`, without their parts taken apart."""
    return {field.name: getattr(rules, field.name) for field in fields(rules)}


def _plain(value: Any) -> Any:
    """Return what JSON has in place of a value that it does not know."""
    if isinstance(value, np.generic):
        return value.item()

    return _fields(value) if type(value) is Rules else {"repr": repr(value)[:_MAX_TEXT]}


class _StandIn(Exception):
    """Stands for what only the policy's process has, an exception too: errors say what it was."""

    def __repr__(self) -> str:
        return str(self)


class HiddenColumn:
    """Stands for a column of output lengths in the views of a policy that says it needs none."""

    def _refuse(self, *given: object) -> NoReturn:
        raise LookupError("output lengths are hidden, as the policy says clairvoyant = False")

    __getitem__ = __len__ = __iter__ = __array__ = _refuse


class Link:
    """A policy's process, and the connection to it.

    `lost`: whether it cannot be asked any more.
    """

    def __init__(self, policy: str, memory_limit: int) -> None:
        if not _host().alive():
            _host.cache_clear()  # so that the next call makes another

        self._host = _host()
        self._connection = self._host.start(policy, memory_limit)
        self.policy = policy
        self.lost = False
        self._budget = NO_LIMIT
        self._read = b""  # what has come after the last line

    def close(self) -> None:
        """End the policy's process, and what it has started."""
        self._connection.close()
        with suppress(DiedError):
            self._host.end_policy()

    def ask(self, limit: int, *order: Any) -> dict[str, Any]:
        """Return the answer to an order, of at most so many bytes; `FailedError` if it failed."""
        try:
            self._do_in_time(self._connection.sendall, pickle.dumps(order, pickle.HIGHEST_PROTOCOL))
            line = self._read_line(limit)
        except OSError:
            line = None  # a broken connection: the process has ended
        except OutOfTimeError:
            self.lost = True  # its answer may still come, and would be taken for the next one
            raise

        if line is None:
            raise self._lose("ended without a schedule")

        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None  # such a line is no object either
        if not isinstance(answer, dict):
            raise self._lose(f"sent {line[:40]!r}; expected an object of JSON")
        if "raised" in answer:
            raise FailedError(answer)

        return answer

    def _do_in_time(self, call: Callable[[Any], T], what: Any) -> T:
        """Send or receive within the time that is left."""
        try:
            self._budget.check("the policy was asked")
            self._connection.settimeout(min(self._budget.left_s, _MAX_WAIT_S))
            return call(what)
        except TimeoutError:
            raise OutOfTimeError("time limit while the policy was asked") from None

    def _read_line(self, limit: int) -> bytes | None:
        """Return the next line, or None where the process has ended before the line's end.

        `limit`: the bytes that it may have. What comes behind the line is kept for the next call.
        """
        parts, size = [self._read], len(self._read)
        while b"\n" not in parts[-1]:
            received = self._do_in_time(self._connection.recv, 1 << 16)
            if not received:
                return None

            parts.append(received)
            size += len(received)
            if size > limit:
                raise self._lose(f"sent more than {limit} bytes in answer to one order")

        line, _, self._read = b"".join(parts).partition(b"\n")
        return line

    def _lose(self, words: str) -> LostError:
        """Give the process up, and return the error to raise."""
        self.lost = True
        return LostError(f"its process {words}")

    def simulate(self, problem: Problem, seed: int, budget: Budget) -> Schedule:
        """Return the schedule of the policy, which is made anew."""
        self._budget = budget
        predictor, scheduler = predictor_of(self.policy), None
        answer = self.ask(MAX_BYTES, "make")
        # A user's predictor has true lengths, so that it runs in the policy's process, too.
        if predictor is None or not is_file(predictor):
            # Without predictions, the predicted lengths of views are the true ones.
            blind = predictor is None and not problem.instance.has_predictions
            scheduler = self._scheduler(answer, blind)
        # Without one, the policy simulates for itself, in its own process.
        if scheduler is not None:
            return simulate(problem, scheduler, seed=seed, predictor=predictor, budget=budget)

        return schedule_from_dict(self.ask(MAX_BYTES, "run", problem, seed), problem.instance)

    def _scheduler(self, answer: Mapping[str, Any], blind: bool) -> Scheduler | None:
        """Return what the policy says that it is; None: what simulates for itself.

        `blind`: whether views are without lengths if it says that it needs none.
        """
        if answer.get("is") in ("Rules", "Windows"):
            return _rules_of(_DATA[answer["is"]], answer.get("fields"), self.policy)
        if answer.get("is") == "object":
            return Remote(self, dict(answer.get("attributes") or ()), blind)

        return None


class Remote:
    """A policy with ``batch(view)`` in another process, which is sent what views change.

    Attributes
    ----------
    clairvoyant, evict_mode, hybrid, chunked
        The policy's own, if it has them.
    """

    def __init__(self, link: Link, attributes: Mapping[str, Any], blind: bool) -> None:
        self._link = link
        self.name = link.policy
        self._sent = dict[str, Any]()  # the fields of views as they were sent last
        vars(self).update({key: attributes[key] for key in _ATTRIBUTES if key in attributes})
        self._hidden = dict[str, Any]()
        if blind and not attributes.get("clairvoyant", True):
            self._hidden = dict.fromkeys(("predicted", "remaining"), HiddenColumn())

    def __deepcopy__(self, memo: object) -> "Remote":
        """Return itself: as for copies, the policy behind it is made anew for each run."""
        return self

    def batch(self, view: View) -> Batch:
        """See `Policy.batch`."""
        news = dict[str, Any]()
        # Only what differs from what was sent last (`_sent`) is sent. What is hidden from the
        # policy (`_hidden`) stands in place of the view's own columns.
        for name, value in {**vars(view), **self._hidden}.items():
            sent, is_column = self._sent.get(name), isinstance(value, np.ndarray)
            is_same: Callable[..., bool] = np.array_equal if is_column else operator.is_
            if sent is None or not is_same(sent, value):
                news[name] = value
                # The engine writes into its columns, so that only a copy stays as it was sent.
                self._sent[name] = value.copy() if is_column else value

        limit = _SOME_BYTES + _REQUEST_BYTES * len(view.arrival)  # of the answer, in bytes
        try:
            answer = self._link.ask(limit, "batch", news)
        except FailedError as error:
            if error.kind in ("PolicyError", "OutOfTimeError"):
                raise

            # The engine wraps what a policy's own code raises, as if it had run here.
            raise _StandIn(error.raised) from None

        if "found" in answer:
            return _StandIn(answer["found"])  # type: ignore[return-value]  # it is no batch

        return _batch(answer)


def _batch(answer: Mapping[str, Any]) -> Batch:
    """Return the batch of an answer. What is in it is not checked yet."""
    try:
        tokens, reused = (
            {_plain_value(request): _plain_value(value) for request, value in answer[name]}
            for name in ("tokens", "reused")
        )
        evicted = [_plain_value(request) for request in answer["evict"]]
    except (KeyError, TypeError, ValueError) as error:
        raise LostError("its process sent an object that is no batch") from error

    return Batch(tokens, evicted, answer.get("stall") is True, reused)


def _plain_value(value: Any) -> Any:
    """Return a number or text of an answer, and for anything else what errors can say of it."""
    if isinstance(value, dict | list):
        return _StandIn(value.get("repr") if isinstance(value, dict) else tuple(value))

    return value


def _rules_of(kind: Any, sent: Any, policy: str) -> Any:
    """Return `Rules` or `Windows` of their fields, which they check."""

    # JSON has lists in place of tuples, and objects in place of the `Rules` in `Windows`.
    def field(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(value)
        return _rules_of(Rules, value, policy) if isinstance(value, dict) else value

    try:
        rules = kind(**{name: field(value) for name, value in dict(sent).items()})
    except (TypeError, ValueError) as error:
        raise LostError(f"its process sent fields that {kind.__name__} do not have") from error

    object.__setattr__(rules, "name", policy)  # for errors, as in the policy's own process
    return rules
