"""Replays on a real engine: a small server in this process stands for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_line import invoke, one_line_error

import optsched
from optsched import Instance, Measured, read_measured
from optsched.engines import in_process
from optsched.engines.replay import replay
from optsched.problem.errors import InputError, UsageError

SHORT, REFUSED, HANGS, BROKEN, NO_USAGE, NO_EVENT, NO_STREAM = 7, 8, 9, 10, 11, 12, 13
"""Prompt tokens at which the server does something else than to answer."""


class Answer(BaseHTTPRequestHandler):
    """Streams as many tokens as are asked for, as vLLM's server does."""

    server: Any

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        models = [{"id": "small"}] if self.path == "/v1/models" else []
        self._send(200, json.dumps({"data": models}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.times.append(time.perf_counter())
        self.server.bodies.append((self.path, body))
        prompt, tokens = len(body["prompt"]), body["max_tokens"]
        if prompt == REFUSED:
            return self._send(400, b'{"error": "too long"}')
        self.send_response(200)
        self.end_headers()
        if prompt == HANGS:
            self._event({"choices": [{"text": "a"}]})
            self.server.release.wait(20)
            return None
        if prompt == BROKEN:
            self.wfile.write(b"data: {not json\n\n")
            return None
        if prompt == NO_EVENT:
            self.wfile.write(b"data: [5]\n\n")
            return None
        made = tokens - 1 if prompt == SHORT else tokens
        for k in range(made if prompt != NO_STREAM else 0):
            ids = {"token_ids": [k + 1]} if body.get("return_token_ids") else {}
            self._event({"choices": [{"text": "a", **ids}]})
        if prompt != NO_USAGE:
            self._event({"choices": [], "usage": {"completion_tokens": made}})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _send(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def server() -> Iterator[Any]:
    """Yield a server with its address, and lists of what it was sent and when."""
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    made.daemon_threads = True
    made.bodies, made.times, made.release = [], [], threading.Event()
    made.address = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.release.set()
    made.shutdown()
    thread.join()
    made.server_close()


def small(prompt: list[int], output: list[int]) -> Instance:
    """Return requests 10 ms apart; their prompt tokens tell the server what to do."""
    arrival = [0.01 * k for k in range(len(prompt))]
    return Instance(arrival, prompt, output, kv_capacity=1000, time_unit="second")


def test_every_request_is_sent_once_with_its_lengths(server: Any) -> None:
    """To a prompt of NO_USAGE tokens the server sends the tokens, but not how many they are."""
    instance = small([3, NO_USAGE, 5], [4, 1, 2])
    found = replay(instance, server.address)
    assert found.errors == {}
    assert found.name == "small"
    found.check(instance)
    assert (found.latency >= found.ttft).all()
    assert (found.ttft > 0).all()
    bodies = sorted((body for _, body in server.bodies), key=lambda body: len(body["prompt"]))
    assert {path for path, _ in server.bodies} == {"/v1/completions"}
    assert [len(b["prompt"]) for b in bodies] == [3, 5, NO_USAGE]
    # Prompts of 3, 5 and NO_USAGE tokens ask for 4, 2 and 1.
    assert [(b["max_tokens"], b["min_tokens"]) for b in bodies] == [(4, 4), (2, 2), (1, 1)]
    assert all(b["ignore_eos"] and b["stream"] and b["model"] == "small" for b in bodies)


def test_prompts_are_drawn_from_the_seed_and_share_no_beginning(server: Any) -> None:
    for seed in (1, 1, 2):
        replay(small([40, 40], [1, 1]), server.address, seed=seed, vocabulary=5000, model="m")
    prompts = [tuple(body["prompt"]) for _, body in server.bodies]
    assert len(set(prompts)) == 4  # two of each seed
    assert len({prompt[:3] for prompt in prompts}) == 4
    assert all(100 <= token < 5000 for prompt in prompts for token in prompt)
    assert {body["model"] for _, body in server.bodies} == {"m"}


def test_what_goes_wrong_is_told_per_request_and_the_rest_is_kept(
    server: Any, tmp_path: Path
) -> None:
    """Of six requests 1 to 4 go wrong, each in a way of its own, and 0 and 5 are served.

    The errors name the request, what was measured before is kept, both survive a file, and the
    whole is refused as times of the instance.
    """
    instance = small([3, SHORT, REFUSED, HANGS, BROKEN, 5], [2, 3, 2, 2, 2, 2])
    found = replay(instance, server.address, timeout_s=0.5)
    assert found.errors[1] == "answered with 2 of 3 tokens"
    assert found.errors[2] == 'refused with status 400: {"error": "too long"}'
    assert found.errors[3] == "no end within 0.5 s"
    assert found.errors[4].startswith("broke off: ")
    assert sorted(found.errors) == [1, 2, 3, 4]
    # The short answer and the first token before the timeout were measured.
    assert np.isnan(found.latency).tolist() == [False, False, True, False, True, False]
    optsched.write_measured(found, tmp_path / "m.json")
    again = read_measured(tmp_path / "m.json")
    assert again.errors == found.errors
    assert np.array_equal(again.latency, found.latency, equal_nan=True)
    words = r"found 4 requests that were not served .*\(request 1: answered with 2 of 3 tokens\)"
    with pytest.raises(InputError, match=words):
        again.check(instance)


def test_an_answer_without_a_stream_of_tokens_ends_its_request_alone(
    server: Any, tmp_path: Path
) -> None:
    """A prompt of NO_EVENT tokens makes the server send a list, one of NO_STREAM a count and no
    tokens."""
    found = replay(small([3, NO_EVENT, NO_STREAM], [2, 2, 4]), server.address)
    assert found.errors == {
        1: "broke off: found no event; expected a JSON object",
        2: "found 4 tokens at once; expected a stream of tokens",
    }
    optsched.write_measured(found, tmp_path / "m.json")
    assert read_measured(tmp_path / "m.json").errors == found.errors


def test_a_stop_keeps_what_there_is(server: Any) -> None:
    stop = threading.Event()
    instance = small([3, HANGS, 5], [2, 2, 2])

    def heard(ended: int, failed: int) -> None:
        if ended == 2:  # all but the one that hangs
            stop.set()

    found = replay(instance, server.address, progress=heard, stop=stop)
    assert found.errors == {1: "interrupted"}
    assert not np.isnan(found.latency[[0, 2]]).any()


def test_compare_takes_what_was_measured(server: Any, tmp_path: Path) -> None:
    instance, out = tmp_path / "i.json", tmp_path / "m.json"
    sent = tmp_path / "sent.json"
    optsched.write_instance(small([3, 4, 5], [2, 3, 2]), instance)
    words = ("--rate-scale", "2", "--instance-out", sent)
    done = invoke("gpu", "replay", instance, "--server", server.address, "-o", out, *words)
    assert (done.exit_code, done.stdout) == (
        0, f"{out}: 3 of 3 requests served as the instance says\n",
    )  # fmt: skip
    # `small` has one request each 0.01 s; at twice the rate, each 0.005 s.
    assert optsched.read_instance(sent).arrival.tolist() == [0.0, 0.005, 0.01]
    compared = invoke("compare", sent, "--cost-model", "llama2-7b-a100-infermax", "--policy",
                      "fcfs", "--measured", out, "--time-limit", "0.1")  # fmt: skip
    assert compared.exit_code == 0
    assert "small" in compared.stdout


def test_priorities_and_predictions_go_along(server: Any, tmp_path: Path) -> None:
    # By predicted outputs of 1, 9 and 3 tokens the prompts of 3, 5 and 4 come in this order.
    instance = small([3, 4, 5], [4, 1, 2])
    # Priorities that are given, by prompt.
    replay(instance, server.address, priority=[7, 8, 9])
    assert {len(b["prompt"]): b["priority"] for _, b in server.bodies} == {3: 7, 4: 8, 5: 9}
    assert not any("vllm_xargs" in body for _, body in server.bodies)
    # Priorities by predicted output, and the predictions, on the command line.
    server.bodies.clear()
    optsched.write_instance(replace(instance, predicted=[1, 9, 3]), tmp_path / "i.json")
    words = ("--server", server.address, "-o", tmp_path / "m.json", "--priority", "output")
    assert invoke("gpu", "replay", tmp_path / "i.json", *words).exit_code == 0
    bodies = {len(body["prompt"]): body for _, body in server.bodies}
    assert {k: body["priority"] for k, body in bodies.items()} == {3: 0, 5: 1, 4: 2}
    told = {k: body["vllm_xargs"] for k, body in bodies.items()}
    assert told == {k: {"predicted_output_tokens": o} for k, o in ((3, 1), (4, 9), (5, 3))}
    # What is refused.
    with pytest.raises(InputError, match=r"priority:.*2.*3"):
        replay(instance, server.address, priority=[1, 2])
    for more, error in (
        (("--priority", "work"), "found work without --cost-model"),
        (("--priority", "best"), "priority: found 'best'; expected one of arrival"),
        (("--cost-model", "x.toml"), "--cost-model: found 'x.toml'; expected --priority work"),
        (("--priority", "total", "--cost-model", "x.toml"), "found total with --cost-model"),
    ):
        done = invoke("gpu", "replay", tmp_path / "i.json", *words[:4], *more)
        assert error in one_line_error(done)


def test_several_instances_are_sent_one_after_another(server: Any, tmp_path: Path) -> None:
    files, outs = [], []
    for k, prompt in enumerate(([3, 4], [5])):
        files.append(tmp_path / f"{k}.json")
        outs += ["-o", tmp_path / f"m{k}.json"]
        optsched.write_instance(small(prompt, [2] * len(prompt)), files[-1])
    words = ("gpu", "replay", *files, "--server", server.address)
    assert invoke(*words, *outs).exit_code == 0
    for file, out in zip(files, outs[1::2], strict=True):
        read_measured(out).check(optsched.read_instance(file))
    assert "--out: found 1 files; expected 2" in one_line_error(invoke(*words, *outs[:2]))
    error = one_line_error(invoke(*words, *outs, "--instance-out", tmp_path / "x.json"))
    assert "--instance-out: found 2 instances; expected one" in error


def test_what_the_engine_cannot_take_is_refused(server: Any) -> None:
    with pytest.raises(UsageError, match=r"options:.*max_num_seqs"):
        replay(small([3], [1]), server.address, options={"max_num_seqs": 4})
    with pytest.raises(UsageError, match=r"model:.*'m'"):
        replay(small([3], [1]), "vllm:nowhere", model="m")


def test_ctrl_c_before_the_engine_is_ready_ends_the_command_at_once(tmp_path: Path) -> None:
    optsched.write_instance(small([3], [2]), tmp_path / "i.json")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = ["gpu", "replay", "i.json", "--server", address, "-o", "m.json"]
        with subprocess.Popen(
            [sys.executable, "-m", "optsched", *words], cwd=tmp_path, text=True,
            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as command:  # fmt: skip
            asked, _ = silent.accept()  # for the models; there is no answer
            command.send_signal(signal.SIGINT)
            _, error = command.communicate(timeout=8)
            asked.close()
    # 128 + 2, the number of SIGINT
    assert (command.returncode, error) == (130, "error: interrupted\n")
    assert not (tmp_path / "m.json").exists()


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("ftp://x", "engine: found 'ftp://x'; expected http://HOST:PORT"),
        ("http://[", "engine: found 'http://['; expected http://HOST:PORT"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1: found no answer (.*); expected an OpenAI"),
        ("vllm:nowhere", r"nowhere/config.json: no such file; expected a model's configuration"),
    ],
)
def test_an_engine_that_is_not_there_is_named_in_one_line(
    engine: str, words: str, tmp_path: Path
) -> None:
    optsched.write_instance(small([3], [2]), tmp_path / "i.json")
    done = invoke(
        "gpu", "replay", tmp_path / "i.json", "--server", engine, "-o", tmp_path / "m.json"
    )
    assert done.exit_code == 2
    assert words.split(" (")[0] in one_line_error(done)
    assert not (tmp_path / "m.json").exists()


def test_a_server_without_models_is_refused(server: Any) -> None:
    with pytest.raises(InputError, match="found no list of models"):
        replay(small([3], [1]), server.address + "/other", model=None)


def test_bad_arguments_are_named(server: Any) -> None:
    with pytest.raises(UsageError, match="found an instance in rounds"):
        replay(Instance([0], [1], [1], kv_capacity=9), server.address)
    with pytest.raises(InputError, match="timeout: found 0"):
        replay(small([3], [1]), server.address, timeout_s=0)
    with pytest.raises(InputError, match="vocabulary: found 100"):
        replay(small([3], [1]), server.address, vocabulary=100)  # ids are drawn from 100 on


class InThisProcess:
    """Gives each request a token a step, as vLLM's engine does, but request 2 none."""

    def __init__(self) -> None:
        self.left: dict[str, list[int]] = {}  # tokens made, and wanted
        self.added: dict[str, tuple[int, Any, int]] = {}
        self.prompts: dict[str, list[int]] = {}

    def reset_prefix_cache(self) -> None:
        assert not self.has_unfinished_requests()

    def add_request(self, name: str, prompt: dict[str, Any], exact: Any, priority: int) -> None:
        tokens = len(prompt["prompt_token_ids"])
        if tokens > 100:
            raise ValueError("longer than\nthe model")
        self.added[name] = (tokens, exact.extra_args, priority)
        self.prompts[name] = prompt["prompt_token_ids"]
        self.left[name] = [0, exact.max_tokens]

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.left[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        found = []
        for name, tokens in list(self.left.items()):
            if name != "2":
                tokens[0] += 1
                output = SimpleNamespace(token_ids=[1] * tokens[0])
                done = tokens[0] == tokens[1]
                found.append(SimpleNamespace(request_id=name, finished=done, outputs=[output]))
                if done:
                    del self.left[name]
        return found


def test_an_engine_in_this_process_serves_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`InThisProcess` refuses prompts of more than 100 tokens, and never serves request 2."""
    engine = InThisProcess()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setattr(in_process, "start", lambda *_: SimpleNamespace(llm_engine=engine))
    instance = Instance(
        [0, 0.01, 0.02, 0.03], [5, 101, 7, 8], [3, 4, 12, 1], 5000, "second", predicted=[3, 4, 9, 1]
    )
    found = replay(instance, "vllm:folder", priority=[3, 2, 1, 0], timeout_s=0.2)
    assert found.errors == {1: "refused: longer than the model", 2: "no end within 0.2 s"}
    assert np.isfinite(found.latency[[0, 3]]).all()
    assert (found.ttft[[0, 3]] <= found.latency[[0, 3]]).all()
    assert not engine.left  # the request that never ends was taken back
    # Of each are noted its prompt's length, what went along, and its priority.
    assert engine.added["0"] == (5, {"predicted_output_tokens": 3}, 3)
    assert engine.added["3"] == (8, {"predicted_output_tokens": 1}, 0)


def sessions(**fields: Any) -> Instance:
    """Two calls after one another, one after both of two others, and a request of its own."""
    columns = {"arrival": [0, None, None, None, 0.01], "prompt_tokens": [20, 60, 50, 90, 6],
               "output_tokens": [4, 3, 2, 1, 2], "after": [None, 0, 0, [1, 2], None],
               "delay": [None, 0.05, 0, 0.1, None]}  # fmt: skip
    return Instance(**{**columns, "kv_capacity": 1000, "time_unit": "second", **fields})


def tree(**fields: Any) -> Instance:
    """`sessions`, each call of which repeats what was said before it."""
    return sessions(prefix_parent=[None, 0, 0, 1, None], prefix_tokens=[0, 24, 22, 63, 0], **fields)


def releases(instance: Instance, found: Measured) -> list[float]:
    """Return when requests were released, from the latencies of those before them."""
    ends: dict[int, float] = {}
    release: list[float] = []
    for i, before in enumerate(instance.after):
        given = float(instance.arrival[i])
        release.append(max(ends[k] for k in before) + instance.delay[i] if before else given)
        ends[i] = release[i] + found.latency[i]
    return release


def test_calls_are_sent_when_those_before_them_have_ended(server: Any) -> None:
    instance, began = sessions(), time.perf_counter()
    found = replay(instance, server.address)
    assert found.errors == {}
    found.check(instance)
    prompts = [len(body["prompt"]) for _, body in server.bodies]
    sent = dict(zip(prompts, server.times, strict=True))
    release = releases(instance, found)
    for i, prompt in enumerate(instance.prompt_tokens.tolist()):
        assert release[i] <= sent[prompt] - began <= release[i] + 5  # a busy machine may be late
    # Call 3 waits 0.1 s after calls 1 and 2.
    assert release[3] >= max(release[1] + found.latency[1], release[2] + found.latency[2]) + 0.1


def test_prompts_repeat_the_prompt_and_the_answer_before(server: Any) -> None:
    replay(tree(), server.address, seed=3)
    prompts = {len(body["prompt"]): body["prompt"] for _, body in server.bodies}
    assert all(body["return_token_ids"] for _, body in server.bodies)
    # The server's tokens are 1, 2, 3, ...; no drawn id is below 100. Call 1 repeats 20 + 4 tokens,
    # call 2 no more than 20 + 2 of them, and call 3 the 60 + 3 of call 1.
    assert prompts[60][:24] == [*prompts[20], 1, 2, 3, 4]
    assert prompts[50][:22] == [*prompts[20], 1, 2]
    assert prompts[90][:63] == [*prompts[60], 1, 2, 3]
    assert min(prompts[60][24:] + prompts[50][22:] + prompts[90][63:] + prompts[6]) >= 100
    # Without prefixes no token ids are asked for. What was drawn stays (of 20 tokens all, of 60
    # those after the 24), and the call of 60 no longer begins with the prompt of 20.
    server.bodies.clear()
    replay(sessions(), server.address, seed=3)
    assert not any("return_token_ids" in body for _, body in server.bodies)
    plain = {len(body["prompt"]): body["prompt"] for _, body in server.bodies}
    assert plain[20] == prompts[20]
    assert plain[60][24:] == prompts[60][24:]
    assert plain[60][:20] != prompts[20]


def test_calls_after_one_that_failed_are_told(server: Any) -> None:
    found = replay(sessions(prompt_tokens=[20, REFUSED, 50, 90, 6]), server.address)
    assert sorted(found.errors) == [1, 3]
    assert found.errors[3] == "comes after request 1, which failed"
    # Of five requests all but request 3 were sent.
    assert len(server.bodies) == 4


def test_an_engine_in_this_process_runs_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """`InThisProcess` never serves request 2, gives all others a token a step, and each token is
    1."""
    engine = InThisProcess()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setattr(in_process, "start", lambda *_: SimpleNamespace(llm_engine=engine))
    instance = sessions(after=[None, 0, None, [1, 2], None], arrival=[0, None, 0, None, 0.01],
                        delay=[None, 0.05, None, 0.1, None])  # fmt: skip
    found = replay(instance, "vllm:folder", timeout_s=0.3)
    # The engine never ends request 2.
    assert found.errors == {
        2: "no end within 0.3 s", 3: "comes after request 2, which failed",
    }  # fmt: skip
    assert list(engine.added) == ["warm-up", "0", "2", "4", "1"]
    engine.prompts.clear()
    found = replay(
        tree(
            after=[None, 0, None, 1, None],
            arrival=[0, None, 5, None, 0.01],
            delay=[None, 0, None, 0, None],
        ),
        "vllm:folder",
        stop=StopsAt(0.5),
    )
    assert found.errors == {2: "interrupted"}
    # Call 1 repeats the prompt of 20 and the 4 tokens of 0, and call 3 the 60 and 3 of 1.
    assert engine.prompts["1"][:24] == [*engine.prompts["0"], 1, 1, 1, 1]
    assert engine.prompts["3"][:63] == [*engine.prompts["1"], 1, 1, 1]


class StopsAt(threading.Event):
    """An event that is set some seconds after it is made."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        threading.Timer(seconds, self.set).start()
