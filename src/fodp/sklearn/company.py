"""Whether a transformer treats each row by itself: parts of the rows are transformed again and compared.

A step that looks at more than one row is private, fitted or not (rule 30).
"""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import joblib
import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction import FeatureHasher
from sklearn.frozen import FrozenEstimator
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.kernel_approximation import PolynomialCountSketch, RBFSampler, SkewedChi2Sampler
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    SplineTransformer,
)
from sklearn.random_projection import GaussianRandomProjection, SparseRandomProjection
from sklearn.utils import _safe_indexing, get_tags

_ROUNDING = 256  # units in the last place; a matrix product has others for other numbers of rows
_FAR = 1e4  # times as large as all rows
_MOVED = "{}, which gives a row other values alone than among others"
_ALONE = 6  # rows that are transformed alone, beside the first and the last


def why_private(step: Any, rows: Any, targets: Any) -> tuple[str | None, Any]:
    """Why a step may not be taken for public, or None; and what it makes of the rows."""
    if any(hasattr(leaf, "fit_resample") for leaf in _leaves(step)):  # imbalanced-learn's
        return f"{_called(step)}, which makes or drops rows by looking at others", None
    learnt = [_called(leaf) for leaf in _leaves(step) if _is_of_sklearn(leaf) and not _is_public(leaf)]
    reason, whole = _fitted(learnt) if learnt else None, None
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # those of the fit itself were shown
        try:
            whole, fitted = _applied(step, rows, targets)
            return reason or _unlike(step, rows, targets, whole, fitted), whole
        except Exception as error:  # of anybody's code, and its message may hold a row
            return reason or f"{_called(step)}, which could not be looked at ({type(error).__name__})", whole


def _unlike(step: Any, rows: Any, targets: Any, whole: Any, fitted: Any) -> str | None:
    """What differs where a part of the rows is transformed, in another order or alone."""
    expected = _Output(whole)
    if expected.size != _size(rows):
        return f"{_called(step)}, which changes the number of rows"
    for part in _parts(_size(rows)):
        try:
            found, again = _applied_to(part, step, rows, targets, fitted)
        except Exception as error:
            return f"{_called(step)}, which fails on a part of the rows ({type(error).__name__})"
        learnt = [
            _called(leaf) for leaf, other in zip(_leaves(fitted), _leaves(again), strict=False) if _differ(leaf, other)
        ]
        if learnt:
            return _fitted(learnt)
        if not expected.agrees(part, _Output(found)):
            if not expected.agrees(np.arange(_size(rows)), _Output(_applied(step, rows, targets)[0])):
                return f"{_called(step)}, which gives other values each time (fix its random_state)"
            return _MOVED.format(_called(step))
    return _MOVED.format(_called(step)) if _minds_far_rows(step, rows, targets, expected) else None


def _minds_far_rows(step: Any, rows: Any, targets: Any, expected: "_Output") -> bool:
    """Whether rows change when two more are there, far outside of them: by a maximum above a limit, say."""
    if not isinstance(rows, np.ndarray) or rows.dtype.kind != "f" or rows.ndim != 2:
        return False
    far = _FAR * (1 + np.nanmax(np.abs(rows), axis=0, keepdims=True))
    try:
        more = None if targets is None else np.concatenate([np.asarray(targets), np.asarray(targets)[:2]])
        found = _Output(_applied(step, np.concatenate([rows, far, -far]), more)[0])
    except Exception:
        return False  # it refuses such rows
    return found.size == len(rows) + 2 and not found.agrees(np.arange(len(rows)), expected)


def _fitted(names: list[str]) -> str:
    return f"{', '.join(names)}, which was fitted on the private rows without noise"


def _parts(size: int) -> Iterator[NDArray[np.int64]]:
    """Two halves in another order, so that every row is in other company, and some rows alone."""
    order = np.random.default_rng(0).permutation(size)
    if size > 1:
        yield order[: size // 2]
        yield order[size // 2 :]
        yield from (np.array([row]) for row in dict.fromkeys([0, size - 1, *order[:_ALONE].tolist()]))


def _applied(step: Any, rows: Any, targets: Any) -> tuple[Any, Any]:
    """What a copy of the step makes of rows that it is fitted on, as a pipeline would do it; and that copy."""
    try:
        fresh = clone(step)
    except TypeError:  # not one of scikit-learn's kind
        fresh = copy.deepcopy(step)
    if hasattr(fresh, "fit_transform"):
        return fresh.fit_transform(rows, targets), fresh
    fresh.fit(rows, targets)
    return fresh.transform(rows), fresh


def _applied_to(part: NDArray[np.int64], step: Any, rows: Any, targets: Any, fitted: Any) -> tuple[Any, Any]:
    """What a copy of the step makes of some of the rows, and that copy."""
    some = _safe_indexing(rows, part)
    try:
        return _applied(step, some, None if targets is None else _safe_indexing(targets, part))
    except ValueError:
        if len(part) > 1:
            raise
        return fitted.transform(some), fitted  # a fit may ask for two rows


def _leaves(step: Any) -> Iterator[Any]:
    """The steps within a step; those that were fitted, where it was."""
    if isinstance(step, Pipeline):
        inner = [part for _, part in step.steps]
    elif isinstance(step, FeatureUnion):
        inner = [part for _, part in step.transformer_list]
    elif isinstance(step, ColumnTransformer):
        inner = [part for _, part, _ in getattr(step, "transformers_", step.transformers)]
        inner += [] if hasattr(step, "transformers_") else [step.remainder]
    else:
        if step is not None and not isinstance(step, str):
            yield step
        return
    for part in inner:
        yield from _leaves(part)


def _is_of_sklearn(step: Any) -> bool:
    return type(step).__module__.split(".")[0] == "sklearn"


def _is_public(step: Any) -> bool:
    """Whether a transformer of scikit-learn's knows no more of the rows than how many columns they have."""
    if isinstance(
        step, FrozenEstimator | PolynomialFeatures | PolynomialCountSketch | SkewedChi2Sampler | FeatureHasher
    ):
        return True  # frozen: fitted before, on data that its owner answers for
    if isinstance(step, SplineTransformer):
        return not isinstance(step.knots, str)
    if isinstance(step, RBFSampler):
        return not isinstance(step.gamma, str)
    if isinstance(step, GaussianRandomProjection | SparseRandomProjection):
        return not isinstance(step.n_components, str)
    if isinstance(step, MissingIndicator):
        return bool(step.features == "all")
    if isinstance(step, SimpleImputer):
        return step.strategy == "constant" and not step.add_indicator
    if isinstance(step, OneHotEncoder | OrdinalEncoder):
        counts = step.min_frequency is not None or step.max_categories is not None
        return not (isinstance(step.categories, str) or counts)
    return not get_tags(step).requires_fit


def _differ(one: Any, other: Any) -> bool:
    """Whether two fits of a step of somebody's own left it in other states: then it learns from the rows."""
    if _is_of_sklearn(one):
        return False
    try:
        return bool(joblib.hash(_state(one)) != joblib.hash(_state(other)))
    except Exception:  # states that cannot be compared
        return True


def _state(step: Any) -> dict[str, Any]:
    """What a step holds beside its parameters, which are those of its owner."""
    given = step.get_params(deep=False) if hasattr(step, "get_params") else {}
    return {name: value for name, value in vars(step).items() if name not in given}


def _called(step: Any) -> str:
    function = step.func if isinstance(step, FunctionTransformer) else None
    return type(step).__name__ + ("" if function is None else f"({getattr(function, '__name__', 'func')})")


def _size(rows: Any) -> int:
    return int(rows.shape[0]) if hasattr(rows, "shape") else len(rows)


class _Output:
    """What a step returns, as blocks of columns that can be compared."""

    def __init__(self, found: Any):
        self.size = _size(found)
        self.names = [str(name) for name in found.columns] if hasattr(found, "columns") else []
        if sparse.issparse(found):
            self.blocks: list[Any] = [found.tocsr()]
        elif hasattr(found, "iloc") and hasattr(found, "columns"):
            self.blocks = [found.iloc[:, place].to_numpy() for place in range(found.shape[1])]
        else:
            self.blocks = [np.asarray(found)]

    def agrees(self, part: NDArray[np.int64], other: "_Output") -> bool:
        """Whether the other output is that of these rows, but for rounding."""
        if self.names != other.names or len(self.blocks) != len(other.blocks):
            return False
        return all(_agree(mine[part], theirs, mine) for mine, theirs in zip(self.blocks, other.blocks, strict=True))


def _agree(one: Any, other: Any, whole: Any) -> bool:
    if one.shape != other.shape:
        return False
    if sparse.issparse(one) or sparse.issparse(other):
        one, other = sparse.csr_matrix(one), sparse.csr_matrix(other)
        places = (one != other).nonzero()
        return not len(places[0]) or _are_close(np.asarray(one[places])[0], np.asarray(other[places])[0], 0)
    if one.dtype.kind not in "biufc" or other.dtype.kind not in "biufc":
        return all(_are_equal(mine, theirs) for mine, theirs in zip(one.ravel(), other.ravel(), strict=True))
    mine, theirs = one.reshape(len(one), -1), other.reshape(len(one), -1)
    unequal = (mine != theirs) & ~((mine != mine) & (theirs != theirs))
    if not unequal.any():
        return True
    columns = np.nonzero(unequal)[1]
    return "f" in one.dtype.kind + other.dtype.kind and _are_close(
        mine[unequal], theirs[unequal], _usual_size(whole.reshape(len(whole), -1))[columns]
    )


def _are_close(one: NDArray[Any], other: NDArray[Any], usual: Any) -> bool:
    """Whether unequal numbers differ by rounding alone, for columns whose numbers are usually of that size."""
    mine, theirs = one.astype(np.float64), other.astype(np.float64)
    if not (np.isfinite(mine).all() and np.isfinite(theirs).all()):
        return False
    sizes = usual + np.maximum(np.abs(mine), np.abs(theirs))
    return bool((np.abs(mine - theirs) <= _ROUNDING * max(_unit(one), _unit(other)) * sizes).all())


def _usual_size(whole: NDArray[Any]) -> NDArray[np.float64]:
    """How large the numbers of each column usually are, by some rows: single large ones would hide the others."""
    sizes = np.abs(whole[:: max(1, len(whole) // 1000)].astype(np.float64))
    sizes = np.where(np.isfinite(sizes), sizes, 0)
    usual = np.quantile(sizes, 0.9, axis=0)
    return np.asarray(np.where(usual > 0, usual, sizes.max(axis=0)))


def _unit(block: NDArray[Any]) -> float:
    """The rounding of one operation: that of float32 also for numbers that float32 holds, however they are kept."""
    if block.dtype.kind != "f":
        return 0.0
    single = bool((block == block.astype(np.float32)).all()) and bool((block != np.round(block)).any())
    return float(np.finfo(np.float32 if single and block.dtype.itemsize > 4 else block.dtype).eps)


def _are_equal(one: Any, other: Any) -> bool:
    return one is other or (one != one and other != other) or bool(one == other)
