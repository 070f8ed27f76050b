"""CIFAR and SVHN as their authors serve them: pickles in a tar file, and MATLAB files.

Both formats can harm whoever reads a crafted file, so only the official bytes are read, known by their SHA-256.
"""

import hashlib
import io
import pickle
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fodp.data.archives import ARCHIVES, Archive
from fodp.data.arrays import Arrays
from fodp.errors import DataError

# Data set: training members, test member, key of the labels.
_CIFAR = {
    "cifar10": (tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", b"labels"),
    "cifar100": (("train",), "test", b"fine_labels"),
}


def read(name: str, paths: list[Path]) -> Arrays:
    """Read the archives of a data set, in the order of `ARCHIVES`; images become (n, 3, 32, 32)."""
    contents = [_official(path, archive) for path, archive in zip(paths, ARCHIVES[name], strict=True)]
    if name == "svhn":
        return Arrays(*_svhn(contents[0]), *_svhn(contents[1]))
    return _cifar(contents[0], *_CIFAR[name])


def _official(path: Path, archive: Archive) -> bytes:
    """The bytes of a file, which are what its authors published."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}): make it readable, or fetch it again") from None
    if hashlib.sha256(content).hexdigest() != archive.sha256:
        raise DataError(
            f"{path} is not the official file (its SHA-256 is not {archive.sha256[:12]}…) and was not opened, since "
            f"such a file can run code: fetch {archive.url} again, or write your own data as .npz with numpy.savez"
        )
    return content


def _cifar(content: bytes, train: tuple[str, ...], test: str, labels: bytes) -> Arrays:
    batches: dict[str, dict[bytes, Any]] = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            name = PurePosixPath(member.name).name
            if file is not None and name in (*train, test):
                batches[name] = pickle.load(file, encoding="bytes")
    images = {name: batch[b"data"].reshape(-1, 3, 32, 32) for name, batch in batches.items()}
    numbers = {name: np.array(batch[labels], dtype=np.int64) for name, batch in batches.items()}
    return Arrays(
        np.concatenate([images[name] for name in train]),
        np.concatenate([numbers[name] for name in train]),
        images[test],
        numbers[test],
    )


def _svhn(content: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """X (32, 32, 3, n) and y (n, 1), in which the label 10 stands for the digit 0."""
    from scipy.io import loadmat

    variables = loadmat(io.BytesIO(content))
    return variables["X"].transpose(3, 2, 0, 1), variables["y"].reshape(-1).astype(np.int64) % 10
