"""`fodp train --public-sample`: public records for the shape kronecker, read as the data is."""

import json

import numpy as np
import pytest
import torch

from fodp.cli.main import main
from fodp.data import CARDS, load
from fodp.data.loading import public_records
from fodp.trainer import Trainer

QUICK = ["--epochs", "1", "--quiet", "--noise-multiplier", "2", "--accountant", "rdp", "--seed", "0", "--threads", "1"]
SHAPE = ["--method", "dp-sgd", "--shape", "kronecker", "--lr", "0.1"]
SCHEMA = """
public_size = 60
[columns.age]
bounds = [0, 100]
[columns.town]
values = ["Ulm", "Bonn"]
[columns.ill]
values = ["no", "yes"]
"""


@pytest.fixture
def seen(monkeypatch):
    """What trainers were given as a public sample."""
    given, make = [], Trainer.__init__

    def noting(self, *arguments, **words):
        given.append(words.get("public_sample"))
        make(self, *arguments, **words)

    monkeypatch.setattr(Trainer, "__init__", noting)
    return given


def arrays(path, count, shape=(5,), dtype=np.float32, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 17, (count, *shape)) if dtype == np.uint8 else rng.normal(size=(count, *shape))
    np.savez(path, train_images=values.astype(dtype), train_labels=rng.integers(0, classes, count))
    return str(path)


def table(path, count, town="Ulm"):
    path.write_text("\n".join(["age,town,ill", *(f"{n},{town},{'yes' if n % 2 else 'no'}" for n in range(count))]))
    return str(path)


def own(tmp_path):
    data = arrays(tmp_path / "own.npz", 60)
    return ["train", *QUICK, "--data", data, "--assume-size", "60", "--classes", "3", "--model", "logistic"]


def weights(out):
    return torch.load(out / "checkpoint.pt", weights_only=True)["model"]


def test_records_of_an_npz_are_what_layers_are_measured_by(tmp_path, seen):
    words = [*own(tmp_path), *SHAPE]
    samples = [[], *(["--public-sample", arrays(tmp_path / f"{n}.npz", 20, seed=n)] for n in (1, 2))]
    trained = []
    for place, sample in enumerate(samples):
        assert main([*words, *sample, "--out", str(tmp_path / str(place))]) == 0
        trained.append(torch.cat([w.flatten() for w in weights(tmp_path / str(place)).values()]))
    assert seen[0] is None
    with np.load(tmp_path / "1.npz") as file:
        assert torch.equal(seen[1][0], torch.from_numpy(file["train_images"]))
        assert torch.equal(seen[1][1], torch.from_numpy(file["train_labels"]))
    assert not any(torch.equal(trained[one], trained[other]) for one, other in ((0, 1), (1, 2)))


def test_rows_of_a_table_are_read_by_the_schema_of_the_data(tmp_path, seen):
    (tmp_path / "schema.toml").write_text(SCHEMA)
    data, public = table(tmp_path / "own.csv", 60), table(tmp_path / "public.csv", 8, town="Rome")
    words = ["--data", data, "--schema", str(tmp_path / "schema.toml"), "--target", "ill", "--model", "logistic"]
    assert main(["train", *QUICK, *SHAPE, *words, "--public-sample", public, "--out", str(tmp_path / "r")]) == 0
    rows, targets = seen[0]
    assert torch.equal(rows[:, 1:], torch.tensor([[0.0, 0.0, 1.0]]).expand(8, 3))
    assert rows[:, 0].tolist() == pytest.approx([n / 50 - 1 for n in range(8)])
    assert targets.tolist() == [n % 2 for n in range(8)]


def test_records_of_a_named_data_set_are_normalised_by_its_card(tmp_path):
    path = arrays(tmp_path / "digits.npz", 20, (1, 8, 8), np.uint8, classes=10)
    images, labels = public_records(path, CARDS["digits"], flatten=False)
    with np.load(path) as file:
        assert torch.equal(images, torch.from_numpy(file["train_images"]).float() / 8 - 1)
    assert images.shape[1:] == load("digits", flatten=False).train[0][0].shape
    assert labels.dtype == torch.int64
    assert public_records(path, CARDS["digits"], flatten=True)[0].shape == (20, 64)


def test_a_resumed_run_has_its_sample_and_no_other(tmp_path, seen, capsys):
    sample = arrays(tmp_path / "public.npz", 20, seed=1)
    out = str(tmp_path / "r")
    assert main([*own(tmp_path), *SHAPE, "--public-sample", sample, "--out", out]) == 0
    assert json.loads((tmp_path / "r" / "config.json").read_text())["public_sample"] == sample
    assert main(["train", "--resume", "--quiet", "--out", out]) == 0
    assert torch.equal(seen[0][0], seen[1][0])
    assert main(["train", "--resume", "--out", out, "--public-sample", "other.npz"]) == 2
    assert "the run in" in capsys.readouterr().err


class TestRefused:
    def refused(self, capsys, words):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert "Traceback" not in err
        return err

    @pytest.mark.parametrize("shape", [[], ["--shape", "fan-in"]])
    def test_without_the_shape_that_looks_at_it(self, tmp_path, capsys, shape):
        words = [*own(tmp_path), *shape, "--public-sample", arrays(tmp_path / "public.npz", 20)]
        assert "add --shape kronecker" in self.refused(capsys, [*words, "--out", str(tmp_path / "r")])
        assert not (tmp_path / "r").exists()

    @pytest.mark.parametrize(
        ("form", "says"),
        [
            (dict(shape=(6,)), "of shape (5,)"),
            (dict(dtype=np.uint8), "must be floating point"),
            (dict(classes=9), "must lie in 0..2"),
            (None, "is the private data itself"),
        ],
    )
    def test_records_of_another_form_and_the_private_ones(self, tmp_path, capsys, form, says):
        words = own(tmp_path)
        sample = str(tmp_path / "own.npz") if form is None else arrays(tmp_path / "public.npz", 50, **form)
        words += [*SHAPE, "--public-sample", sample, "--out", str(tmp_path / "r")]
        assert says in self.refused(capsys, words)
        assert not (tmp_path / "r").exists()

    def test_a_file_that_is_not_there_and_a_table_for_arrays(self, tmp_path, capsys):
        words = [*own(tmp_path), *SHAPE, "--out", str(tmp_path / "r"), "--public-sample"]
        assert "no such file" in self.refused(capsys, [*words, str(tmp_path / "nowhere.npz")])
        assert "are an .npz" in self.refused(capsys, [*words, table(tmp_path / "public.csv", 8)])

    def test_arrays_for_a_table(self, tmp_path, capsys):
        (tmp_path / "schema.toml").write_text(SCHEMA)
        words = [
            "--data",
            table(tmp_path / "own.csv", 60),
            "--schema",
            str(tmp_path / "schema.toml"),
            "--target",
            "ill",
        ]
        sample = arrays(tmp_path / "public.npz", 20)
        err = self.refused(capsys, ["train", *QUICK, *SHAPE, *words, "--public-sample", sample])
        assert "are a table too" in err
