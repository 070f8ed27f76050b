"""`fodp train` for people with several records: whose each record is, and one line for what is wrong."""

import json

import numpy as np
import pytest

import fodp
from fodp.cli.main import main

QUICK = [
    "--epochs",
    "0.5",
    "--quiet",
    "--noise-multiplier",
    "2",
    "--accountant",
    "rdp",
    "--seed",
    "0",
    "--threads",
    "1",
]
PEOPLE = ["--records-per-person", "2", "--assume-people", "20"]
ROWS = 60


@pytest.fixture
def table(tmp_path):
    """Visits of twenty patients, and a schema without the column that says whose they are."""
    lines = [f"{20 + i % 50},{'yes' if i % 3 else 'no'},patient {i % 20}" for i in range(ROWS)]
    (tmp_path / "visits.csv").write_text("\n".join(["age,smokes,patient", *lines]) + "\n")
    schema = {"public_size": ROWS, "columns": {"age": {"bounds": [0, 120]}, "smokes": {"values": ["no", "yes"]}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "owned.json").write_text(json.dumps({**schema, "owner": "patient"}))
    return ["train", "--data", str(tmp_path / "visits.csv"), "--target", "smokes", "--model", "logistic", *QUICK]


def schema(tmp_path, name="schema"):
    return ["--schema", str(tmp_path / f"{name}.json")]


def stored(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("name", "said"), [("schema", ["--owners", "patient"]), ("owned", [])])
def test_a_table_says_whose_each_row_is(table, tmp_path, capsys, name, said):
    out = tmp_path / "run"
    words = [*table, *schema(tmp_path, name), *said, *PEOPLE, "--out", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "one person with all of their records is added or removed" in shown.out
    assert "are not used" not in shown.err
    plan = stored(out)["plan"]
    assert (plan["unit"], plan["records_per_person"], plan["lot_size"]) == ("person", 2, 2.0)
    assert main(["export", str(out), str(tmp_path / "model.safetensors")]) == 0
    exported = fodp.load_exported(tmp_path / "model.safetensors")
    assert exported.privacy["unit"] == "one person with all of their records, added or removed"
    assert len(exported.predict({"age": [30]})) == 1
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0  # nothing is left to do, and all fits


@pytest.mark.parametrize("kind", ["npy", "txt"])
def test_arrays_have_a_file_of_owners(tmp_path, kind):
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(ROWS, 4)).astype(np.float32), rng.integers(0, 2, ROWS)
    np.savez(tmp_path / "data.npz", train_images=images, train_labels=labels)
    owners = tmp_path / f"owners.{kind}"
    if kind == "npy":
        np.save(owners, np.arange(ROWS) % 20)
    else:
        owners.write_text("".join(f"patient {i % 20}\n" for i in range(ROWS)))
    words = ["train", "--data", str(tmp_path / "data.npz"), "--assume-size", str(ROWS), "--classes", "2", *QUICK]
    out = tmp_path / "run"
    assert main([*words, "--model", "logistic", "--owners", str(owners), *PEOPLE, "--out", str(out)]) == 0
    assert stored(out)["plan"]["unit"] == "person"


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("schema", ["--owners", "patient"], "add --records-per-person"),
        ("schema", ["--person-gradient", "sum"], "add --records-per-person"),
        ("schema", PEOPLE, "whose each record is"),
        ("owned", ["--records-per-person", "2"], "--assume-people N"),
        ("owned", [*PEOPLE[2:], "--records-per-person", "0"], "at least 1"),
        ("schema", ["--owners", "doctor", *PEOPLE], "no column 'doctor'"),
        ("schema", ["--owners", "age", *PEOPLE], "take it out there"),
        ("owned", [*PEOPLE, "--person-gradient", "median"], "mean, sum"),
    ],
)
def test_what_is_wrong_gets_one_line_before_anything_is_spent(table, tmp_path, capsys, name, words, message):
    out = tmp_path / "run"
    assert main([*table, *schema(tmp_path, name), *words, "--out", str(out)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert not out.exists()


def test_a_row_without_an_owner_is_named_by_its_line(table, tmp_path, capsys):
    (tmp_path / "visits.csv").write_text("age,smokes,patient\n30,yes,ann\n40,no,\n")
    assert main([*table, *schema(tmp_path, "owned"), *PEOPLE]) == 2
    assert "line 3, column 'patient'" in capsys.readouterr().err


def test_an_audit_of_a_run_adds_and_removes_people(table, tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*table, *schema(tmp_path, "owned"), *PEOPLE, "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["audit", "--run", str(out), "--attack", "replay", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["consistent"]
