"""Files: round trips, strict reading, atomic writing, schemas."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from optsched.files.outputs import check_folder, check_output, make_folder
from optsched.files.read_write import (
    example_instances,
    json_schema,
    json_text,
    read_instance,
    read_json,
    read_schedule,
    schedule_from_dict,
    write_bytes,
    write_instance,
    write_json,
    write_schedule,
)
from optsched.files.schemas import MODELS
from optsched.problem import text_files
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance, Limits, canonical_json
from optsched.problem.schedule import Schedule, from_batches, from_starts

GOOD = {
    "format": "optsched-instance", "version": 1, "name": "two", "time_unit": "round",
    "kv_capacity": 10, "kv_accounting": "generated",
    "requests": {"arrival": [0, 2], "prompt_tokens": [1, 2], "output_tokens": [3, 4]},
}  # fmt: skip
# The instance that GOOD describes.
TWO = Instance([0, 2], [1, 2], [3, 4], kv_capacity=10, name="two")
quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def put(folder, data, name="x.json"):
    """Write a text as it is, or anything else as JSON."""
    file = folder / name
    file.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return file


def with_request(**columns):
    """Return GOOD with other columns of requests."""
    return {**GOOD, "requests": {**GOOD["requests"], **columns}}


def without(key):
    """Return GOOD without a field."""
    return {k: v for k, v in GOOD.items() if k != key}


def refused(file, words, read=read_instance):
    """Check for one line that begins with the file and holds ``words``."""
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@st.composite
def instances(draw):
    """Draw instances of any field that files keep."""
    n = draw(st.integers(1, 8))
    unit = draw(st.sampled_from(["round", "second"]))

    def column(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    seconds = st.floats(0, 1e6, allow_nan=False) | st.integers(0, 10**6)
    prompt, output = column(st.integers(1, 50)), column(st.integers(1, 50))
    lower, upper = column(st.integers(0, 9)), column(st.integers(0, 9))
    interval = draw(st.booleans())
    text = st.text(max_size=8)
    return Instance(
        arrival=column(st.integers(0, 1000) if unit == "round" else seconds),
        prompt_tokens=prompt,
        output_tokens=output,
        kv_capacity=draw(st.integers(100, 2**62)),
        time_unit=unit,
        kv_accounting=draw(st.sampled_from(["generated", "cached"])),
        limits=Limits(max_running=draw(st.none() | st.integers(1, 9))),
        hybrid_batching=draw(st.none() | st.booleans()),
        chunked_prefill=draw(st.none() | st.booleans()),
        predicted=draw(st.none() | st.lists(st.floats(1, 100), min_size=n, max_size=n)),
        predicted_lower=[max(1, o - d) for o, d in zip(output, lower, strict=True)]
        if interval
        else None,
        predicted_upper=[o + d for o, d in zip(output, upper, strict=True)] if interval else None,
        name=draw(text),
        id=draw(st.none() | st.lists(text | st.integers(), min_size=n, max_size=n, unique=True)),
        known=draw(st.none() | st.just({"optimum": 5, "bound": 4.5, "reference": "here"})),
    )


@st.composite
def schedules(draw):
    """Draw starts or batches of TWO, which need not be feasible: files do not judge."""
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, 99), min_size=2, max_size=2))
        return from_starts(starts, TWO)
    batches = draw(st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9))), max_size=6))
    evicted = [draw(st.lists(st.integers(0, 1), max_size=2)) for _ in batches]
    flat = [entry for batch in batches for entry in batch]
    return from_batches(
        np.cumsum([0, *map(len, batches)]),
        [request for request, _ in flat],
        [tokens for _, tokens in flat],
        instance=TWO,
        evicted_offsets=np.cumsum([0, *map(len, evicted)]),
        evicted=[i for batch in evicted for i in batch],
        start=[3 * j for j in range(len(batches))] if draw(st.booleans()) else None,
        worker=[j % 2 for j in range(len(batches))] if draw(st.booleans()) else None,
        evict_mode=draw(st.sampled_from(["restart", "recompute"])),
        cost_model_sha256=draw(st.none() | st.just("0" * 64)),
    )


@quick
@given(instance=instances(), suffix=st.sampled_from([".json", ".json.gz"]))
def test_an_instance_comes_back_as_it_was(tmp_path, instance, suffix):
    file = tmp_path / f"x{suffix}"
    write_instance(instance, file)
    back = read_instance(file)
    assert back.to_dict() == instance.to_dict()
    assert back.sha256 == instance.sha256
    # The digest recomputed from the file alone, as another program would.
    text = gzip.decompress(file.read_bytes()) if suffix.endswith("gz") else file.read_bytes()
    data = json.loads(text)
    data["requests"].pop("id", None)
    bare = {k: v for k, v in data.items() if k not in ("name", "known")}
    canonical = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(canonical.encode()).hexdigest() == instance.sha256


@quick
@given(schedule=schedules(), given_instance=st.booleans())
def test_a_schedule_comes_back_as_it_was(tmp_path, schedule, given_instance):
    """With and without its instance at hand, in all columns and their types."""
    file = tmp_path / "x.json"
    write_schedule(schedule, file)
    back = read_schedule(file, TWO if given_instance else None)
    assert back.to_dict() == schedule.to_dict()
    for name in ("starts", "request", "tokens", "start", "worker"):
        mine, theirs = getattr(schedule, name), getattr(back, name)
        assert (mine is None) == (theirs is None)
        assert mine is None or mine.dtype == theirs.dtype


def test_key_order_and_1_0_do_not_change_the_digest(tmp_path):
    shuffled = dict(reversed(GOOD.items()))
    shuffled["kv_capacity"] = 10.0
    shuffled["requests"] = {"output_tokens": [3.0, 4], "prompt_tokens": [1, 2], "arrival": [0.0, 2]}
    nulls = {**shuffled, "limits": None, "known": None, "hybrid_batching": None}
    assert read_instance(put(tmp_path, shuffled)).sha256 == TWO.sha256
    assert read_instance(put(tmp_path, nulls)).sha256 == TWO.sha256


@pytest.mark.parametrize("file_name", ["mine.json", "mine.json.gz"])
def test_a_nameless_instance_is_named_after_its_file(tmp_path, file_name):
    file = tmp_path / file_name
    write_json(without("name"), file)
    assert read_instance(file).name == "mine"


def test_shipped_instances_are_read_by_name_unless_a_file_has_it(tmp_path, monkeypatch):
    """`tiny` as shipped has six requests, and the file of that name here is GOOD, with two."""
    assert read_instance("tiny").n == 6
    assert example_instances()["tiny"].name == "tiny.json"
    monkeypatch.chdir(tmp_path)
    put(tmp_path, GOOD, "tiny")
    assert read_instance("tiny").n == 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("", "found an empty file"),
        ("  \n", "found an empty file"),
        ("{", "line 1, column 2: not JSON"),
        ('{\n "a": 1,\n}', "line 3, column 1: not JSON"),
        ("[1]", "found a JSON list; expected an object"),
        ("3", "found a JSON int; expected an object"),
        ('{"a": NaN}', "found NaN, which is not JSON; expected a finite number or null"),
        ('{"a": -Infinity}', "found -Infinity, which is not JSON"),
        ('{"a": 1, "a": 1}', "a: found twice in one object; expected once"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 400 + "}", "number of hundreds of digits"),
        (without("format"), "format: found nothing; expected 'optsched-instance'"),
        ({**GOOD, "format": "instance"}, "format: found 'instance'; expected 'optsched-instance'"),
        ({**GOOD, "format": "optsched-schedule"}, "format: found 'optsched-schedule'; expected"),
        ({**GOOD, "format": ["x"] * 9999}, "expected 'optsched-instance'"),
        (without("version"), "version: found nothing; expected 1"),
        (
            {**GOOD, "version": 2},
            "version: found 2; expected 1, the version of instance files that",
        ),
        ({**GOOD, "version": True}, "version: found True; expected 1, the version of instance"),
        ({**GOOD, "version": "1"}, "version: found '1'; expected 1, the version of instance files"),
        (without("kv_capacity"), "kv_capacity: found nothing; expected this field of the format"),
        (without("time_unit"), "time_unit: found nothing; expected this field of the format"),
        (without("requests"), "requests: found nothing; expected this field of the format"),
        ({**GOOD, "kv_capcity": 3}, "kv_capcity: unknown field; known here are format, version"),
        (with_request(output=[1]), "requests.output: unknown field; known here are arrival, pro"),
        ({**GOOD, "limits": {"max": 1}}, "limits.max: unknown field; known here are max_batch_to"),
        ({**GOOD, "limits": 3}, "limits: found 3; expected an object with named fields"),
        ({**GOOD, "limits": {"max_running": 0}}, "limits.max_running: found 0"),
        (
            {**GOOD, "limits": {"max_running": True}},
            "limits.max_running: found True; expected an integer",
        ),
        (
            {**GOOD, "known": {"optimum": "9"}},
            "known.optimum: found '9'; input should be a valid number",
        ),
        ({**GOOD, "known": {"optimal": 9}}, "known.optimal: unknown field; known here are optimum"),
        ({**GOOD, "name": 3}, "name: found 3; input should be a valid string"),
        (
            {**GOOD, "hybrid_batching": 1},
            "hybrid_batching: found 1; input should be a valid boolean",
        ),
        ({**GOOD, "requests": [[0, 1, 1]]}, "requests: found [[0, 1, 1]]; expected an object"),
        (
            {**GOOD, "requests": {"arrival": []}},
            "requests.prompt_tokens: found nothing; expected this field of",
        ),
        (
            with_request(arrival=[], prompt_tokens=[], output_tokens=[]),
            "requests: found an empty list; expected one or more requests",
        ),
        (
            with_request(arrival=[0]),
            "requests.prompt_tokens: found 2 values; expected 1, as many as",
        ),
        (with_request(arrival=7), "requests.arrival: found 7; expected a list of numbers"),
        (with_request(arrival=[0, -1]), "requests.arrival: request 1: found -1"),
        (
            with_request(arrival=[0, 1.5]),
            "requests.arrival: request 1: found 1.5; expected an integer",
        ),
        (
            with_request(prompt_tokens=[1, -1]),
            "requests.prompt_tokens: request 1: found -1; expected a",
        ),
        (
            with_request(output_tokens=[1, 0]),
            "requests.output_tokens: request 1: found 0; expected a number",
        ),
        (
            with_request(output_tokens=[1, 2.5]),
            "requests.output_tokens: request 1: found 2.5; expected an",
        ),
        (
            with_request(output_tokens=[1, True]),
            "requests.output_tokens: request 1: found True; expected an",
        ),
        (
            with_request(output_tokens=[1, "2"]),
            "requests.output_tokens: request 1: found '2'; expected an",
        ),
        (
            with_request(output_tokens=[1, None]),
            "requests.output_tokens: request 1: found None; expected an",
        ),
        (with_request(output_tokens=[1, 2**64]), "request 1: found 18446744073709551616"),
        (with_request(output_tokens=["y" * 9999, 1]), "request 0: found"),
        (
            with_request(output_tokens=[3, 9]),
            "kv_capacity: request 1: found 10; expected at least 11, the",
        ),
        (
            with_request(id=["a", "a"]),
            "requests.id: request 1: found 'a', which request 0 has too;",
        ),
        (with_request(id=5), "requests.id: found 5; expected a list"),
        (
            json.dumps(GOOD).replace("[0, 2]", "[0, 1e999]"),
            "found 1e999; expected a number below 1e308",
        ),
    ],
)
def test_a_wrong_instance_is_refused_in_one_line(tmp_path, data, words):
    refused(put(tmp_path, data), words)


def test_files_that_cannot_be_read_are_named(tmp_path):
    refused(tmp_path / "none.json", "no such file; expected a file or one of chen-example-3-2,")
    refused(tmp_path / "none.json", "no such file", read=read_schedule)
    refused(tmp_path, "found a directory; expected a file")
    file = tmp_path / "x.json"
    file.write_bytes(b'{"name": "\xff"}')
    refused(file, "expected UTF-8 text; byte 10")
    file.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    refused(file, "found gzip compression; expected a name that ends in .json.gz")
    packed = tmp_path / "x.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-20])
    refused(packed, "broken or truncated gzip file")
    packed.write_bytes(b"{}")
    refused(packed, "broken or truncated gzip file")


def test_unsorted_arrivals_and_a_byte_order_mark_are_accepted(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(with_request(arrival=[5, 2])), encoding="utf-8-sig")
    assert read_instance(file).arrival.tolist() == [5, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "start"}, "kind: found 'start'; input should be 'starts' or 'batches'"),
        ({"starts": None}, "starts: found nothing; expected one start per request"),
        ({"starts": [0, 1.5]}, "starts: entry 1: found 1.5; expected an integer"),
        ({"starts": [0, True]}, "starts: entry 1: found True; expected an integer"),
        ({"starts": [0, 2**70]}, "starts: entry 1: found 1180591620717411303424"),
        ({"request": [0]}, "request: expected no such column in a schedule of kind 'starts'"),
        ({"kind": "batches"}, "starts: expected no such column in a schedule of kind 'batches'"),
        ({"starst": [1]}, "starst: unknown field; known here are"),
        ({"instance_sha256": "abc"}, "instance_sha256: found 'abc'; string should match pattern"),
        (
            {"columns": "../y.parquet", "starts": None},
            "columns: found '../y.parquet'; string should match pattern",
        ),
        ({"columns": "y.parquet"}, "starts: found here and in y.parquet; expected one place"),
    ],
)
def test_a_wrong_schedule_of_starts_is_refused(tmp_path, changes, words):
    data = {**from_starts([0, 2], TWO).to_dict(), **changes}
    refused(put(tmp_path, data), words, read=read_schedule)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [1]}, "tokens: found 1 values; expected 2, as many as request has"),
        ({"tokens": None}, "tokens: found nothing; expected the columns batch_offsets,"),
        (
            {"batch_offsets": [0, 3]},
            "batch_offsets: found [0, 3]; expected offsets that rise from 0",
        ),
        ({"evicted_offsets": None}, "evicted_offsets: found nothing; expected the columns"),
        ({"start": [0, 1]}, "start: found 2 values; expected 1"),
        ({"start": ["0"]}, "start: batch 0: found '0'; expected a number"),
        (
            {"evict_mode": "drop"},
            "evict_mode: found 'drop'; input should be 'restart' or 'recompute'",
        ),
        (
            {"evict_mode": None, "evicted": [0], "evicted_offsets": [0, 1]},
            "evict_mode: found nothing; expected 'restart' or 'recompute'",
        ),
    ],
)
def test_a_wrong_schedule_of_batches_is_refused(tmp_path, changes, words):
    schedule = from_batches([0, 2], [0, 1], [1, 2], instance=TWO)
    refused(put(tmp_path, {**schedule.to_dict(), **changes}), words, read=read_schedule)


def test_a_schedule_of_another_instance_is_refused_with_both_digests(tmp_path):
    """With its own instance, or with none given, it is read."""
    other = Instance([0], [1], [3], kv_capacity=10)
    file = tmp_path / "x.json"
    write_schedule(from_starts([0, 2], TWO), file)
    with pytest.raises(InputError) as caught:
        read_schedule(file, other)
    assert other.sha256 in str(caught.value)
    assert TWO.sha256 in str(caught.value)
    assert read_schedule(file, TWO).instance_sha256 == TWO.sha256
    assert read_schedule(file).starts.tolist() == [0, 2]


def test_a_start_between_rounds_is_refused_where_the_instance_is_known():
    data = from_batches([0, 2], [0, 1], [1, 2], instance=TWO).to_dict() | {"start": [0.5]}
    assert schedule_from_dict(data).start.tolist() == [0.5]
    with pytest.raises(InputError, match=r"start:.*batch 0.*0.5"):
        schedule_from_dict(data, TWO)


def test_columns_in_parquet_come_back_and_are_tied_to_their_file(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    file = tmp_path / "plan.json.gz"
    schedule = from_batches(
        [0, 2, 3], [0, 1, 1], [1, 2, 1], instance=TWO, start=[0, 4], evict_mode="restart"
    )
    write_schedule(schedule, file, columns="parquet")
    assert sorted(os.listdir(tmp_path)) == ["plan.columns.parquet", "plan.json.gz"]
    assert "tokens" not in read_json(file)
    assert read_schedule(file, TWO).to_dict() == schedule.to_dict()
    beside = tmp_path / "plan.columns.parquet"
    beside.write_bytes(b"other")  # not what the digest in the file is of
    refused(file, "columns_sha256: ", read=read_schedule)
    data = {k: v for k, v in read_json(file).items() if k != "columns_sha256"}
    write_json(data, file)  # no digest to compare with, but it is no Parquet either
    refused(file, "expected a Parquet file", read=read_schedule)
    beside.unlink()
    refused(file, "'plan.columns.parquet' beside this file; it cannot be read", read=read_schedule)


def test_columns_in_parquet_may_be_empty_or_start_between_seconds(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    seconds = Instance([0.0], [1], [2], kv_capacity=9, time_unit="second", kv_accounting="cached")
    for schedule, instance in (
        (from_batches([0, 1, 2], [0, 0], [1, 1], instance=seconds, start=[0.5, 3]), seconds),
        (from_starts([0, 2], TWO), TWO),
    ):
        write_schedule(schedule, tmp_path / "x.json", columns="parquet")
        assert read_schedule(tmp_path / "x.json", instance).to_dict() == schedule.to_dict()


def test_bytes_go_to_an_open_descriptor_as_they_are(tmp_path):
    # Replacing the file behind /dev/fd/N would lose what it already holds.
    file = tmp_path / "x.txt"
    with open(file, "ab") as stream:
        stream.write(b"before ")
        stream.flush()
        write_bytes(b"after", f"/dev/fd/{stream.fileno()}")
    assert file.read_bytes() == b"before after"
    with pytest.raises(InputError, match=r"cannot be written:.*file"):
        write_bytes(b"", "/dev/fd/987")  # a descriptor that nobody has opened


def test_without_pyarrow_parquet_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"'parquet'.*pyarrow"):
        write_schedule(from_starts([0, 2], TWO), tmp_path / "x.json", columns="parquet")
    assert os.listdir(tmp_path) == []
    data = {"format": "optsched-schedule", "version": 1, "kind": "starts", "columns": "x.parquet"}
    refused(
        put(tmp_path, data),
        "needs pyarrow, which is not installed; install pyarrow",
        read=read_schedule,
    )
    with pytest.raises(InputError, match=r"columns:.*'csv'.*'json'.*'parquet'"):
        write_schedule(from_starts([0, 2], TWO), tmp_path / "x.json", columns="csv")


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("blow", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, step, blow):
    """A full disk or Ctrl-C, while the new file is made or as it is put in the old one's place."""
    file = put(tmp_path, GOOD)
    before = file.read_bytes()

    def crash(*_):
        raise blow

    monkeypatch.setattr(os, step, crash)
    with pytest.raises(InputError if isinstance(blow, OSError) else KeyboardInterrupt) as caught:
        write_instance(TWO.subset([0]), file)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["x.json"]
    assert file.read_bytes() == before
    if isinstance(blow, OSError):
        assert str(caught.value) == f"{file}: cannot be written: no space left on device"


def test_paths_that_cannot_be_written_are_named(tmp_path):
    for path, words in [
        (tmp_path, "found a directory; expected a file"),
        (tmp_path / "none" / "x.json", "cannot be written: its folder does not exist"),
        (put(tmp_path, "", "f") / "x.json", "cannot be written: not a directory"),
        (tmp_path / ("y" * 300), "cannot be written: file name too long"),
    ]:
        refused(path, words, read=lambda path: write_instance(TWO, path))
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    refused(tmp_path / "x.json", "permission denied", read=lambda path: write_instance(TWO, path))
    tmp_path.chmod(0o700)


@pytest.mark.skipif(os.name == "nt", reason="POSIX modes and links")
def test_writing_keeps_modes_links_and_devices(tmp_path):
    """A new file has the mode of the umask; writing through a link changes the file it is of."""
    file = tmp_path / "x.json"
    write_instance(TWO, file)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    file.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    write_instance(TWO.subset([0]), link)
    assert link.is_symlink()
    assert read_instance(file).n == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    write_instance(TWO, os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_gzip_gives_the_same_bytes_for_the_same_content(tmp_path):
    write_instance(TWO, tmp_path / "a.json.gz")
    write_instance(TWO, tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_json_text_is_plain_and_null_where_unknown():
    data = {
        "a": np.float64(1.5), "b": np.arange(2), "c": float("nan"), "e": np.array([1.0, np.inf]),
        "d": {"x": np.int64(3), "y": [float("inf"), {"z": np.float32("nan")}]},
    }  # fmt: skip
    assert json.loads(json_text(data)) == {
        "a": 1.5, "b": [0, 1], "c": None, "e": [1.0, None], "d": {"x": 3, "y": [None, {"z": None}]},
    }  # fmt: skip
    with pytest.raises(TypeError, match="set has no place in a JSON file"):
        json_text({"a": {1, 2}})


def test_read_json_tells_formats_apart(tmp_path):
    starts = put(tmp_path, from_starts([0, 2], TWO).to_dict())
    assert read_json(starts, expect=("schedule", "certificate"))["format"] == "optsched-schedule"
    words = "format: found 'optsched-schedule'; expected 'optsched-result' or 'optsched-comparison'"
    refused(starts, words, read=lambda file: read_json(file, expect=("result", "comparison")))


RESULT = {
    "format": "optsched-result", "version": 1, "optsched": "0.1.0", "command": "solve",
    "instance": {"name": "two", "sha256": TWO.sha256, "requests": 2}, "formulation": "hindsight",
    "method": "highs", "objective_name": "tel", "status": "feasible", "objective": 9006,
    "bound": 8042.0, "gap": 0.107, "gap_definition": "(objective - bound) / objective",
    "certificate": None, "metrics": {"tel": 9006, "mean_tpot": None, "peak_kv": 9},
    "build_s": 0.1, "solve_s": 1.0, "seed": 0, "threads": 2, "versions": {"highspy": "1"},
    "schedule": None,
}  # fmt: skip
COMPARISON = {
    **{k: RESULT[k] for k in ("version", "optsched", "instance")}, "command": "compare",
    "format": "optsched-comparison", "bound": None, "best_known": 7,
    "policies": [{"policy": "mc-sf", "metrics": {"tel": 7}, "ratio_to_bound": None, "wall_s": 0.1}],
}  # fmt: skip
CERTIFICATE = {
    "format": "optsched-certificate", "version": 1, "instance_sha256": TWO.sha256,
    "model": "rounds", "objective": "tel", "claim": "bound", "value": 8042, "denominator": 10**6,
    "tree": {"relaxation": "prices"}, "sha256": "0" * 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        (RESULT, {"status": "ok"}, "status: found 'ok'; input should be 'optimal', 'feasible',"),
        (RESULT, {"objective": "9"}, "objective: found '9'; input should be a valid number"),
        (
            RESULT,
            {"instance": {"name": "x"}},
            "instance.sha256: found nothing; expected this field of the",
        ),
        (
            COMPARISON,
            {"policies": [{}]},
            "policies.0.policy: found nothing; expected this field of the",
        ),
        (
            CERTIFICATE,
            {"claim": "proof"},
            "claim: found 'proof'; input should be 'bound' or 'optimal'",
        ),
        (CERTIFICATE, {"sha256": "00"}, "sha256: found '00'; string should match pattern"),
    ],
)
def test_results_comparisons_and_certificates_have_a_checked_shape(tmp_path, data, changes, words):
    file = put(tmp_path, data)
    name = data["format"].removeprefix("optsched-")
    assert read_json(file, expect=name) == data
    refused(put(tmp_path, {**data, **changes}), words, read=lambda f: read_json(f, expect=name))


@pytest.mark.parametrize("name", MODELS)
def test_every_format_has_a_json_schema(name):
    """Title, format, version 1 and address are those of the format's name."""
    schema = json_schema(name)
    assert schema["title"] == f"optsched-{name}"
    assert schema["properties"]["format"]["const"] == f"optsched-{name}"
    assert schema["properties"]["version"]["const"] == 1
    assert {"format", "version"} <= set(schema["required"])
    assert schema["$id"] == f"https://optsched.github.io/optsched/schemas/{name}-1.json"


def test_the_instance_schema_is_precise():
    """Fields that are unknown are not allowed, and integers have the ends that reading allows."""
    schema = json_schema("instance")
    requests = schema["$defs"]["RequestsFile"]
    assert schema["additionalProperties"] is False
    assert requests["additionalProperties"] is False
    assert requests["required"] == ["arrival", "prompt_tokens", "output_tokens"]
    assert requests["properties"]["output_tokens"]["items"] == {
        "maximum": 2**31 - 1, "minimum": 1, "type": "integer",
    }  # fmt: skip
    with pytest.raises(InputError, match=r"schema:.*'nope'"):
        json_schema("nope")


STARTS = from_starts([0, 2], TWO).to_dict()
BATCHES = from_batches([0, 2], [0, 1], [1, 2], instance=TWO, start=[0]).to_dict()


@pytest.mark.parametrize("data", [GOOD, RESULT, COMPARISON, CERTIFICATE, STARTS, BATCHES])
def test_published_schemas_accept_what_is_read(data):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = json_schema(data["format"].removeprefix("optsched-"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(data)


def test_20_000_requests_are_read_to_the_last_digit(tmp_path):
    n = 20_000
    file = tmp_path / "x.json"
    rng = np.random.default_rng(0)
    columns = {k: rng.integers(1, 1000, n).tolist() for k in ("prompt_tokens", "output_tokens")}
    arrival = rng.uniform(0, 3600, n).tolist()
    write_json({**GOOD, "time_unit": "second", "kv_capacity": 9999,
                "requests": {"arrival": arrival, **columns}}, file)  # fmt: skip
    found = read_instance(file)
    assert found.arrival.tolist() == arrival
    assert {name: getattr(found, name).tolist() for name in columns} == columns


def test_importing_io_does_not_import_pydantic():
    code = "import sys, optsched.files.read_write; print('pydantic' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_canonical_json_is_sorted_and_tight():
    assert canonical_json({"b": 1, "a": [1, 2]}) == b'{"a":[1,2],"b":1}'


def test_a_schedule_without_a_digest_fits_any_instance():
    data = {**from_starts([0, 2], TWO).to_dict(), "instance_sha256": None}
    schedule = schedule_from_dict(data, TWO)
    assert isinstance(schedule, Schedule)
    assert schedule.instance_sha256 == TWO.sha256


# A link to itself, a name with a zero byte, and one that is too long.
LOOP, NUL, LONG = "loop", "a\0b", "y" * 300
BAD_OUTPUTS = {
    LOOP: "too many levels of symbolic links",
    f"{LOOP}/x": "too many levels of symbolic links",
    NUL: "embedded null byte",
    LONG: "file name too long",
    "file/x": "not a directory",
    "none/x": "its folder does not exist",
    ".": "found a directory; expected a file",
}


@pytest.mark.skipif(os.name == "nt", reason="POSIX links")
@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_an_output_that_cannot_be_written_is_the_same_before_and_at_the_end(
    tmp_path, monkeypatch, name
):
    # A command checks its output before it works, and writes at the end: the words are the same.
    monkeypatch.chdir(tmp_path)
    Path(LOOP).symlink_to(LOOP)
    Path("file").touch()
    for act in (check_output, lambda path: write_bytes(b"x", path)):
        refused(name, BAD_OUTPUTS[name], read=act)
    assert sorted(os.listdir()) == ["file", LOOP]
    assert Path(LOOP).is_symlink()


@pytest.mark.skipif(os.name == "nt", reason="POSIX links")
def test_a_folder_that_cannot_be_made_is_named_before_and_at_the_end(tmp_path, monkeypatch):
    """The same words when it is checked and when it is made; checking makes nothing."""
    monkeypatch.chdir(tmp_path)
    Path(LOOP).symlink_to(LOOP)
    Path("dangling").symlink_to("none/none")
    Path("file").touch()
    for name, words in {
        LOOP: "cannot be written: too many levels of symbolic links",
        NUL: "cannot be written: embedded null byte",
        LONG: "cannot be written: file name too long",
        "file": "found a file; expected a folder",
        "file/x": "cannot be written: not a directory",
        "dangling": "found a link to nothing; expected a folder",
    }.items():
        for act in (check_folder, make_folder):
            with pytest.raises(InputError, match=re.escape(words)):
                act(name)
    assert sorted(os.listdir()) == ["dangling", "file", LOOP]
    check_folder("a/b")
    assert not Path("a").exists()
    assert make_folder("a/b").is_dir()


def test_a_file_without_an_end_is_not_read_to_it(tmp_path, monkeypatch):
    # 10,000 bytes are 0 MiB, rounded down.
    monkeypatch.setattr(text_files, "MAX_BYTES", 10_000)
    link = tmp_path / "x.json"
    link.symlink_to("/dev/zero")
    refused(link, "found more than 0 MiB", read=read_schedule)
