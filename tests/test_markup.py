"""Rich representations in notebooks: small tables, escaped."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser

import optsched
from optsched.problem.instance import Instance
from optsched.problem.markup import facts, number, table

EVIL = '<script>alert("x")</script>'


class Cells(HTMLParser):
    """Collects cells, and the tags that are open at the end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def checked(text: str) -> list[str]:
    """Return the cells of a text whose tags are plain ones, all of them closed."""
    found = Cells(text)
    assert not found.open
    assert found.tags <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    return found.cells


def test_everything_is_escaped() -> None:
    instance = Instance([0, 0], [1, 2], [2, 1], kv_capacity=9, name=EVIL)
    for thing in (instance, optsched.solve(instance), optsched.compare(instance, ["fcfs"])):
        text = thing._repr_html_()
        checked(text)
        assert EVIL not in text
        assert "&lt;script&gt;" in text
    assert checked(table(EVIL, [EVIL], [[EVIL]], EVIL)) == [EVIL, EVIL]


def test_an_instance_shows_its_sizes() -> None:
    cells = checked(optsched.read_instance("tiny")._repr_html_())
    facts_of = dict(zip(cells[::2], cells[1::2], strict=True))
    assert facts_of["requests"] == "6"
    assert facts_of["KV capacity"] == "14 tokens (generated)"
    assert facts_of["known optimum"] == "33"
    assert "limits" not in facts_of  # there are none


def test_an_evaluation_shows_what_the_judge_found() -> None:
    instance = optsched.read_instance("tiny")
    judged = optsched.run(instance, "mc-sf").evaluation
    text = judged._repr_html_()
    cells = checked(text)
    assert cells[:5] == ["", "mean", "p50", "p90", "p99"]
    # 48 rounds of six requests are 8 on average.
    assert cells[5:7] == ["latency [rounds]", "8"]
    assert "total latency 48 rounds" in text


def test_a_result_and_a_comparison_show_value_and_bound() -> None:
    instance = optsched.read_instance("tiny")
    cells = checked(optsched.solve(instance)._repr_html_())
    assert cells[:2] == ["status", "optimal"]
    assert cells[2:6] == ["TEL (times in rounds)", "33", "bound", "33"]
    comparison = optsched.compare(instance, ["mc-sf", "vllm"])
    cells = checked(comparison._repr_html_())
    at = cells.index("mc-sf")
    # 48 / 33 = 1.455, and the optimum is both the bound and the best known.
    assert cells[at : at + 5] == ["mc-sf", "clairvoyant", "48", "1.455", "1.455"]
    assert cells[cells.index("vllm") + 3] == "–"  # no ratio outside the bound's model
    assert "1.455 times the optimum" in cells


def test_a_bound_shows_what_is_certified() -> None:
    bounded = optsched.bound(optsched.read_instance("tiny"), time_limit_s=1)
    cells = checked(bounded._repr_html_())
    facts_of = dict(zip(cells[::2], cells[1::2], strict=True))
    assert facts_of["bound"] == str(bounded.bound)
    assert facts_of["by"] == bounded.method
    assert facts_of["certified"] == str(bounded.certified)


def test_numbers_are_short() -> None:
    values = (None, 3, 1234567, 0.123456, 1234.56, 5.0, "text", True, float("nan"))
    words = ["–", "3", "1,234,567", "0.1235", "1,234.6", "5", "text", "True", "–"]
    assert [number(value) for value in values] == words
    assert checked(facts("t", [("a", None), ("b", 1)])) == ["b", "1"]


def test_no_heavy_package_is_loaded_for_an_instance() -> None:
    code = (
        "import sys, optsched; optsched.read_instance; "
        "optsched.Instance([0], [1], [1], kv_capacity=3)._repr_html_(); "
        "assert not {'pandas', 'matplotlib', 'numba', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
