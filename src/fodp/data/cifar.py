"""CIFAR's official Python archives: tar files of pickles, read without unpickling anything but plain data."""

import io
import pickle
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fodp._checks import PrivacyError
from fodp.data.arrays import Arrays, reading

# Data set: training members, test member, key of the labels.
MEMBERS = {
    "cifar10": (tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "labels"),
    "cifar100": (("train",), "test", "fine_labels"),
}
LARGEST_MEMBER = 512 * 2**20  # bytes; the official ones stay below 160 MB


def read(name: str, path: Path) -> Arrays:
    """Read an official archive; images become (n, 3, 32, 32). Nothing is written to disk, no code is run."""
    train_names, test_name, labels_key = MEMBERS[name]
    with reading(path):
        members = _read_members(path, {*train_names, test_name})
        missing = [member for member in (*train_names, test_name) if member not in members]
        if missing:
            raise PrivacyError(f"{path} lacks {', '.join(missing)}; fetch the official Python archive of {name}")
        batches = [_batch(members[member], labels_key, f"{member} of {path}") for member in train_names]
        test_images, test_labels = _batch(members[test_name], labels_key, f"{test_name} of {path}")
        train_images = np.concatenate([images for images, _ in batches])
        train_labels = np.concatenate([labels for _, labels in batches])
    return Arrays(train_images, train_labels, test_images, test_labels)


def _read_members(path: Path, wanted: set[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(path, "r:*") as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            if name not in wanted or not member.isfile():  # links and devices are not followed
                continue
            if member.size > LARGEST_MEMBER:
                raise PrivacyError(f"{name} of {path} claims {member.size} bytes; at most {LARGEST_MEMBER} are read")
            content = archive.extractfile(member)
            if content is not None:
                found[name] = content.read()
    return found


def _batch(content: bytes, labels_key: str, where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    batch = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(batch, dict):
        raise PrivacyError(f"{where} must be a dictionary with data and {labels_key}")
    by_name = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
    pixels, labels = by_name.get("data"), by_name.get(labels_key)
    if not isinstance(pixels, _PickledArray) or not isinstance(labels, list):
        raise PrivacyError(f"{where} must hold an array named data and a list named {labels_key}")
    images = pixels.uint8()
    if images.ndim != 2 or images.shape[1] != 3072:
        raise PrivacyError(f"data of {where} must have the shape (n, 3072), got {images.shape}")
    return images.reshape(-1, 3, 32, 32), np.array(labels, dtype=None if labels else np.int64)


class _PickledArray:
    """Stands in for numpy's array while unpickling: keeps what the pickle says, as data to be checked."""

    def __init__(self, *_: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def uint8(self) -> NDArray[np.uint8]:
        _version, shape, dtype, fortran, content = self.state
        if not isinstance(dtype, _PickledDtype) or dtype.name not in ("u1", b"u1"):
            raise ValueError("a pickled array is not uint8")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


class _PickledDtype:
    """Stands in for numpy's dtype."""

    def __init__(self, name: object = None, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment: of no matter for single bytes."""


class _Encoded:
    """Stands in for codecs.encode, by which Python 3 writes bytes into old pickle protocols."""

    def __new__(cls, text: str, encoding: str) -> bytes:  # type: ignore[misc]
        if encoding != "latin1":
            raise ValueError(f"a pickled text is encoded as {encoding!r}")
        return text.encode("latin1")


class _PlainUnpickler(pickle.Unpickler):
    """Resolves the few names an array needs to the stand-ins above and refuses all others.

    Not even numpy's own reconstruction runs: a crafted dtype can do harm there too.
    """

    _names: dict[tuple[str, str], type] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): _PickledDtype,
        ("_codecs", "encode"): _Encoded,
    }

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in self._names:
            raise PrivacyError(
                f"the archive asks to run {module}.{name}, which no official CIFAR file does: it may be "
                "malicious and was not run; fetch the official archive"
            )
        return self._names[module, name]
