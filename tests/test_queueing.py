"""Queueing theory of TRAIL: formulas against classic results, enumeration and simulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from optsched_studies.queueing import (
    Jobs,
    Sizes,
    exponential,
    exponential_predictions,
    joint,
    learned,
    mean_memory,
    mean_response_time,
    perfect,
    refined_jobs,
    refined_response_time,
    response_time,
    simulate_queue,
    simulate_refined,
    weibull,
)
from optsched_studies.queueing.events import limited_preemption, stepwise_ranks
from optsched_studies.queueing.refined import components
from optsched_studies.queueing.simulation import estimate

from optsched.experiments.runner import run_experiment
from optsched.problem.errors import InputError

Floats = NDArray[np.float64]

# Exponential sizes of mean 1, with right predictions, and with exponential ones of mean x.
PERFECT = perfect(exponential())
NOISY = exponential_predictions(exponential())


def independent(mean: float) -> Jobs:
    """Exponential sizes; predictions that tell nothing."""
    return joint(lambda x, r: np.exp(-x - r / mean) / mean)


# --- formulas -----------------------------------------------------------------------------------


def test_with_perfect_predictions_c_1_is_srpt() -> None:
    # Schrage and Miller for exponential sizes: rho_x = lambda (1 - (1 + x) e^-x), and
    # E[T(x)] = lambda (int_0^x t^2 e^-t dt + x^2 e^-x) / (2 (1 - rho_x)^2)
    #           + int_0^x dt / (1 - rho_t).
    rate = 0.8
    x = np.linspace(0, 40, 400_001)
    slower = 1 / (1 - rate * (1 - (1 + x) * np.exp(-x)))
    served = np.append(0, np.cumsum((slower[1:] + slower[:-1]) / 2 * np.diff(x)))
    second = 2 - (x * x + 2 * x + 2) * np.exp(-x)
    total = rate * (second + x * x * np.exp(-x)) / 2 * slower**2 + served
    known = np.trapezoid(total * np.exp(-x), x)
    assert mean_response_time(PERFECT, rate=rate, c=1) == pytest.approx(known, rel=1e-6)
    at = response_time([0.5, 2.0], [0.5, 2.0], PERFECT, rate=rate, c=1)
    assert at == pytest.approx(np.interp([0.5, 2.0], x, total), rel=1e-6)


def test_with_perfect_predictions_c_0_is_shortest_job_first() -> None:
    # Phipps: E[T] = lambda E[X^2] / 2 * int f / (1 - rho_x)^2 + E[X].
    rate = 0.8
    x = np.linspace(0, 40, 400_001)
    rho = rate * (1 - (1 + x) * np.exp(-x))
    known = rate * np.trapezoid(np.exp(-x) / (1 - rho) ** 2, x) + 1
    assert mean_response_time(PERFECT, rate=rate, c=0) == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize("mean", [0.1, 1.0, 5.0])
def test_without_preemption_uninformative_predictions_are_as_good_as_fcfs(mean: float) -> None:
    # The order does not depend on the sizes, so that Pollaczek-Khinchine gives the mean:
    # 1 + lambda E[X^2] / (2 (1 - rho)) = 1 + 0.8 * 2 / 0.4 = 5.
    assert mean_response_time(independent(mean), rate=0.8, c=0) == pytest.approx(5, rel=1e-5)


def test_the_mean_is_the_response_times_weighted_with_the_density() -> None:
    # Another route: E[T(x, r)] on a grid of sizes and predictions.
    r = NOISY.predictions[:, None]
    x = np.exp(np.arange(-10, 4, 0.05))
    # The density e^-x e^(-r / x) / x on grids of logarithms: dx = 0.05 x and dr = r NOISY.spacing.
    weight = np.exp(-x - r / x) * r * NOISY.spacing * 0.05
    for printed in (False, True):
        times = response_time(x, r, NOISY, rate=0.7, c=0.5, printed=printed)
        mean = mean_response_time(NOISY, rate=0.7, c=0.5, printed=printed)
        assert mean == pytest.approx((weight * times).sum(), rel=1e-4)


def test_a_callers_density_and_finer_grids_give_the_same() -> None:
    ours = mean_response_time(NOISY, rate=0.9, c=0.8)
    for step in (0.06, 0.1):
        theirs = joint(lambda x, r: np.exp(-x - r / x) / x, step=step)
        assert mean_response_time(theirs, rate=0.9, c=0.8) == pytest.approx(ours, rel=1e-5)


def test_densities_that_jump_need_their_support() -> None:
    # Sizes uniform on [1, 2] are 1.5 on average, with second moment 7 / 3; predictions on [1, 3]
    # tell nothing: Pollaczek-Khinchine again, 1.5 + 0.5 * (7 / 3) / (2 (1 - 0.75)).
    jobs = joint(
        lambda x, r: 0.5 * ((x >= 1) & (x <= 2) & (r >= 1) & (r <= 3)), support=((1, 2), (1, 3))
    )
    assert jobs.moments == pytest.approx((1, 1.5, 7 / 3), rel=1e-6)
    known = 1.5 + 0.5 * 7 / 3 / (2 * 0.25)
    assert mean_response_time(jobs, rate=0.5, c=0) == pytest.approx(known, rel=1e-5)
    # A prediction below all others waits for the rest of what is running only:
    # W = 0.5 * (7 / 3) / 2 without preemption.
    early = response_time(1.0, 0.5, jobs, rate=0.5, c=0)
    assert early == pytest.approx(1 + 0.5 * 7 / 3 / 2, rel=1e-5)
    # SRPT with sizes uniform on [0, 2]: rho_x = lambda x^2 / 4. The first term is
    # the wait, and ``served`` the time in service (Schrage and Miller, as for exponential sizes).
    sizes = Sizes(lambda x: 0.5 * (x <= 2), lambda generator, n: generator.uniform(0, 2, n))
    x = np.linspace(0, 2, 100_001)
    slower = 1 / (1 - 0.8 * x * x / 4)
    served = np.append(0, np.cumsum((slower[1:] + slower[:-1]) / 2 * np.diff(x)))
    total = 0.8 * (x**3 / 6 + x * x * (1 - x / 2)) / 2 * slower**2 + served
    found = mean_response_time(perfect(sizes, support=(0, 2)), rate=0.8, c=1)
    assert found == pytest.approx(np.trapezoid(total / 2, x), rel=1e-4)


def test_predictions_with_little_noise_approach_perfect_ones() -> None:
    """Predictions are lognormal around the size. Half of the spread leaves less than half of
    what is lost to perfect predictions, and a spread of 0.4 loses less than a tenth."""

    def off(sigma: float) -> float:
        jobs = joint(
            lambda x, r: (
                np.exp(-x - (np.log(r / x) / sigma) ** 2 / 2) / (r * sigma * math.sqrt(2 * math.pi))
            ),
            step=sigma / 2,
        )
        found = mean_response_time(jobs, rate=0.8, c=0.5)
        return found / mean_response_time(PERFECT, rate=0.8, c=0.5) - 1

    assert 0 < off(0.2) < off(0.4) / 2 < 0.05


@pytest.mark.parametrize("shape", [0.4, 0.5, 1.0, 3.0])
def test_quadrature_keeps_the_moments_of_sizes(shape: float) -> None:
    # E[X^2] = Gamma(1 + 2 / k) / Gamma(1 + 1 / k)^2 for mean 1; shape 0.5 has 1.4e-4 of its mass
    # below 1e-8.
    square = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2
    for jobs in (perfect(weibull(shape)), exponential_predictions(weibull(shape))):
        assert jobs.moments == pytest.approx((1, 1, square), rel=1e-5)


def test_the_unit_of_time_scales_everything() -> None:
    """Sizes of mean 700 at 0.8 / 700: times and memory are 700 times those of mean 1 at 0.8."""
    jobs = exponential_predictions(exponential(mean=700.0))
    mean = mean_response_time(jobs, rate=0.8 / 700, c=0.5)
    assert mean / 700 == pytest.approx(mean_response_time(NOISY, rate=0.8, c=0.5), rel=1e-6)
    memory = mean_memory(jobs, rate=0.8 / 700, c=0.5) / 700
    assert memory == pytest.approx(mean_memory(NOISY, rate=0.8, c=0.5), rel=1e-6)


def test_without_preemption_only_the_running_job_holds_memory() -> None:
    # Rate lambda times E[integral of its age] = lambda E[X^2] / 2 = 0.8.
    assert mean_memory(NOISY, rate=0.8, c=0) == pytest.approx(0.8, rel=1e-6)
    found = [mean_memory(NOISY, rate=0.8, c=c) for c in (0.2, 0.5, 1.0)]
    assert 0.8 < found[0] < found[1] < found[2]


# --- simulation ---------------------------------------------------------------------------------


def least_rank_first(
    arrival: Floats, size: Floats, rank: Callable[[int, float], float], unit: bool = False
) -> Floats:
    """Serve the job of least (rank, arrival) at every event; a unit of service is one, if told."""
    n = len(arrival)
    age, response = np.zeros(n), np.zeros(n)
    present: list[int] = []
    clock, known = 0.0, 0
    while present or known < n:
        job = min(present, key=lambda i: (rank(i, age[i]), i), default=None)
        until = arrival[known] if known < n else math.inf
        if job is not None:
            step = size[job] - age[job]
            if unit:
                step = min(step, math.floor(age[job] + 1e-9) + 1 - age[job])
            until = min(until, clock + step)
            age[job] += until - clock
        clock = until
        if job is not None and age[job] > size[job] - 1e-9:
            response[job] = clock - arrival[job]
            present.remove(job)
        elif known < n and clock == arrival[known]:
            present.append(known)
            known += 1
    return response


@pytest.mark.parametrize("c", [0.0, 0.3, 0.8, 1.0])
def test_the_compiled_queue_is_the_readable_one(c: float) -> None:
    """Against `least_rank_first`, which serves by the definition, event by event."""
    # A load of 0.9; both sum up to 600 floats, in another order.
    rng = np.random.default_rng(0)
    n = 600
    arrival = np.cumsum(rng.exponential(1 / 0.9, n))
    size = rng.exponential(size=n)
    prediction = size * rng.exponential(size=n)

    def rank(job: int, age: float) -> float:
        # Nothing is preempted once it has begun at C = 0: its rank is r only before.
        free = age == 0 or age < c * prediction[job]
        return prediction[job] - age if free else -math.inf

    found = limited_preemption(arrival, size, prediction, c, 0, n - 1)[0]
    assert found == pytest.approx(least_rank_first(arrival, size, rank), abs=1e-7)


def test_the_compiled_queue_with_refinement_is_the_readable_one() -> None:
    """Against `least_rank_first`, which serves by the definition, event by event."""
    rng = np.random.default_rng(1)
    n = 400
    # Sizes are 1 to 6 with these shares, 3.2 in the mean: a load of 3.2 / 3.6.
    size, ranks = learned([0.3, 0.1, 0.2, 0.1, 0.1, 0.2], 0.3).draw(rng, n)
    arrival = np.cumsum(rng.exponential(3.6, n))
    at = np.cumsum(size) - size

    def rank(job: int, age: float) -> float:
        return float(ranks[at[job] + math.floor(age + 1e-9)])

    found = stepwise_ranks(arrival, size, ranks, 0, n - 1)[0]
    readable = least_rank_first(arrival, size.astype(np.float64), rank, unit=True)
    assert found == pytest.approx(readable, abs=1e-7)


@pytest.mark.parametrize("c", [0.0, 0.5, 1.0])
def test_equal_predictions_are_first_come_first_served(c: float) -> None:
    """Against the recursion of a queue in order of arrival: each begins when the last one ends."""
    # Load 1 / 1.2. Every prediction is 3, and jobs 0 to n - 1, all, are looked at. Finish times are
    # sums of up to 2,000 floats, so the last digits differ.
    rng = np.random.default_rng(2)
    n = 2000
    arrival, size = np.cumsum(rng.exponential(1.2, n)), rng.exponential(size=n)
    finish, last = [], 0.0
    for a, x in zip(arrival, size, strict=True):
        last = max(last, a) + x
        finish.append(last)
    found = limited_preemption(arrival, size, np.full(n, 3.0), c, 0, n - 1)[0]
    assert found == pytest.approx(np.array(finish) - arrival, abs=1e-7)


def test_memory_of_two_jobs_by_hand() -> None:
    # Job 0 (size 4, prediction 4) from 0; job 1 (size 1) at 2 preempts it (1 < 4 - 2), ends at 3;
    # job 0 ends at 5; job 2 comes at 10. Ages sum to 0..2, 2..3, 2..4: areas 2, 2.5, 6; peak 4.
    arrival, size = np.array([0.0, 2.0, 10.0]), np.array([4.0, 1.0, 1.0])
    response, mean, peak = limited_preemption(arrival, size, size, 1.0, 0, 2)
    assert response.tolist() == [5.0, 1.0, 1.0]
    assert (mean, peak) == (pytest.approx(10.5 / 10), 4.0)  # 2 + 2.5 + 6 over 10 s
    # With C = 0.5 job 0 may no longer be preempted at age 2.
    assert limited_preemption(arrival, size, size, 0.5, 0, 2)[0].tolist() == [4.0, 3.0, 1.0]


@pytest.mark.parametrize(
    ("jobs", "rate", "c", "printed_is_off"),
    [
        (PERFECT, 0.8, 0.5, -0.13),  # 2.100 printed, 2.429 corrected
        (PERFECT, 0.8, 1.0, -0.10),
        (NOISY, 0.8, 0.2, -0.13),
        (exponential_predictions(weibull(2.0)), 0.7, 0.8, 0.05),
        (perfect(weibull(0.5)), 0.7, 0.5, -0.28),
    ],
    ids=["perfect-0.5", "perfect-1", "exponential-0.2", "weibull-2-exponential", "weibull-0.5"],
)
def test_the_corrected_lemma_meets_simulation_and_the_printed_one_does_not(
    jobs: Jobs, rate: float, c: float, printed_is_off: float
) -> None:
    """Jobs (of mean size 1, so the rate is the load), C, and by what share the printed lemma is
    off."""
    found = simulate_queue(
        jobs, rate=rate, c=c, generator=np.random.default_rng(5), arrivals=25_000, replications=30
    )
    ours = mean_response_time(jobs, rate=rate, c=c)
    assert found.response_time.half_width < 0.01 * ours  # so that 1 % can be told
    assert found.response_time.mean == pytest.approx(ours, rel=0.01)
    assert found.mean_memory.mean == pytest.approx(mean_memory(jobs, rate=rate, c=c), rel=0.03)
    printed = mean_response_time(jobs, rate=rate, c=c, printed=True)
    # Each printed value is off by 0.05 or more.
    assert printed / ours - 1 == pytest.approx(printed_is_off, abs=0.02)


def test_response_times_of_jobs_that_were_predicted_too_short_and_too_long() -> None:
    rng = np.random.default_rng(8)
    n = 1_000_000
    size, prediction = NOISY.draw(rng, n)  # type: ignore[misc]
    # Load 0.6, and C = 0.5.
    arrival = np.cumsum(rng.exponential(1 / 0.6, n))
    response = limited_preemption(arrival, size, prediction, 0.5, 0, n - 1)[0]
    for group in (size > 2 * prediction, 2 * size < prediction):
        # The formula at 3000 of them, scaled to all by what it mostly depends on.
        some = np.flatnonzero(group)[:3000]
        formula = response_time(size[some], prediction[some], NOISY, rate=0.6, c=0.5)
        scale = size + prediction
        expected = formula.mean() * scale[group].mean() / scale[some].mean()
        assert response[group].mean() == pytest.approx(expected, rel=0.03)  # scaled, so roughly


def test_the_same_generator_gives_the_same_numbers() -> None:
    first, second = (
        simulate_queue(
            NOISY, rate=0.5, c=1, generator=np.random.default_rng(3), arrivals=500, replications=3
        )
        for _ in range(2)
    )
    assert first == second


def test_a_control_variate_explains_what_it_explains() -> None:
    control = np.array([1.0, 2.0, 4.0, 7.0])
    found = estimate(3 + 2 * (control - 5), control, expected=5.0)
    assert (found.mean, found.half_width) == (pytest.approx(3.0), pytest.approx(0.0, abs=1e-9))
    # Without it: mean 3.5, standard deviation sqrt(21 / 3) * 2 = 5.29, Student's t(3) 3.182446.
    plain = estimate(3 + 2 * (control - 5))
    assert plain.mean == 0.0
    assert plain.half_width == pytest.approx(3.182446 * 2 * math.sqrt(21 / 3) / 2)


# --- refined predictions ------------------------------------------------------------------------


def test_soap_components_are_the_papers_sums_over_all_lists_of_predictions() -> None:
    """Jobs of 1 to 4 units, and 3 predictions after each unit: all lists, 3^4 at most, are
    tried, each with its probability p."""
    rng = np.random.default_rng(4)
    n, k = 4, 3

    def shares(*shape: int) -> Floats:
        drawn = rng.random(shape)
        return np.asarray(drawn / drawn.sum(axis=-1, keepdims=True))

    jobs = refined_jobs(shares(n), [1, 2.5, 4], shares(n, k), shares(n, k, k))
    found = components(jobs)
    for at, r in enumerate(found.ranks):
        new = original = squares = 0.0
        for size in range(1, n + 1):
            for states in itertools.product(range(k), repeat=size):
                p = jobs.shares[size - 1] * jobs.initial[size - 1, states[0]]
                for before, after in itertools.pairwise(states):
                    p *= jobs.steps[size - 1, before, after]
                ranks = [jobs.values[state] - age for age, state in enumerate(states)]
                new += p * next((a for a, v in enumerate(ranks) if v >= r), size)
                original += p * next((a for a, v in enumerate(ranks) if v > r), size)
                runs = itertools.groupby(v <= r for v in ranks)
                squares += p * sum(len(list(run)) ** 2 for low, run in runs if low)
        assert found.new[at] == pytest.approx(new)
        assert found.original[at] == pytest.approx(original)
        assert found.squares[at] == pytest.approx(squares)


def test_one_possible_prediction_is_first_come_first_served() -> None:
    # Ranks v - a only fall: Pollaczek-Khinchine with E[X] = 2.1 and
    # E[X^2] = 0.3 + 0.3 * 4 + 0.4 * 9 = 5.1.
    jobs = refined_jobs([0.3, 0.3, 0.4], [2], [1], [[1]])
    assert refined_response_time(jobs, rate=0.3) == pytest.approx(
        2.1 + 0.3 * 5.1 / (2 * (1 - 0.63))
    )


def test_exact_predictions_of_units_are_srpt_in_steps() -> None:
    # Two sizes, exact: rank x - a. Size 1 (share 0.5) waits for the rest of a unit... of a job of
    # rank 1 only. X_0^old[1] = 1 w.p. 0.5; size 2 is recycled for its last unit w.p. 0.5:
    # W(1) = lambda (0.5 + 0.5) / (2 (1 - 0.5 lambda)), new jobs below rank 1: none.
    # W(2) = lambda (0.5 + 0.5 * 4) / (2 (1 - 1.5 lambda)(1 - 0.5 lambda)); its first unit is
    # stretched by 1 / (1 - 0.5 lambda), its second by nothing.
    rate = 0.4
    jobs = refined_jobs([0.5, 0.5], [1, 2], np.eye(2), np.eye(2))
    first = rate * 1.0 / (2 * (1 - 0.2)) + 1
    second = rate * 2.5 / (2 * (1 - 0.6) * (1 - 0.2)) + 1 / (1 - 0.2) + 1
    assert refined_response_time(jobs, rate=rate) == pytest.approx((first + second) / 2)


@pytest.mark.parametrize(("n", "hit", "load"), [(4, 0.5, 0.8), (12, 0.2, 0.7), (12, 0.0, 0.7)])
def test_the_refined_formula_meets_simulation(n: int, hit: float, load: float) -> None:
    """Jobs have sizes 1 to n with shares n, n - 1, ..., 1; a unit of service reveals the size
    with probability `hit`."""
    jobs = learned(np.arange(n, 0, -1) / (n * (n + 1) / 2), hit)
    rate = load / jobs.mean
    found = simulate_refined(
        jobs, rate=rate, generator=np.random.default_rng(6), arrivals=20_000, replications=30
    ).response_time
    assert found.half_width < 0.01 * found.mean  # so that 1 % can be told
    assert found.mean == pytest.approx(refined_response_time(jobs, rate=rate), rel=0.01)


def test_refinement_helps() -> None:
    times = [
        refined_response_time(learned(np.full(10, 0.1), hit), rate=0.15) for hit in (0, 0.2, 1)
    ]
    assert times[0] > times[1] > times[2]


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mean_response_time(PERFECT, rate=0.8, c=1.1), "c: found 1.1; expected 0 <= C"),
        (lambda: mean_response_time(PERFECT, rate=0.8, c=-0.1), "c: found -0.1"),
        (lambda: mean_response_time(PERFECT, rate=0.8, c=math.nan), "c: found nan"),
        (lambda: mean_response_time(PERFECT, rate=1.0, c=1), "found 1.0, a load of 1; expected"),
        (lambda: mean_memory(PERFECT, rate=0.0, c=1), "rate: found 0.0, a load of 0"),
        (lambda: mean_memory(perfect(exponential(2.0)), rate=0.7, c=1), "below 0.5"),
        (lambda: mean_response_time(PERFECT, rate=math.nan, c=1), "rate: found nan"),
        (lambda: response_time(-1, 1, PERFECT, rate=0.5, c=1), "x: found -1; expected finite"),
        (lambda: response_time(1, [1, math.inf], PERFECT, rate=0.5, c=1), "r: found inf; expected"),
        (lambda: weibull(0.1), "shape: found 0.1; expected 0.3 <= shape <= 20"),
        (lambda: exponential(0.0), "mean: found 0.0; expected a number > 0"),
        (lambda: perfect(exponential(), step=0.5), "step: found 0.5"),
        (lambda: joint(lambda x, r: 2 * np.exp(-x - r)), "an integral of 2; expected 1"),
        (lambda: joint(lambda x, r: -np.exp(-x - r)), "found -.*; expected finite numbers >= 0"),
        (lambda: joint(lambda x, r: np.exp(-x - r) * math.nan), "finite numbers"),
        (lambda: joint(lambda x, r: np.exp(-x)), "expected one value for each"),
        (lambda: joint(lambda x, r: 0 * x * r), r"0 at all points from exp\(-40\)"),
        (
            lambda: perfect(Sizes(lambda x: 1e3 * (abs(x - 1) < 5e-4), exponential().sample)),
            "a smaller step where the density is narrow",
        ),
        (lambda: joint(lambda x, r: np.exp(-r) / (1 + x) ** 2), r"E\[X\^2\] to be infinite"),
        (
            lambda: joint(lambda x, r: np.exp(-x) * (np.abs(r - x) < 1e-3) / 2e-3),
            "a step below 0.05 where the density is narrow",
        ),
        (
            lambda: perfect(exponential(), support=(2, 1)),
            r"support: found \(2, 1\); expected 0 <= smallest < largest",
        ),
        (
            lambda: joint(lambda x, r: np.exp(-x - r), support=((0, 1), (0, 9))),
            "an integral of 0.632",
        ),
        (lambda: learned([0.5, 0.5], 1.5), "hit: found 1.5"),
        (lambda: learned([0.5, 0.6], 0.5), "shares: found a sum of 1.1; expected 1"),
        (lambda: refined_jobs([1.0], [1, 2], [0.5, 0.6], np.eye(2)), "initial: found a sum of 1.1"),
        (lambda: refined_jobs([1.0], [1, 2], [1, 0], np.eye(3)), r"steps: found shape \(3, 3\)"),
        (lambda: refined_jobs([1.0], [1, 2], [2, -1], np.eye(2)), "initial: found -1; expected"),
        (lambda: refined_jobs([1.0], [math.nan], [1], [[1]]), "expected two flat lists"),
        (lambda: refined_response_time(learned([1.0], 0), rate=1.2), "found 1.2, a load of 1.2"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("jobs", "options", "message"),
    [
        (NOISY, {"rate": 1.5}, "rate: found 1.5, a load of 1.5"),
        (NOISY, {"c": 2}, "c: found 2; expected 0 <= C <= 1"),
        (NOISY, {"arrivals": 10}, "found 10, 3; expected at least 100 and 3"),
        (NOISY, {"replications": 2}, "expected at least 100 and 3"),
        (independent(1.0), {}, "no draw to simulate them"),
        (joint(lambda x, r: np.exp(-x - r), lambda g, n: np.ones(n)), {}, "expected a pair"),
        (
            joint(lambda x, r: np.exp(-x - r), lambda g, n: (np.ones(n), np.zeros(n))),
            {},
            "draw: found 0 among predictions; expected numbers > 0",
        ),
    ],
)
def test_bad_simulations_are_one_line(jobs: Jobs, options: dict, message: str) -> None:
    settings = {"rate": 0.5, "c": 0.5, "arrivals": 100, "replications": 3, **options}
    with pytest.raises(InputError, match=message):
        simulate_queue(jobs, generator=np.random.default_rng(0), **settings)


# --- experiments --------------------------------------------------------------------------------


def test_the_experiments_hold_formulas_against_simulation() -> None:
    small = {"arrivals": 5000, "replications": 10}
    lemma = run_experiment(
        "trail-lemma-1", {"shape": [1.0], "load": [0.6], "c": [0.2, 1.0], **small}
    )
    assert [(row["predictions"], row["c"]) for row in lemma.rows] == [
        ("perfect", 0.2), ("perfect", 1.0), ("exponential", 0.2), ("exponential", 1.0),
    ]  # fmt: skip
    for row in lemma.rows:
        assert row["error"] is None
        # The simulation's confidence interval, twice as wide, holds the formula.
        assert abs(row["corrected"] - row["simulated"]) < 2 * row["half_width"]
        assert row["corrected_error"] == row["corrected"] / row["simulated"] - 1
    refined = run_experiment("trail-refined", {"load": [0.6], "hit": [0.0, 1.0], **small})
    for row in refined.rows:
        assert abs(row["soap"] - row["simulated"]) < 2 * row["half_width"]
    # One trial of two: what needs both is left out.
    assert run_experiment("trail-lemma-1", {"shape": [1.0], **small}, trials=1).claims


def test_an_experiments_bad_values_are_one_line() -> None:
    with pytest.raises(InputError, match=r"predictions:.*'good'"):
        run_experiment("trail-lemma-1", {"predictions": "good"})
    row = run_experiment("trail-lemma-1", {"load": [1.5]}, trials=1).rows[0]
    assert row["error"].startswith("rate: found 1.5, a load of 1.5")
