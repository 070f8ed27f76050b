"""A scaler with public numbers: what it does to a row depends on that row alone."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from fodp.errors import ConfigurationError
from fodp.sklearn.inputs import checked_rows, declared_bounds
from fodp.support.checks import shown

Floats = NDArray[np.float64]


class PublicScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Scales features by public numbers, in the place of StandardScaler and MinMaxScaler, which read them off the rows.

    With `bounds`, features are clipped to them and become -1 to 1; with `mean` and `scale` each becomes
    (x - mean) / scale. `fit` learns how many features there are and what they are called, nothing else.

    Args:
        bounds: (low, high) for all features, or one pair for each.
        mean: public numbers to subtract, one for all features or one for each; default 0.
        scale: public numbers above 0 to divide by; default 1.

    Example:
        >>> PublicScaler(bounds=[(0, 100), (0, 2)]).fit_transform([[50, 2], [200, 1]]).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
        >>> PublicScaler(mean=40, scale=[20, 10]).fit_transform([[60, 30]]).tolist()
        [[1.0, -1.0]]
    """

    def __init__(self, *, bounds: Any = None, mean: Any = None, scale: Any = None):
        self.bounds, self.mean, self.scale = bounds, mean, scale

    def fit(self, X: Any, y: Any = None) -> "PublicScaler":
        """Check the public numbers against the number of features."""
        checked_rows(self, X, reset=True)
        self._line()
        return self

    def transform(self, X: Any) -> Floats:
        """The rows, scaled."""
        check_is_fitted(self)
        rows = checked_rows(self, X, reset=False)
        center, half = self._line()
        if self.bounds is not None:
            rows = rows.clip(center - half, center + half)
        return (rows - center) / half

    def inverse_transform(self, X: Any) -> Floats:
        """The rows before they were scaled; what was clipped stays clipped."""
        check_is_fitted(self)
        center, half = self._line()
        return np.asarray(X, dtype=np.float64) * half + center

    def _line(self) -> tuple[Floats, Floats]:
        """What is subtracted, and by what is divided."""
        if self.bounds is not None:
            if self.mean is not None or self.scale is not None:
                raise ConfigurationError("give bounds=, or mean= and scale=, not both")
            lows, highs = declared_bounds("bounds", self.bounds, self.n_features_in_)
            return (lows + highs) / 2, (highs - lows) / 2
        if self.mean is None and self.scale is None:
            raise ConfigurationError(
                "declare bounds=(low, high), or mean= and scale=, as anybody may know them: read off the data they "
                "would tell who is in it"
            )
        mean, scale = self._numbers("mean", 0), self._numbers("scale", 1)
        if not (scale > 0).all():
            raise ConfigurationError(f"scale must be above 0, got {shown(self.scale)}")
        return mean, scale

    def _numbers(self, name: str, otherwise: float) -> Floats:
        given = getattr(self, name)
        try:
            found = np.asarray(otherwise if given is None else given, dtype=np.float64)
        except (TypeError, ValueError):
            found = np.array(np.nan)
        if found.shape not in ((), (self.n_features_in_,)) or not np.isfinite(found).all():
            raise ConfigurationError(
                f"{name} must be a number, or one for each of the {self.n_features_in_} features, known without the "
                f"data; got {shown(given)}"
            )
        return np.broadcast_to(found, (self.n_features_in_,))
