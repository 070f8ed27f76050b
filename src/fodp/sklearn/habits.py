"""Habits of scikit-learn that would void the guarantee, met by a sentence.

What a fit can see is who calls it: a search fits one estimator again and again, a pipeline fits what stands in front.
What it cannot see, such as a scaler that was fitted by hand before, is listed in docs/scikit-learn.md.
"""

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.compose import TransformedTargetRegressor
from sklearn.model_selection import FixedThresholdClassifier
from sklearn.pipeline import Pipeline

from fodp.errors import ConfigurationError
from fodp.sklearn import company, seen
from fodp.support import checks

# Modules of scikit-learn whose functions and estimators fit one estimator several times, on parts of the data.
_FIT_AGAIN_AND_AGAIN = (
    "sklearn.model_selection",
    "sklearn.calibration",
    "sklearn.ensemble",
    "sklearn.feature_selection",
    "sklearn.impute",
    "sklearn.inspection",
    "sklearn.linear_model._ransac",
    "sklearn.multiclass",
    "sklearn.multioutput",
    "sklearn.semi_supervised",
)
_EXACT = 1e-6  # of means and deviations that were made 0 and 1; float32 keeps that much


def refuse_searches() -> None:
    """Raise if scikit-learn is about to fit many times: one fit's ε is not that of all, and their scores are private.

    A fit asks, and a clone too: a search makes its copies where it does not catch errors, and swallows those of a fit.
    """
    found = _repeating()
    if found is not None:
        raise ConfigurationError(
            f"{found} fits on parts of the private data again and again, and looks at scores on the rest of it: the "
            "epsilon of one fit covers neither. Choose settings on public data (data_is_public=True, which claims no "
            "privacy), or in a loop of your own with ledger= (every fit is charged) and scores on public data; "
            "`fodp tune` is the place for a search that has a price"
        )


def private_steps() -> list[str]:
    """What stands in front of this estimator and looks at more than one row, or was fitted on the rows (rule 30)."""
    if any(_module(frame) == company.__name__ for frame in _callers()):
        raise ConfigurationError(
            "a private estimator in front of another one cannot be looked at without spending its epsilon again: fit "
            "the first one by itself, and wrap it in sklearn.frozen.FrozenEstimator"
        )
    return [reason for steps, rows, targets in _in_front() for reason in _private_among(steps, rows, targets)]


def refuse_private_steps(found: list[str]) -> None:
    """Raise if something private stands in front of the estimator, with the ways out."""
    if found:
        raise ConfigurationError(
            f"in front of this estimator stands {'; and '.join(found)}: each row's inputs then depend on other rows, "
            "and no epsilon covers that. Scale by public numbers instead: bounds= or schema= of the estimator, or "
            "fodp.sklearn.PublicScaler; or fit the step on public data and wrap it in sklearn.frozen.FrozenEstimator. "
            "allow_private_preprocessing=True trains all the same, and the statement and the card say what is not "
            "covered"
        )


def warn_of_standardised_rows(rows: NDArray[Any]) -> None:
    """Warn if all columns have mean 0 and deviation 1 to many digits: a scaler was fitted on these very rows.

    Columns that hold one or two different numbers, as of a balanced design, say nothing.
    """
    means, deviations = np.abs(rows.mean(axis=0)), rows.std(axis=0)
    scaled = (means < _EXACT) & (np.abs(deviations - 1) < _EXACT)
    if (scaled | (deviations == 0)).all() and any(len(np.unique(column)) > 2 for column in rows.T[scaled]):
        checks.warn(
            "every column has mean 0 and standard deviation 1 to six digits: these rows were scaled by numbers of "
            "their own, so that each depends on all others, and no epsilon covers that. Give the rows as they came, "
            "with bounds=, or scale them by fodp.sklearn.PublicScaler"
        )


def refuse_two_kinds(rows: NDArray[Any], public: bool) -> None:
    """Raise if rows of a private fit are declared public, or the other way round (rule 29)."""
    if (seen.PRIVATE if public else seen.PUBLIC).know(rows):
        before, now = ("given to a private fit", "declared public") if public else ("declared public", "private")
        raise ConfigurationError(
            f"these rows, or most of them, were {before} in this process, and are {now} in this fit: rows are "
            "one or the other. What was chosen or scored on them has left already; choose settings on other, public "
            "rows"
        )


def remember(rows: NDArray[Any], public: bool, charged: bool) -> None:
    """Count the fits on these very rows in this process; from the second on, without a ledger, say that they add up."""
    times = (seen.PUBLIC if public else seen.PRIVATE).add(rows)
    if times > 1 and not charged and not public:
        checks.warn(
            f"this is private fit number {times} on the same rows, and each spends its own epsilon: together they are "
            "not private with that of one. Give all of them ledger=, which adds up and keeps to a budget"
        )


def warn_of_private_score(rows: NDArray[Any]) -> None:
    """Warn if a score is asked for on rows that a private fit of this process was given, all of them or a part."""
    if seen.PRIVATE.know(rows):
        checks.warn(
            "these are rows that a private fit was given: their score is a private number that no epsilon covers, do "
            "not publish it. Score on data that is public"
        )


def warn_of_learning_from_outputs(rows: NDArray[Any]) -> None:
    """Warn if something of scikit-learn's learns from, or averages, the outputs on rows of a private fit."""
    found = None if any(frame.f_code.co_name == "score" for frame in _callers()) else _repeating()  # a score has warned
    if found is not None and seen.PRIVATE.know(rows):
        checks.warn(
            f"{found} computes from this model's outputs on rows that a private fit was given: what it finds is "
            "private, and no epsilon covers it. Give it public rows"
        )


def _in_front() -> Iterator[tuple[list[Any], Any, Any]]:
    """The steps that stand in front of this estimator, in pipelines and around targets, with what they are given.

    scikit-learn tells a step nothing of what surrounds it, so that the callers are asked: a pipeline that fits has the
    rows as they came.
    """
    known: list[Any] = []
    behind: dict[int, int] = {}  # how many steps a pipeline has fitted, if it is busy with one of them
    for frame in _callers():
        around, names = frame.f_locals.get("self"), frame.f_locals
        if any(around is each for each in known):
            continue
        if isinstance(around, Pipeline) and "step_idx" in names:
            behind[id(around)] = names["step_idx"]
        elif isinstance(around, Pipeline) and "X" in names and frame.f_code.co_name.startswith("fit"):
            known.append(around)
            yield [step for _, step in around.steps[: behind.get(id(around), -1)]], names["X"], names.get("y")
        elif isinstance(around, TransformedTargetRegressor) and "y" in names and hasattr(around, "transformer_"):
            known.append(around)
            targets = np.asarray(names["y"])
            yield [around.transformer_], targets.reshape(len(targets), -1), None


def _private_among(steps: list[Any], rows: Any, targets: Any) -> Iterator[str]:
    for step in steps:
        if step is None or isinstance(step, str):
            continue
        reason, rows = company.why_private(step, rows, targets)
        if reason is not None:
            yield reason
        if rows is None:  # it could not be applied, so that those behind it have nothing to be looked at with
            return


def _repeating() -> str | None:
    """What of scikit-learn's calls us that fits or asks one estimator many times."""
    found: str | None = None
    for frame in _callers():
        once = isinstance(frame.f_locals.get("self"), FixedThresholdClassifier)
        if _module(frame).startswith(_FIT_AGAIN_AND_AGAIN) and not once:
            found = _name(frame, found)
    return found


def _callers() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _name(frame: FrameType, inner: str | None) -> str:
    """What people call the function or estimator that this frame is part of."""
    around = frame.f_locals.get("self")
    if type(around).__module__.startswith(_FIT_AGAIN_AND_AGAIN):
        return type(around).__name__
    name = frame.f_code.co_name
    return name if inner is None or not name.startswith(("_", "<")) else inner
