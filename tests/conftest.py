"""What every test process needs, and files that several tests read."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import run

from optsched.experiments import load_studies

load_studies()  # tests import them from optsched_studies

# A shell starts background jobs with interrupts ignored; the tests of Ctrl-C need them.
signal.signal(signal.SIGINT, signal.default_int_handler)
# An empty variable names no folder of traces.
if not os.environ.get("OPTSCHED_DATA"):
    os.environ.pop("OPTSCHED_DATA", None)
# Tables are as wide as they are, whatever the shell says of a terminal.
os.environ.pop("COLUMNS", None)


WHOLE = {"browser", "site", "log"}
"""Fixtures of a browser, of the built site, and of an experiment's processes and their log."""
LONG = set(Path(__file__).with_name("long.txt").read_text(encoding="utf-8").split())
"""Tests that take long, as `make test-times` measured: in `make test-all`, not in `make test`."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark notebooks, what uses one of `WHOLE` and what takes long as tests of the product.

    Who names a file or a test wants all that it has, and so `LONG` counts for all files only.
    """
    folders = {Path(argument).name for argument in config.args}
    everything = folders == set(config.getini("testpaths")) and not config.option.keyword
    for item in items:
        is_long = item.nodeid.partition("[")[0].removeprefix("tests/") in LONG
        if (
            item.path.suffix == ".ipynb"
            or WHOLE.intersection(getattr(item, "fixturenames", ()))
            or (everything and is_long)
        ):
            item.add_marker("whole")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write the CPU seconds of a test and of its processes, where ``OPTSCHED_TEST_TIMES`` asks."""
    before = sum(os.times()[:4])
    result = yield
    if file := os.environ.get("OPTSCHED_TEST_TIMES"):
        line = f"{sum(os.times()[:4]) - before:.2f} {item.nodeid.removeprefix('tests/')}\n"
        with open(file, "a", encoding="utf-8") as times:  # one write a line: workers share the file
            times.write(line)
    return result


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a solve, a comparison with schedules, and a proved optimum of ``tiny``."""
    import optsched
    from optsched.files.read_write import write_json

    place = tmp_path_factory.mktemp("answers")
    run("solve", "tiny", "--schedule-out", place / "best.json", "--json", place / "result.json")
    run(
        "compare", "tiny", "--policy", "mc-sf", "--policy", "vllm", "--policy", "sarathi",
        "--policy", "alpha-protection:alpha=0.3", "--schedules-out", place / "all",
        "--json", place / "comparison.json",
    )  # fmt: skip
    proved = optsched.solve(optsched.read_instance("tiny"), method="ramp", time_limit_s=600)
    write_json(proved.certificate, place / "certificate.json")
    bound = {**proved.to_dict(), "command": "bound", "certificate": "certificate.json"}
    write_json(bound, place / "bound.json")
    return place


@pytest.fixture
def without_figures() -> Iterator[None]:
    """Leave out the longest part of an experiment, which tests/test_experiment_figures.py has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optsched.experiments.runner.write_figures", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a browser without a window, which remembers what it complains of."""
    chromium, chromedriver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if chromium is None or chromedriver is None:
        pytest.skip("no browser: chromium and chromedriver are not on the PATH")
    selenium = pytest.importorskip("selenium.webdriver", reason="needs the package selenium")
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--window-size=1300,2400", f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(chromedriver))
    yield driver
    driver.quit()
