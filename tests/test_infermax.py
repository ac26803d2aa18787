"""InferMax's CSP: its methods against each other, exhaustive search and the paper's 11 cases.

Exhaustive search (exhaustive_batches.py) goes through all batches in exact fractions. Values that
are written out are of the cost model PAPER, in milliseconds.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from exhaustive_batches import Exhaustive

from optsched import Instance, Problem, model, solve
from optsched.costs.cost import BatchCost
from optsched.costs.load import load_cost_model
from optsched.judge.evaluate import evaluate
from optsched.optimize.formulations import Task, check_method, get
from optsched.optimize.formulations.batches.batch_count import batches_needed
from optsched.optimize.formulations.batches.labels import why_chunks_matter
from optsched.optimize.formulations.batches.plans import UNITS
from optsched.optimize.formulations.batches.problem import Costs, problem
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.problem.errors import InfeasibleError, InputError, SolverError, UsageError
from optsched.problem.instance import Limits

PAPER = load_cost_model("llama2-7b-a100-infermax-paper")
ODD = BatchCost(
    "decoding dearer than refilling, prefill batches cheaper than decode batches",
    1,
    {
        "token": "0.01", "base": "0.5", "decode_kv": "0.02", "decode_request": "0.3",
        "decode_base": "0.4", "prefill_square": "0.001", "prefill_cross": "0.0005",
        "prefill_kv": "0.001", "prefill_token": "0.002", "prefill_request": "0.05",
        "prefill_base": "0.1",
    },
)  # fmt: skip
MODELS = [
    PAPER,
    load_cost_model("llama2-7b-a100-infermax"),
    load_cost_model("llama2-7b-a100-fit"),
    ODD,
]
METHODS = ["labels", "cpsat", "pulp-bigm"]
CASES = [2**k for k in range(11)]
OPTIMA_MS = dict(
    zip(
        CASES,
        [40.336265, 45.964563, 49.272378, 50.751786, 53.713694, 59.649877, 69.118343, 85.238095,
         118.005232, 185.650038, 329.381776],
        strict=True,
    )
)  # fmt: skip
"""By Dijkstra's algorithm over states in exact fractions, written before the package's methods."""


def fixed(requests, prompt, output, capacity=None, **rest):
    """Return equal requests at 0, M = max(2 I, I + O - 1) as in the paper's section 4.5."""
    return Instance(
        np.zeros(requests),
        np.full(requests, prompt),
        np.full(requests, output),
        capacity or max(2 * prompt, prompt + output - 1),
        time_unit="second",
        kv_accounting="cached",
        **rest,
    )


def tiny(rng, kind):
    """Return a random instance with B <= 3, O <= 3, small M, and what is asked besides."""
    n = int(rng.integers(1, 3 if "chunks" in kind else 4))
    prompt = rng.integers(1, 4 if "chunks" in kind else 5, n)
    output = rng.integers(1, 3 if "chunks" in kind else 4, n)
    if rng.random() < 0.4:
        prompt[:] = prompt[0]
    if rng.random() < 0.4:
        output[:] = output[0]
    accounting = "cached" if rng.random() < 0.5 else "generated"
    peak = int((prompt + output).max()) - (accounting == "cached")
    room = int(rng.integers(peak, peak + prompt.sum() + 1))
    limits, switches, extras = {}, {"chunked_prefill": False}, {}
    if "limits" in kind:
        if rng.random() < 0.5:
            limits["max_batch_tokens"] = int(rng.integers(prompt.max(), prompt.sum() + 3))
        if rng.random() < 0.5:
            limits["max_prefill_tokens"] = int(rng.integers(prompt.max(), prompt.sum() + 2))
        if rng.random() < 0.5:
            limits["max_running"] = int(rng.integers(1, n + 1))
        if rng.random() < 0.5:
            switches["hybrid_batching"] = False
        if rng.random() < 0.3:
            extras["eviction_free"] = True
    if "chunks" in kind:
        switches["chunked_prefill"] = True
        if rng.random() < 0.5:
            limits["max_prefill_tokens"] = int(rng.integers(1, prompt.sum() + 2))
    arrival = np.round(rng.random(n) * 0.03, 4) if "arrivals" in kind else np.zeros(n)
    instance = Instance(
        arrival, prompt, output, room, time_unit="second", kv_accounting=accounting,
        limits=Limits(**limits), **switches,
    )  # fmt: skip
    return instance, extras


def run(instance, method, *objectives, cost=PAPER, limit=600.0, warm_start=None, **extras):
    """Return a method's answer, its schedule judged."""
    task = Task(instance, cost, objectives or ("makespan",), extras=extras)
    options = SolveOptions(time_limit_s=limit, threads=2, warm_start=warm_start)
    answer = check_method(get("infermax"), method, task).run(task, options)
    if answer.schedule is not None:
        judged = evaluate(Problem(instance, cost), answer.schedule)
        assert answer.objective == pytest.approx(judged.metrics[task.names[0]], rel=1e-9)
    return answer


def agrees(method, kind, seed, *, objectives=None, draws=1):
    """Hold a method against exhaustive search on random instances."""
    rng = np.random.default_rng(seed)
    for draw in range(draws):
        instance, extras = tiny(rng, kind)
        cost = MODELS[int(rng.integers(len(MODELS)))]
        if method == "pulp-bigm" and "chunks" in kind and cost["prefill_cross"]:
            cost = PAPER
        search = Exhaustive(instance, cost, **extras)
        declared = get("infermax").methods[method].objectives
        # tests/test_most_in_time.py has the objective that needs limits of its own.
        wanted = objectives or [(name,) for name in declared if name != "slo_attainment"]
        for names in wanted:
            if any("tpot" in name for name in names) and (instance.output_tokens == 1).all():
                continue
            if method == "labels" and is_refused(instance, cost, names):
                with pytest.raises(UsageError, match=r"found labels with .*; expected cpsat"):
                    run(instance, method, *names, cost=cost, **extras)
                continue
            best = search.best(*names)
            answer = run(instance, method, *names, cost=cost, **extras)
            what = f"{method} {kind} {seed}/{draw} {names}: {instance.to_dict()} {extras}"
            assert answer.status == Status.OPTIMAL, what
            assert answer.bound == pytest.approx(best[0], rel=1e-9), what
            metrics = evaluate(Problem(instance, cost), answer.schedule).metrics
            found = [metrics[name] for name in names]
            assert found == pytest.approx(list(best), rel=1e-9), what
            if extras.get("eviction_free"):
                assert metrics["evictions"] == 0, what


def is_refused(instance, cost, names):
    """Whether labels cannot say: times per token with arrivals, or chunks that may be better."""
    if instance.chunked_prefill and why_chunks_matter(Task(instance, cost, names)):
        return True
    return names == ("mean_tpot",) and instance.arrivals_differ


KINDS = {
    "labels": ["plain", "limits", "arrivals limits", "chunks"],
    "cpsat": ["plain", "limits", "arrivals limits", "chunks", "chunks arrivals limits"],
    "pulp-bigm": ["plain", "limits", "chunks"],
}
"""Switches by exact method, as declared."""
# Random instances of each kind in the default tests.
QUICK = {"labels": 8, "cpsat": 2, "pulp-bigm": 2}
PAIRS = [(method, kind) for method, kinds in KINDS.items() for kind in kinds]


@pytest.mark.parametrize(("method", "kind"), PAIRS)
def test_method_agrees_with_exhaustive_search(method, kind):
    agrees(method, kind, seed=[5, PAIRS.index((method, kind))], draws=QUICK[method])


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), PAIRS)
def test_method_agrees_with_exhaustive_search_200(method, kind):
    draws = -(-200 // len(KINDS[method]))
    agrees(method, kind, seed=[8, PAIRS.index((method, kind))], draws=draws)


LEXICOGRAPHIC = [
    ("makespan", "tel"),
    ("mean_ttft", "makespan"),
    ("tps", "mean_ttft"),
    ("tel", "max_tpot"),
    ("max_tpot", "makespan", "tel"),
]


def test_cpsat_agrees_on_several_objectives():
    agrees("cpsat", "plain", seed=11, objectives=LEXICOGRAPHIC, draws=2)
    agrees("cpsat", "arrivals", seed=12, objectives=LEXICOGRAPHIC[:3], draws=2)


@pytest.mark.slow
def test_cpsat_agrees_on_several_objectives_40():
    agrees("cpsat", "limits", seed=13, objectives=LEXICOGRAPHIC, draws=20)
    agrees("cpsat", "arrivals limits", seed=14, objectives=LEXICOGRAPHIC[:3], draws=20)


def test_every_declared_switch_is_among_the_kinds():
    """What a method says it can do, random tests ask of it: KINDS has the words of each switch."""
    formulation = get("infermax")
    assert set(formulation.methods) - {"search", "split"} == set(KINDS)
    assert set(KINDS) == set(METHODS)
    for name in KINDS:
        method, kinds = formulation.methods[name], " ".join(KINDS[name])
        assert ("chunked_prefill" in method.switches) == ("chunks" in kinds)
        assert ("arrivals" in method.switches) == ("arrivals" in kinds)
        assert method.switches >= {"max_running", "hybrid_batching_off"}


# Beyond exact methods


def test_the_offline_search_and_its_bound_enclose_the_optimum():
    """The bound is not above exhaustive search's optimum, and the schedule not below it."""
    rng = np.random.default_rng(16)
    for draw in range(12):
        instance, extras = tiny(rng, "arrivals limits" if draw % 2 else "chunks limits")
        exact = Exhaustive(instance, PAPER, **extras)
        for name in ("makespan", "tel", "mean_ttft"):
            answer = run(instance, "search", name, limit=0.02, **extras)
            (best,) = exact.best(name)
            what = f"{draw} {name}: {instance.to_dict()} {extras}"
            assert answer.bound <= best * (1 + 1e-12), what
            if answer.schedule is None:
                continue  # no policy keeps these rules
            judged = evaluate(Problem(instance, PAPER), answer.schedule)
            assert answer.objective >= best * (1 - 1e-12), what
            assert not (extras.get("eviction_free") and judged.evictions.any()), what
            assert not judged.split_prefill or instance.chunked_prefill, what


def test_large_instances_go_to_the_offline_search_and_exact_methods_say_so():
    # 400 requests x 400 x 30 output tokens = 4,800,000, and 100,000 is the limit, which
    # 16 x 16 x 16 = 4,096 keep.
    many = fixed(400, 20, 30)
    task = Task(many, PAPER, ("tel",))
    assert get("infermax").choose(task) == "search"
    assert get("infermax").choose(Task(fixed(16, 64, 16), PAPER, ("tel",))) == "labels"
    answer = run(many, "search", "tel", limit=0.5)
    assert answer.status == Status.FEASIBLE
    # After half a second within 1.5 times.
    assert 0 < answer.bound < answer.objective < 1.5 * answer.bound
    words = r"900 requests with 27000 output tokens.*the method search"
    with pytest.raises(UsageError, match=words):
        run(fixed(900, 20, 30), "cpsat", "tel")


# The paper's 11 cases


def test_the_paper_cases_are_proved_and_agree():
    """Against OPTIMA_MS, which another algorithm found in exact fractions."""
    for prompt in CASES:
        answer = run(fixed(4, prompt, 4), "labels")
        assert answer.status == Status.OPTIMAL
        assert 1000 * answer.objective == pytest.approx(OPTIMA_MS[prompt], abs=1e-6)
        assert 1000 * answer.bound == pytest.approx(OPTIMA_MS[prompt], abs=1e-6)


@pytest.mark.slow
def test_cpsat_proves_the_paper_cases():
    for prompt in CASES:
        answer = run(fixed(4, prompt, 4), "cpsat")
        assert answer.status == Status.OPTIMAL
        assert 1000 * answer.objective == pytest.approx(OPTIMA_MS[prompt], abs=1e-6)


def test_anchors():
    """The first and the last of the paper's cases, and what evictions gain in the first."""
    # 40.336 and 329.382 ms are OPTIMA_MS of 1 and of 1024 tokens, to three decimals.
    instance = fixed(4, 1, 4)
    answer = run(instance, "labels")
    assert 1000 * answer.objective == pytest.approx(40.336, abs=5e-4)
    assert evaluate(Problem(instance, PAPER), answer.schedule).metrics["evictions"] == 4
    # Without evictions one after the other is best: 4 times 13.3556 ms alone, which are a prefill
    # of 5.0998 ms, three decodes of 2.7514 and 0.0016 for reading 1 + 2 + 3 tokens of KV.
    free = run(instance, "labels", eviction_free=True)
    assert 1000 * free.objective == pytest.approx(53.422, abs=5e-4)
    instance = fixed(4, 1024, 4)
    answer = run(instance, "labels")
    assert 1000 * answer.objective == pytest.approx(329.382, abs=5e-4)
    assert evaluate(Problem(instance, PAPER), answer.schedule).metrics["evictions"] == 0


def test_evictions_stop_paying_at_45_tokens():
    # A refill pays while (token - decode_kv) I + prefill_square (I + 1)^2 < base + decode_base. By
    # PAPER's coefficients the left is 0.08401 ms a layer at I = 44 and 0.08592 at 45, and the right
    # is 0.08407.
    for prompt, evicts in ((43, True), (44, True), (45, False), (46, False)):
        instance = fixed(4, prompt, 4)
        free = run(instance, "labels", eviction_free=True).objective
        assert (run(instance, "labels").objective < free - 1e-12) == evicts


def test_pulp_reports_a_true_gap_where_it_is_stopped():
    """Whether or not 2 s are enough, the optimum of OPTIMA_MS is between bound and value."""
    answer = run(fixed(4, 64, 4), "pulp-bigm", limit=2.0)
    optimum = OPTIMA_MS[64] / 1000
    assert answer.objective >= optimum * (1 - 1e-9)
    assert answer.bound <= optimum * (1 + 1e-9)
    # It says optimal just where they are within a millionth of each other.
    assert (answer.status == Status.OPTIMAL) == (answer.bound >= answer.objective * (1 - 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [1, 8, 64])
def test_pulp_proves_three_requests(prompt):
    answer = run(fixed(3, prompt, 3), "pulp-bigm", limit=300.0)
    assert answer.status == Status.OPTIMAL
    assert answer.objective == pytest.approx(run(fixed(3, prompt, 3), "labels").objective, rel=1e-9)


def test_an_evicted_request_may_be_overtaken_by_an_equal_one():
    # Ordering the tokens of equal requests in every batch would cost 24.821 ms here.
    instance = fixed(3, 3, 4, 11)
    values = [1000 * run(instance, m).objective for m in ("labels", "cpsat")]
    assert values == pytest.approx([22.496468] * 2, abs=1e-6)


def test_large_instances_of_the_search():
    # 8 requests of 8 tokens each; the value is also that of a flow model, which is gone.
    answer = run(fixed(8, 8, 8), "labels")
    assert answer.status == Status.OPTIMAL
    assert 1000 * answer.objective == pytest.approx(189.656058, abs=1e-6)


# Questions, limits, statuses


@pytest.mark.parametrize("method", METHODS)
def test_below_the_optimum_is_proved_impossible(method):
    """Asked for a value below the optimum it proves that there is none, and above it finds it."""
    instance = fixed(2, 3, 3)
    best = run(instance, "labels").objective
    none = run(instance, method, below=best * (1 - 1e-12))
    assert none.status == Status.INFEASIBLE
    assert none.schedule is None
    some = run(instance, method, below=best * 1.0001)
    assert some.status == Status.OPTIMAL
    assert some.objective == pytest.approx(best, rel=1e-9)


def test_below_in_tokens_per_second():
    """Of a rate, which is maximized, `below` asks for more than the value."""
    instance = fixed(2, 3, 3)
    best = run(instance, "labels", "tps").objective
    higher = best * (1 + 1e-12)
    assert run(instance, "cpsat", "tps", below=higher).status == Status.INFEASIBLE
    assert run(instance, "cpsat", "tps", below=best * 0.999).objective == pytest.approx(best)
    with pytest.raises(InputError, match="below"):
        run(instance, "cpsat", below=-1.0)


@pytest.mark.parametrize("method", METHODS)
def test_a_limit_that_a_request_breaks_is_named(method):
    limits = Limits(max_prefill_tokens=7)
    arrays = (np.zeros(3), [5, 8, 6], [2, 2, 2], 20)
    instance = Instance(*arrays, time_unit="second", limits=limits)
    with pytest.raises(InfeasibleError, match=r"max_prefill_tokens.*7.*request 1.*8"):
        run(instance, method)
    split = Instance(*arrays, time_unit="second", limits=limits, chunked_prefill=True)
    if method != "labels":
        assert run(split, method, limit=2.0).status in (Status.OPTIMAL, Status.FEASIBLE)
    else:
        # Inputs of 6 + 9 + 7 tokens at most, of which KV holds 20, in batches of 7.
        match = r"chunked_prefill.*max_prefill_tokens 7 may cut prefills \(up to 20 .* cpsat$"
        with pytest.raises(UsageError, match=match):
            run(split, method)


def test_what_a_method_cannot_do_names_one_that_can():
    """Objectives it has not, several at once, arrivals; and no second token for a mean TPOT."""
    instance = fixed(2, 3, 3)
    for method, objectives in (("pulp-bigm", ("tel",)), ("labels", ("max_tpot",))):
        with pytest.raises(UsageError, match=r"cannot do objective .*; expected \S+$"):
            run(instance, method, *objectives)
    with pytest.raises(UsageError, match="several objectives; expected cpsat"):
        run(instance, "labels", "makespan", "tel")
    apart = Instance([0.0, 1.0], [2, 2], [2, 2], 9, time_unit="second")
    with pytest.raises(UsageError, match="arrivals; expected cpsat"):
        run(apart, "pulp-bigm")
    with pytest.raises(UsageError, match=r"mean_tpot.*arrivals.*cpsat"):
        run(apart, "labels", "mean_tpot")
    with pytest.raises(UsageError, match="expected a request with more than one"):
        run(fixed(2, 3, 1), "cpsat", "mean_tpot")


@pytest.mark.parametrize("method", METHODS)
def test_no_time_is_no_infeasibility(method):
    answer = run(fixed(8, 8, 8), method, limit=0.0)
    assert answer.status == Status.FEASIBLE
    # The optimum is 189.656058 ms, as in `test_large_instances_of_the_search`. The bound that is
    # known without time is more than half of it.
    assert 0.1 < answer.bound <= 0.189656059
    assert answer.objective >= 0.189656057  # not below the optimum, to a nanosecond


@pytest.mark.parametrize("method", METHODS[1:])  # labels has no number of batches
def test_too_few_batches_are_an_error_never_infeasible(method, monkeypatch):
    where = "optsched.optimize.formulations.batches.plans.max_batches"
    monkeypatch.setattr(where, lambda prob, best: 4)
    # In 5 tokens of KV the two run one after the other: 3 + 3 batches.
    with pytest.raises(SolverError, match="4 batches"):
        run(fixed(2, 3, 3, 5), method)


def test_search_keeps_incumbent_and_bound_when_stopped():
    """A stop from another thread after 1.5 s: it has a schedule, and what was told of the bound."""
    instance = fixed(16, 1, 8)  # not proved within a minute
    stop = threading.Event()
    told = []
    task = Task(instance, PAPER, ("makespan",))
    options = SolveOptions(time_limit_s=None, stop=stop, progress=told.append)
    threading.Timer(1.5, stop.set).start()
    answer = check_method(get("infermax"), "labels", task).run(task, options)
    assert answer.status == Status.FEASIBLE
    assert 0.2 < answer.bound < answer.objective  # in seconds: far above 0
    assert answer.native_status.startswith("interrupted")
    assert told
    assert told[-1].bound <= answer.bound * (1 + 1e-12)


def test_auto_says_which_method_ran():
    """`labels` for one objective, CP-SAT for two; throughput is maximized."""
    instance = fixed(3, 3, 3, chunked_prefill=False)
    assert solve(Problem(instance, PAPER)).method == "labels"
    assert solve(Problem(instance, PAPER, "makespan,tel")).method == "cpsat"
    result = solve(Problem(instance, PAPER, "tps"))
    assert result.status == "optimal"
    assert result.maximized


def test_warm_start_is_used_by_pulp():
    instance = fixed(4, 1, 4)
    best = run(instance, "labels")
    answer = run(instance, "pulp-bigm", limit=3.0, warm_start=best.schedule)
    assert answer.objective == pytest.approx(best.objective, rel=1e-12)


def test_pulp_takes_another_solver():
    """CBC, by its name, finds the optimum of `labels`; a name that is none is refused."""
    instance = fixed(2, 3, 2)
    answer = run(instance, "pulp-bigm", solver="PULP_CBC_CMD")
    assert answer.status == Status.OPTIMAL
    assert answer.objective == pytest.approx(run(instance, "labels").objective, rel=1e-9)
    with pytest.raises(UsageError, match="solver: found 'nobody'"):
        run(instance, "pulp-bigm", solver="nobody")


@pytest.mark.parametrize("format_name", ["lp", "mps"])
def test_exports_parse_and_have_the_optimum(tmp_path, format_name):
    """HiGHS reads the file by itself (in ms) and finds the optimum that `labels` finds."""
    import highspy

    instance = fixed(2, 3, 2)
    path = tmp_path / f"model.{format_name}"
    model(Problem(instance, PAPER, "makespan")).write(path, format_name)
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("mip_rel_gap", 0.0)
    assert highs.readModel(str(path)) == highspy.HighsStatus.kOk
    highs.run()
    optimum = 1000 * run(instance, "labels").objective
    assert highs.getInfo().objective_function_value == pytest.approx(optimum, rel=1e-6)


# The pieces


def test_costs_are_exact_integers_of_the_decimal_text():
    costs = Costs.of(PAPER)
    # 1.6773e-7 ms has the finest digits: units of 1e-11 ms per layer, 32 layers. A token's 0.00191
    # ms are 191,000,000 of them. A unit of all layers is 32 x 1e-14 s.
    assert costs["prefill_square"] == 16773
    assert costs["token"] == 191_000_000
    assert float(costs.unit_s) == pytest.approx(32e-14)


def test_a_bound_in_floats_is_not_rounded_up_beyond_the_integer_that_it_is():
    # CP-SAT was seen to prove 12064 units as 12064.000000000002; 12065 would exclude the optimum.
    assert UNITS.level(12064.0000001) == 12064
    assert UNITS.level(12064.2) == 12065
    assert UNITS.level(None) is None


def test_arrivals_are_no_coarser_than_costs():
    # ODD's own unit is 0.5 us; an arrival of 0.02243317 s must not be rounded down to it.
    instance = Instance([0.02243317], [4], [2], 7, time_unit="second", hybrid_batching=False)
    answer = run(instance, "cpsat", "makespan", "tel", cost=ODD)
    assert answer.bound == pytest.approx(answer.objective, rel=1e-10)


def test_batches_needed_by_kv_volume_and_bin_packing():
    # Two requests of 3 tokens and prompt 3, M = 6: KV 3, 4, 5 each; any two beyond the first
    # pair (3 + 3) exceed 6, so 5 batches (2 + 2 more of 4 and 5, each alone).
    task = Task(fixed(2, 3, 3, 6), PAPER, ("makespan",))
    # And at least 1 of the batches has prefills, which may be that of both.
    assert batches_needed(problem(task)) == (5, 1)


def test_methods_agree_on_costs_too_fine_for_64_bits():
    # 23 decimals: in units of the last one, costs have more than 64 bits.
    text = {"token": "0.00191000000000000000001", "base": "0.0648", "prefill_base": "0.0926"}
    cost = BatchCost("fine", 32, text)
    instance = fixed(3, 2, 3)
    values = [run(instance, m, cost=cost).objective for m in ("labels", "cpsat")]
    assert values == pytest.approx([values[0]] * 2, rel=1e-9)


def test_the_export_refuses_arrivals_that_it_would_drop(tmp_path: Path) -> None:
    instance = Instance(
        [0.0, 0.01], [2, 2], [2, 1], kv_capacity=6, time_unit="second", kv_accounting="cached"
    )
    cost = load_cost_model("llama2-7b-a100-infermax-paper")
    with pytest.raises(UsageError, match="arrive at different times"):
        model(Problem(instance, cost, "makespan")).write(tmp_path / "model.lp")
    assert not list(tmp_path.iterdir())
