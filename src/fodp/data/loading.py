"""The one entry: a name or a file becomes normalised tensors with a public card."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fodp.data.cards import Card, own_card
from fodp.data.more_cards import known_cards
from fodp.errors import ConfigurationError, DataError
from fodp.support.checks import whole

if TYPE_CHECKING:  # so that asking for a card, or for --help, does not wait for torch
    from torch import Tensor
    from torch.utils.data import TensorDataset

    from fodp.data.arrays import Arrays

MOST_CLASSES = 10**6
LARGEST_VALIDATION = 5000  # enough to choose hyper-parameters; 45,000 float images would fill the memory


@dataclass(frozen=True)
class Splits:
    """A data set, ready to use: `train` is private; `validation` and `test` are taken to be public, and may be empty.

    `validation` holds training examples beyond the first `card.train_size`, at most 5,000, for choosing
    hyper-parameters.
    """

    card: Card
    train: "TensorDataset"
    validation: "TensorDataset"
    test: "TensorDataset"
    owners: Sequence[int | str] | None = None  # whose each training example is, where that is known


def load(
    name: str | Path,
    data_dir: str | Path | None = None,
    *,
    train_size: int | None = None,
    test_size: int | None = None,
    assume_size: int | None = None,
    classes: int | None = None,
    flatten: bool = True,
    download: bool = True,
    progress: bool = True,
) -> Splits:
    """Load a data set by name (`digits`, `cifar10`, `mnist`, `imdb`, …: docs/features.md) or a user's own `.npz`.

    Args:
        name: a data set's name, or the path of an `.npz` with train_images, train_labels and, to score on,
            test_images and test_labels. Images are uint8 (mapped to [-1, 1]) or floating point (used as they
            are), of the shape (n, features), (n, h, w), (n, h, w, c) or (n, c, h, w).
        data_dir: folder with `<name>.npz` or the official archives; default: the variable FODP_DATA. What
            is not there is downloaded to the user's cache.
        train_size: train on the first so many examples of a named data set (default: its card's).
        test_size: test on the first so many examples (default: the card's; all of one's own).
        assume_size: for one's own data: the public size of the training set, from which rates follow. It is
            never taken from the file, because the number of examples present is private.
        classes: for one's own data: the public number of classes, for the same reason.
        flatten: one row per image, as the paper's classifier wants; False keeps (channels, height, width).
        download: False refuses to use the network.
        progress: show a bar while downloading.

    Returns:
        The tensors to train and to test on, and the public card.

    Example:
        >>> splits = load("digits")
        >>> len(splits.train), splits.card.lot_size
        (1437, 144)
    """
    label = str(name)
    if label in (cards := known_cards()):
        if assume_size is not None or classes is not None:
            raise ConfigurationError(
                f"{label} has a public card; leave assume_size and classes out (train_size cuts it)"
            )
        card = cards[label]
        card = replace(
            card,
            train_size=card.train_size if train_size is None else whole("train_size", train_size),
            test_size=card.test_size if test_size is None else whole("test_size", test_size),
        )
        if card.scale == 1.0:
            from fodp.data import texts

            return texts.load(card, _files(label, texts.PLAIN[label], data_dir, download=download, progress=progress))
        arrays = _read_named(card, data_dir, download=download, progress=progress)
        return _split(arrays, card, train_stop=card.train_size, flatten=flatten)
    if label.endswith(".npz"):
        if train_size is not None:
            raise ConfigurationError(
                f"train_size={train_size} cuts a named data set; for your own {label} state assume_size"
            )
        arrays, card = _read_own(Path(name), assume_size, classes, test_size)
        return _split(arrays, card, train_stop=len(arrays.train_images), flatten=flatten)
    refuse_other_kind(Path(label))
    raise ConfigurationError(
        f"the data set must be one of {', '.join(cards)} or the path of your own .npz file (a table: from_table); got "
        f"{label!r}"
    )


_OTHER_KINDS = {
    ".xlsx": "a workbook: save the sheet as CSV (UTF-8)",
    ".xls": "a workbook: save the sheet as CSV (UTF-8)",
    ".ods": "a workbook: save the sheet as CSV (UTF-8)",
    ".parquet": "Parquet: pandas.read_parquet(path).to_csv(name, index=False)",
    ".feather": "Feather: pandas.read_feather(path).to_csv(name, index=False)",
    ".json": "JSON: pandas.read_json(path).to_csv(name, index=False)",
    ".jsonl": "JSON: pandas.read_json(path, lines=True).to_csv(name, index=False)",
    ".npy": "one array: numpy.savez(name, train_images=…, train_labels=…, …) (docs/your-data.md)",
    ".txt": "a text: name it .csv if its cells are separated by commas, .tsv if by tabs",
}


def refuse_other_kind(path: Path) -> None:
    """Raise for a file of a kind that is not read, with the way to one that is."""
    hint = _OTHER_KINDS.get(path.suffix.lower())
    if hint is not None:
        raise DataError(f"{path} is {hint}; what is read are .csv, .tsv and .npz")


def public_records(path: str | Path, card: Card, *, flatten: bool) -> "tuple[Tensor, ...]":
    """Public records in the form of a card's data, as a loss takes them, from an `.npz` or, by its schema, a table.

    Of an `.npz` those are train_images and train_labels. They are normalised with the card's constants, not their own.
    """
    from fodp.data import arrays as checks
    from fodp.data import npz

    path = Path(path)
    suffix = path.suffix.lower()
    if card.schema is not None:
        if suffix == ".npz":
            raise ConfigurationError(f"{card.name} is a table: public records for it are a table too, got {path}")
        from fodp.data.tables import encode_records

        return encode_records(path, card)
    if suffix != ".npz":
        raise ConfigurationError(
            f"public records in the form of {card.name} are an .npz (docs/your-data.md), got {path}"
        )
    arrays = npz.read(path)
    checks.check(arrays, path, card.classes)
    images = arrays.train_images
    if images.shape[1:] != card.shape or (images.dtype == "uint8") != card.is_uint8:
        kind = "uint8" if card.is_uint8 else "floating point"
        raise DataError(
            f"images of {path} must be {kind} of shape {card.shape} each, like those of {card.name}; "
            f"got {images.dtype} of {images.shape[1:]}"
        )
    return checks.to_dataset(images, arrays.train_labels, card, flatten=flatten).tensors


def _read_own(path: Path, assume_size: int | None, classes: int | None, test_size: int | None) -> "tuple[Arrays, Card]":
    if assume_size is None or classes is None:
        raise ConfigurationError(
            f"for your own data {path} state assume_size (--assume-size) and classes (--classes), as public "
            "numbers: counted from the file they would reveal who is in it"
        )
    whole("assume_size", assume_size)
    whole("classes", classes, minimum=2, maximum=MOST_CLASSES)

    from fodp.data import arrays as checks
    from fodp.data import npz

    arrays = npz.read(path)
    checks.check(arrays, path, classes)
    card = own_card(
        path.name,
        assume_size=assume_size,
        test_size=len(arrays.test_images) if test_size is None else whole("test_size", test_size),
        classes=classes,
        shape=arrays.train_images.shape[1:],
        is_uint8=arrays.train_images.dtype == "uint8",
    )
    return arrays, card


def _read_named(card: Card, data_dir: str | Path | None, *, download: bool, progress: bool) -> "Arrays":
    from fodp.data import arrays as checks

    arrays, where = _find(card.name, data_dir, download=download, progress=progress)
    checks.check(arrays, where, card.classes)
    images = arrays.train_images
    if images.shape[1:] != card.shape or images.dtype != "uint8":
        raise DataError(
            f"images of {where} must be uint8 of shape {card.shape} (channels first) each, "
            f"got {images.dtype} of {images.shape[1:]}; is it really {card.name}?"
        )
    return arrays


def _find(name: str, data_dir: str | Path | None, *, download: bool, progress: bool) -> "tuple[Arrays, object]":
    """The arrays of a named data set and where they come from: an .npz, official archives, the network."""
    from fodp.data import digits, npz, official

    if name == "digits":
        return digits.read(), "digits"
    paths = _files(name, (f"{name}.npz",), data_dir, download=download, progress=progress)
    if paths[0].suffix == ".npz":
        return npz.read(paths[0]), paths[0]
    return official.read(name, paths), paths[0]


def _files(
    name: str, plain: tuple[str, ...], data_dir: str | Path | None, *, download: bool, progress: bool
) -> list[Path]:
    """The files of a data set: plain ones, or the official archives, in the folder; else the archives, downloaded."""
    from fodp.data import archives

    folder = _folder(data_dir)
    official = tuple(archive.file for archive in archives.ARCHIVES[name])
    if folder is not None:
        for files in (plain, official):
            paths = [folder / file for file in files]
            if all(path.exists() for path in paths):
                return paths
    if not download:
        raise DataError(
            f"{name} is not in {folder or 'any folder (FODP_DATA is not set)'} and downloading is off; put "
            f"{' and '.join(plain)} or {' and '.join(official)} into a folder and name it with data_dir, --data-dir or "
            "FODP_DATA"
        )
    return archives.fetch(name, progress=progress)


def _folder(data_dir: str | Path | None) -> Path | None:
    chosen, origin = (data_dir, "data_dir") if data_dir is not None else (os.environ.get("FODP_DATA"), "FODP_DATA")
    if not chosen:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        # A mistyped folder must not end in a silent download.
        raise DataError(f"{origin} must name an existing folder, got {str(chosen)!r}; correct or unset it")
    return folder


def _split(arrays: "Arrays", card: Card, *, train_stop: int, flatten: bool) -> Splits:
    from fodp.data.arrays import to_dataset

    refuse_short(card, train_stop, len(arrays.train_images), len(arrays.test_images))
    rest = slice(train_stop, train_stop + LARGEST_VALIDATION)
    parts = (
        (arrays.train_images[:train_stop], arrays.train_labels[:train_stop]),
        (arrays.train_images[rest], arrays.train_labels[rest]),
        (arrays.test_images[: card.test_size], arrays.test_labels[: card.test_size]),
    )
    train, validation, test = (to_dataset(images, labels, card, flatten=flatten) for images, labels in parts)
    return Splits(card=card, train=train, validation=validation, test=test)


def refuse_short(card: Card, train_stop: int, train: int, test: int) -> None:
    """Raise if there are fewer examples than are asked for."""
    for asked, option, present in ((train_stop, "train_size", train), (card.test_size, "test_size", test)):
        if present < asked:
            raise DataError(
                f"{card.name} needs {asked} examples but the file holds {present}; "
                f"fetch the whole data set or ask for {option}={present} or less"
            )
