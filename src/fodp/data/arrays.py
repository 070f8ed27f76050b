"""What every reader returns, the checks it must pass, and the step from pixels to tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from fodp.data.cards import Card
from fodp.errors import DataError, PrivacyError


class Arrays(NamedTuple):
    """Images as stored (channels first) and whole-number labels, for training and for testing."""

    train_images: NDArray[Any]
    train_labels: NDArray[Any]
    test_images: NDArray[Any]
    test_labels: NDArray[Any]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a reader trips over into one line; a damaged file can raise almost anything."""
    try:
        yield
    except PrivacyError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise DataError(
            f"cannot read {path} ({reason}): it is missing, truncated, corrupt or of another format; "
            "fetch it or write it again"
        ) from error


def check(arrays: Arrays, where: object, classes: int) -> None:
    """Refuse data on which training would fail or silently go wrong, and name the place."""
    for split in ("train", "test"):
        images: NDArray[Any] = getattr(arrays, f"{split}_images")
        labels: NDArray[Any] = getattr(arrays, f"{split}_labels")
        at = f"{split}_images of {where}"
        if split == "test" and len(images) == len(labels) == 0:
            continue  # nothing to score on
        if images.ndim < 2 or images.size == 0:
            raise DataError(f"{at} must hold at least one example, got shape {images.shape}")
        if images.dtype != np.uint8 and images.dtype.kind != "f":
            raise DataError(f"{at} must be uint8 or floating point, got {images.dtype}; convert it first")
        _check_labels(labels, f"{split}_labels of {where}", classes)
        if len(images) != len(labels):
            raise DataError(f"{at} has {len(images)} examples but {split}_labels {len(labels)}; they must match")
        # Judged in float32, where training happens: 1e300 is finite only before the conversion.
        finite = _is_finite(images)
        if not finite.all():
            raise DataError(
                f"{at} must be finite in float32; example {int(np.argmin(finite))} is not: repair or drop it"
            )
    train, test = arrays.train_images, arrays.test_images
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise DataError(
            f"train_images and test_images of {where} must have examples of one shape and dtype, "
            f"got {train.shape[1:]} {train.dtype} and {test.shape[1:]} {test.dtype}"
        )


def _check_labels(labels: NDArray[Any], at: str, classes: int) -> None:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"{at} must be one whole number per example, got shape {labels.shape} of {labels.dtype}")
    if labels.size:
        outside = (labels < 0) | (labels >= classes)
        if outside.any():
            raise DataError(
                f"{at} must lie in 0..{classes - 1} for {classes} classes; that of example {int(outside.argmax())} "
                "does not: correct the labels or the number of classes"
            )


def read_owners(path: str | Path, records: int) -> list[Any]:
    """Whose each record is: an `.npy` of whole numbers or texts, or a text file with a name on each line."""
    path = Path(path)
    with reading(path):
        if path.suffix.lower() == ".npy":
            names: list[Any] = np.load(path, allow_pickle=False).tolist()
        else:
            names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    if len(names) != records:
        raise DataError(f"{path} must name one owner for each of the {records} records, it has {len(names)}")
    if any(name == "" for name in names):
        line = names.index("") + 1
        raise DataError(f"line {line} of {path} names no owner: give the record a name of its own")
    return names


def _is_finite(images: NDArray[Any]) -> NDArray[np.bool_]:
    """One truth value per example."""
    if images.dtype == np.uint8:
        return np.ones(len(images), dtype=np.bool_)
    with np.errstate(over="ignore"):
        finite = np.isfinite(images.astype(np.float32))
    return np.asarray(finite.reshape(len(images), -1).all(axis=1))


def to_dataset(images: NDArray[Any], labels: NDArray[Any], card: Card, *, flatten: bool) -> TensorDataset:
    """Normalise with the card's public constants; float32 images, int64 labels."""
    pixels = normalise_(torch.from_numpy(np.array(images, dtype=np.float32, order="C")), card)
    return TensorDataset(pixels.flatten(1) if flatten else pixels, torch.from_numpy(np.array(labels, dtype=np.int64)))


def normalise_(images: torch.Tensor, card: Card) -> torch.Tensor:
    """Examples as a model is trained on them, by the card's public constants; changes the floats that are given."""
    per_channel = (-1,) + (1,) * (len(card.shape) - 1)
    mean, std = (torch.tensor(constants).reshape(per_channel) for constants in (card.mean, card.std))
    return images.div_(card.scale).sub_(mean).div_(std)
