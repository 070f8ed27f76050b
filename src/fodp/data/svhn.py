"""SVHN's official cropped digits: two MATLAB files with X (32, 32, 3, n) and y (n, 1)."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fodp._checks import PrivacyError
from fodp.data.arrays import Arrays, reading
from fodp.data.matlab import read_variables


def read(train: Path, test: Path) -> Arrays:
    """Read both files; images become (n, 3, 32, 32) and the official label 10 becomes the digit 0."""
    return Arrays(*_read_one(train), *_read_one(test))


def _read_one(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    with reading(path):
        variables = read_variables(path.read_bytes())
    if "X" not in variables or "y" not in variables:
        raise PrivacyError(
            f"{path} lacks X or y; fetch the official cropped digits, train_32x32.mat and test_32x32.mat"
        )
    images, labels = variables["X"], variables["y"].reshape(-1)
    if images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise PrivacyError(f"X of {path} must have the shape (32, 32, 3, n), got {images.shape}")
    if not np.isin(labels, range(1, 11)).all():
        raise PrivacyError(f"y of {path} must hold whole numbers from 1 to 10 (10 is the digit 0)")
    return images.transpose(3, 2, 0, 1), labels.astype(np.int64) % 10
