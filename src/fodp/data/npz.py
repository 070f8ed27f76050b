"""NumPy archives with `train_images`, `train_labels` and, for scores, `test_images` and `test_labels`."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fodp.data.arrays import Arrays, reading
from fodp.errors import DataError

CHANNELS = (1, 3, 4)  # grey, colour, colour with transparency


def read(path: Path) -> Arrays:
    """Read the arrays and put channels first; without a test split it is empty. Pickled objects are refused."""
    with reading(path):
        if not path.is_file():
            raise DataError(f"no such file: {path}; give the path of an .npz archive")
        try:
            archive = np.load(path, allow_pickle=False)
        except ValueError:  # NumPy takes anything unknown for a pickle and advises to load it unsafely
            raise DataError(
                f"{path} is not a NumPy archive: it is truncated, corrupt or of another format; write it again "
                "with numpy.savez"
            ) from None
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{path} is a single array; write an archive with numpy.savez")
        with archive:
            wanted = [
                n for n in Arrays._fields if n.startswith("train") or {"test_images", "test_labels"} & {*archive.files}
            ]
            missing = [name for name in wanted if name not in archive.files]
            if missing:
                raise DataError(
                    f"{path} lacks {', '.join(missing)}; it needs train_images and train_labels, and for scores "
                    "test_images and test_labels (numpy.savez)"
                )
            found = {name: archive[name] for name in wanted}
    empty = {name.replace("train", "test"): np.empty((0, *a.shape[1:]), a.dtype) for name, a in found.items()}
    arrays = Arrays(**{**empty, **found})
    return arrays._replace(
        train_images=channels_first(arrays.train_images, path),
        test_images=channels_first(arrays.test_images, path),
    )


def channels_first(images: NDArray[Any], where: object) -> NDArray[Any]:
    """(n, h, w) and (n, h, w, c) become (n, c, h, w); (n, features) and (n, c, h, w) stay."""
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[3] in CHANNELS:
        return images.transpose(0, 3, 1, 2)
    if images.ndim == 2 or (images.ndim == 4 and images.shape[1] in CHANNELS):
        return images
    raise DataError(
        f"images of {where} must have the shape (n, features), (n, h, w), (n, h, w, c) or (n, c, h, w) "
        f"with 1, 3 or 4 channels, got {images.shape}"
    )
