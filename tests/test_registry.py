"""Registries: values found in the modules of a package, or added by a decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import answer, invoke, one_line_error

from optsched.problem.errors import InputError, UsageError
from optsched.problem.registry import Registry, modules_of


@dataclass(frozen=True)
class Thing:
    name: str


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a package of modules a, b and inner.c with Things, and a kernel that cannot be
    loaded."""
    folder = tmp_path / f"things_{tmp_path.name}"
    (folder / "inner").mkdir(parents=True)
    head = f"from {__name__} import Thing\n"
    files = {
        "__init__": "", "b": head + "B, TWO = Thing('b'), Thing('two')\n",
        "a": head + f"from {folder.name}.b import B\nA = Thing('a')\n",
        "hot_kernel": "raise RuntimeError('loads numba')\n", "inner/__init__": "",
        "inner/c": head + "C = Thing('c')\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return folder.name


def test_values_at_the_top_level_of_modules_are_found_sorted(package: str) -> None:
    registry = Registry("thing", package, Thing)
    # Module a imports B: the same value twice is one.
    assert list(registry.all()) == ["a", "b", "two"]
    assert registry.get("two") == Thing("two")


def test_compiled_loops_and_inner_packages_are_left_alone(package: str) -> None:
    assert [m.__name__ for m in modules_of(package)] == [f"{package}.a", f"{package}.b"]
    deep = [m.__name__.removeprefix(f"{package}.") for m in modules_of(package, deep=True)]
    assert deep == ["a", "b", "inner", "inner.c"]


def test_an_unknown_name_lists_those_known() -> None:
    registry: Registry[int] = Registry("number", error=UsageError)
    registry.add("two", 2)
    registry.add("one", 1)
    with pytest.raises(UsageError, match="'three'"):
        registry.get("three")
    with pytest.raises(InputError, match="'x' is unknown"):
        Registry("thing").get("x")


def test_a_name_is_given_once() -> None:
    registry: Registry[Thing] = Registry("thing")
    first = registry.add("x", Thing("x"))
    assert registry.add("x", first) is first
    with pytest.raises(ValueError, match="'x'"):
        registry.add("x", Thing("x"))


def test_what_a_decorator_registers_again_takes_the_place_of_what_it_did() -> None:
    @dataclass(frozen=True)
    class Made:
        make: Callable[[], int]

    def cell(value: int) -> Callable[[], int]:
        """Return a function as a notebook's cell defines it, run with another text each time."""

        def make() -> int:
            return value

        return make

    registry: Registry[Made] = Registry("thing")
    registry.add("x", Made(cell(1)))
    registry.add("x", Made(cell(2)))
    assert registry.get("x").make() == 2
    with pytest.raises(ValueError, match="'x'"):
        registry.add("x", Made(lambda: 3))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("simulate", "tiny", "--policy", "vlm-v1"), "vllm-v1"),
        (("simulate", "tinny", "--policy", "fcfs"), "tiny"),
        (("bound", "tiny", "--objective", "p99_tfft"), "p99_ttft"),
        (("gpu", "roofline", "meta-llama/Llama-3.1-8b", "--gpu", "h100-80g8"), "h100-80gb"),
        (("gpu", "roofline", "llama4-8b"), "llama3-8b"),
        (
            ("simulate", "tiny-seconds", "--policy", "fcfs", "--cost-model", "llama2-7b-infermax"),
            "llama2-7b-a100-infermax",
        ),
    ],
)
def test_a_name_that_is_nearly_known_is_named(words: tuple[str, ...], meant: str) -> None:
    assert f"did you mean {meant!r}?" in one_line_error(invoke(*words))


@pytest.mark.parametrize("text", ["50ms", "0.05", "0.05s", "50000us"])
def test_times_take_units(text: str) -> None:
    words = ("simulate", "tiny-seconds", "--policy", "fcfs", "--cost-model")
    model = "llama2-7b-a100-infermax"
    plain = answer(*words, model, "--slo-tpot", "0.05")
    assert answer(*words, model, "--slo-tpot", text)["metrics"] == plain["metrics"]


def test_a_time_that_is_none_is_refused_and_one_that_is_odd_warned_of() -> None:
    for text in ("50 parsecs", "-1", "0s", "nan", "ms", "1e400", ""):
        error = one_line_error(invoke("simulate", "tiny", "--policy", "fcfs", "--slo-tpot", text))
        assert error.startswith("error: --slo-tpot: found ")
    odd = invoke("simulate", "tiny", "--policy", "fcfs", "--slo-tpot", "50")
    assert "50ms is meant more often" in odd.stderr
