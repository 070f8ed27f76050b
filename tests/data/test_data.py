"""Data sets: official formats on small archives made here, refusals, safe loading, downloads on localhost."""

import hashlib
import http.server
import io
import os
import pickle
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from fodp.data import CARDS, archives, load
from fodp.data.archives import Archive
from fodp.data.more_cards import known_cards
from fodp.errors import PrivacyError

REAL_DATA = os.environ.get("FODP_DATA")
needs_real_data = pytest.mark.skipif(not REAL_DATA, reason="FODP_DATA is not set: no folder with real data")

TRAIN, TEST = 15, 6
SIZES: dict[str, Any] = {"train_size": 10, "test_size": TEST}


@pytest.fixture(autouse=True)
def _away_from_the_users_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FODP_DATA", raising=False)
    monkeypatch.setattr(archives, "cache_folder", lambda: tmp_path / "cache")


@contextmanager
def refused(words: str) -> Iterator[None]:
    """One line that says what is wrong and contains these words."""
    with pytest.raises(PrivacyError) as caught:
        yield
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def pixels(classes: int = 10, size: int = TRAIN + TEST) -> tuple[np.ndarray, np.ndarray]:
    """Channel-first images and labels."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (size, 3, 32, 32), dtype=np.uint8)
    return images, generator.integers(0, classes, size).astype(np.uint8)


def as_arrays(images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "train_images": images[:TRAIN],
        "train_labels": labels[:TRAIN],
        "test_images": images[TRAIN:],
        "test_labels": labels[TRAIN:],
    }


def write_npz(folder: Path, name: str, images: np.ndarray, labels: np.ndarray) -> None:
    np.savez_compressed(folder / f"{name}.npz", **as_arrays(images.transpose(0, 2, 3, 1), labels))


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def batch(images: np.ndarray, labels: np.ndarray, key: bytes) -> bytes:
    flat = images.reshape(len(images), -1)
    return pickle.dumps({b"batch_label": b"a batch", key: labels.tolist(), b"data": flat, b"filenames": [b"a.png"]}, 2)


def cifar10_members(images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    chunks = np.array_split(np.arange(TRAIN), 5)
    members = {"cifar-10-batches-py/readme.html": b"hello"}
    for i, chunk in enumerate(chunks, start=1):
        members[f"cifar-10-batches-py/data_batch_{i}"] = batch(images[chunk], labels[chunk], b"labels")
    members["cifar-10-batches-py/test_batch"] = batch(images[TRAIN:], labels[TRAIN:], b"labels")
    return members


def write_cifar10(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    write_tar(folder / "cifar-10-python.tar.gz", cifar10_members(images, labels))


def write_cifar100(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    write_tar(
        folder / "cifar-100-python.tar.gz",
        {
            "cifar-100-python/train": batch(images[:TRAIN], labels[:TRAIN], b"fine_labels"),
            "cifar-100-python/test": batch(images[TRAIN:], labels[TRAIN:], b"fine_labels"),
        },
    )


def write_svhn(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    official = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
    for split, part in (("train", slice(0, TRAIN)), ("test", slice(TRAIN, None))):
        savemat(
            folder / f"{split}_32x32.mat",
            {"X": images[part].transpose(2, 3, 1, 0), "y": official[part]},
            do_compression=True,
        )


WRITERS: dict[str, Callable[..., None]] = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "svhn": write_svhn,
}


def make_official(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, url: str = "http://nowhere") -> None:
    """Let the files in a folder be the official ones of a data set."""
    local = tuple(
        Archive(a.file, f"{url}/{a.file}", hashlib.sha256((folder / a.file).read_bytes()).hexdigest())
        for a in archives.ARCHIVES[name]
    )
    monkeypatch.setitem(archives.ARCHIVES, name, local)


class TestCards:
    def test_a_card_needs_neither_torch_nor_numpy(self) -> None:
        code = "import sys, fodp.data.cards; print([m for m in ('torch', 'numpy', 'pooch') if m in sys.modules])"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == "[]"

    @pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn"])
    def test_the_papers_protocol(self, name: str) -> None:
        card = CARDS[name]
        assert (card.train_size, card.test_size, card.sampling_rate, card.lot_size) == (5000, 2000, 0.04, 200)
        assert (card.shape, card.features) == ((3, 32, 32), 3072)

    @pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
    def test_every_card_says_where_its_numbers_come_from(self, card: Any) -> None:
        assert card.source
        assert card.constants
        assert "\n" not in card.description
        assert len(card.mean) == len(card.std) == card.shape[0]


class TestDigits:
    def test_split_is_fixed_disjoint_and_balanced(self) -> None:
        from sklearn.datasets import load_digits

        splits = load("digits", flatten=False)
        images, labels = splits.train.tensors
        assert (len(splits.train), len(splits.validation), len(splits.test)) == (1437, 0, 360)
        assert images.shape == (1437, 1, 8, 8)
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
        assert (images.min(), images.max()) == (-1, 1)
        counts = torch.bincount(splits.test.tensors[1])
        assert counts.min() >= 35
        assert counts.max() <= 37
        together = torch.cat([images, splits.test.tensors[0]]).flatten(1) * 8 + 8
        original = load_digits().data
        assert sorted(map(tuple, together.numpy())) == sorted(map(tuple, original))

    def test_what_is_not_trained_on_is_for_validation(self) -> None:
        whole, part = load("digits"), load("digits", train_size=1200, test_size=100)
        assert (len(part.train), len(part.validation), len(part.test)) == (1200, 237, 100)
        assert (part.card.train_size, part.card.lot_size, part.card.test_size) == (1200, 120, 100)
        assert torch.equal(part.validation.tensors[0], whole.train.tensors[0][1200:])

    def test_flat_rows_are_the_default(self) -> None:
        assert load("digits").train[0][0].shape == (64,)


class TestNamedDataSets:
    @pytest.mark.parametrize("name", WRITERS)
    def test_archive_and_npz_give_the_same_tensors(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images, labels = pixels(CARDS[name].classes)
        labels[0] = 0  # SVHN writes 10 for it
        (tmp_path / "npz").mkdir()
        (tmp_path / "official").mkdir()
        write_npz(tmp_path / "npz", name, images, labels)
        WRITERS[name](tmp_path / "official", images, labels)
        make_official(name, tmp_path / "official", monkeypatch)
        for folder in ("npz", "official"):
            splits = load(name, tmp_path / folder, **SIZES, download=False)
            mean = np.array(CARDS[name].mean)[:, None, None]
            std = np.array(CARDS[name].std)[:, None, None]
            expected = ((images / 255 - mean) / std).reshape(len(images), 3072)
            np.testing.assert_allclose(splits.train.tensors[0], expected[:10], atol=1e-5)
            np.testing.assert_allclose(splits.validation.tensors[0], expected[10:TRAIN], atol=1e-5)
            np.testing.assert_allclose(splits.test.tensors[0], expected[TRAIN:], atol=1e-5)
            assert splits.train.tensors[1].tolist() == labels[:10].tolist()
            assert splits.test.tensors[1].tolist() == labels[TRAIN:].tolist()

    def test_the_variable_names_the_folder_and_the_argument_wins(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_npz(tmp_path, "cifar10", *pixels())
        monkeypatch.setenv("FODP_DATA", str(tmp_path))
        assert load("cifar10", **SIZES, flatten=False).train[0][0].shape == (3, 32, 32)
        with refused("data_dir must name an existing folder"):
            load("cifar10", tmp_path / "typo")
        monkeypatch.setenv("FODP_DATA", str(tmp_path / "typo"))
        with refused("FODP_DATA must name an existing folder"):
            load("cifar10")

    def test_without_data_or_network_the_fix_is_named(self, tmp_path: Path) -> None:
        with refused("name it with data_dir, --data-dir or FODP_DATA"):
            load("svhn", tmp_path, download=False)
        with refused("FODP_DATA is not set"):
            load("svhn", download=False)

    def test_too_few_examples_are_not_quietly_accepted(self, tmp_path: Path) -> None:
        write_npz(tmp_path, "cifar10", *pixels())
        with refused("needs 5000 examples but the file holds 15; fetch the whole data set or ask for train_size=15"):
            load("cifar10", tmp_path)
        with refused("test_size=6 or less"):
            load("cifar10", tmp_path, train_size=10)

    def test_public_numbers_of_a_named_set_are_not_restated(self) -> None:
        with refused("has a public card"):
            load("digits", classes=10)
        with refused("train_size must be a whole number"):
            load("digits", train_size=0)

    def test_unknown_name(self) -> None:
        with refused("must be one of digits, cifar10, cifar100, svhn, mnist, "):
            load("emnist")

    def test_a_file_of_another_data_set_is_noticed(self, tmp_path: Path) -> None:
        grey = as_arrays(np.zeros((TRAIN + TEST, 28, 28), np.uint8), np.zeros(TRAIN + TEST, np.uint8))
        np.savez(tmp_path / "cifar10.npz", **grey)
        with refused("is it really cifar10?"):
            load("cifar10", tmp_path, **SIZES)
        images, labels = pixels(100)
        write_npz(tmp_path, "cifar10", images, np.full_like(labels, 57))
        with refused("must lie in 0..9 for 10 classes; that of example"):
            load("cifar10", tmp_path, **SIZES)


class TestOfficialFormats:
    """Pickles and MATLAB files can harm who reads them: only the bytes with the official checksum are opened."""

    def test_pickle_as_python_2_wrote_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The official files hold Python 2 strings (opcodes U and T), which pickle no longer writes."""
        images, labels = pixels()

        def text(value: bytes) -> bytes:
            return b"U" + bytes([len(value)]) + value

        def old(images: np.ndarray, labels: np.ndarray) -> bytes:
            raw = images.tobytes()
            array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
            dtype = b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|")
            dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            shape = b"(K" + bytes([len(images)]) + b"M\x00\x0ct"
            state = b"(K\x01" + shape + dtype + b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
            listed = b"(" + b"".join(b"K" + bytes([label]) for label in labels) + b"l"
            return b"\x80\x02}(" + text(b"data") + array + state + text(b"fine_labels") + listed + b"u."

        write_tar(
            tmp_path / "cifar-100-python.tar.gz",
            {"a/train": old(images[:TRAIN], labels[:TRAIN]), "a/test": old(images[TRAIN:], labels[TRAIN:])},
        )
        make_official("cifar100", tmp_path, monkeypatch)
        old_splits = load("cifar100", tmp_path, **SIZES)
        (tmp_path / "npz").mkdir()
        write_npz(tmp_path / "npz", "cifar100", images, labels)
        assert torch.equal(old_splits.train.tensors[0], load("cifar100", tmp_path / "npz", **SIZES).train.tensors[0])

    @pytest.mark.parametrize("damage", ["cut", "one bit", "empty"])
    @pytest.mark.parametrize("name", WRITERS)
    def test_a_file_in_the_folder_that_is_not_the_official_one(
        self, name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        WRITERS[name](tmp_path, *pixels(CARDS[name].classes))
        make_official(name, tmp_path, monkeypatch)
        path = tmp_path / archives.ARCHIVES[name][-1].file
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= damage == "one bit"
        path.write_bytes({"cut": content[:-9], "one bit": content, "empty": b""}[damage])
        with refused(f"{path} is not the official file"):
            load(name, tmp_path, **SIZES)

    def test_a_malicious_pickle_is_not_opened(self, tmp_path: Path) -> None:
        members = cifar10_members(*pixels())
        evil = {b"data": Evil(os.system, f"touch {tmp_path / 'was-run'}"), b"labels": [1]}
        members["cifar-10-batches-py/data_batch_2"] = pickle.dumps(evil, 2)
        write_tar(tmp_path / "cifar-10-python.tar.gz", members)
        with refused("write your own data as .npz"):
            load("cifar10", tmp_path, **SIZES)
        assert not (tmp_path / "was-run").exists()

    def test_a_file_that_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "cifar-10-python.tar.gz").mkdir()
        with refused("make it readable"):
            load("cifar10", tmp_path, **SIZES)


class Evil:
    """Pickles to a call of any function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


class TestNothingRunsOnLoad:
    def test_npz_with_objects(self, tmp_path: Path) -> None:
        arrays = as_arrays(*pixels())
        arrays["train_labels"] = np.array([Evil(os.system, f"touch {tmp_path / 'was-run'}")] * TRAIN, dtype=object)
        np.savez(tmp_path / "own.npz", **arrays)
        with refused("allow_pickle=False"):
            load(tmp_path / "own.npz", assume_size=15, classes=10)
        assert not (tmp_path / "was-run").exists()


class TestOwnData:
    def save(self, folder: Path, **changes: object) -> Path:
        arrays: dict[str, Any] = as_arrays(*pixels())
        for name, value in changes.items():
            arrays[name] = value
        np.savez(folder / "own.npz", **{name: value for name, value in arrays.items() if value is not None})
        return folder / "own.npz"

    @pytest.mark.rule(1)
    def test_public_numbers_must_be_stated(self, tmp_path: Path) -> None:
        path = self.save(tmp_path)
        with refused("counted from the file they would reveal who is in it"):
            load(path, classes=10)
        with refused("state assume_size (--assume-size) and classes (--classes)"):
            load(path, assume_size=15)
        with refused("assume_size must be a whole number"):
            load(path, assume_size=1.5, classes=10)
        with refused("state assume_size"):
            load(path, assume_size=15, classes=10, train_size=10)

    @pytest.mark.rule(1)
    def test_the_card_does_not_depend_on_who_is_in_the_data(self, tmp_path: Path) -> None:
        images, labels = pixels()
        one = load(self.save(tmp_path), assume_size=20, classes=12)
        other = load(
            self.save(tmp_path, train_images=images[1:TRAIN], train_labels=labels[1:TRAIN]),
            assume_size=20,
            classes=12,
        )
        assert one.card == other.card
        assert (one.card.train_size, one.card.classes, one.card.lot_size) == (20, 12, 2)
        assert (len(one.train), len(other.train), len(one.validation)) == (15, 14, 0)

    def test_default_rate_keeps_lots_of_moderate_size(self, tmp_path: Path) -> None:
        path = self.save(tmp_path)
        assert load(path, assume_size=100_000, classes=10).card.lot_size == 256
        assert load(path, assume_size=1000, classes=10).card.lot_size == 100

    @pytest.mark.parametrize(
        ("stored", "shape"),
        [
            ((21, 7), (7,)),
            ((21, 9, 8), (1, 9, 8)),
            ((21, 9, 8, 3), (3, 9, 8)),
            ((21, 3, 9, 8), (3, 9, 8)),
            ((21, 9, 8, 1), (1, 9, 8)),
        ],
    )
    def test_image_layouts(self, stored: tuple[int, ...], shape: tuple[int, ...], tmp_path: Path) -> None:
        arrays = as_arrays(np.full(stored, 255, np.uint8), np.zeros(21, np.int64))
        np.savez(tmp_path / "own.npz", **arrays)
        splits = load(tmp_path / "own.npz", assume_size=15, classes=2, flatten=False)
        assert splits.card.shape == shape
        assert splits.train.tensors[0].shape == (15, *shape)
        assert (splits.train.tensors[0] == 1).all()
        assert load(tmp_path / "own.npz", assume_size=15, classes=2).train[0][0].ndim == 1

    def test_floats_are_used_as_they_stand(self, tmp_path: Path) -> None:
        values = np.random.default_rng(0).normal(size=(21, 5))
        np.savez(tmp_path / "own.npz", **as_arrays(values, np.zeros(21, np.int64)))
        splits = load(tmp_path / "own.npz", assume_size=15, classes=2, test_size=3)
        np.testing.assert_array_equal(splits.train.tensors[0], values[:15].astype(np.float32))
        assert len(splits.test) == splits.card.test_size == 3

    @pytest.mark.rule(5)
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
    def test_values_that_are_not_finite(self, bad: float, tmp_path: Path) -> None:
        values = np.zeros((TRAIN, 5))
        values[3, 2] = bad
        path = self.save(tmp_path, train_images=values, test_images=np.zeros((TEST, 5)))
        with refused("own.npz must be finite in float32; example 3 is not"):
            load(path, assume_size=15, classes=10)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"train_labels": None}, "lacks train_labels"),
            ({"train_images": None, "test_labels": None}, "lacks train_images, test_labels"),
            ({"train_labels": np.zeros(TRAIN - 1, int)}, "15 examples but train_labels 14; they must match"),
            ({"train_labels": np.full(TRAIN, 10)}, "must lie in 0..9 for 10 classes; that of example 0 does not"),
            ({"test_labels": np.full(TEST, -1)}, "test_labels of"),
            ({"test_labels": np.full(TEST, -1)}, "that of example 0 does not"),
            ({"train_labels": np.zeros(TRAIN)}, "one whole number per example"),
            ({"train_labels": np.zeros((TRAIN, 1), int)}, "one whole number per example"),
            ({"train_images": np.zeros((0, 3, 32, 32), np.uint8)}, "at least one example"),
            ({"test_images": np.zeros((0, 3, 32, 32), np.uint8)}, "test_images"),
            ({"train_images": np.zeros((TRAIN, 3, 32, 32), np.int64)}, "uint8 or floating point, got int64"),
            ({"train_images": np.zeros((TRAIN, 3, 30, 32), np.uint8)}, "one shape and dtype"),
            ({"train_images": np.zeros((TRAIN, 3, 32, 32), np.float32)}, "one shape and dtype"),
            ({"train_images": np.zeros(TRAIN, np.uint8)}, "must have the shape (n, features)"),
            ({"train_images": np.zeros((TRAIN, 5, 9, 9), np.uint8)}, "1, 3 or 4 channels"),
            ({"train_images": np.full((TRAIN, 3), "x")}, "uint8 or floating point"),
        ],
    )
    def test_wrong_arrays(self, changes: dict[str, object], words: str, tmp_path: Path) -> None:
        with refused(words):
            load(self.save(tmp_path, **changes), assume_size=15, classes=10)

    def test_missing_and_damaged_files(self, tmp_path: Path) -> None:
        own = partial(load, assume_size=15, classes=10)
        with refused("no such file"):
            own(tmp_path / "nowhere.npz")
        path = self.save(tmp_path)
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = content[: middle - 50] + bytes(100) + content[middle + 50 :]
        for damaged in (b"", b"hello", content[:100], content[:middle], content[:-5], flipped):
            path.write_bytes(damaged)
            with refused("truncated, corrupt or of another format"):
                own(path)
        np.save(tmp_path / "single.npy", np.zeros(3))
        (tmp_path / "single.npy").rename(path)
        with refused("single array"):
            own(path)


class TestDownload:
    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[tuple[Path, str]]:
        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

        folder = tmp_path / "served"
        folder.mkdir()
        handler = partial(Quiet, directory=str(folder))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
            thread = threading.Thread(target=running.serve_forever, args=(0.01,))  # seconds until it ends
            thread.start()
            yield folder, f"http://127.0.0.1:{running.server_address[1]}"
            running.shutdown()
            thread.join()

    def serve(self, name: str, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        WRITERS[name](folder, *pixels(CARDS[name].classes))
        make_official(name, folder, monkeypatch, url)

    @pytest.mark.parametrize("progress", [True, False])
    @pytest.mark.parametrize("name", WRITERS)
    def test_downloads_once(
        self,
        name: str,
        progress: bool,
        server: tuple[Path, str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        folder, url = server
        self.serve(name, folder, url, monkeypatch)
        first = load(name, **SIZES, progress=progress)
        files = [archive.file for archive in archives.ARCHIVES[name]]
        assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(files)
        for file in files:
            (folder / file).unlink()
        assert torch.equal(load(name, **SIZES).train.tensors[0], first.train.tensors[0])
        captured = capfd.readouterr()
        assert captured.out == ""
        assert progress or captured.err == ""

    def test_a_wrong_checksum_leaves_nothing_behind(
        self, server: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, url = server
        self.serve("cifar10", folder, url, monkeypatch)
        (folder / "cifar-10-python.tar.gz").write_bytes(b"something else")
        with refused("does not have the official checksum and was thrown away"):
            load("cifar10", **SIZES)
        assert list((tmp_path / "cache").iterdir()) == []

    def test_failures_name_the_fix(
        self, server: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, url = server
        self.serve("cifar10", folder, url, monkeypatch)
        (folder / "cifar-10-python.tar.gz").unlink()
        with refused("the server answered 404"):
            load("cifar10", **SIZES)
        nobody = Archive("cifar-10-python.tar.gz", "http://127.0.0.1:9/cifar-10-python.tar.gz", "0" * 64)
        monkeypatch.setitem(archives.ARCHIVES, "cifar10", (nobody,))
        with refused("name its folder with data_dir, --data-dir or FODP_DATA"):
            load("cifar10", tmp_path, **SIZES, progress=False)
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(archives, "cache_folder", lambda: tmp_path / "file" / "below")
        with refused("could not download"):
            load("cifar10", **SIZES, progress=False)

    def test_the_official_table(self) -> None:
        for name, files in archives.ARCHIVES.items():
            assert name in known_cards()
            for archive in files:
                assert archive.url.endswith("/" + archive.file.removeprefix("fashion-"))  # the names are those of MNIST
                assert len(bytes.fromhex(archive.sha256)) == 32


@needs_real_data
class TestRealData:
    @pytest.mark.parametrize("name", WRITERS)
    def test_the_papers_subset(self, name: str) -> None:
        assert REAL_DATA is not None
        splits = load(name, REAL_DATA, download=False)
        images, labels = splits.train.tensors
        assert images.shape == (5000, 3072)
        assert splits.test.tensors[0].shape == (2000, 3072)
        assert splits.validation.tensors[0].shape[1] == 3072
        assert labels.unique().tolist() == list(range(splits.card.classes))
        # The published constants fit: about zero mean and unit variance, channel by channel.
        channels = images.reshape(5000, 3, 1024)
        assert channels.mean((0, 2)).abs().max() < 0.05
        assert (channels.std((0, 2)) - 1).abs().max() < 0.05


def test_a_file_of_another_kind_is_named_as_such_without_unsafe_advice(tmp_path):
    path = tmp_path / "own.npz"
    path.write_bytes(b"garbage")
    with pytest.raises(PrivacyError, match="not a NumPy archive") as caught:
        load(path, assume_size=10, classes=2)
    assert "pickle" not in str(caught.value)
