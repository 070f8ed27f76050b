"""The full data sets: official formats on small files made here, plain files, public cards, and real files if there."""

import gzip
import hashlib
import io
import json
import os
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fodp.data import CARDS, adult, archives, load, more_cards, texts
from fodp.data.archives import ARCHIVES, Archive
from fodp.data.more_cards import MORE_CARDS, known_cards
from fodp.errors import DataError

TRAIN, TEST = 12, 4
REAL = os.environ.get("FODP_DATA")  # before tests take it away
FEW = dict(train_size=8, test_size=TEST, download=False)
REVIEWS = [(number % 2, f"review {number} is {'good' if number % 2 else 'bad'}") for number in range(TRAIN + TEST)]
ADULT = """39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Peru, <=50K
50, ?, 83311, Masters, 14, Divorced, ?, Husband, Black, Female, 0, 1902, 13, ?, >50K
"""  # noqa: E501 (rows as the official file has them)


@pytest.fixture(autouse=True)
def _away_from_the_users_folders(monkeypatch, tmp_path):
    monkeypatch.delenv("FODP_DATA", raising=False)
    monkeypatch.setattr(archives, "cache_folder", lambda: tmp_path / "cache")


def make_official(name, folder, monkeypatch):
    """Let the files in a folder be the official ones of a data set."""
    local = tuple(
        Archive(each.file, each.url, hashlib.sha256((folder / each.file).read_bytes()).hexdigest())
        for each in ARCHIVES[name]
    )
    monkeypatch.setitem(ARCHIVES, name, local)


def idx(values):
    header = bytes([0, 0, 8, values.ndim]) + b"".join(side.to_bytes(4, "big") for side in values.shape)
    return gzip.compress(header + values.tobytes())


class TestCards:
    def test_sizes_classes_and_shapes_as_published(self):
        found = {n: (c.train_size, c.test_size, c.classes, c.shape) for n, c in MORE_CARDS.items()}
        assert found == {
            "mnist": (60_000, 10_000, 10, (1, 28, 28)),
            "fashion-mnist": (60_000, 10_000, 10, (1, 28, 28)),
            "cifar10-full": (50_000, 10_000, 10, (3, 32, 32)),
            "imdb": (25_000, 25_000, 2, (2048,)),
            "sst2": (67_349, 872, 2, (2048,)),
            "adult": (32_561, 16_281, 2, (112,)),
        }
        assert all(card.lot_size == 1000 and card.source and card.constants for card in MORE_CARDS.values())

    def test_the_cards_that_records_are_known_by_are_as_they_were(self):
        assert list(CARDS) == ["digits", "cifar10", "cifar100", "svhn"]
        assert list(known_cards()) == [*CARDS, *MORE_CARDS]

    def test_every_data_set_has_an_official_source_with_a_checksum(self):
        for name in MORE_CARDS:
            assert all(len(each.sha256) == 64 and each.url.startswith("http") for each in ARCHIVES[name])
        files = {(each.file, each.sha256) for rows in ARCHIVES.values() for each in rows}
        assert len({file for file, _ in files}) == len(files)  # in one folder no file takes another one's place


class TestImages:
    @pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
    def test_archive_and_npz_give_the_same_tensors(self, name, tmp_path, monkeypatch):
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (TRAIN + TEST, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, TRAIN + TEST).astype(np.uint8)
        parts = images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:]
        for each, values in zip(ARCHIVES[name], parts, strict=True):
            (tmp_path / each.file).write_bytes(idx(values))
        with pytest.raises(DataError, match="is not the official file"):
            load(name, tmp_path, **FEW)
        make_official(name, tmp_path, monkeypatch)
        official = load(name, tmp_path, **FEW, flatten=False)
        (tmp_path / "npz").mkdir()
        words = ("train_images", "train_labels", "test_images", "test_labels")
        np.savez(tmp_path / "npz" / f"{name}.npz", **dict(zip(words, parts, strict=True)))
        plain = load(name, tmp_path / "npz", **FEW, flatten=False)
        assert official.train.tensors[0].shape == (8, 1, 28, 28)
        assert len(official.validation) == TRAIN - 8
        for split in ("train", "validation", "test"):
            for one, other in zip(getattr(official, split).tensors, getattr(plain, split).tensors, strict=True):
                assert torch.equal(one, other)
        assert torch.allclose(
            official.train.tensors[0][:, 0], torch.from_numpy(images[:8] / 127.5 - 1).float(), atol=1e-6
        )

    def test_cifar10_full_is_the_same_archive_and_a_file_of_its_own(self, tmp_path):
        assert ARCHIVES["cifar10-full"] == ARCHIVES["cifar10"]
        with pytest.raises(DataError, match=r"put cifar10-full\.npz or cifar-10-python\.tar\.gz into a folder"):
            load("cifar10-full", tmp_path, download=False)


def write_plain(folder):
    for part, rows in (("train", REVIEWS[:TRAIN]), ("test", REVIEWS[TRAIN:])):
        (folder / f"imdb-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for part, rows in (("train", REVIEWS[:TRAIN]), ("dev", REVIEWS[TRAIN:])):
        (folder / f"sst2-{part}.tsv").write_text("label\ttext\n" + "".join(f"{y}\t{text}\n" for y, text in rows))


def write_archives(folder):
    with tarfile.open(folder / "aclImdb_v1.tar.gz", "w:gz") as archive:

        def add(name, text):
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))

        add("aclImdb/README", "read me")
        add("aclImdb/train/unsup/0_0.txt", "no label")
        for number, (label, text) in reversed([*enumerate(REVIEWS)]):  # in no order
            part = "train" if number < TRAIN else "test"
            add(f"aclImdb/{part}/{'pos' if label else 'neg'}/{number // 2}_{number % 10}.txt", text)
    with zipfile.ZipFile(folder / "SST-2.zip", "w") as archive:
        for part, rows in (("train", REVIEWS[:TRAIN]), ("dev", REVIEWS[TRAIN:])):
            archive.writestr(
                f"SST-2/{part}.tsv", "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for label, text in rows)
            )


class TestTexts:
    @pytest.mark.parametrize("name", ["imdb", "sst2"])
    def test_archive_and_plain_files_give_the_same_tensors(self, name, tmp_path, monkeypatch):
        for folder in ("plain", "official"):
            (tmp_path / folder).mkdir()
        write_plain(tmp_path / "plain")
        write_archives(tmp_path / "official")
        with pytest.raises(DataError, match="is not the official file"):
            load(name, tmp_path / "official", **FEW)
        make_official(name, tmp_path / "official", monkeypatch)
        plain, official = (load(name, tmp_path / folder, **FEW) for folder in ("plain", "official"))
        assert plain.train.tensors[1].tolist() == [0, 1] * 4
        assert plain.train.tensors[0].shape == (8, 2048)
        assert (len(plain.validation), len(plain.test), plain.card.train_size) == (4, 4, 8)
        for split in ("train", "validation", "test"):
            for one, other in zip(getattr(official, split).tensors, getattr(plain, split).tensors, strict=True):
                assert torch.equal(one, other)

    def test_texts_themselves_for_other_features(self, tmp_path):
        write_plain(tmp_path)
        train, test = texts.read("imdb", [tmp_path / file for file in texts.PLAIN["imdb"]])
        assert (train.texts[1], train.labels[1]) == ("review 1 is good", 1)
        assert (len(train), len(test)) == (TRAIN, TEST)

    @pytest.mark.parametrize("content", ["no json\n", "[2, 'x']\n", '[5, "x"]\n', "[0]\n", ""])
    def test_damaged_files_are_refused(self, content, tmp_path):
        write_plain(tmp_path)
        (tmp_path / "imdb-test.jsonl").write_text(content)
        with pytest.raises(DataError, match=r"imdb-test\.jsonl"):
            load("imdb", tmp_path, **FEW)

    def test_too_few_are_not_quietly_accepted(self, tmp_path):
        write_plain(tmp_path)
        with pytest.raises(DataError, match="sst2 needs 67349 examples but the file holds 12"):
            load("sst2", tmp_path, download=False)


class TestAdult:
    def test_uci_files_and_files_with_a_header(self, tmp_path):
        (tmp_path / "adult.data").write_text(ADULT)
        (tmp_path / "adult.test").write_text("|1x3 Cross validator\n" + ADULT.replace("50K\n", "50K.\n") + "\n")
        splits = load("adult", tmp_path, train_size=2, test_size=2, download=False)
        assert splits.train.tensors[1].tolist() == [0, 1]
        for one, other in zip(splits.train.tensors, splits.test.tensors, strict=True):
            assert torch.equal(one, other)
        (tmp_path / "adult.data").write_text(",".join(adult.NAMES) + "\n" + ADULT)
        again = load("adult", tmp_path, train_size=2, test_size=2, download=False)
        assert torch.equal(again.train.tensors[0], splits.train.tensors[0])

    def test_every_number_is_public_in_scale(self, tmp_path):
        rows = adult.encoded(adult.read(self.written(tmp_path))).tensors[0]
        assert rows.shape == (2, more_cards.ADULT_WIDTH)
        assert rows[0][:2].tolist() == pytest.approx([39 / 50 - 1, 12 / 7.5 - 1])  # age, years of education
        assert rows[:, 5:].sum(1).tolist() == [8, 8]  # one place for each of eight columns, also where it is missing
        assert rows.abs().max() <= 1

    def test_a_cut_line_is_refused_with_its_number(self, tmp_path):
        (tmp_path / "adult.data").write_text(ADULT + "39, State-gov")
        with pytest.raises(DataError, match=r"line 3 of .*adult\.data has 2 cells and not 15"):
            adult.read(tmp_path / "adult.data")

    def test_a_missing_file_is_one_line(self, tmp_path):
        with pytest.raises(DataError, match="cannot read"):
            adult.read(tmp_path / "adult.data")

    def written(self, folder):
        (folder / "adult.data").write_text(ADULT)
        return folder / "adult.data"


@pytest.mark.parametrize("name", MORE_CARDS)
def test_real_files(name):
    """Sizes as published, in the folder FODP_DATA, if they are there."""
    plain = texts.PLAIN.get(name, (f"{name}.npz",))
    if REAL is None or not all((Path(REAL) / file).exists() for file in plain):
        pytest.skip(f"FODP_DATA names no folder with {' and '.join(plain)}")
    card = replace(MORE_CARDS[name], train_size=1000, test_size=800)
    splits = load(name, REAL, train_size=card.train_size, test_size=card.test_size, download=False)
    assert splits.train.tensors[0].shape[1:] == (card.features,)
    assert len(splits.test) == 800
    assert len(splits.train.tensors[1].unique()) == card.classes
