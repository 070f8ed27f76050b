"""Files that are named as public and hold the private rows are refused, by every command that takes them."""

import os
import shutil

import numpy as np
import pytest

from fodp.cli.main import main

SCHEMA = """
public_size = 60
[columns.age]
bounds = [0, 128]
[columns.weight]
bounds = [0, 256]
[columns.ill]
values = ["no", "yes"]
"""
QUICK = ["--quiet", "--epochs", "1", "--method", "dp-sgd", "--model", "logistic", "--target", "ill"]
NOISE = ["--noise-multiplier", "2", "--accountant", "rdp"]
TUNE = ["--target-epsilon", "3", "--vary", "lr=0.1,0.2", "--runs", "2", "--jobs", "1"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    rng = np.random.default_rng(0)
    rows = [f"{a:.4f},{w:.4f},{'yes' if a > 50 else 'no'}" for a, w in rng.uniform(0, 100, (120, 2))]

    def table(name, chosen):
        (tmp_path / name).write_text("\n".join(["age,weight,ill", *chosen]))

    table("own.csv", rows[:60])
    table("public.csv", rows[60:])
    table("part.csv", rows[50:20:-1])
    table("tenth.csv", [*rows[:6], *rows[60:]])
    shutil.copy("own.csv", "copy.csv")
    os.link("own.csv", "link.csv")
    os.symlink("own.csv", "symlink.csv")
    return tmp_path


def words(command, test):
    rest = {"train": NOISE, "tune": TUNE, "audit": NOISE}[command]
    out = ["--trials", "2"] if command == "audit" else []
    return [command, *QUICK, *rest, *out, "--data", "own.csv", "--schema", "schema.toml", "--test-data", test,
            "--out", "r"]  # fmt: skip


@pytest.mark.rule(29)
@pytest.mark.parametrize("command", ["train", "tune"])
@pytest.mark.parametrize("test", ["own.csv", "copy.csv", "link.csv", "symlink.csv", "./own.csv", "part.csv"])
def test_test_data_that_is_the_private_file_is_refused(files, capsys, command, test):
    assert main(words(command, test)) == 2
    err = capsys.readouterr().err
    assert "fodp: --test-data " in err
    assert test.removeprefix("./") in err
    assert "gets no noise" in err
    assert "Traceback" not in err
    assert not (files / "r").exists()


@pytest.mark.rule(29)
def test_an_audit_compares_them_too(files, capsys):
    assert main(words("audit", "copy.csv")) == 2
    assert "is the private data itself" in capsys.readouterr().err


def test_other_rows_are_taken_and_some_private_ones_are_told(files, recwarn):
    assert main(words("train", "public.csv")) == 0
    assert not [w for w in recwarn if "training data" in str(w.message)]
    assert main([*words("train", "tenth.csv")[:-1], "second"]) == 0
    assert [w for w in recwarn if "--test-data tenth.csv: some of these rows" in str(w.message)]


def test_rows_can_be_said_to_be_public_but_not_the_file(files, capsys):
    assert main([*words("train", "part.csv"), "--shared-rows-are-public"]) == 0
    capsys.readouterr()
    assert main([*words("train", "copy.csv")[:-1], "other", "--shared-rows-are-public"]) == 2
    assert "is the private data itself" in capsys.readouterr().err


@pytest.mark.rule(29)
def test_the_test_split_of_an_archive_is_compared(files, capsys):
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(60, 5)).astype(np.float32), rng.integers(0, 3, 60)
    np.savez("own.npz", train_images=images, train_labels=labels, test_images=images[:20], test_labels=labels[:20])
    own = ["train", "--quiet", "--epochs", "1", "--method", "dp-sgd", "--model", "logistic", *NOISE]
    own += ["--data", "own.npz", "--assume-size", "60", "--classes", "3", "--out", "r"]
    assert main(own) == 2
    assert "the test split of own.npz: most of these rows" in capsys.readouterr().err


@pytest.mark.rule(29)
def test_a_public_sample_of_the_private_rows_is_refused(files, capsys):
    base = words("train", "public.csv")
    base = [*base[:-1], "r", "--shape", "kronecker", "--lr", "0.1", "--public-sample"]
    for sample in ("copy.csv", "link.csv", "part.csv"):
        assert main([*base, sample]) == 2
        assert "gets no noise" in capsys.readouterr().err
    assert not (files / "r").exists()
