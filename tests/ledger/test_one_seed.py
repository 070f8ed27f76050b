"""One seed, one run: a second run under it repeats masks and noise, which an observer subtracts without the seed."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fodp
from fodp.callbacks import Checkpoint
from fodp.cli.main import main
from fodp.ledger import Ledger
from fodp.ledger.card import card, summary
from fodp.ledger.fingerprint import secret_file
from fodp.own_loop import make_private
from fodp.trainer import Trainer
from ledgers_for_tests import QUICK, data, losses, plan
from sessions_for_tests import session

BUDGET = (3.0, 1e-5)


def ledger(tmp_path, name="people", budget=BUDGET):
    return Ledger(tmp_path / "l.sqlite", dataset=name, budget=budget)


def train(the_ledger, the_plan, rows=0, **options):
    torch.manual_seed(0)
    trainer = Trainer(nn.Linear(6, 2), losses, data(number=rows), the_plan, ledger=the_ledger, **options)
    trainer.fit()
    return trainer


def loop(the_ledger, the_plan, rows=0):
    model = nn.Linear(6, 2)
    return make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data(number=rows), the_plan, ledger=the_ledger
    )


def test_what_a_repeated_seed_gives_away():
    """Two runs, one seed, one record apart: the releases differ by that record's clipped gradient and nothing else."""
    releases = []
    for rows in (slice(None), slice(1, None)):
        torch.manual_seed(0)
        run = session(nn.Linear(6, 2), losses, TensorDataset(*data()[rows]), plan(sampling_rate=1.0))
        releases.append(run.take_step())
    assert (releases[0] - releases[1]).norm() <= 1.0 + 1e-5  # no trace of noise of 6 in each of 14 coordinates


@pytest.mark.rule(17)
@pytest.mark.rule(22)
class TestRefused:
    @pytest.mark.parametrize("first", [train, loop])
    @pytest.mark.parametrize("second", [train, loop])
    @pytest.mark.fault(
        "a second run with one seed on data that has a budget",
        happens="refused: whoever sees both subtracts the noise",
        lost="nothing",
        costs="nothing",
    )
    def test_a_second_run_with_the_seed(self, tmp_path, first, second):
        first(ledger(tmp_path), plan())
        with pytest.raises(fodp.PrivacyError, match=r"used this seed.*another seed, or leave it out"):
            second(ledger(tmp_path), plan())
        assert len(summary(ledger(tmp_path))[0]["runs"]) == 1  # nothing was begun
        second(ledger(tmp_path), plan(seed=8))

    @pytest.mark.parametrize(
        ("one", "name", "other", "changes"),
        [
            (BUDGET, "others", BUDGET, {}),
            (BUDGET, "others", None, {}),
            (None, "others", BUDGET, {}),
            (BUDGET, None, None, {}),
            (BUDGET, "people", BUDGET, dict(steps=3, noise_multiplier=9.0, method="fo-dp-sgd")),
        ],
    )
    def test_also_on_other_data_or_under_another_plan_if_either_has_a_budget(self, tmp_path, one, name, other, changes):
        train(ledger(tmp_path, "people", one), plan())
        with pytest.raises(fodp.PrivacyError, match=r"'people'.* used this seed"):
            train(ledger(tmp_path, name, other), plan(**changes), rows=1)

    def test_by_the_command_before_it_makes_a_folder(self, tmp_path, capsys):
        words = ["train", *QUICK, "--seed=3"]
        words += ["--ledger", str(tmp_path / "l.sqlite"), "--dataset-name=people", "--budget=30,1e-5"]
        assert main([*words, "--out", str(tmp_path / "a")]) == 0
        assert main([*words, "--out", str(tmp_path / "b")]) == 2
        assert "used this seed" in capsys.readouterr().err
        assert not (tmp_path / "b").exists()

    @pytest.mark.fault(
        "no home folder to keep a secret in",
        happens="secure runs work without a fingerprint; a seed beside a budget is refused",
        lost="nothing",
        costs="nothing",
    )
    def test_where_no_secret_can_be_kept(self, tmp_path, monkeypatch):
        """Without it the ledger could not know the seed again."""
        monkeypatch.setattr("fodp.ledger.fingerprint._secret", lambda: None)
        with pytest.raises(fodp.PrivacyError, match=r"configuration folder.*leave the seed out"):
            train(ledger(tmp_path), plan())
        train(ledger(tmp_path), plan(seed=None))
        train(Ledger(tmp_path / "free.sqlite"), plan())


class TestTaken:
    @pytest.mark.parametrize(("budget", "seed"), [(None, 7), (BUDGET, None)])
    def test_runs_without_a_budget_or_a_seed(self, tmp_path, budget, seed):
        for _ in range(2):
            train(ledger(tmp_path, budget=budget), plan(seed=seed))

    def test_the_same_run_resumed_or_replayed(self, tmp_path):
        done = train(ledger(tmp_path), plan(), callbacks=[Checkpoint(tmp_path / "c.pt", every=100)])
        charged = ledger(tmp_path).steps(done.run_id)
        again = Trainer(nn.Linear(6, 2), losses, data(), plan(), ledger=ledger(tmp_path))
        again.resume(tmp_path / "c.pt")
        again.fit()
        assert ledger(tmp_path).steps(done.run_id) == charged == 6

    def test_marks_of_another_machine_cannot_be_compared(self, tmp_path):
        train(ledger(tmp_path), plan(), rows=0)
        key = secret_file().read_bytes()
        try:
            secret_file().unlink()
            train(ledger(tmp_path), plan(), rows=0)
        finally:
            secret_file().write_bytes(key)


def test_the_ledger_does_not_hold_the_seed(tmp_path):
    """Nor a hash that somebody without the machine's secret could try seeds against."""
    train(ledger(tmp_path), plan(seed=7))
    train(ledger(tmp_path), plan(seed=None))
    marks = [entry.data["seed"] for entry in ledger(tmp_path).store.select("run")]
    assert marks[1] is None
    assert len(marks[0]) == 45
    assert marks[0].partition(":")[2] != "7"


def test_the_words_say_so(tmp_path):
    assert "a second run" in plan().statement()
    assert "a second run" not in plan(seed=None).statement()
    train(ledger(tmp_path), plan())
    assert "seed" in card(summary(ledger(tmp_path))[0]).partition("Not covered")[2]


@pytest.mark.fault(
    "the secret behind fingerprints can be read by others (POSIX); on Windows modes do not tell",
    happens="refused with the command that mends it; on Windows the mode is not looked at",
    lost="nothing",
    costs="nothing",
)
def test_modes_are_read_as_each_system_means_them(tmp_path, monkeypatch):
    from fodp.ledger import fingerprint

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    made = fingerprint.fingerprint([b"data"])
    fingerprint.secret_file().chmod(0o666)  # what Windows says of every file
    with pytest.raises(fodp.PrivacyError, match="chmod 600"):
        fingerprint.fingerprint([b"data"])
    path = fingerprint.secret_file()
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "secret_file", lambda: path)
        patch.setattr(fingerprint.os, "name", "nt")
        again = fingerprint.fingerprint([b"data"])
    assert again == made
