"""The small digits embedded in scikit-learn: no file, no network."""

import numpy as np

from fodp.data.arrays import Arrays
from fodp.support.extras import need


def read() -> Arrays:
    """Every fifth image of each digit is for testing (360), the others for training (1,437), in stored order.

    A rule rather than a random split: the same on every machine and for every version of NumPy.
    """
    need("sklearn", "the digits data set", extra="data")
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    is_test = np.zeros(len(labels), dtype=np.bool_)
    is_test[np.argsort(labels, kind="stable")[::5]] = True
    return Arrays(images[~is_test], labels[~is_test], images[is_test], labels[is_test])
