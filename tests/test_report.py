"""Reports: what they say, that everything from files is escaped, and a real browser's opinion."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from command_line import run

import optsched
from instances import MODEL, in_seconds
from optsched.bounds.certificate import certify, same_limits
from optsched.bounds.checker import parts as checker_parts
from optsched.costs.cost import BatchCost
from optsched.costs.model_file import to_toml
from optsched.files.read_write import write_instance, write_schedule
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.workloads.problem import Problem

pytest.importorskip("jinja2", reason="reports need the extra `report`")

from optsched.show import report
from optsched.show.data import capacity_of
from optsched.show.plot import plot_capacity, style
from optsched.show.report import figures, gather, page

EVIL = '<script>alert("x")</script>'


def evil(place: Path) -> list[Path]:
    """Write an instance, schedule, result and comparison whose every text is hostile."""
    instance = Instance(
        [0, 0, 1], [2, 2, 1], [2, 1, 3], kv_capacity=9, name=EVIL,
        id=[EVIL, "\"><img src=x onerror='alert(1)'>", "</script><b>&amp;"],
        known={"optimum": 7, "reference": EVIL},
    )  # fmt: skip
    schedule = optsched.run(instance, "mc-sf").schedule
    files = [place / "instance.json", place / "schedule<b>.json"]
    write_instance(instance, files[0])
    write_schedule(schedule, files[1])
    made = optsched.compare(instance, ["mc-sf", "fcfs"], bound=False).to_dict()
    made["policies"][0].update(policy=EVIL, notes=[EVIL], schedule=str(files[1]))
    made["bound_origin"], made["bound"], made["notes"] = EVIL, 1, [EVIL]
    files.append(place / "comparison.json")
    files[-1].write_text(json.dumps(made))
    result = optsched.solve(instance).to_dict()
    result.update(method=EVIL, formulation=EVIL, versions={EVIL: EVIL}, schedule=str(files[1]))
    files.append(place / "result.json")
    files[-1].write_text(json.dumps(result))
    return files


class Tags(HTMLParser):
    """Collects elements, attributes and the visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._raw = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        if not self._raw:
            self.text += data


def parsed(path: Path) -> Tags:
    """Return the elements of a page, after it was parsed."""
    tags = Tags()
    tags.feed(path.read_text(encoding="utf-8"))
    return tags


# --- What it says ---------------------------------------------------------------------------------


def test_a_report_says_what_was_verified(answers: Path) -> None:
    names = ("comparison.json", "result.json", "bound.json", "certificate.json")
    found = gather.gather(["tiny", *(answers / name for name in names)])
    (section,) = found.sections
    assert section.certified({}) == 33  # the known optimum of tiny
    assert [v.state for _, v in section.certificates] == ["verified"]
    solved = next(entry for entry in section.results if entry["command"] == "solve")
    assert solved["verdicts"]["schedule"].state == "verified"
    assert solved["verdicts"]["bound"].state == "verified"
    (comparison,) = section.comparisons
    assert {v.state for v in comparison["verdicts"].values()} == {"verified"}
    assert set(comparison["verdicts"]) == {
        "bound", *(f"schedule of {p}" for p in ("mc-sf", "vllm", "sarathi", "best known")),
    }  # fmt: skip
    text = page.render(found)
    assert "total latency 33 is proved" in text
    assert "endless loop" in text  # why alpha-protection has no schedule
    facts = dict(section.facts)
    assert facts["requests"] == "6"
    assert facts["KV capacity"] == "14 tokens (generated)"
    assert {o["file"] for o in found.origins} == {"tiny.json", *names}


def capacity_file(folder: Path, **changed: Any) -> Path:
    """Write what policies reach on ``tiny``: shares of 1 and 0.5 with 2 workers and with 1."""
    data = {
        "format": "optsched-capacity", "version": 1, "optsched": "0", "command": "capacity",
        "instance": {"name": "tiny", "sha256": optsched.read_instance("tiny").sha256,
                     "requests": 6},
        "time_unit": "round", "attainment": 1.0, "searched": "workers", "slos": {"slo_ttft": 3.0},
        "policies": [{"policy": "fcfs", "workers": 2, "attainment": 1.0, "missed": 1,
                      "points": [[1, 0.5], [2, 1.0]], "wall_s": 0.1, "error": None},
                     {"policy": EVIL, "points": [["x", 1]], "error": EVIL}],
        "bound_points": [[1, 0.75], [2, 1.0]],
        "workers": {"rate_scale": 1.0, "fewest": 2, "impossible": 1}, **changed,
    }  # fmt: skip
    (folder / "capacity.json").write_text(json.dumps(data))
    return folder / "capacity.json"


def test_a_report_draws_capacity_with_what_is_impossible(tmp_path: Path) -> None:
    """`capacity_file`: with one worker and two, fcfs has half of the requests in time and all,
    and at most three quarters and all can be."""
    out = tmp_path / "report.html"
    report.write_report(["tiny", capacity_file(tmp_path)], out)
    text = " ".join(parsed(out).text.split())
    assert "Capacity within SLOs (capacity.json)" in text
    assert "workers 1 or fewer" in text
    assert "slo_ttft 3 rounds" in text
    assert EVIL not in out.read_text(encoding="utf-8")
    drawn = capacity_of(json.loads(capacity_file(tmp_path).read_text()))
    ax = plot_capacity(**drawn, ax=style.figure().subplots())
    fcfs, bound = ax.get_lines()[:2]
    assert bound.get_xydata().tolist() == [[1, 0.75], [2, 1]]
    assert bound.get_drawstyle() == "steps-pre"  # with less than two workers at most one's share
    assert fcfs.get_xydata().tolist() == [[1, 0.5], [2, 1]]
    assert "no schedule" in text
    report.write_report([capacity_file(tmp_path, policies=[], bound_points=7, slos={})], out)
    assert "columns of the instance" in parsed(out).text


def test_where_nothing_is_proved_impossible_the_rates_of_policies_are_shown() -> None:
    # The search for an impossible rate went up to 2^20. The policy was tried up to 1: see 1.3.
    data = {
        "policies": [{"policy": "fcfs", "points": [[0.5, 1], [1, 0.5]]}],
        "bound_points": [[2.0**k, 0.9] for k in range(-1, 21)],
        "attainment": 0.8,
    }
    assert capacity_of(data)["bound"] == [(0.5, 0.9), (1, 0.9), (1.3, 0.9)]
    # An impossible rate of 2 is shown too, up to 1.3 times 2.
    assert capacity_of({**data, "impossible_rate_scale": 2})["bound"][-2:] == [(2, 0.9), (2.6, 0.9)]
    # That no schedule has more than all requests in time says nothing.
    assert capacity_of({**data, "bound_points": [[1, 1], [2, 1]]})["bound"] == []


def test_a_changed_certificate_and_a_wrong_objective_are_rejected(
    answers: Path, tmp_path: Path
) -> None:
    certificate = json.loads((answers / "certificate.json").read_text())
    certificate["value"] += 1
    (tmp_path / "certificate.json").write_text(json.dumps(certificate))
    result = json.loads((answers / "result.json").read_text())
    result["objective"] = 32  # it is 33
    result["certificate"] = "certificate.json"  # beside the result
    (tmp_path / "result.json").write_text(json.dumps(result))
    (section,) = gather.gather([tmp_path / "result.json"]).sections
    (entry,) = section.results
    assert entry["verdicts"]["certificate"].state == "rejected"
    assert entry["verdicts"]["schedule"].words == "replayed by the judge: tel 33, not 32"
    assert section.certified({}) is None


def test_a_certificate_that_is_too_large_to_check_is_unchecked(
    answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_parts, "MAX_STEPS", 1)
    (section,) = gather.gather(["tiny", answers / "certificate.json"]).sections
    ((_, verdict),) = section.certificates
    assert verdict.state == "unchecked"
    assert verdict.words.endswith("found more than 1 steps; too large to check")


def test_a_row_that_its_schedule_does_not_bear_out_is_rejected(
    answers: Path, tmp_path: Path
) -> None:
    data = json.loads((answers / "comparison.json").read_text())
    data["policies"][0]["metrics"]["tel"] = 47
    data["policies"][1].update(notes="one text", error=["a", 1], gap={})
    data.update(notes=7, gap="small", cost_model="none", time_unit=["round"])
    (tmp_path / "c.json").write_text(json.dumps(data))
    found = gather.gather([tmp_path / "c.json"])
    verdicts = found.sections[0].comparisons[0]["verdicts"]
    assert verdicts["schedule of mc-sf"].words == "replayed by the judge: tel 48, not 47"
    assert verdicts["schedule of vllm"].state == "verified"
    text = page.render(found)  # fields of unexpected kinds are shown as they are
    assert "vllm: one text" in text
    assert "rejected" in text


def test_a_certificate_that_proves_less_than_the_bound_does_not_verify_it(
    answers: Path, tmp_path: Path
) -> None:
    data = json.loads((answers / "bound.json").read_text())
    # The certificate proves 33, the optimum of tiny, and not 34.
    data.update(bound=34, objective=34, seed=10**300, certificate=str(answers / "certificate.json"))
    (tmp_path / "bound.json").write_text(json.dumps(data))
    found = gather.gather([tmp_path / "bound.json"])
    assert found.sections[0].results[0]["verdicts"]["bound"].state == "unchecked"
    assert "as the file says; 33 of it is proved by a certificate" in page.render(found)


def test_two_certificates_of_one_name_are_two_certificates(answers: Path, tmp_path: Path) -> None:
    """One of them claims a unit more. The right one is given twice, and shown once."""
    broken = json.loads((answers / "certificate.json").read_text())
    broken["value"] += 1
    (tmp_path / "certificate.json").write_text(json.dumps(broken))
    files = [answers / "certificate.json", tmp_path / "certificate.json"]
    (section,) = gather.gather(["tiny", *files, files[0]]).sections
    assert [v.state for _, v in section.certificates] == ["verified", "rejected"]


def test_a_schedule_that_names_no_instance_belongs_to_the_only_one(
    answers: Path, tmp_path: Path
) -> None:
    data = json.loads((answers / "best.json").read_text())
    del data["instance_sha256"]
    (tmp_path / "s.json").write_text(json.dumps(data))
    (section,) = gather.gather(["tiny", tmp_path / "s.json"]).sections
    assert list(section.schedules) == ["s"]


def test_without_the_instance_nothing_is_checked_and_the_report_says_so(
    answers: Path, tmp_path: Path
) -> None:
    data = json.loads((answers / "comparison.json").read_text())
    data["instance"]["sha256"] = "0" * 64
    (tmp_path / "c.json").write_text(json.dumps(data))
    certificate = json.loads((answers / "certificate.json").read_text())
    certificate["instance_sha256"] = "0" * 64
    (tmp_path / "z.json").write_text(json.dumps(certificate))
    found = gather.gather([tmp_path / "c.json", tmp_path / "z.json"])
    (section,) = found.sections
    assert section.instance is None
    assert [v.state for _, v in section.certificates] == ["unchecked"]
    assert "no schedule could be checked" in page.render(found)


def test_files_of_several_instances_are_sections_of_their_own(answers: Path) -> None:
    found = gather.gather(["tiny", "tiny-seconds", answers / "comparison.json"])
    assert [s.name for s in found.sections] == ["tiny", "tiny-seconds"]
    assert [len(s.comparisons) for s in found.sections] == [1, 0]


def test_schedules_of_files_come_before_those_of_comparisons(answers: Path) -> None:
    (section,) = gather.gather([answers / "comparison.json", answers / "best.json"]).sections
    assert list(section.schedules) == ["best", "best known", "mc-sf", "sarathi", "vllm"]


def test_the_best_schedules_come_first_where_more_is_better(answers: Path, tmp_path: Path) -> None:
    data = json.loads((answers / "comparison.json").read_text())
    data.update(objective_name="slo_attainment", best=None)
    shares = {"mc-sf": 0.2, "vllm": 0.9, "sarathi": 0.5}
    for row in data["policies"]:
        if row["policy"] in shares:
            row["metrics"]["slo_attainment"] = shares[row["policy"]]
            row["schedule"] = str(answers / row["schedule"])
    (tmp_path / "c.json").write_text(json.dumps(data))
    (section,) = gather.gather([tmp_path / "c.json"]).sections
    assert list(section.schedules) == ["vllm", "sarathi", "mc-sf"]  # 0.9, 0.5, 0.2


def test_the_boxes_of_a_timeline_say_what_they_are() -> None:
    instance = Instance([0, 0], [9, 9], [2, 600], kv_capacity=999, id=["x" * 20, EVIL])
    found = optsched.timeline(instance, optsched.run(instance, "fcfs").schedule)
    text = figures.timeline_figure(found, "t")
    titles = [element.text for element in ElementTree.fromstring(text).iter() if
              element.tag.endswith("}title")]  # fmt: skip
    assert len(titles) == len(found.span_start)
    assert "x" * 20 + ": decode, 1 to 2 rounds; prompt 9, output 2 tokens, 1 processed" in titles
    assert EVIL not in text
    assert any(title is not None and title.startswith(EVIL) for title in titles)
    assert "mean tokens per batch" in text  # 600 batches are drawn in 500 steps
    many = in_seconds("vllm", 1500, 9000, span=30.0, most=(300, 100))
    text = figures.timeline_figure(many, "t")
    assert "<title" not in text  # of so many requests there is an image
    assert "<image" in text


def test_the_page_forbids_the_network_and_names_no_other_file(answers: Path) -> None:
    """Its policy allows nothing, all images are in it, and it stays below a megabyte."""
    out = answers / "r.html"
    run("report", answers / "comparison.json", "-o", out)
    tags = parsed(out)
    policy = next(a for t, a in tags.seen if t == "meta" and "http-equiv" in a)["content"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert not [tag for tag, attrs in tags.seen if "src" in attrs or "href" in attrs]
    inside = [a["xlink:href"] for _, a in tags.seen if "xlink:href" in a]
    assert all(str(name).startswith(("#", "data:image/png;")) for name in inside)
    assert out.stat().st_size < 1_000_000


# --- Comparisons without schedule files -----------------------------------------------------------


def test_a_comparison_without_schedules_has_its_tables_and_says_how_to_keep_them(
    answers: Path, tmp_path: Path
) -> None:
    data = json.loads((answers / "comparison.json").read_text())
    for row in [*data["policies"], data["best"]]:
        row.pop("schedule", None)
    (tmp_path / "c.json").write_text(json.dumps(data))
    found = gather.gather([tmp_path / "c.json"])
    assert not found.sections[0].schedules
    text = page.render(found)
    assert "mc-sf takes 1.455 times the optimum" in text  # 48 / 33 rounds
    assert "--schedules-out DIR` keeps them" in text


# --- Escaping -------------------------------------------------------------------------------------


def test_everything_from_files_is_escaped(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    report.write_report(evil(tmp_path), out)
    tags = parsed(out)
    assert EVIL in tags.text  # shown as it is
    assert [attrs for tag, attrs in tags.seen if tag == "script"] == [{}]
    assert not {"img", "b"} & {tag for tag, _ in tags.seen}
    assert not [a for _, attrs in tags.seen for a in attrs if a.startswith("on")]


def test_characters_that_xml_forbids_are_shown_as_a_mark(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    # XML 1.0 has no form for them, not even an escape; and the font lacks the last two.
    bad = "a\u00010\x02\ufffe 日本"
    instance = Instance([0, 0], [9, 9], [2, 3], kv_capacity=99, id=[bad, "b"])
    found = optsched.timeline(instance, optsched.run(instance, "fcfs").schedule)
    shown = "a\ufffd0\ufffd\ufffd 日本"
    assert f"<title>{shown}: " in figures.timeline_figure(found, "t")
    assert f">{shown}</text>" in figures.distribution_figure({bad: found, "other": found}, "d")
    files = [tmp_path / "instance.json", tmp_path / "result.json"]
    write_instance(instance, files[0])
    write_schedule(optsched.run(instance, "fcfs").schedule, tmp_path / "schedule.json")
    result = optsched.solve(instance).to_dict()
    result.update(method=bad, schedule=str(tmp_path / "schedule.json"))
    files[1].write_text(json.dumps(result))
    report.write_report(files, tmp_path / "r.html")
    assert shown in parsed(tmp_path / "r.html").text
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


# --- Errors ---------------------------------------------------------------------------------------


def test_bad_input_is_one_line(answers: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    # Names, formats and fields (status 2), then a schedule that the judge rejects (5); no page is
    # written.
    assert "a name ending in .html" in run("report", "tiny", "-o", tmp_path / "r.txt", status=2)
    assert "no such file" in run("report", tmp_path / "none.json", "-o", out, status=2)
    (tmp_path / "other.json").write_text('{"format": "other", "version": 1}')
    assert "format: found 'other'" in run("report", tmp_path / "other.json", "-o", out, status=2)
    (tmp_path / "half.json").write_text('{"format": "optsched-result", "version": 1}')
    assert "found nothing" in run("report", tmp_path / "half.json", "-o", out, status=2)
    bad = json.loads((answers / "best.json").read_text())
    bad["starts"] = [0] * 6
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    assert "before its arrival" in run("report", tmp_path / "bad.json", "-o", out, status=5)
    assert not out.exists()
    with pytest.raises(UsageError, match="found no file"):
        gather.gather([])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the package jinja2; .*optsched\[report\]"):
        report.write_report(["tiny"], tmp_path / "r.html")


def test_a_schedule_in_seconds_of_an_unknown_cost_model_asks_for_it(tmp_path: Path) -> None:
    run("simulate", "tiny-seconds", "--policy", "vllm", "--cost-model", MODEL,
        "--schedule-out", tmp_path / "s.json")  # fmt: skip
    data = json.loads((tmp_path / "s.json").read_text())
    data["cost_model_sha256"] = None
    (tmp_path / "s.json").write_text(json.dumps(data))
    text = run("report", "tiny-seconds", tmp_path / "s.json", "-o", tmp_path / "r.html", status=2)
    assert "cost model" in text
    run("report", "tiny-seconds", tmp_path / "s.json", "--cost-model", MODEL,
        "-o", tmp_path / "r.html")  # fmt: skip


# --- A real browser -------------------------------------------------------------------------------


def column(browser: Any, table: str, place: int) -> list[str]:
    """Return the texts of one column of a table in the browser."""
    script = (
        "return Array.from(document.querySelectorAll(arguments[0] + ' tbody tr'))"
        ".map(row => row.cells[arguments[1]].textContent.trim())"
    )
    return list(browser.execute_script(script, table, place))


def test_the_browser_sorts_zooms_and_complains_of_nothing(answers: Path, browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    out = answers / "browser.html"
    run("report", answers / "comparison.json", answers / "result.json", "-o", out)
    browser.get(out.as_uri())
    # Sorting by total latency, then the other way; what has none stays at the end going up.
    assert column(browser, "#comparison-1-1", 0)[:3] == ["mc-sf", "vllm", "sarathi"]
    head = browser.find_elements("css selector", "#comparison-1-1 th button")[2]
    head.click()
    # The optimum, 33, stands in two rows: best known schedule and bound.
    assert column(browser, "#comparison-1-1", 2) == ["33", "33", "48", "56", "72", "–"]
    head.click()
    assert column(browser, "#comparison-1-1", 2)[:3] == ["72", "56", "48"]
    head = browser.find_elements("css selector", "#comparison-1-1 th button")[0]
    head.click()
    names = column(browser, "#comparison-1-1", 0)
    assert names == sorted(names)
    # Ctrl and the wheel show a part of a figure, and a double click all of it again.
    figure = browser.find_elements("css selector", ".figure svg")[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
    whole = figure.get_dom_attribute("viewBox")
    zoom = "arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: -1, ctrlKey: true, "
    browser.execute_script(zoom + "clientX: 400, clientY: 300, cancelable: true}))", figure)
    width = float(figure.get_dom_attribute("viewBox").split()[2])
    assert width == pytest.approx(0.8 * float(whole.split()[2]))  # what a step of the wheel leaves
    zoomed = figure.get_dom_attribute("viewBox")
    drag = ActionChains(browser).move_to_element(figure).click_and_hold().move_by_offset(40, 0)
    drag.release().perform()
    left = [float(box.split()[0]) for box in (figure.get_dom_attribute("viewBox"), zoomed)]
    assert left[0] < left[1]  # what is to the left has come into view
    ActionChains(browser).double_click(figure).perform()
    assert figure.get_dom_attribute("viewBox") == whole
    assert browser.get_log("browser") == []


def test_the_browser_runs_nothing_that_files_hold(tmp_path: Path, browser: Any) -> None:
    out = tmp_path / "r.html"
    report.write_report(evil(tmp_path), out)
    browser.get(out.as_uri())  # an alert would make every further call fail
    assert browser.title == f"optsched: {EVIL}"
    assert EVIL in column(browser, "#comparison-1-1", 0)
    texts = "return Array.from(document.querySelectorAll('svg text')).map(t => t.textContent)"
    assert any(text.startswith("<script>") for text in browser.execute_script(texts))
    assert browser.get_log("browser") == []


def test_the_browser_copes_with_twenty_thousand_requests(tmp_path: Path, browser: Any) -> None:
    rng = np.random.default_rng(5)
    n = 20_000
    instance = Instance(
        np.sort(rng.uniform(0, 2000, n)), rng.integers(1, 400, n), rng.integers(1, 30, n),
        kv_capacity=30_000, time_unit="second",
    )  # fmt: skip
    write_instance(instance, tmp_path / "i.json")
    write_schedule(
        optsched.run(optsched.Problem(instance, MODEL), "fcfs").schedule, tmp_path / "s.json"
    )
    out = tmp_path / "r.html"
    report.write_report([tmp_path / "i.json", tmp_path / "s.json"], out)
    assert out.stat().st_size < 10_000_000
    browser.get(out.as_uri())
    count = "return document.querySelectorAll(arguments[0]).length"
    assert browser.execute_script(count, "svg title") == 0  # no boxes, but an image of shares
    assert browser.execute_script(count, "svg image") >= 1
    assert browser.get_log("browser") == []


def test_a_report_says_what_intervals_mean(tmp_path: Path) -> None:
    # KV holds one request at a time. The long one first: 5 + 6 rounds. The short one first: 1 + 6.
    instance = Instance([0, 0], [1, 5], [5, 1], kv_capacity=6)
    data = optsched.compare(instance, ["fcfs", "sorted-f"]).to_dict()
    (tmp_path / "comparison.json").write_text(json.dumps(data), encoding="utf-8")
    (section,) = page_sections([tmp_path / "comparison.json"])
    (made,) = section["comparisons"]
    headers = [header["text"] for header in made["headers"]]
    fcfs = {h: c["text"] for h, c in zip(headers, made["rows"][0], strict=True)}
    assert [row[0]["text"] for row in made["rows"][2:]] == ["bound"]  # a policy is the best known
    # Latencies sum to 11 and 7 rounds: 11 / 7.
    assert fcfs["in words"] == "1.571 times the optimum"


def page_sections(files: list[Path]) -> list[dict[str, Any]]:
    """Return what the page says of files, section by section, without a browser."""
    return [page._section(k, one) for k, one in enumerate(gather.gather(files).sections)]


def test_a_certificate_of_requests_in_time_says_within_what(tmp_path: Path) -> None:
    # Three of 20 ms each within 55 ms, twice: two of each three.
    cost = BatchCost("work", 1, {"token": "2"})
    crowds = Instance([0.0] * 3 + [1.0] * 3, [10] * 6, [1] * 6, kv_capacity=99, time_unit="second")
    found = optsched.bound(
        Problem(crowds, cost, slo_ttft=0.055, objective="slo_attainment"), time_limit_s=1
    )
    assert found.certified == found.bound == 4 / 6
    assert found.certificate is not None
    (tmp_path / "work.toml").write_text(to_toml(cost))
    write_instance(crowds, tmp_path / "crowds.json")
    (tmp_path / "proof.json").write_text(json.dumps(found.certificate))
    gathered = gather.gather([tmp_path / "crowds.json", tmp_path / "proof.json"])
    (section,) = gathered.sections
    assert [words.words for _, words in section.certificates] == [
        "SLO attainment 0.6667 is proved (no schedule on one worker has more, within slo_ttft "
        "0.055)"
    ]
    # It is about this limit only, and about no column of the instance.
    for goal, value in (("", None), (":slo_ttft=0.05", None), (":slo_ttft=0.055", 4 / 6)):
        section.proved.append((section.proved[0][0], 1.0))  # of two the tightest
        about = {"objective_name": f"slo_attainment{goal}"}
        assert section.certified(about, str(tmp_path / "work.toml")) == value


def test_a_weaker_certificate_is_not_more_than_it_proves() -> None:
    # 12 of 100 ms each, whatever a batch holds, two a batch. Work of tokens lets all be in time.
    cost = BatchCost("b", 1, {"base": "100", "token": "0.01"})
    crowd = Instance([0.0] * 12, [500] * 12, [1] * 12, kv_capacity=1002, time_unit="second")
    problem = Problem(crowd, cost, slo_ttft=0.35, objective="slo_attainment")
    found = optsched.bound(problem, time_limit_s=1)
    proof = certify(crowd, cost, "slo_attainment", leaf_without_prices(12))
    weak = replace(found, certificate=proof)
    # Three batches of two end within 0.35 s: 6 of 12. Without prices all may be in time.
    assert found.bound == 0.5
    assert weak.certified == optsched.verify(problem, proof) == 1.0
    assert same_limits(proof, problem.instance)
    assert not same_limits(proof, problem.instance, {"slo_ttft": 0.3})
    assert not same_limits(proof, crowd)


def leaf_without_prices(n: int) -> dict[str, Any]:
    """Return a leaf within a TTFT of 0.35 s that charges nobody anything."""
    return {
        "relaxation": "slo-prices", "limits": {"slo_ttft": "0.35"}, "rates": ["1", "1"],
        "edges": [0, 1], "price": [0], "rate": [0] * n, "extra": [0] * n, "stretches": [],
    }  # fmt: skip
