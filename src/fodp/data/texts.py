"""IMDb and SST-2 as texts with labels, and Adult as rows: official archives or plain files, made into numbers.

Each text is hashed by itself (`fodp.features.HashedText`), each row encoded by a public schema (`fodp.data.adult`).
"""

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from fodp.data import adult
from fodp.data.archives import ARCHIVES
from fodp.data.arrays import reading
from fodp.data.cards import Card
from fodp.data.loading import LARGEST_VALIDATION, Splits, refuse_short
from fodp.data.official import official_bytes
from fodp.errors import DataError
from fodp.features.text import HashedText

# Files with one record a line, as `load` looks for them in a folder.
PLAIN = {
    "imdb": ("imdb-train.jsonl", "imdb-test.jsonl"),
    "sst2": ("sst2-train.tsv", "sst2-dev.tsv"),
    "adult": ("adult.data", "adult.test"),
}
_REVIEW = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/(\d+)_\d+\.txt")


@dataclass(frozen=True)
class Texts:
    """Texts and their labels, 0 or 1."""

    texts: list[str]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, where: slice) -> "Texts":
        """Some of them."""
        return Texts(self.texts[where], self.labels[where])


def load(card: Card, paths: list[Path]) -> Splits:
    """Splits of `imdb`, `sst2` or `adult`, as many examples as the card says."""
    if card.name == "adult":
        train, test = (adult.encoded(adult.read(path)) for path in paths)
        return _cut(card, train, test, lambda rows, where: TensorDataset(*rows[where]))
    return _cut(card, *read(card.name, paths), lambda texts, where: hashed(texts.part(where), card.features))


def _cut(card: Card, train: Any, test: Any, part: Callable[[Any, slice], TensorDataset]) -> Splits:
    refuse_short(card, card.train_size, len(train), len(test))
    return Splits(
        card=card,
        train=part(train, slice(card.train_size)),
        validation=part(train, slice(card.train_size, card.train_size + LARGEST_VALIDATION)),
        test=part(test, slice(card.test_size)),
    )


def read(name: str, paths: list[Path]) -> tuple[Texts, Texts]:
    """The texts of `imdb` or `sst2`, for training and for testing, from `PLAIN` files or the official archive.

    For features of your own: `HashedText` of other lengths, a frozen language model.
    """
    return read_plain(name, paths) if len(paths) > 1 else read_archive(name, paths[0])


def read_plain(name: str, paths: list[Path]) -> tuple[Texts, Texts]:
    """Read two files of `PLAIN`: a JSON list [label, text] a line; or label, tab and sentence below a header line."""
    found = []
    for path in paths:
        with reading(path):
            content = path.read_text(encoding="utf-8")
            rows = [json.loads(line) for line in content.split("\n") if line] if name == "imdb" else _table(content)
            found.append(_checked([text for _, text in rows], [int(label) for label, _ in rows], path))
    return found[0], found[1]


def read_archive(name: str, path: Path) -> tuple[Texts, Texts]:
    """Read the official archive; another one is refused."""
    content = io.BytesIO(official_bytes(path, ARCHIVES[name][0]))
    with reading(path):
        if name == "imdb":
            return _reviews(content, path)
        with zipfile.ZipFile(content) as archive:
            tables = [_table(archive.read(f"SST-2/{part}.tsv").decode(), swapped=True) for part in ("train", "dev")]
        pairs = [([text for _, text in rows], [int(label) for label, _ in rows]) for rows in tables]
        return _checked(*pairs[0], path), _checked(*pairs[1], path)


def _reviews(content: io.BytesIO, path: Path) -> tuple[Texts, Texts]:
    """IMDb's files by their numbers, both classes in turns, so that the first n of them hold both."""
    found: dict[str, list[tuple[int, int, str]]] = {"train": [], "test": []}
    with tarfile.open(fileobj=content) as archive:
        for member in archive:
            named = _REVIEW.fullmatch(member.name)
            file = archive.extractfile(member) if named else None
            if named and file is not None:
                found[named[1]].append((int(named[3]), int(named[2] == "pos"), file.read().decode()))
    train, test = (
        _checked([text for *_, text in sorted(found[part])], [label for _, label, _ in sorted(found[part])], path)
        for part in ("train", "test")
    )
    return train, test


def _table(content: str, *, swapped: bool = False) -> list[tuple[str, str]]:
    """Pairs (label, sentence) below a header line; GLUE's own files have the sentence first."""
    rows = [line.split("\t") for line in content.split("\n")[1:] if line]
    return [(row[1], row[0]) if swapped else (row[0], row[1]) for row in rows]


def _checked(texts: list[str], labels: list[int], path: Path) -> Texts:
    if not texts or not all(isinstance(text, str) for text in texts) or not set(labels) <= {0, 1}:
        raise DataError(f"{path} must hold texts with labels 0 or 1: fetch it again")
    return Texts(texts, labels)


def hashed(texts: Texts, buckets: int) -> TensorDataset:
    """Each text as `buckets` numbers (`fodp.features.HashedText`), with its label."""
    return TensorDataset(HashedText(buckets)(texts.texts), torch.tensor(texts.labels, dtype=torch.int64))
