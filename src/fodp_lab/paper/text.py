"""SST-2 as numbers: words hashed into a public number of buckets, cut to a public length. No vocabulary is learnt."""

import os
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fodp.data import Card, Splits
from fodp.data.loading import LARGEST_VALIDATION
from fodp.errors import DataError

BUCKETS = 4096  # 0 is padding, words are 1 to 4095: public, whatever the text
LENGTH = 24  # words of a sentence; what follows is cut off
# Not one of `fodp.data.CARDS`: this is no data set of the library's, and records are known by those cards.
SST2 = Card(
    name="sst2",
    description="phrases and sentences of film reviews, positive or negative; 5,000 train and 872 test",
    source="Socher et al. 2013 in GLUE's split (train and dev); no licence stated, cite the paper",
    train_size=5000,
    test_size=872,
    classes=2,
    shape=(LENGTH,),
    sampling_rate=0.04,
    scale=1.0,
    mean=(0.0,),
    std=(1.0,),
    constants="buckets and length, chosen beforehand; no data was looked at",
)
FILES = ("sst2-train.tsv", "sst2-dev.tsv")


def numbered(sentence: str) -> list[int]:
    """The words of a sentence as bucket numbers, padded with 0; the same on every machine."""
    words = sentence.lower().split()[:LENGTH]
    return [1 + zlib.crc32(word.encode()) % (BUCKETS - 1) for word in words] + [0] * (LENGTH - len(words))


def load(folder: str | Path | None = None, card: Card = SST2) -> Splits:
    """The first 5,000 training sentences, at most 5,000 after them for validation, and the dev set for the test.

    The two files lie in the folder, or in the one that FODP_DATA names: one header line, then a label, a tab and a
    sentence a line.
    """
    chosen = folder if folder is not None else os.environ.get("FODP_DATA")
    paths = [Path(chosen or ".").expanduser() / file for file in FILES]
    for path in paths:
        if not path.is_file():
            raise DataError(
                f"sst2 needs {path.name}, and it is not in {chosen or 'any folder (FODP_DATA is not set)'}; put it "
                "there, or name another folder with --data-dir or FODP_DATA"
            )
    (words, labels), (test_words, test_labels) = (_read(path) for path in paths)
    for path, asked, present in zip(paths, (card.train_size, card.test_size), (words, test_words), strict=True):
        if len(present) < asked:
            raise DataError(f"{path.name} holds {len(present)} sentences and {asked} are needed; is it the whole file?")
    n, rest = card.train_size, slice(card.train_size, card.train_size + LARGEST_VALIDATION)
    return Splits(
        card=card,
        train=TensorDataset(words[:n], labels[:n]),
        validation=TensorDataset(words[rest], labels[rest]),
        test=TensorDataset(test_words[: card.test_size], test_labels[: card.test_size]),
    )


def _read(path: Path) -> tuple[Tensor, Tensor]:
    rows = [line.split("\t", 1) for line in path.read_text(encoding="utf-8").split("\n")[1:] if line.strip()]
    for number, row in enumerate(rows, 2):
        if len(row) != 2 or row[0] not in ("0", "1"):
            raise DataError(f"line {number} of {path.name} must be a label 0 or 1, a tab and a sentence; mend the file")
    return torch.tensor([numbered(text) for _, text in rows]), torch.tensor([int(label) for label, _ in rows])
