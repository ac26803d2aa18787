"""Texts that users give, of every format: whatever is in them, it is one line and exit status 2."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import invoke, one_line_error

from optsched.problem.errors import InputError
from optsched.problem.text_files import parse_json, read_object, read_text

COST = ("--cost-model", "llama2-7b-a100-infermax")
# By what is read: the end of the file's name, and a command that reads it.
READERS: dict[str, tuple[str, Callable[[Path], tuple[object, ...]]]] = {
    "instance": (".json", lambda file: ("simulate", file, "--policy", "fcfs")),
    "schedule": (".json", lambda file: ("evaluate", "tiny", file)),
    "certificate": (".json", lambda file: ("verify", "tiny", file)),
    "result": (".json", lambda file: ("plot", file, "-o", "x.png")),
    "report": (".json", lambda file: ("report", file, "-o", "x.html")),
    "measured": (
        ".json",
        lambda file: ("compare", "tiny-seconds", *COST, "--policy", "fcfs", "--measured", file),
    ),
    "cost model": (
        ".toml",
        lambda file: ("simulate", "tiny-seconds", "--policy", "fcfs", "--cost-model", file),
    ),
    "predictions": (
        ".csv",
        lambda file: ("export", "tiny", "--predictor", f"column:file={file}", "-o", "x.json"),
    ),
    "trace": (".jsonl", lambda file: ("import", "mooncake", file, "-o", "x.json")),
    "benchmark": (".json", lambda file: ("import", "vllm", file, "-o", "x.json")),
}
# What the file holds: bytes, or something that is no file.
CONTENT = {
    "nothing": b"",
    "deep list": b"[" * 100_000,
    "deep object": b'{"a": ' * 900 + b"1" + b"}" * 900,
    "deep table": b"a = " + b"[" * 100_000,
    "no UTF-8": b'{"format": "\xff\xfe"}',
    "huge cell": b"predicted\n" + b"1" * 200_000 + b"\n",
    "huge number": b'{"timestamp": ' + b"9" * 400 + b', "format": 1e999}',
    "half a character": b'{"format": "\\ud800", "timestamp": "\\ud800"}',
    "controls": b'{"format": "\\u001b[2J\\u0000"}',
    "a folder": None,
    "a loop": "a loop",
    "no file": "no file",
}


@pytest.mark.skipif(os.name == "nt", reason="POSIX links")
@pytest.mark.parametrize("content", CONTENT)
@pytest.mark.parametrize("reader", READERS)
def test_a_text_that_is_none_is_one_line(
    reader: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`READERS` has a command for each kind of file, and `CONTENT` what it finds there: bytes, a
    folder, a link to itself, or no file."""
    monkeypatch.chdir(tmp_path)
    suffix, command = READERS[reader]
    file = Path(f"given{suffix}")
    found = CONTENT[content]
    if isinstance(found, bytes):
        file.write_bytes(found)
    elif content == "a folder":
        file.mkdir()
    elif content == "a loop":
        file.symlink_to(file)
    error = one_line_error(invoke(*command(file)))
    assert "given" in error
    assert len(error) < 1000  # whatever the file holds
    assert error.isprintable()
    assert not list(tmp_path.glob("x.*"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1, "a": 2}', "a: found twice"),
        ('{"a": NaN}', "found NaN, which is not JSON"),
        ('{"a": -1e999}', "found -1e999; expected a number below 1e308"),
        ('{"a": [1, -' + "1" * 400 + "]}", "a number of hundreds of digits"),
        ('{"a": "\\uD800"}', r"found \\ud800, half of a character"),
        ("", "line 1, column 1: not JSON"),
        ("[1, 2,]", "line 1, column 7: not JSON"),
    ],
)
def test_json_that_nothing_can_be_done_with_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_json(text)


def test_json_at_the_edge_is_read() -> None:
    whole = {"pair": "\U0001f600", "escaped": "\\ud800", "large": 1.7e308, "digits": 10**300}
    assert parse_json(json.dumps(whole)) == whole
    assert parse_json(json.dumps("1" * 400)) == "1" * 400


def test_the_object_of_another_program_is_one(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("[]")
    with pytest.raises(InputError, match=r"x.json"):
        read_object(file, "a model's configuration")
    file.write_bytes(b"\xef\xbb\xbf{}")  # a byte order mark
    assert read_object(file, "anything") == {}
    with pytest.raises(InputError, match="cannot be read:"):
        read_text("a\0b")
