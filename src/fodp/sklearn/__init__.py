"""scikit-learn estimators that train privately: public numbers declared, `fit`, `predict`, `score` as ever.

One page about them is docs/scikit-learn.md. They take the extra `sklearn`.
"""

from fodp.support.extras import need

need("sklearn", "fodp.sklearn", extra="sklearn")

from fodp.sklearn.estimators import (  # noqa: E402 - said in one line if scikit-learn is missing
    PrivateClassifier,
    PrivateLogisticRegression,
    PrivateRegressor,
)
from fodp.sklearn.scaler import PublicScaler  # noqa: E402

__all__ = ["PrivateClassifier", "PrivateLogisticRegression", "PrivateRegressor", "PublicScaler"]
