"""CIFAR, SVHN and MNIST as their authors serve them: pickles in a tar file, MATLAB files, and numbers behind a header.

Some of these formats can harm whoever reads a crafted file, so only official bytes are read, known by their SHA-256.
"""

import gzip
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
    """Read the archives of a data set, in the order of `ARCHIVES`; images become (n, channels, height, width)."""
    contents = [official_bytes(path, archive) for path, archive in zip(paths, ARCHIVES[name], strict=True)]
    if name == "svhn":
        return Arrays(*_svhn(contents[0]), *_svhn(contents[1]))
    if name in ("mnist", "fashion-mnist"):
        return Arrays(*(_idx(content) for content in contents))
    return _cifar(contents[0], *_CIFAR[name.removesuffix("-full")])


def official_bytes(path: Path, archive: Archive) -> bytes:
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


def _idx(content: bytes) -> NDArray[Any]:
    """Bytes behind a header: two zeros, the type (8: uint8), the number of dimensions, four bytes for each of them."""
    raw = gzip.decompress(content)
    sizes = np.frombuffer(raw, ">u4", count=raw[3], offset=4)
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes)
    return values[:, None] if values.ndim == 3 else values.astype(np.int64)
