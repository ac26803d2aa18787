"""Public traces: downloads from a local server, checked, and nothing half-written left behind."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import invoke, one_line_error

import optsched
from optsched.problem.errors import InputError
from optsched.workloads import datasets as data

pytest.importorskip("pooch", reason="pooch is not installed")

CONTENT = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n" + (
    b"2023-11-16 18:15:50.9951690,396,109\n" * 5000
)
NAME, FILE = "azure-2023-conv", "AzureLLMInferenceTrace_conv.csv"


class Server(ThreadingHTTPServer):
    """Serves files of a folder of the mirror as its ``answers`` say, one for each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[str] = []
        self.paths: list[str] = []

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
        self.send_response(200)
        if answer not in ("endless", "growing"):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if answer == "silent":
            self.wfile.write(body[:100])
            self.wfile.flush()
            time.sleep(0.5)
            return
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
    monkeypatch.setattr("pooch.core.time", SimpleNamespace(sleep=lambda seconds: None))
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


def refused(words: str, folder: Path, **options: Any) -> None:
    """Expect an error of one line, and nothing new in the folder."""
    before = set(folder.rglob("*"))
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        optsched.fetch_dataset(NAME, folder, **options)
    assert "\n" not in str(caught.value)
    assert set(folder.rglob("*")) == before


def test_a_dataset_is_downloaded_once_and_checked(server: Server, cache: Path) -> None:
    assert data.cached(NAME) is None
    seen: list[tuple[int, int]] = []
    file = optsched.fetch_dataset(NAME, progress=lambda *state: seen.append(state))
    assert file == cache / FILE == data.cached(NAME)
    assert file.read_bytes() == CONTENT
    # Everybody may read it.
    assert os.name != "posix" or file.stat().st_mode & 0o777 == 0o644
    assert server.paths == [f"/mirror/{FILE}"]
    assert seen[0][1] == len(CONTENT)
    assert max(done for done, _ in seen) == len(CONTENT)
    assert optsched.fetch_dataset(NAME) == file
    assert len(server.paths) == 1  # it was there
    assert os.listdir(cache) == [FILE]
    # The first row of CONTENT has 374 prompt tokens.
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
        ("growing", "found more than 1000000 bytes; expected a smaller file"),
        ("around", "Exceeded 30 redirects"),
    ],
)
def test_what_does_not_come_whole_is_no_file(
    server: Server, tmp_path: Path, answer: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CONTENT has some 180 kB, and "growing" sends more than a megabyte.
    monkeypatch.setattr(data, "_MAX_BYTES", 10**6)
    # Two attempts. Each follows 30 redirects, and the 31st answer is one too many.
    server.answers = [answer] * (62 if answer == "around" else 2)
    words = f"dataset '{NAME}': {server.url}/{FILE}: {words}"
    refused(words, tmp_path, retries=1, timeout_s=0.2)
    assert len(server.paths) == (62 if answer == "around" else 2)
    assert optsched.fetch_dataset(NAME, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("answer", ["changed", "short", "missing"])
def test_a_failed_attempt_is_followed_by_another(
    server: Server, tmp_path: Path, answer: str
) -> None:
    server.answers = [answer, answer]
    assert optsched.fetch_dataset(NAME, tmp_path).read_bytes() == CONTENT
    # Two attempts failed, and the third answer is good.
    assert len(server.paths) == 3
    assert os.listdir(tmp_path) == [FILE]


def test_ctrl_c_leaves_nothing(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, name: str, done: int, total: int) -> None:
        if done > len(CONTENT) // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("optsched.cli.output.LiveLine.show_download", interrupt)
    result = invoke("import", "azure", NAME)
    assert one_line_error(result, 130) == "error: interrupted"
    assert os.listdir(cache) == []


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


def test_without_pooch_the_extra_is_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    refused("needs the package pooch; install it (pip install 'optsched[data]')", tmp_path)


def test_every_dataset_has_an_address_a_sum_and_a_format_that_is_read() -> None:
    """Each has all fields, names of files differ, and an unknown name is refused."""
    found = optsched.datasets()
    assert len(found) == len(data._DATASETS)
    for name, one in found.items():
        assert one.name == name
        assert one.url.startswith("https://")
        assert re.fullmatch("[0-9a-f]{64}", one.sha256)
        assert one.format in optsched.workloads.traces.trace_formats()
        assert one.licence
    assert len({one.file_name for one in found.values()}) == len(found)
    with pytest.raises(InputError, match="'nope'"):
        optsched.fetch_dataset("nope")


def test_the_command_line_lists_and_fetches(
    server: Server, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list says whether a dataset is there; import fetches it, unless a file has its name."""
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
