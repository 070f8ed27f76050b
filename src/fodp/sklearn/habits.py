"""Habits of scikit-learn that would void the guarantee, met by a sentence.

What a fit can see is who calls it: a search fits one estimator again and again, a pipeline fits what stands in front.
What it cannot see, such as a scaler that was fitted by hand before, is listed in docs/scikit-learn.md.
"""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, PolynomialFeatures
from sklearn.utils import get_tags

from fodp import _checks
from fodp._checks import ConfigurationError

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
# Rows that were trained on in this process, by a mark that nobody else can compute; never stored with an estimator.
_KEY = os.urandom(32)
_fitted: Counter[bytes] = Counter()


def refuse_searches() -> None:
    """Raise if scikit-learn is about to fit many times: one fit's ε is not that of all, and their scores are private.

    A worker process of a search is seen too, for scikit-learn calls the fit there as well.
    """
    found: str | None = None
    for frame in _callers():
        if _module(frame).startswith(_FIT_AGAIN_AND_AGAIN):
            found = _name(frame, found)
    if found is not None:
        raise ConfigurationError(
            f"{found} fits on parts of the private data again and again, and looks at scores on the rest of it: the "
            "epsilon of one fit covers neither. Choose settings on public data, or in a loop of your own with ledger= "
            "(every fit is charged) and scores on public data; `fodp tune` is the place for a search that has a price"
        )


def warn_of_learnt_steps() -> None:
    """Warn if a pipeline has fitted something on the private data in front of this estimator."""
    for frame in _callers():
        around = frame.f_locals.get("self")
        if _module(frame) == "sklearn.pipeline" and isinstance(around, Pipeline):
            _warn_of(list(_learnt([step for _, step in around.steps[:-1]])))
        elif isinstance(around, TransformedTargetRegressor) and around.transformer is not None:
            _warn_of(list(_learnt([around.transformer])))


def warn_of_more_fits(tensors: tuple[torch.Tensor, ...], charged: bool) -> None:
    """Count the fits on these very rows in this process; from the second on, without a ledger, say that they add up."""
    mark = _mark(tensors[0])
    _fitted[mark] += 1
    if _fitted[mark] > 1 and not charged:
        _checks.warn(
            f"this is private fit number {_fitted[mark]} on the same rows, and each spends its own epsilon: together "
            "they are not private with that of one. Give all of them ledger=, which adds up and keeps to a budget"
        )


def warn_of_private_score(inputs: torch.Tensor) -> None:
    """Warn if a score is asked for on the very rows that a private fit of this process was given."""
    if _mark(inputs) in _fitted:
        _checks.warn(
            "these are rows that a private fit was given: their score is a private number that no epsilon covers, do "
            "not publish it. Score on data that is public"
        )


def _mark(inputs: torch.Tensor) -> bytes:
    rows = inputs.detach().cpu().contiguous()
    return hashlib.blake2b(rows.reshape(-1).view(torch.uint8).numpy().data, key=_KEY, digest_size=16).digest()


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
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


def _learnt(steps: list[Any]) -> Iterator[str]:
    """The names of steps that learn something from the rows they are fitted on."""
    for step in steps:
        if isinstance(step, Pipeline):
            yield from _learnt([part for _, part in step.steps])
        elif isinstance(step, FeatureUnion):
            yield from _learnt([part for _, part in step.transformer_list])
        elif isinstance(step, ColumnTransformer):
            yield from _learnt([part for _, part, _ in step.transformers])
        elif step is not None and not isinstance(step, str) and not _is_public(step):
            yield type(step).__name__


def _is_public(step: Any) -> bool:
    """Whether a transformer knows no more of the rows than how many columns they have."""
    if isinstance(step, FrozenEstimator | PolynomialFeatures):
        return True  # frozen: fitted before, on data that its owner answers for
    if isinstance(step, SimpleImputer):
        return step.strategy == "constant" and not step.add_indicator
    if isinstance(step, OneHotEncoder | OrdinalEncoder):
        counts = step.min_frequency is not None or step.max_categories is not None
        return not (isinstance(step.categories, str) or counts)
    try:
        return not get_tags(step).requires_fit
    except Exception:  # a transformer of somebody's own, which says nothing about itself
        return False


def _warn_of(learnt: list[str]) -> None:
    if learnt:
        _checks.warn(
            f"{', '.join(learnt)} in front of this estimator was fitted on the private data without noise, and leaves "
            "with the pipeline: no epsilon covers it. Declare bounds= or schema= instead, which clip and scale by "
            "public numbers, or fit it on public data and wrap it in sklearn.frozen.FrozenEstimator"
        )
