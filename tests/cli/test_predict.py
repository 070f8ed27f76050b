"""`fodp predict`: a run, a search or an export says what it makes of new examples, and nothing of them is in errors."""

import csv
import io
import json

import numpy as np
import pytest

import fodp
from fodp.cli.main import main
from odd_input_for_tests import run

QUICK = ["train", "--epochs", "1", "--quiet", "--noise-multiplier", "2", "--accountant", "rdp", "--seed", "0"]
SCHEMA = '[columns.age]\nbounds = [0, 100]\n[columns.pay]\nbounds = [0, 10]\n[columns.ill]\nvalues = ["no", "yes"]\n'


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder with runs on a table (`ill`, `pay`) and on digits (`digits`), an export and new examples."""
    folder = tmp_path_factory.mktemp("predict")
    (folder / "s.toml").write_text("public_size = 60\n" + SCHEMA)
    (folder / "t.csv").write_text(
        "age,pay,ill\n" + "".join(f"{n},{n % 10},{['no', 'yes'][n > 30]}\n" for n in range(60))
    )
    for target in ("ill", "pay"):
        table = ["--data", str(folder / "t.csv"), "--schema", str(folder / "s.toml"), "--target", target]
        assert main([*QUICK, *table, "--model", "logistic", "--out", str(folder / target)]) == 0
    assert main([*QUICK, "--model", "logistic", "--out", str(folder / "digits")]) == 0
    assert main(["export", str(folder / "ill"), str(folder / "ill.safetensors")]) == 0
    (folder / "new.csv").write_text("age,pay,ill\n20,3,no\n70,4,yes\n")
    np.save(folder / "new.npy", np.zeros((3, 1, 8, 8)))
    return folder


def rows(out):
    return list(csv.reader(io.StringIO(out)))


def test_records_in_place_of_features_are_refused_with_a_hint(places):
    np.save(places / "other.npy", np.zeros((3, 81, 2, 2)))
    code, _, err = run("predict", str(places / "digits"), str(places / "other.npy"))
    assert code == 2
    assert "predict takes examples of shape (1, 8, 8)" in err
    assert "After --features they are features, not records" in err


@pytest.mark.parametrize("model", ["ill", "ill.safetensors"])
def test_a_table_is_predicted_in_its_own_words(places, model):
    code, out, err = run("predict", str(places / model), str(places / "new.csv"))
    expected = fodp.load_exported(places / "ill.safetensors")
    assert (code, err) == (0, "")
    assert rows(out) == [["prediction"], *([word] for word in expected.predict(places / "new.csv"))]
    code, out, _ = run("predict", str(places / model), str(places / "new.csv"), "--probabilities", "--json")
    found = json.loads(out)
    assert [list(row) for row in found] == [["probability of no", "probability of yes"]] * 2
    assert [list(row.values()) for row in found] == expected.predict_proba(places / "new.csv").tolist()
    assert sum(found[0].values()) == pytest.approx(1)


def test_numbers_and_arrays_too(places):
    code, out, _ = run("predict", str(places / "pay"), str(places / "new.csv"), "--out", str(places / "p.csv"))
    assert (code, out) == (0, "")
    assert all(isinstance(float(value), float) for (value,) in rows((places / "p.csv").read_text())[1:])
    code, out, _ = run("predict", str(places / "digits"), str(places / "new.npy"))
    assert [row[0] in "prediction 0123456789" for row in rows(out)] == [True] * 4


def test_a_model_of_ones_own_is_named_by_the_run_and_for_a_file_by_its_user(places, tmp_path, monkeypatch):
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\ndef net(classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main([*QUICK, "--model", "own_net:net", "--out", "r"]) == 0
    assert main(["export", "r", "m.safetensors"]) == 0
    images = str(places / "new.npy")
    assert run("predict", "r", images)[1] == run("predict", "m.safetensors", images, "--model", "own_net:net")[1]
    assert "model of own_net:net" in run("predict", "m.safetensors", images)[2]


REFUSED = {
    "no model": (["nowhere", "new.csv"], "nowhere"),
    "no data": (["ill", "nothing.csv"], "nothing.csv"),
    "another kind": (["digits", "new.csv"], "DATA is a .npy"),
    "a secret in a table": (["ill", "secret.csv"], "line 2, column 'age'"),
    "a secret in an array": (["digits", "secret.npy"], "not an array of numbers"),
    "another shape": (["digits", "wide.npy"], "of shape (1, 8, 8)"),
    "chances of numbers": (["pay", "new.csv", "--probabilities"], "use predict"),
    "an unusable place": (["ill", "new.csv", "--out", "new.csv/p.csv"], "cannot be written"),
}


@pytest.mark.rule(14)
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_one_line_and_tells_nothing_of_the_examples(places, case, monkeypatch):
    monkeypatch.chdir(places)
    (places / "secret.csv").write_text("age,pay,ill\nAlice Secret,3,no\n")
    (places / "secret.npy").write_bytes(b"Alice Secret")
    np.save(places / "wide.npy", np.full((2, 7), 3.25))
    words, hint = REFUSED[case]
    code, out, err = run("predict", *words)
    assert (code, out) == (2, "")
    assert hint in err
    assert not any(part in err for part in ("Alice", "Secret ", "3.25"))
