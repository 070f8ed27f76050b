"""What somebody meets who comes with data, a model and a method of their own."""

import json
import os
import stat
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open

import fodp
from fodp.cli.main import main
from fodp.methods import METHODS
from fodp.support import extras

QUICK = ["--epochs", "1", "--quiet", "--noise-multiplier", "2", "--accountant", "rdp", "--threads", "1"]

OWN_METHOD = '''
from fodp.accounting import Event, Phase
from fodp.methods import Method, register

if "sign-sgd" not in __import__("fodp.methods").methods.METHODS:
    @register
    class SignSGD(Method):
        """Signs of releases."""
        name = "sign-sgd"
        summary = "Signs of DP-SGD releases."
        reference = "an example"
        noise_meaning = "the multiplier"

        def events(self, plan):
            return (Phase((Event(plan.sampling_rate, plan.noise_multiplier),), plan.steps),)

        def step(self, step, state):
            query = step.gradients(step.draw()).clipped_sum(step.clip_norm)
            return step.release(query, std=step.plan.noise_multiplier * step.clip_norm).sign()
'''


def run(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def own_method(tmp_path, monkeypatch):
    """A module `my_method` in the current directory, forgotten afterwards."""
    (tmp_path / "my_method.py").write_text(OWN_METHOD)
    monkeypatch.chdir(tmp_path)
    before = dict(METHODS)

    def forget():
        sys.modules.pop("my_method", None)
        METHODS.clear()
        METHODS.update(before)

    yield forget
    forget()


class TestImport:
    RATE = ("--sampling-rate", "0.1", "--steps", "5", "--method", "sign-sgd")

    @pytest.mark.parametrize(
        "words",
        [
            ("methods", "sign-sgd"),
            ("epsilon", "--noise-multiplier", "2", *RATE),
            ("calibrate", "--target-epsilon", "2", *RATE),
            ("ledger", "select", "l", "--dataset-name=d", "--no-budget", "--mean=2", "--noise-multiplier=9", *RATE),
            ("audit", "--method", "sign-sgd", "--lr", "0.1", "--attack", "replay", "--epochs", "0.3", "--quiet"),
        ],
        ids=lambda words: words[0],
    )  # fmt: skip
    def test_a_method_in_a_file_is_known_by_its_name(self, own_method, capsys, words):
        assert run(capsys, *words)[0] == 2
        code, _, err = run(capsys, *words, "--import", "my_method")
        assert (code, err) == (0, "")

    def test_a_run_remembers_it(self, own_method, capsys):
        words = ("train", *QUICK, "--method", "sign-sgd", "--lr", "0.1", "--import", "my_method", "--out", "r")
        assert run(capsys, *words)[0] == 0
        own_method()
        assert run(capsys, "train", "--resume", "--quiet", "--out", "r")[0] == 0
        own_method()
        assert run(capsys, "audit", "--run", "r", "--attack", "replay", "--quiet")[0] == 0
        own_method()
        code, _, err = run(capsys, "train", "--resume", "--quiet", "--out", "r", "--import", "math")
        assert code == 2
        assert "has --import ['my_method'], not ['math']" in err

    @pytest.mark.parametrize("name", ["nowhere", "my_method.py", "./my_method", "broken", ""])
    def test_what_cannot_be_imported_is_said_in_one_line(self, own_method, capsys, tmp_path, name):
        (tmp_path / "broken.py").write_text("1 / 0\n")
        code, out, err = run(capsys, "methods", "--import", name)
        assert (code, out) == (2, "")
        assert "--import" in err
        assert len(err.splitlines()) == 1


def test_every_file_of_a_run_belongs_to_its_owner_alone(capsys, tmp_path):
    before = os.umask(0o002)
    try:
        assert run(capsys, "train", *QUICK, "--out", str(tmp_path / "r"))[0] == 0
        words = ("--method=dp-sgd", "--noise-multiplier=1", "--attack=replay", "--quiet")
        assert run(capsys, "audit", *words, "--out", str(tmp_path / "a"))[0] == 0
    finally:
        os.umask(before)
    files = [*(tmp_path / "r").iterdir(), *(tmp_path / "a").iterdir()]
    assert {"accuracy.png", "ledger.sqlite", "audit.json", "audit.png"} <= {file.name for file in files}
    assert {file.name: oct(stat.S_IMODE(file.stat().st_mode)) for file in files} == {
        file.name: "0o600" for file in files
    }


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_no_name_is_cut_whatever_the_width(capsys, tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run(capsys, "methods")
    assert all(name in out for name in METHODS)
    assert "…" not in out
    if columns >= 80:
        longest = max(METHODS, key=len)
        words = ("--method", longest, "--ledger", str(tmp_path / "l.sqlite"), "--dataset-name=people", "--no-budget")
        run(capsys, "train", *QUICK, *words, "--out", str(tmp_path / "r"))
        _, out, _ = run(capsys, "ledger", "show", str(tmp_path / "l.sqlite"))
        assert longest in out
        assert "…" not in out
        assert all(line.endswith("│") for line in out.splitlines() if line.startswith("│"))


def test_an_export_of_what_is_no_run_says_what_to_name(capsys, tmp_path):
    code, _, err = run(capsys, "export", str(tmp_path / "nope"), str(tmp_path / "m.safetensors"))
    assert code == 2
    assert "nope is not the folder of a run" in err
    assert "resum" not in err


def test_matplotlib_says_nothing_on_its_first_run(tmp_path):
    """It would speak of its font cache and of folders that it cannot write."""
    (tmp_path / "file").write_text("")
    code = "from fodp.support.extras import pyplot; pyplot().figure().savefig('x.png')"
    environment = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "file" / "below")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_whoever_has_set_matplotlibs_log_level_keeps_it():
    import logging

    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        extras.pyplot()
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)


SCHEMA = """
public_size = 60
[columns.age]
bounds = [0, 100]
[columns.town]
values = ["Ulm", "Bonn"]
[columns.pay]
bounds = [0, 10]
[columns.ill]
values = ["no", "yes"]
"""


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """t.csv and a public test.csv in the current directory, with their schema."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{n},{n},{('Ulm', 'Rome', 'Bonn')[n % 3]},{n % 11},{('no', 'yes')[n > 30]}" for n in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["id,age,town,pay,ill", *lines, ""]))
    (tmp_path / "test.csv").write_text("\n".join(["ill,pay,town,age", *("yes,3,Ulm,50", "no,4,,3") * 5]))
    (tmp_path / "s.toml").write_text(SCHEMA)
    return tmp_path


class TestTables:
    WORDS = ("train", *QUICK, "--data", "t.csv", "--schema", "s.toml")

    def test_a_table_trains_and_is_scored(self, tables, capsys):
        words = (*self.WORDS, "--target", "ill", "--test-data", "test.csv", "--out", "r", "--json")
        code, out, err = run(capsys, *words)
        assert code == 0
        assert "not used: id" in err
        assert json.loads(out)["final_accuracy"] is not None
        config = json.loads((tables / "r" / "config.json").read_text())
        assert config["schema"]["columns"]["town"] == {"values": ["Ulm", "Bonn"]}
        assert config["plan"]["lot_size"] == 6  # a tenth of the public size

    def test_a_run_keeps_its_schema(self, tables, capsys):
        assert run(capsys, *self.WORDS, "--target", "ill", "--out", "r")[0] == 0
        (tables / "s.toml").write_text(SCHEMA.replace("100", "90"))
        assert run(capsys, "train", "--resume", "--quiet", "--out", "r")[0] == 0
        code, _, err = run(capsys, "train", "--resume", "--quiet", "--out", "r", "--schema", "s.toml")
        assert code == 2
        assert "has --schema" in err

    def test_without_test_data_there_is_no_accuracy(self, tables, capsys):
        code, out, _ = run(capsys, *self.WORDS, "--target", "ill", "--out", "r")
        assert code == 0
        assert "no accuracy: there is no public test data" in out
        result = json.loads((tables / "r" / "result.json").read_text())
        assert result["final_accuracy"] is result["final_loss"] is None
        assert (tables / "r" / "metrics.csv").read_text().splitlines()[0] == "epoch,step,epsilon"

    def test_numbers_are_predicted_too(self, tables, capsys):
        words = (*self.WORDS, "--target", "pay", "--test-data", "test.csv", "--out", "r")
        code, out, _ = run(capsys, *words)
        assert code == 0
        assert "mean squared error" in out
        assert "accuracy" not in out
        assert run(capsys, "audit", "--run", "r", "--attack", "replay", "--quiet")[0] == 0

    @pytest.mark.rule(14)
    @pytest.mark.parametrize(
        ("words", "hint"),
        [
            (("--data", "t.csv"), "add --schema FILE"),
            (("--data", "t.csv", "--schema", "s.toml"), "--target"),
            (("--data", "t.csv", "--schema", "s.toml", "--target", "id"), "column of the schema"),
            (("--data", "t.csv", "--schema", "s.toml", "--target", "ill", "--classes", "2"), "--classes is for"),
            (("--data", "t.csv", "--schema", "s.toml", "--target", "ill", "--assume-size", "9"), "say one of them"),
            (("--data", "t.csv", "--schema", "s.toml", "--target", "ill", "--early-stopping", "2"), "no test data"),
            (("--data", "t.csv", "--schema", "s.toml", "--target", "ill", "--test-data", "no.csv"), "no.csv"),
            (("--data", "t.csv", "--schema", "s.toml", "--target", "ill", "--method", "sa-dpsgd"), "held-out"),
            (("--data", "bad.csv", "--schema", "s.toml", "--target", "ill"), "line 3, column 'age'"),
            (("--data", "t.csv", "--dataset", "digits"), "give one of them"),
            (("--target", "ill"), "--target is for a table"),
            (("--schema", "no.toml"), "no.toml"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_said_before_anything_is_charged(self, tables, capsys, words, hint):
        (tables / "bad.csv").write_text("age,town,pay,ill\n3,Ulm,1,no\nold,Ulm,1,no\n")
        code, out, err = run(
            capsys, "train", *QUICK, *words, "--out", "r", "--ledger=l", "--dataset-name=d", "--no-budget"
        )
        assert (code, out) == (2, "")
        assert hint in err
        assert not (tables / "r").exists()
        assert not (tables / "l").exists()


@pytest.mark.parametrize("test", [{}, {"test_images": np.zeros((0, 4, 4), np.uint8), "test_labels": np.arange(0)}])
def test_an_archive_without_a_test_split(capsys, tmp_path, monkeypatch, test):
    monkeypatch.chdir(tmp_path)
    np.savez("own.npz", train_images=np.zeros((40, 4, 4), np.uint8), train_labels=np.arange(40) % 3, **test)
    words = ("--data", "own.npz", "--assume-size", "40", "--classes", "3", "--out", "r")
    code, out, err = run(capsys, "train", *QUICK, *words)
    assert (code, err) == (0, "")
    assert "no accuracy" in out


class TestEarlyStopping:
    @pytest.mark.rule(23)
    def test_the_epsilon_is_the_plans_and_the_output_says_so(self, capsys, tmp_path):
        out_dir = str(tmp_path / "r")
        words = [word if word != "1" or QUICK[place - 1] != "--epochs" else "8" for place, word in enumerate(QUICK)]
        stop = ("--early-stopping", "1", "--lr", "1e-9", "--seed", "0")
        code, out, _ = run(capsys, "train", *words, *stop, "--out", out_dir)
        assert code == 0
        assert "stopped early at step 20 of 80, because of public scores: the epsilon is still that of all" in out
        result = json.loads((tmp_path / "r" / "result.json").read_text())
        config = json.loads((tmp_path / "r" / "config.json").read_text())
        assert result["reason"] == "stopped early"
        assert result["steps"] == 20
        assert result["epsilon"] == fodp.Plan(**config["plan"]).epsilon()
        run(capsys, "export", out_dir, str(tmp_path / "m.safetensors"))
        with safe_open(tmp_path / "m.safetensors", "pt") as opened:
            assert float(opened.metadata()["epsilon"]) == result["epsilon"]
        code, out, _ = run(capsys, "train", "--resume", "--quiet", "--out", out_dir)
        assert code == 0
        assert "stopped early at step 20" in out
