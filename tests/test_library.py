"""The library of instances: every number in it is checked, and a change of any is found."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from command_line import answer, invoke, one_line_error, run

import optsched
from optsched.analysis import library
from optsched.files.library import (
    library_folder,
    read_library,
    sealed,
    write_library,
)
from optsched.files.schemas import check_shape
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import canonical_json
from optsched.workloads.generate import parse_parameters

ROOT = Path(__file__).resolve().parents[1]
FROZEN = "ebf82c34f9a3cef229aa06279d85c2ab7ca060af52b42bb115f0fc35e907ab29"
"""The digest of the names and digests of the instances of release 2026.1."""
LIMIT_BYTES = 4_000_000


def part_of_library(folder: Path, family: str = "tiny") -> Path:
    """Copy a family of the library into a folder, as a library of its own."""
    data, home = read_library(), library_folder()
    rows = {name: e for name, e in data["instances"].items() if e["family"] == family}
    for name, entry in rows.items():
        for file in (f"{name}.json.gz", entry["best"]["file"], entry["bound"]["file"]):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(home / file, folder / file)

    families = {family: data["families"][family]}
    write_library({**data, "families": families, "instances": rows}, folder)
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Return a library of the tiny family alone, which a test may change."""
    return part_of_library(tmp_path / "library")


def is_found(folder: Path) -> bool:
    """Return whether `verify` sees that something is wrong, by an answer or by an error."""
    try:
        return bool(library.verify(folder=folder, jobs=1))
    except InputError:
        return True


def changed(text: str, rng: np.random.Generator) -> str:
    """Return a text with one of its digits changed by one."""
    places = [match.start() for match in re.finditer(r"\d", text)]
    at = places[rng.integers(len(places))]
    return f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}"


def resealed(folder: Path, name: str, **fields: Any) -> None:
    """Change an entry as a forger would, who knows how digests are made."""
    data = read_library(folder)
    data["instances"][name] = sealed(name, data["instances"][name] | fields, data)
    write_library(data, folder)


# --- What the library holds -----------------------------------------------------------------------


def test_the_library_is_small_and_has_what_it_promises() -> None:
    data = read_library()
    entries = data["instances"].values()
    assert data["release"] == "2026.1"
    # Release 2026.1 has some more of each: these are floors.
    assert len(entries) >= 60
    assert len(data["families"]) >= 8
    assert sum(entry["status"] == "open" for entry in entries) >= 20
    assert sum(entry["status"] == "closed" for entry in entries) >= 20
    files = [file for file in library_folder().rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= LIMIT_BYTES
    digests = [entry["instance_sha256"] for entry in entries]
    assert len(set(digests)) == len(digests)  # a submitted file belongs to one instance


def test_a_release_is_frozen() -> None:
    rows = {name: e["instance_sha256"] for name, e in read_library()["instances"].items()}
    assert hashlib.sha256(canonical_json(rows)).hexdigest() == FROZEN


def test_instances_are_what_their_source_says() -> None:
    """Each family's first instance that a generator makes is made again."""
    seen = set()
    for name, entry in read_library()["instances"].items():
        words = shlex.split(entry["source"].partition(";")[0])
        if entry["family"] in seen or words[:2] != ["optsched", "generate"]:
            continue

        seen.add(entry["family"])
        # `optsched generate NAME --seed SEED --set KEY=VALUE ...`: words 2, 4, and 6, 8, ...
        texts = dict(word.split("=", 1) for word in words[6::2])
        made = optsched.generate(words[2], seed=int(words[4]), **parse_parameters(words[2], texts))
        slos = dict(re.findall(r"(slo_\w+) = ([\d.]+)", entry["source"]))
        instance = library.load(name)
        assert np.array_equal(made.arrival, instance.arrival)
        assert np.array_equal(made.prompt_tokens, instance.prompt_tokens)
        assert np.array_equal(made.output_tokens, instance.output_tokens)
        assert {key: set(column) for key, column in instance.slos.items()} == {
            key: {float(text)} for key, text in slos.items()
        }

    assert len(seen) >= 10  # of the families that a generator makes, and not of none


def test_a_family_verifies() -> None:
    assert library.verify(["tiny", "library/worst-fcfs"], jobs=1) == {}


def test_no_solver_is_loaded_to_verify() -> None:
    """The judge and the checker alone say whether values hold, of rounds and of batches."""
    lines = (
        "import sys, optsched",
        "assert optsched.library.verify(['tiny-n4', 'csp-b4-o4-i64'], jobs=1) == {}",
        "print(sorted({'highspy', 'ortools', 'pulp'} & set(sys.modules)))",
    )
    words = [sys.executable, "-c", "\n".join(lines)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


@pytest.mark.slow
def test_the_whole_library_verifies_in_processes() -> None:
    seen: list[tuple[int, int]] = []
    assert library.verify(jobs=2, progress=lambda done, of: seen.append((done, of))) == {}
    assert seen[-1] == (len(read_library()["instances"]),) * 2


# --- Changes are found ----------------------------------------------------------------------------


def check_changes_of_the_table(folder: Path, count: int) -> None:
    table = folder / "bks.json"
    text = table.read_text(encoding="utf-8")
    rng = np.random.default_rng(count)
    assert not is_found(folder)
    for _ in range(count):
        table.write_text(changed(text, rng), encoding="utf-8")
        assert is_found(folder), table.read_text(encoding="utf-8")


def check_changes_of_files(folder: Path, count: int) -> None:
    rng = np.random.default_rng(count)
    files = sorted(folder.rglob("*.json.gz"))
    for _ in range(count):
        file = files[rng.integers(len(files))]
        before = file.read_bytes()
        text = gzip.decompress(before).decode()
        file.write_bytes(gzip.compress(changed(text, rng).encode(), mtime=0))
        # The name of an instance is no part of it. All else is.
        same = file.parent == folder and name_alone(text, file)
        assert is_found(folder) or same, file
        file.write_bytes(before)


def name_alone(text: str, file: Path) -> bool:
    """Return whether an instance's file differs from a text in its name alone."""
    one, two = json.loads(text), json.loads(gzip.decompress(file.read_bytes()))
    return one.pop("name") != two.pop("name") and one == two


def test_changes_of_numbers_are_found(tiny: Path) -> None:
    check_changes_of_the_table(tiny, 20)


def test_changes_of_files_are_found(tiny: Path) -> None:
    check_changes_of_files(tiny, 20)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tiny", "ttft"])
def test_many_changes_of_numbers_are_found(tmp_path: Path, family: str) -> None:
    check_changes_of_the_table(part_of_library(tmp_path, family), 200)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tiny", "ttft"])
def test_many_changes_of_files_are_found(tmp_path: Path, family: str) -> None:
    check_changes_of_files(part_of_library(tmp_path, family), 200)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("requests", 5, "requests: found 5; expected 4"),
        ("status", "open", "status: found 'open'; expected 'closed'"),
        ("workers", 2, "expected a certificate about the fleet"),
        ("objective", "makespan", "best.value: found 25; expected"),
        ("instance_sha256", "0" * 64, "instance_sha256: found"),
    ],
)
def test_claims_are_computed_anew_even_if_the_seal_fits(
    tiny: Path, field: str, value: object, words: str
) -> None:
    resealed(tiny, "tiny-n4", **{field: value})
    assert words in library.verify(["tiny-n4"], folder=tiny)["tiny-n4"]


@pytest.mark.parametrize(("key", "step"), [("best", -1), ("best", 1), ("bound", -1), ("bound", 1)])
def test_values_are_computed_anew_even_if_the_seal_fits(tiny: Path, key: str, step: int) -> None:
    """A value of one more or less, sealed as a forger would: `verify` says which would be right."""
    record = read_library(tiny)["instances"]["tiny-n4"][key]
    right = record["value"]
    resealed(tiny, "tiny-n4", **{key: record | {"value": right + step}})
    words = library.verify(["tiny-n4"], folder=tiny)["tiny-n4"]
    assert words == f"bks.json: {key}.value: found {right + step}; expected {right}"


def test_seals_cover_purposes_and_origins(tiny: Path) -> None:
    data = read_library(tiny)
    data["instances"]["tiny-n4"]["best"]["by"] = "somebody else"
    write_library(data, tiny)
    assert library.verify(["tiny-n4"], folder=tiny)["tiny-n4"].startswith("bks.json: sha256")


def test_files_that_no_entry_names_are_found(tiny: Path) -> None:
    (tiny / "schedules" / "more.json.gz").write_bytes(b"")
    found = library.verify(folder=tiny, jobs=1)
    assert found == {"bks.json": "schedules/more.json.gz: found a file that no instance names"}


# --- Submitting -----------------------------------------------------------------------------------


@pytest.fixture
def weak(tiny: Path) -> Path:
    """Return a library that knows of ``tiny-n8`` no more than fcfs and half of a bound."""
    data, instance = read_library(tiny), library.load("tiny-n8", tiny)
    entry = data["instances"]["tiny-n8"]
    del entry["best"], entry["bound"]
    for file in tiny.glob("*/tiny-n8.json.gz"):
        file.unlink()

    schedule = optsched.run(instance, "fcfs").schedule.to_dict()
    origin: dict[str, Any] = {"by": "us", "method": "fcfs", "seconds": 0.1, "threads": 1}
    first = library.answer("tiny-n8", data, schedule, origin, folder=tiny)
    assert (first.verdict, first.value, first.known) == ("better", 41, None)
    library.adopt(first, tiny)
    assert library.verify(folder=tiny, jobs=1) == {}
    return tiny


def test_a_better_schedule_and_a_bound_are_taken(weak: Path, tmp_path: Path) -> None:
    # `weak` knows fcfs's 41 and no bound; the schedule shipped has 34, and the certificate proves
    # it.
    home = library_folder()
    schedule = home / "schedules" / "tiny-n8.json.gz"
    said = run("library", "check", schedule, "--folder", weak, "--by", "me", "--took", "2")
    assert "tiny-n8: better: 34 beside 41: better by 7" in said
    line = json.loads("{" + said.splitlines()[-1].strip() + "}")["tiny-n8"]
    assert (line["best"]["value"], line["best"]["by"], line["status"]) == (34, "me", "open")

    # The line that was printed is the one that --write puts there.
    run("library", "check", schedule, "--folder", weak, "--by", "me", "--took", "2", "--write")
    assert read_library(weak)["instances"]["tiny-n8"] == line
    assert json.dumps(line) in (weak / "bks.json").read_text(encoding="utf-8")
    assert "not better: 34 beside 34" in run("library", "check", schedule, "--folder", weak)

    certificate = home / "certificates" / "tiny-n8.json.gz"
    said = run("library", "check", certificate, "--folder", weak, "--write")
    assert "tiny-n8: better: 34, the first" in said
    assert read_library(weak)["instances"]["tiny-n8"]["status"] == "closed"
    assert "instances: 8, failures: 0" in run("library", "verify", "--folder", weak, "--jobs", 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny-n4", "rule kv_capacity: round 1: running requests hold 19 KV tokens; expected"),
        ("tiny-n6-poisson", r"rule arrival: .*request \d"),
    ],
)
def test_a_schedule_that_breaks_a_rule_is_refused_with_the_rule_and_the_request(
    tmp_path: Path, name: str, words: str
) -> None:
    # All start at 0. Of tiny-n4 they hold 3 + 3 + 4 + 5 prompt tokens and one more each, 19 of 16;
    # of the other the first arrives at 1.
    instance = library.load(name)
    file = tmp_path / "all.json"
    optsched.write_schedule(optsched.from_starts([0] * instance.n, instance), file)
    said = run("library", "check", file, status=5)
    assert re.search(f"{name}: not feasible: {words}", said), said


def test_a_certificate_that_proves_nothing_is_refused(tmp_path: Path) -> None:
    """It claims one round more than its tree proves."""
    data = library.read_json(library_folder() / "certificates" / "tiny-n4.json.gz")
    data["value"] += 1
    file = tmp_path / "more.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    assert "not feasible: rule certificate" in run("library", "check", file, status=5)


def test_a_file_about_another_instance_is_refused(tmp_path: Path) -> None:
    instance = optsched.read_instance("tiny")
    file = tmp_path / "other.json"
    optsched.write_schedule(optsched.run(instance, "fcfs").schedule, file)
    words = one_line_error(invoke("library", "check", file))
    assert "expected that of an instance of the library" in words
    # Nor does the library take what `check` has found to be no better.
    with pytest.raises(UsageError, match="expected a better one"):
        library.adopt(library.Answer("tiny-n4", "not better", ""))


def test_a_schedule_on_more_workers_than_allowed_is_refused(tmp_path: Path) -> None:
    """The entry of tiny-n4 is of one worker."""
    instance = library.load("tiny-n4")
    file = tmp_path / "two.json"
    optsched.write_schedule(optsched.run(instance, "fcfs:workers=2").schedule, file)
    assert "rule workers: workers: found 2; expected at most 1" in run(
        "library", "check", file, status=5
    )


# --- Commands -------------------------------------------------------------------------------------


def test_the_library_is_listed_and_shown() -> None:
    # A row has the objective, the requests, the best value, the bound, the gap and the status: the
    # eight requests of tiny-n8 have an optimum of 34.
    assert re.search(
        r"^tiny-n8 +tiny +tel +8 +34 +34 +0.00% +closed$", run("library", "list"), re.M
    )
    said = run("library", "show", "library/tiny-n8")
    assert "source: optsched generate uniform --seed 3" in said
    assert "best: 34 (" in said
    assert "status: closed" in said
    data = answer("library", "show", "tiny-n8")
    check_shape("library", data)
    assert data["instances"] == {"tiny-n8": read_library()["instances"]["tiny-n8"]}


def test_failures_have_a_line_and_a_status(tiny: Path) -> None:
    resealed(tiny, "tiny-n4", requests=5)  # it has four requests
    result = invoke("library", "verify", "tiny-n4", "--folder", tiny)
    assert (result.exit_code, result.stdout) == (5, "instances: 1, failures: 1\n")
    assert result.stderr == "tiny-n4: bks.json: requests: found 5; expected 4\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("library", "show", "nothing"), "library: 'nothing' is unknown; `optsched list library`"),
        (("library", "verify", "nothing"), "library: 'nothing' is unknown"),
        (
            ("compare", "library/nothing"),
            "library/nothing: no such file; expected a file or one",
        ),
        (("library", "list", "--folder", "nowhere"), "nowhere/bks.json"),
    ],
)
def test_unknown_names_are_one_line_errors(words: tuple[str, ...], expected: str) -> None:
    assert expected in one_line_error(invoke(*words))


def test_an_instance_of_the_library_stands_for_a_file_and_brings_its_cost_model() -> None:
    said = run("compare", "library/tiny-n8", "--policy", "fcfs", "--no-bound")
    # `weak` above has 41 for fcfs, too.
    assert re.search(r"^fcfs +clairvoyant +41 ", said, re.M)
    entry = read_library()["instances"]["csp-b4-o4-i64"]
    file = library_folder() / entry["best"]["file"]
    said = run("evaluate", "library/csp-b4-o4-i64", file)
    # Two decimals of the four, without the last two characters.
    assert re.search(rf"makespan +{entry['best']['value']:.4f}"[:-2], said)
    assert "valid schedule" in run("verify", "library/csp-b4-o4-i64", file)
    with pytest.raises(InputError, match="no such file"):
        optsched.read_instance("library/nothing")


def test_schedules_of_the_library_find_their_instance(tmp_path: Path) -> None:
    file = library_folder() / "schedules" / "tiny-n8.json.gz"
    run("plot", file, "-o", tmp_path / "gantt.png")
    assert (tmp_path / "gantt.png").stat().st_size > 1000  # a picture, and no empty file


# --- The page of the site -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    """Return benchmarks/library.py."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "benchmarks" / "library.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_page_have_every_instance(builder: ModuleType) -> None:
    """The page made from the table has each family with its words and a row for each instance."""
    data = read_library()
    tables = builder.tables(data)
    assert all(f"### {family}\n\n{words}\n" in tables for family, words in data["families"].items())
    shown = re.findall(r"^\| `([\w.-]+)` \|", tables, re.MULTILINE)
    assert sorted(shown) == sorted(data["instances"])


def test_the_table_of_instances_is_what_the_files_say(builder: ModuleType) -> None:
    """What benchmarks/library.py would build is what the table of the library lists."""
    data = read_library()
    listed = {name: (family, row) for family, name, row in builder.rows([])}
    assert list(listed) == list(data["instances"])
    for name, (family, row) in listed.items():
        entry = data["instances"][name]
        for key in ("objective", "purpose"):
            assert entry[key] == row[key], name
        assert (entry["family"], entry["workers"]) == (family, row.get("workers", 1))
        for key in ("cost_model", "pools", "link"):
            assert entry.get(key) == row.get(key)
        assert data["families"][family] == row["summary"]


def test_a_library_may_be_started_anew(builder: ModuleType, tmp_path: Path) -> None:
    """The command that builds the library makes an instance that verifies, to the same digest."""
    builder.build(["tiny-n4"], seconds=1.0, folder=tmp_path)
    assert library.verify(folder=tmp_path, jobs=1) == {}
    made, known = (read_library(at)["instances"]["tiny-n4"] for at in (tmp_path, None))
    assert made["instance_sha256"] == known["instance_sha256"]
    assert (made["best"]["value"], made["status"]) == (known["best"]["value"], "closed")
