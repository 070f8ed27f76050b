"""A published model predicts as the run did: by the Python in its own card, without fodp where the data is an array."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fodp
from fodp.cli.main import main
from fodp.data import digits

QUICK = ["--epochs", "2", "--quiet", "--noise-multiplier", "1", "--accountant", "rdp", "--seed", "0", "--threads", "1"]
OWN_MODEL = (
    "from torch import nn\ndef fixed(classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(75, classes))\n"
)
# Nothing of fodp can be imported in the process that predicts.
CHECK = """
import sys
from pathlib import Path
sys.modules["fodp"] = None
import json, numpy
exec(open("loader.py").read())
raw = numpy.load("raw.npz")
with torch.no_grad():
    scores = predict(torch.from_numpy(raw["test_images"]))
print(json.dumps(float((scores.argmax(dim=1) == torch.from_numpy(raw["test_labels"])).double().mean())))
"""


def trained_and_exported(*words):
    """The result of a run in the current directory, and the metadata of its export."""
    assert main(["train", *QUICK, *words, "--out", "r"]) == 0
    assert main(["export", "r", "model.safetensors"]) == 0
    with safe_open("model.safetensors", "pt") as opened:
        return json.loads(open("r/result.json").read()), opened.metadata()


def accuracy_elsewhere(metadata, folder):
    (folder / "loader.py").write_text(metadata["loader"])
    done = subprocess.run([sys.executable, "-c", CHECK], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("model", ["mlp", "cnn", "logistic"])
def test_the_cards_own_loader_has_the_runs_accuracy_to_the_digit(model, tmp_path):
    result, metadata = trained_and_exported("--dataset", "digits", "--model", model)
    np.savez("raw.npz", **digits.read()._asdict())
    assert accuracy_elsewhere(metadata, tmp_path) == result["final_accuracy"]
    exported = fodp.load_exported("model.safetensors")
    images, labels = digits.read().test_images, digits.read().test_labels
    assert np.mean(np.array(exported.predict(images)) == labels) == result["final_accuracy"]
    assert exported.privacy["epsilon"] == json.dumps(result["epsilon"])
    assert len([line for line in metadata["loader"].splitlines() if not line.startswith(("import", "from"))]) == 3


def test_of_a_run_with_an_average_the_average_is_scored_and_exported():
    """Also where the folder was resumed after its end."""
    from fodp.state import checkpoint

    words = ("--dataset", "digits", "--method", "dp-sgd", "--model", "logistic", "--lr", "4", "--set", "average=power")
    result, _ = trained_and_exported(*words, "--set", "average_power=1")
    images, labels = digits.read().test_images, digits.read().test_labels
    exported = fodp.load_exported("model.safetensors")
    assert np.mean(np.array(exported.predict(images)) == labels) == result["final_accuracy"]
    saved = checkpoint.load(Path("r/checkpoint.pt"))
    weights = torch.cat([parameter.flatten() for parameter in exported.model.parameters()])
    assert torch.equal(weights, torch.cat([tensor.flatten() for tensor in saved["model"].values()]))
    assert not torch.allclose(weights, saved["iterate"])
    assert main(["train", "--resume", "--out", "r", "--quiet"]) == 0
    assert main(["export", "r", "again.safetensors"]) == 0
    again = fodp.load_exported("again.safetensors").model.parameters()
    assert torch.equal(weights, torch.cat([parameter.flatten() for parameter in again]))


@pytest.mark.parametrize("kind", ["uint8 colour", "floats", "features"])
def test_data_and_a_model_of_ones_own(kind, tmp_path):
    generator = np.random.default_rng(0)
    shape = (75,) if kind == "features" else (3, 5, 5)
    arrays = {}
    for split, size in (("train", 60), ("test", 40)):
        pixels = generator.integers(0, 256, (size, *shape), dtype=np.uint8)
        arrays[f"{split}_images"] = pixels if kind == "uint8 colour" else pixels.astype(np.float32) / 100
        arrays[f"{split}_labels"] = pixels.reshape(size, -1)[:, 0].astype(np.int64) // 100
    np.savez("raw.npz", **arrays)
    (tmp_path / "own.py").write_text(OWN_MODEL)
    sys.modules.pop("own", None)
    words = ("--data", "raw.npz", "--assume-size", "60", "--classes", "3", "--model", "own:fixed")
    result, metadata = trained_and_exported(*words)
    assert accuracy_elsewhere(metadata, tmp_path) == result["final_accuracy"]
    with pytest.raises(fodp.PrivacyError, match="give it as model="):
        fodp.load_exported("model.safetensors")
    import own

    exported = fodp.load_exported("model.safetensors", model=own.fixed)
    assert (
        np.mean(np.array(exported.predict(arrays["test_images"])) == arrays["test_labels"]) == result["final_accuracy"]
    )


def table(tmp_path, target):
    lines = [f"{n % 100},{('Ulm', 'Rome')[n % 2]},{('no', 'yes')[n % 100 > 40]}" for n in range(0, 3000, 7)]
    (tmp_path / "t.csv").write_text("\n".join(["age,town,ill", *lines, ""]))
    (tmp_path / "own.csv").write_text("\n".join(["age,town,ill", *lines[7:], ""]))
    columns = {"age": {"bounds": [0, 100]}, "town": {"values": ["Ulm", "Bonn"]}, "ill": {"values": ["no", "yes"]}}
    (tmp_path / "s.json").write_text(json.dumps({"public_size": 400, "columns": columns}))
    words = ("--data", "own.csv", "--schema", "s.json", "--target", target, "--test-data", "t.csv", "--lr", "1")
    return trained_and_exported(*words)


def test_a_table_is_predicted_in_its_own_words(tmp_path):
    result, metadata = table(tmp_path, "ill")
    names = {}
    exec(metadata["loader"], names)
    told = names["predict"]("t.csv")
    true = [line.rsplit(",", 1)[1] for line in (tmp_path / "t.csv").read_text().splitlines()[1:]]
    assert set(told) <= {"no", "yes"}
    assert np.mean(np.array(told) == np.array(true)) == result["final_accuracy"]
    assert names["predict"]({"age": [90], "town": ["Ulm"]}) in (["no"], ["yes"])


def test_a_number_is_predicted_in_its_own_unit(tmp_path):
    result, _ = table(tmp_path, "age")
    exported = fodp.load_exported("model.safetensors")
    told = np.array(exported.predict("t.csv"))
    true = np.array([n % 100 for n in range(0, 3000, 7)])
    assert np.mean(((told - true) / 50) ** 2) == pytest.approx(result["final_loss"], rel=1e-5)


def test_files_that_are_no_exports(tmp_path):
    save_file({"a": torch.zeros(1)}, "plain.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    for file in ("plain.safetensors", "junk.safetensors", "nowhere.safetensors"):
        with pytest.raises(fodp.PrivacyError, match="export the run again"):
            fodp.load_exported(file)
    trained_and_exported("--model", "logistic")
    with safe_open("model.safetensors", "pt") as opened:
        metadata = opened.metadata()
    save_file({"a": torch.zeros(1)}, "other.safetensors", metadata=metadata)
    with pytest.raises(fodp.PrivacyError, match="of another model"):
        fodp.load_exported("other.safetensors")
