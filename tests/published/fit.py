"""Fits the shipped constants to the shipped runs, and again without each source; prints the proposed constants.

Run from the project's root: ``python -m tests.published.fit``; takes a few minutes. Every fit starts from the priors
(priors.toml): a maximum a posteriori estimate by Gauss-Newton, whose derivatives are taken once at the shipped constants
and whose predictions are the model's own at every step. Nothing is written: constants enter the catalogue by hand.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from pathlib import Path

import numpy as np

from planner import calibrate
from planner.calibrate import Knob, Linear
from planner.cost.arrays import Floats
from planner.measured import Run
from planner.profile import read_profile
from planner.uncertainty import family_weights
from planner.validate import SHIPPED, read_rows, runs_of

PRIORS = Path(__file__).with_name("priors.toml")
ROUNDS = 4
"""Gauss-Newton rounds; the constants move by less than 0.1 % in the last one."""


class Fit:
    """The measured steps, the constants that may move, and the model's derivatives at the shipped ones."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.moving = calibrate.knobs(runs)
        self.measured = np.log([run.step_seconds for run in runs])
        self.families = np.array([run.family for run in runs])
        self.widths = np.array([constant.width for _, _, constant in self.moving])
        self.limits = np.log([constant.most for _, _, constant in self.moving])
        self.centre = prior_centre(runs, self.moving)
        shipped = np.zeros(len(self.moving))
        with multiprocessing.Pool() as pool:
            every = np.array_split(np.arange(len(runs)), 8 * multiprocessing.cpu_count())
            parts = pool.starmap(calibrate.linearise, [([runs[i] for i in part], self.moving, shipped) for part in every])
        self.shipped = Linear(np.concatenate([part.logs for part in parts]), np.concatenate([part.slopes for part in parts]))

    def predicted(self, at: Floats) -> Floats:
        """Logarithms of the step times under constants at ``at``, the logarithms of their ratios to the shipped ones."""
        settings = {calibrate.key_of(knob): float(log) for knob, log in zip(self.moving, at, strict=True)}
        return np.array([calibrate.log_seconds(run, settings) for run in self.runs])

    def constants(self, without: str = "") -> tuple[Floats, Floats]:
        """The fitted constants and their posterior deviations, with one source left out or none."""
        seen = self.families != without
        weights = family_weights(self.families[seen])
        at, logs = np.zeros(len(self.moving)), self.shipped.logs
        for _ in range(ROUNDS):
            linear = Linear(logs[seen], self.shipped.slopes[seen])
            at, deviation = calibrate.solve(linear, at, self.measured[seen], weights, self.widths, self.limits, self.centre)
            logs = self.predicted(at)
        return at, deviation

    def left_out_errors(self, family: str) -> Floats:
        """Logarithmic errors of one source's runs under the constants of a fit that never saw it."""
        at, _ = self.constants(without=family)
        own = self.families == family
        return np.asarray((self.predicted(at) - self.measured)[own])

    def cross_validated(self) -> Floats:
        """Logarithmic error of every run, predicted by a fit that never saw its source."""
        names = np.unique(self.families).tolist()
        with multiprocessing.Pool() as pool:
            parts = pool.map(self.left_out_errors, names, chunksize=1)
        errors = np.zeros(len(self.runs))
        for name, part in zip(names, parts, strict=True):
            errors[self.families == name] = part
        return errors


def prior_centre(runs: list[Run], moving: list[Knob]) -> Floats:
    """Logarithm of each constant's prior over its shipped value."""
    priors = read_profile(PRIORS)
    centre = []
    for kind, name, constant in moving:
        record = next(getattr(run.job, kind) for run in runs if getattr(run.job, kind).name == name)
        now = getattr(record, constant.field)
        centre.append(np.log(priors.get((kind, name), {}).get(constant.field, now) / now))
    return np.array(centre)


def family_median(families: np.ndarray, errors: Floats) -> float:
    """Median over sources of each source's median absolute relative error."""
    relative = np.abs(np.expm1(errors))
    return float(np.median([np.median(relative[families == family]) for family in np.unique(families)]))


def timed_runs() -> list[Run]:
    """The shipped runs that state a step time and did not run out of memory."""
    return [run for run in runs_of(read_rows(SHIPPED), Counter()) if run.step_seconds > 0 and not run.out_of_memory]


def main() -> None:
    """Print the errors before and after the fit, and every constant that it would move by more than 2 %."""
    fit = Fit(timed_runs())
    at, deviation = fit.constants()
    before, after = fit.shipped.logs - fit.measured, fit.predicted(at) - fit.measured
    print(f"family median: shipped {family_median(fit.families, before):.4f}, fitted {family_median(fit.families, after):.4f}")
    for family in np.unique(fit.families):
        own = fit.families == family
        medians = [np.median(np.abs(np.expm1(errors[own]))) for errors in (before, after)]
        print(f"  {family:18} n {own.sum():4}  {medians[0]:.4f} -> {medians[1]:.4f}  bias {np.median(after[own]):+.4f}")
    for (kind, name, constant), log, spread in zip(fit.moving, at, deviation, strict=True):
        if abs(log) > 0.02:
            record = next(getattr(run.job, kind) for run in fit.runs if getattr(run.job, kind).name == name)
            value = getattr(record, constant.field)
            print(f"{kind}.{name}.{constant.field} = {value:.5g} -> {value * np.exp(log):.5g}  deviation {spread:.2f} of {constant.width}")


if __name__ == "__main__":
    main()
