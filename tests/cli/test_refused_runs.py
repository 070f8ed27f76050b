"""A refused or interrupted run: what it leaves, what it says was spent; hints for odd files and numbers."""

import dataclasses
import json

import numpy as np
import pytest

import fodp
from fodp.cli import audit, train, tune
from fodp.cli.main import main
from fodp.methods import recipe
from fodp.session import Session

QUICK = ["--epochs", "0.2", "--quiet", "--accountant", "rdp", "--threads", "1", "--seed", "0"]
NOISE = ["--noise-multiplier", "2", "--method", "dp-sgd"]


def said(capsys, *words):
    code = main(list(words))
    return code, capsys.readouterr()


@pytest.mark.rule(14)
@pytest.mark.fault(
    "a run that is refused when its folder was made already",
    happens="one line, exit code 2; the folder goes again",
    lost="nothing",
    costs="nothing",
)
@pytest.mark.parametrize("existed", [False, True])
def test_a_run_that_is_refused_before_its_first_step_leaves_nothing(capsys, tmp_path, monkeypatch, existed):
    def refuses(*_):
        raise fodp.DataError("record 17 of the data set is odd")

    monkeypatch.setattr("fodp.trainer.rehearse", refuses)
    folder = tmp_path / "runs" / "r"
    if existed:
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
    code, shown = said(capsys, "train", *QUICK, *NOISE, "--out", str(folder))
    assert (code, shown.err) == (2, "fodp: record 17 of the data set is odd\n")
    assert [path.name for path in tmp_path.rglob("*")] == (["runs", "r", "notes.txt"] if existed else [])


def test_a_run_that_has_taken_steps_is_kept(capsys, tmp_path, monkeypatch):
    original = Session.take_step

    def refuses(session):
        if session.number == 1:
            raise fodp.PrivacyError("the second step is odd")
        return original(session)

    monkeypatch.setattr(Session, "take_step", refuses)
    code, _ = said(capsys, "train", *QUICK, *NOISE, "--out", str(tmp_path / "r"))
    assert code == 2
    assert (tmp_path / "r" / "config.json").exists()
    assert fodp.Ledger(tmp_path / "r" / "ledger.sqlite").steps(
        json.loads((tmp_path / "r/config.json").read_text())["run"]
    )


@pytest.mark.fault(
    "Ctrl-C before the first step",
    happens="a line that nothing was charged; no folder is left",
    lost="nothing",
    costs="nothing",
)
@pytest.mark.parametrize("place", ["fodp.data.load", "fodp.trainer.rehearse"])
def test_an_interrupt_before_the_first_step_says_that_nothing_was_charged(capsys, tmp_path, monkeypatch, place):
    def interrupts(*_, **__):
        raise KeyboardInterrupt(2)

    monkeypatch.setattr(place, interrupts)
    code, shown = said(capsys, "train", *QUICK, *NOISE, "--out", str(tmp_path / "r"))
    assert (code, shown.err) == (130, "fodp: interrupted: nothing was charged\n")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_later_says_how_many_steps_are_charged(capsys, tmp_path, monkeypatch):
    original = Session.take_step

    def interrupts(session):
        if session.number == 1:
            raise KeyboardInterrupt(2)
        return original(session)

    monkeypatch.setattr(Session, "take_step", interrupts)
    code, shown = said(capsys, "train", *QUICK, *NOISE, "--out", str(tmp_path / "r"))
    assert code == 130
    assert "fodp: interrupted: 2 of 2 steps are charged" in shown.err
    assert (tmp_path / "r").exists()


@pytest.mark.rule(14)
def test_several_odd_options_are_refused_in_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--epochs=0", "--clip-norm=-1", "--delta=2", "--eval-every=0", "--method=dp-sgd", "--set", "lr=-1"]
    code, shown = said(capsys, "train", *words)
    assert code == 2
    assert shown.err.startswith("fodp: 6 things to mend: (1) how private? add --target-epsilon")
    for part in ("--epochs must", "clip_norm must", "delta must", "--eval-every must", "lr must"):
        assert part in shown.err
    code, shown = said(capsys, "train", "--epochs=four", "--lr=fast", *NOISE)
    assert "--epochs: invalid float value: 'four'; argument --lr: invalid" in shown.err


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("name", "hint"),
    [("a.xlsx", "save the sheet as CSV"), ("a.parquet", "read_parquet"), ("a.json", "read_json"), ("a.npy", "savez")],
)
def test_files_of_other_kinds_have_a_hint(capsys, tmp_path, name, hint):
    (schema := tmp_path / "s.toml").write_text("[columns.y]\nvalues = [0, 1]\n")
    for words in ([], ["--target", "y"], ["--target", "y", "--schema", str(schema)]):
        code, shown = said(capsys, "train", *QUICK, *NOISE, "--data", str(tmp_path / name), *words)
        assert (code, hint in shown.err) == (2, True)


@pytest.mark.rule(14)
@pytest.mark.parametrize(("text", "hint"), [("age;y\n1;0\n", "semicolons"), ("age\ty\n1\t0\n", "tabs")])
def test_a_table_with_other_separators_has_a_hint(tmp_path, text, hint):
    (tmp_path / "t.csv").write_text(text)
    schema = {"public_size": 10, "columns": {"age": {"bounds": [0, 9]}, "y": {"values": [0, 1]}}}
    with pytest.raises(fodp.DataError, match=f"separated by {hint}, and .csv is read with commas"):
        fodp.data.from_table(tmp_path / "t.csv", schema, "y")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--target-epsilon", "1000", "--method", "dp-sgd"], "target epsilon 1000 promises next to nothing"),
        (["--target-epsilon", "0.0001", "--method", "dp-sgd"], "hardly anything is learnt"),
        ([*NOISE, "--lr", "1e9"], "lr 1e+09 moves weights by noise alone"),
    ],
)
def test_numbers_that_nobody_means_are_told_of(capsys, tmp_path, words, hint):
    _, shown = said(capsys, "train", *QUICK, *words, "--out", str(tmp_path / "r"))
    assert hint in shown.err.splitlines()[0]


@pytest.mark.parametrize("command", ["epsilon", "calibrate"])
def test_help_names_the_default_that_train_takes(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"`fodp train` has another default, its recipe, whose noise is that of --method {recipe.METHOD}" in shown
    assert f"(of `fodp train`: {recipe.METHOD})" in shown


def test_what_is_given_to_predict_is_not_told(tmp_path):
    from fodp.data.cards import Card, own_card
    from fodp.data.models import build
    from fodp.runs.exported import Exported

    schema = {"public_size": 10, "columns": {"age": {"bounds": [0, 9]}, "y": {"values": [0, 1]}}, "target": "y"}
    words = dict(assume_size=10, test_size=0, classes=2, shape=(2,), is_uint8=False)
    cards: list[Card] = [own_card("t", schema=schema, **words), own_card("t", **words)]
    table, array = (Exported(build("logistic", card), card, {}) for card in cards)
    for exported, record in (
        (table, [["Alice Secret", 3]]), (array, [["Alice Secret", 3]]), (array, [[1.5, 2.5], [3.25]]),
        (array, np.zeros((2, 7))), (array, None),
    ):  # fmt: skip
        with pytest.raises(fodp.DataError) as raised:
            exported.predict(record)
        assert raised.value.__suppress_context__ or raised.value.__context__ is None
        assert not any(part in str(raised.value) for part in ("Alice", "Secret", "3.25"))
    assert len(array.predict([[1.0, 2.0]])) == 1


@pytest.mark.fault(
    "a checkpoint or log in a folder that cannot be made",
    happens="refused when the callback is made",
    lost="nothing",
    costs="nothing",
)
def test_a_checkpoints_folder_is_looked_at_first_and_made(tmp_path):
    (tmp_path / "file").write_text("")
    for kind in (fodp.callbacks.Checkpoint, fodp.callbacks.CSVLog):
        for path in (tmp_path / "file" / "c.pt", tmp_path):
            with pytest.raises(fodp.ConfigurationError, match="cannot be written"):
                kind(path)
        kind(tmp_path / "deep" / "er" / "c.pt")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("command", ["train", "tune", "audit", "epsilon", "calibrate"])
def test_help_tells_the_defaults_that_are_taken(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split("own data")[0].split())
    taken = {"train": train.DEFAULTS, "tune": tune.DEFAULTS, "audit": audit.DEFAULTS}.get(
        command, {"accountant": "pld"}
    )
    for name, value in taken.items():
        words = f"{value:g}" if isinstance(value, float) else str(value)
        after = shown.split(f"--{name.replace('_', '-')} ")[-1].split(" --")[0]
        assert f"default {words}" in after, name
    fields = {field.name: field.default for field in dataclasses.fields(fodp.Plan)}
    assert taken["accountant"] == fields["accountant"]
