"""Noise of a machine from launches of one cell, and what follows from it for thresholds and numbers of launches."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from statistics import NormalDist, fmean, stdev, variance
from typing import TYPE_CHECKING

from benchbox import __version__
from benchbox.analysis.inference import ALPHA, RELEVANT, Effect, estimate_effect, launches_to_settle
from benchbox.analysis.run_environments import (
    latest_environment,
    mixed_environment,
    run_differences,
    same_environment,
    steps_difference,
)
from benchbox.analysis.summary import matrix_text
from benchbox.errors import RecordError
from benchbox.registry.metrics import metric_by_name
from benchbox.store.noise import Noise, NoiseRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from benchbox.analysis.summary import CellSummary

OF_STEP_TIMES = ("step_time_s", "global_samples_per_s", "mfu", "hfu")  # metrics that a noise floor is of
NO_RANKS = 0  # in place of a number of ranks that is not known
POWER = 0.9  # probability with which a difference of the noise floor is found
MIN_LAUNCHES = 2 * 5  # of both halves: with fewer there is no interval
# Fewer say too little about the drift between runs: in simulations with 3, equal runs differed by more than the noise floor in
# up to 1.3%, with 4 in up to 0.8% (12 launches of each, 5 to 20 of the compared runs, any share of drift).
MIN_NOISE_RUNS = 4


def split_launches(values: Mapping[int, float]) -> tuple[dict[int, float], dict[int, float]]:
    """Return odd and even launches, by round: A and B of an A/A comparison.

    Unlike two cells, which take turns to be first in a round, odd launches always are: a steady drift shows as a difference.
    """
    return (
        {(number + 1) // 2: value for number, value in values.items() if number % 2},
        {number // 2: value for number, value in values.items() if number % 2 == 0},
    )


def measure_noise(summary: CellSummary, cell: str, measure: Mapping[str, Any]) -> tuple[Noise, Effect]:
    """Return the noise of a cell's launches as one run, and the A/A comparison of their halves.

    Args:
        cell: its name in texts.
        measure: how launches are measured, by names for texts. Only runs that agree in it are compared.

    Raises:
        RecordError: fewer launches ended ok than a comparison needs, or they differ in their versions.
    """
    if mixed := mixed_environment(summary.ok, cell):
        raise RecordError(f"{'; '.join(mixed.values())}: measure all of them in another run directory, --out DIR")
    values = summary.by_launch(metric_by_name("step_time_s"))
    if len(values) < MIN_LAUNCHES:
        raise RecordError(f"{len(values)} launches of {cell} ended ok, and {MIN_LAUNCHES} are needed to measure noise")
    effect = estimate_effect(*split_launches(values))
    logarithms = [math.log(value) for value in values.values()]
    run = NoiseRun(
        started_at=min(record["started_at"] for record in summary.ok),
        launches=len(values),
        mean=fmean(logarithms),
        sigma=stdev(logarithms),
        setup={
            "cell": cell,
            "cell id": summary.cell_id,
            **measure,
            **same_environment(latest_environment(summary.ok)),
        },
    )
    noise = Noise(
        sigma=run.sigma,
        launches=run.launches,
        ratio=effect.ratio,
        cell=cell,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        benchbox_version=__version__,
        runs=(run,),
    )
    return noise, effect


def with_earlier_runs(noise: Noise, earlier: Noise | None) -> tuple[Noise, str | None]:
    """Return the noise of a run together with those before it, and why some of these are not counted.

    Those of another cell, environment or source are kept apart, and count again when a run is of their set-up. A run
    with the same first launch is the same one, of which more launches are there now.
    """
    (latest,) = noise.runs
    before = {} if earlier is None else {run.started_at: run for run in (*earlier.runs, *earlier.other_runs)}
    known = before | {latest.started_at: latest}
    ordered = [known[started_at] for started_at in sorted(known)]
    differences = {run.started_at: _difference(run, latest) for run in ordered}
    runs = tuple(run for run in ordered if differences[run.started_at] is None)
    others = tuple(run for run in ordered if differences[run.started_at] is not None)
    degrees = [run.launches - 1 for run in runs]
    within = sum(count * run.sigma**2 for count, run in zip(degrees, runs, strict=True)) / sum(degrees)
    pooled = replace(
        noise,
        sigma=math.sqrt(within),
        launches=sum(run.launches for run in runs),
        runs=runs,
        other_runs=others,
    )
    return pooled, differences[others[-1].started_at] if others else None


def _difference(earlier: NoiseRun, latest: NoiseRun) -> str | None:
    """Return in what the set-ups of two runs differ; what one of them does not know is no difference."""
    for name in (*latest.setup, *earlier.setup):
        sides = earlier.setup.get(name), latest.setup.get(name)
        if None not in sides and sides[0] != sides[1]:
            return f"{name} {matrix_text(sides[0])} against {matrix_text(sides[1])}"
    return None


def why_not_used(noise: Noise, environments: Mapping[int, Mapping[str, Any]], measure: Mapping[str, Any]) -> str | None:
    """Return in what the launches of a noise floor differ from those of a run; None if in nothing that both know.

    Args:
        environments: of the run, by number of ranks.
        measure: how the run was measured.
    """
    setup = noise.runs[-1].setup if noise.runs else {}
    differences = list(run_differences(environments, {NO_RANKS: setup}).values())
    theirs = {"steps": setup.get("steps"), "warmup_steps": setup.get("warm-up steps")}
    return "; ".join(filter(None, [*differences, steps_difference(measure, theirs)])) or None


def describe_span(runs: Sequence[NoiseRun]) -> str:
    """Return the time from the first run to the last in words."""
    first, last = (datetime.fromisoformat(runs[index].started_at) for index in (0, -1))
    hours = (last - first).total_seconds() / 3600
    return f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.1f} hours"


def drift(runs: Sequence[NoiseRun]) -> float | None:
    """Return the standard deviation between runs that their launches do not explain, or None of fewer than two.

    It is of logarithms, such as 0.01 for 1%: the component between groups of a one-way analysis of variance.
    """
    if len(runs) < 2:
        return None
    between = variance([run.mean for run in runs])
    explained = fmean(run.sigma**2 / run.launches for run in runs)
    return math.sqrt(max(0.0, between - explained))


def noise_floor(noise: Noise, launches: int) -> float:
    """Return the relative difference of two runs with these launches each that is no difference of what they measured.

    It is at least the smallest difference that launches of one run show. From `MIN_NOISE_RUNS` runs on it contains the drift
    of the machine between runs. A run's mean then varies by what the means of runs vary by, corrected for the number of
    launches, with the degrees of freedom of Welch and Satterthwaite (Satterthwaite, Biometrics Bulletin 2, 1946), and never by
    less than its launches do.
    """
    of_launches = smallest_difference(noise.sigma, launches)
    if len(noise.runs) < MIN_NOISE_RUNS:
        return of_launches
    within = noise.sigma**2
    between = variance([run.mean for run in noise.runs])
    correction = within * (1 / launches - fmean(1 / run.launches for run in noise.runs))
    of_a_run = max(within / launches, between + correction)
    between_freedom = len(noise.runs) - 1
    within_freedom = noise.launches - len(noise.runs)
    uncertainty = between**2 / between_freedom + correction**2 / within_freedom
    freedom = max(between_freedom, of_a_run**2 / uncertainty) if uncertainty else within_freedom
    return max(of_launches, math.exp(_deviations_of_t(freedom) * math.sqrt(2 * of_a_run)) - 1)


def smallest_difference(sigma: float, launches: int) -> float:
    """Return the smallest relative difference that launches of two runs show with probability `POWER`, at `ALPHA`.

    exp((t(1 - alpha / 2) + t(power)) * sigma * sqrt(2 / n)) - 1 with 2n - 2 degrees of freedom: the sample-size formula of a
    two-sample t test (Lachin, Controlled Clinical Trials 2, 1981), for logarithms of step times. It is approximate, because
    verdicts come from exact tests. For 5 to 8 launches, where these need a larger difference, the sum is simulated.
    """
    fewest = max(launches, launches_to_settle())
    deviations = _SIMULATED.get(fewest) or _deviations_of_t(2 * fewest - 2)
    return _relative(deviations, sigma, launches)


def settled_difference(sigma: float, launches: int) -> float:
    """Return the smallest relative difference of two cells that launches of a run settle with probability `POWER`.

    They must show it, and their estimate must be relevant, which that of a difference of `RELEVANT` is half of the time.
    """
    deviations = NormalDist().inv_cdf(POWER)
    relevant = (1 + RELEVANT) * (1 + _relative(deviations, sigma, launches)) - 1
    return max(relevant, smallest_difference(sigma, launches), _relative(_deviations_of_rounds(launches), sigma, launches))


def launches_for(sigma: float, difference: float) -> int:
    """Return the launches of each of two equal cells of a run that settle that they differ by less than `difference`.

    With them, the interval of the ratio is within it with probability `POWER`.
    """
    central = (1 + POWER) / 2  # the estimate may be on either side
    # A normal distribution asks for fewer.
    normal = NormalDist().inv_cdf(1 - ALPHA / 2) + NormalDist().inv_cdf(central)
    launches = max(launches_to_settle(), math.floor(2 * (normal * sigma / math.log(1 + difference)) ** 2))
    while True:
        deviations = _SIMULATED_EQUAL.get(launches) or _deviations_of_rounds(launches, central)
        if _relative(deviations, sigma, launches) <= difference:
            return launches
        launches += 1


# Standard errors of a difference that the exact test finds with probability `POWER` in normal noise, by number of launches.
# Found in 40,000, 20,000, 8,000 and 4,000 simulated comparisons.
_SIMULATED = {5: 5.76, 6: 5.03, 7: 4.64, 8: 4.48}
# Standard errors within which the interval of two equal cells is with probability `POWER`, where they are more than t says: of
# 40,000, 20,000, 8,000, 4,000 and 2,000 simulated comparisons.
_SIMULATED_EQUAL = {5: 6.32, 6: 5.49, 7: 5.11, 8: 4.95, 10: 5.46}
_MIN_ROUNDS = 10  # launches of each cell of a run from which on they are exchanged within rounds


def _relative(deviations: float, sigma: float, launches: int) -> float:
    """Return so many standard errors of a difference of logarithms as a relative difference."""
    return math.exp(deviations * sigma * math.sqrt(2 / launches)) - 1


def _deviations_of_rounds(launches: int, power: float = POWER) -> float:
    """Return the standard errors of a difference that the test of two cells of a run finds. A round has one difference."""
    return _deviations_of_t(launches - 1 if launches >= _MIN_ROUNDS else 2 * launches - 2, power)


def _deviations_of_t(freedom: float, power: float = POWER) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - ALPHA / 2) + stdtrit(freedom, power))


def describe_missing_floor(noises: Mapping[str, Noise], matrix_file: str) -> str:
    """Return that the noise floor of a matrix was not measured, which ones of this machine are not used, and the remedy."""
    others = f" for this matrix (that of {', '.join(sorted(noises))} is of other cells and not used)" if noises else ""
    return f"not measured{others}; `benchbox noise {matrix_file}` measures it"


def describe_floor(noise: Noise, launches: int) -> str:
    """Return the noise floor in words, and of how many runs it is where they say nothing about drift yet."""
    text = f"{noise_floor(noise, launches):.1%} with {launches} launches"
    runs = len(noise.runs)
    if runs >= MIN_NOISE_RUNS:
        return f"{text}, of {runs} runs within {describe_span(noise.runs)}"
    return f"{text}, without the drift between runs: {max(1, runs)} of {MIN_NOISE_RUNS} runs"
