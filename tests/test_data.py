"""Public traces: downloads from a local server, checked, and nothing half-written left behind."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from command_line import invoke, one_line_error

import optsched
from optsched.problem.errors import InputError
from optsched.workloads import datasets as data

pytest.importorskip("requests", reason="requests is not installed")

CONTENT = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n" + (
    b"2023-11-16 18:15:50.9951690,396,109\n" * 5000
)
NAME, FILE = "azure-2023-conv", "AzureLLMInferenceTrace_conv.csv"
PART = f".optsched-part-{FILE}"


class Server(ThreadingHTTPServer):
    """Serves files of a folder of the mirror as its ``answers`` say, one for each request.

    It knows ranges unless ``ranges`` is False; ``asked`` has the header of every request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[str] = []
        self.paths: list[str] = []
        self.asked: list[str | None] = []
        self.ranges = True
        self.pause: tuple[int, Event] | None = None

    def handle_error(self, *_: object) -> None:
        """Say nothing: a client that has had enough closes the connection."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/mirror"


class Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        answer = self.server.answers.pop(0) if self.server.answers else "good"
        if answer == "around":
            self.send_response(302)
            self.send_header("Location", self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if answer == "missing":
            self.send_error(404)
            return
        body = CONTENT.replace(b"44", b"45") if answer == "changed" else CONTENT
        wanted = self.headers["Range"]
        self.server.asked.append(wanted)
        begin = 0
        if wanted is None or not self.server.ranges:
            self.send_response(200)
        else:
            begin = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
            if begin >= len(body):
                self.send_error(416)
                return
            begin = 1 if answer == "another part" else begin
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        body = body[begin:]
        if answer == "nonsense":
            self.send_header("Content-Length", "9" * 5000)
            self.send_header("Content-Range", f"bytes {'9' * 5000}-x/y")
        elif answer not in ("endless", "trickling", "growing"):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.pause is not None:
            first, go = self.server.pause
            self.wfile.write(body[:first])
            self.wfile.flush()
            go.wait(60)
            return
        if answer == "silent":
            self.wfile.write(body[:100])
            self.wfile.flush()
            time.sleep(0.5)
            return
        while answer == "trickling":
            self.wfile.write(b"x")
            time.sleep(0.05)
        while answer == "growing":
            self.wfile.write(body)
        self.wfile.write(body[: len(body) // 2] if answer in ("short", "endless") else body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Yield a server that holds one dataset; attempts follow without a pause."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    known = [replace(one, sha256=digest) for one in data._DATASETS]
    monkeypatch.setattr(data, "_DATASETS", tuple(known))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(data, "sleep", lambda seconds: None)
    with Server() as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv(data.BASE_URL_VARIABLE, running.url)
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a user's cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "optsched"


def refused(words: str, folder: Path, *, keeps: bool = False, **options: Any) -> None:
    """Expect an error of one line, and nothing new in the folder but bytes to go on with."""
    before = set(folder.rglob("*"))
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        optsched.fetch_dataset(NAME, folder, **options)
    assert "\n" not in str(caught.value)
    assert set(folder.rglob("*")) - before == ({folder / PART} if keeps else set())
    assert ("the next fetch goes on from there" in str(caught.value)) == keeps


def test_a_dataset_is_downloaded_once_and_checked(server: Server, cache: Path) -> None:
    assert data.cached(NAME) is None
    seen: list[tuple[int, int]] = []
    file = optsched.fetch_dataset(NAME, progress=lambda *state: seen.append(state))
    assert file == cache / FILE == data.cached(NAME)
    assert file.read_bytes() == CONTENT
    assert server.paths == [f"/mirror/{FILE}"]
    assert seen[0][1] == len(CONTENT)
    assert max(done for done, _ in seen) == len(CONTENT)
    assert optsched.fetch_dataset(NAME) == file
    assert len(server.paths) == 1  # it was there
    assert os.listdir(cache) == [FILE]
    assert optsched.read_trace("azure", file, limit=1).prompt_tokens.tolist() == [374]


def test_a_mirror_can_be_named_for_one_call(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(data.BASE_URL_VARIABLE)
    base = server.url.replace("/mirror", "/other/")
    assert optsched.fetch_dataset(NAME, tmp_path / "new" / "folder", base_url=base).is_file()
    assert server.paths == [f"/other/{FILE}"]
    refused(
        "base_url: found 'ftp://x'; expected an address that begins", tmp_path, base_url="ftp://x"
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("changed", "its sha256 is not"),
        ("short", "the transfer broke off"),
        ("endless", "its sha256 is not"),  # nothing says how long it should have been
        ("missing", "the server answers 404"),
        ("silent", "the server is silent for 0.2 s"),
        ("trickling", "the server sends fewer than 16384 bytes in 0.4 s"),
        ("growing", "found more than 1000000 bytes; expected a smaller file"),
        ("around", "Exceeded 30 redirects"),
    ],
)
def test_what_does_not_come_whole_is_no_file(
    server: Server, tmp_path: Path, answer: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_MAX_BYTES", 10**6)
    server.answers = [answer] * (62 if answer == "around" else 2)
    words = f"dataset '{NAME}': {server.url}/{FILE}: {words}"
    refused(words, tmp_path, keeps=answer == "short", retries=1, timeout_s=0.2)
    assert len(server.paths) == (62 if answer == "around" else 2)
    assert optsched.fetch_dataset(NAME, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("answer", ["changed", "short", "missing"])
def test_a_failed_attempt_is_followed_by_another(
    server: Server, tmp_path: Path, answer: str
) -> None:
    server.answers = [answer, answer]
    assert optsched.fetch_dataset(NAME, tmp_path).read_bytes() == CONTENT
    assert len(server.paths) == 3
    assert os.listdir(tmp_path) == [FILE]


def test_headers_that_say_nothing_cost_nothing(server: Server, tmp_path: Path) -> None:
    server.answers = ["nonsense"]
    assert optsched.fetch_dataset(NAME, tmp_path, retries=0).read_bytes() == CONTENT


# --- Going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
def test_the_next_fetch_goes_on_where_the_server_can(
    server: Server, tmp_path: Path, ranges: bool
) -> None:
    server.ranges, server.answers = ranges, ["short"]
    refused("the transfer broke off", tmp_path, keeps=True, retries=0)
    have = (tmp_path / PART).stat().st_size
    assert len(CONTENT) // 4 < have < len(CONTENT)
    seen: list[tuple[int, int]] = []
    file = optsched.fetch_dataset(NAME, tmp_path, progress=lambda *state: seen.append(state))
    assert file.read_bytes() == CONTENT
    assert server.asked == [None, f"bytes={have}-"]
    assert (seen[0][0] > have) == ranges  # what is here already counts
    assert {total for _, total in seen} == {len(CONTENT)}
    assert seen[-1][0] == len(CONTENT)
    assert os.listdir(tmp_path) == [FILE]


def test_a_failed_attempt_is_gone_on_with_by_the_next(server: Server, tmp_path: Path) -> None:
    server.answers = ["short", "short"]
    assert optsched.fetch_dataset(NAME, tmp_path).read_bytes() == CONTENT
    ends = [int(asked[6:-1]) for asked in server.asked if asked]
    assert 0 < ends[0] < ends[1]


@pytest.mark.parametrize(
    "left", [b"another version of the file", CONTENT, CONTENT + b"more", CONTENT[:-1] + b"?"]
)
def test_bytes_that_do_not_belong_to_the_file_cost_nothing_but_time(
    server: Server, tmp_path: Path, left: bytes
) -> None:
    (tmp_path / PART).write_bytes(left)
    assert optsched.fetch_dataset(NAME, tmp_path, retries=0).read_bytes() == CONTENT
    assert os.listdir(tmp_path) == [FILE]


def test_an_answer_of_another_part_is_not_appended(server: Server, tmp_path: Path) -> None:
    (tmp_path / PART).write_bytes(CONTENT[:500])
    server.answers = ["another part"]
    assert optsched.fetch_dataset(NAME, tmp_path, retries=0).read_bytes() == CONTENT
    assert server.asked == ["bytes=500-", None]


def test_a_killed_download_leaves_no_file_and_is_gone_on_with(
    server: Server, tmp_path: Path
) -> None:
    # The process is killed with the server waiting in the middle of the body.
    go, half = Event(), len(CONTENT) // 2
    server.pause = (half, go)
    script = (
        "import sys, optsched.workloads.datasets as data; from dataclasses import replace;"
        "data._DATASETS = tuple(replace(d, sha256=sys.argv[1]) for d in data._DATASETS);"
        f"data.fetch_dataset({NAME!r}, sys.argv[2])"
    )
    digest = hashlib.sha256(CONTENT).hexdigest()
    process = subprocess.Popen([sys.executable, "-c", script, digest, str(tmp_path)])
    try:
        part = tmp_path / PART
        until = time.monotonic() + 60
        while time.monotonic() < until and not (part.exists() and part.stat().st_size > half // 2):
            time.sleep(0.01)
        assert process.poll() is None
        # While it runs, another process neither waits for it nor touches its bytes.
        server.pause = None
        before = part.stat().st_size
        assert optsched.fetch_dataset(NAME, tmp_path).read_bytes() == CONTENT
        assert server.asked[-1] is None
        assert part.stat().st_size >= before
        (tmp_path / FILE).unlink()
    finally:
        process.kill()
        process.wait()
        go.set()
    assert not (tmp_path / FILE).exists()
    have = part.stat().st_size
    assert optsched.fetch_dataset(NAME, tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == f"bytes={have}-"
    assert not part.exists()


def test_without_locks_every_download_begins_anew(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "fcntl", None)
    server.answers = ["short"]
    refused("the transfer broke off", tmp_path, retries=0)
    assert optsched.fetch_dataset(NAME, tmp_path).read_bytes() == CONTENT


def test_ctrl_c_says_that_the_same_command_goes_on(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, name: str, done: int, total: int) -> None:
        if done > len(CONTENT) // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("optsched.cli.output.LiveLine.downloaded", interrupt)
    result = invoke("import", "azure", NAME)
    words = "interrupted: the downloaded part is kept; the same command goes on"
    assert words in one_line_error(result, 130)
    assert (cache / PART).stat().st_size > len(CONTENT) // 2
    assert os.listdir(cache) == [PART]


def test_without_a_network_the_address_is_named(server: Server, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    refused(f"{server.url}/{FILE}: the server cannot be reached", tmp_path, retries=0)


def test_a_sum_that_others_report_is_said_to_be_one(server: Server, tmp_path: Path) -> None:
    server.answers = ["changed"]
    with pytest.raises(InputError, match="that sum is as others report it"):
        optsched.fetch_dataset("burstgpt-1", tmp_path, retries=0)


def test_a_damaged_file_in_the_cache_is_replaced(server: Server, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / FILE).write_bytes(CONTENT[:1000])
    assert optsched.fetch_dataset(NAME).read_bytes() == CONTENT
    # If the new one does not come, the old one stays as it was.
    (cache / FILE).write_bytes(CONTENT[:1000])
    server.answers = ["short"]
    with pytest.raises(InputError, match="broke off"):
        optsched.fetch_dataset(NAME, retries=0)
    assert (cache / FILE).read_bytes() == CONTENT[:1000]


def test_a_file_of_the_user_s_is_never_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("mine")
    refused(f"{FILE}: found the sha256", tmp_path)
    assert (tmp_path / FILE).read_text() == "mine"
    assert server.paths == []


def test_a_folder_that_cannot_be_made_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/sub: cannot be written: not a directory"):
        optsched.fetch_dataset(NAME, tmp_path / "file" / "sub")


def test_without_requests_the_extra_is_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "requests", None)
    refused("needs the package requests; install it (pip install 'optsched[data]')", tmp_path)


def test_every_dataset_has_an_address_a_sum_and_a_format_that_is_read() -> None:
    found = optsched.datasets()
    assert len(found) == len(data._DATASETS)
    for name, one in found.items():
        assert one.name == name
        assert one.url.startswith("https://")
        assert re.fullmatch("[0-9a-f]{64}", one.sha256)
        assert one.format in optsched.workloads.traces.trace_formats()
        assert one.licence
    assert len({one.file_name for one in found.values()}) == len(found)
    with pytest.raises(InputError, match="dataset 'nope' is unknown; known are azure-2023-conv"):
        optsched.fetch_dataset("nope")


def test_the_command_line_lists_and_fetches(
    server: Server, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listed = invoke("list", "data")
    assert listed.exit_code == 0
    assert re.search(rf"^{NAME} .* no$", listed.stdout, re.MULTILINE)
    assert re.search(r"^burstgpt-1 .* as others report it$", listed.stdout, re.MULTILINE)
    fetched = invoke("import", "azure", NAME, "-o", "i.json")
    assert "CC-BY-4.0; cite Patel et al., Splitwise, ISCA 2024; format azure\n" in fetched.stderr
    assert (cache / FILE).read_bytes() == CONTENT
    assert re.search(rf"^{NAME} .* yes$", invoke("list", "data").stdout, re.MULTILINE)
    (tmp_path / NAME).write_text("")  # a file of that name is taken, and nothing is fetched
    assert f"{NAME}: " in one_line_error(invoke("import", "azure", NAME, "-o", "i.json"))
