"""Ranks that differ, fail, stall or are killed: the others end in good order, and what was spent is written down."""

import contextlib
import io
import json
import os
import signal
import socket
import time

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import fodp
from fodp.callbacks import Callback, Checkpoint
from fodp.ledger import Account, Ledger
from methods_for_tests import data, flat, losses, network, plan, trainer
from ranks_for_tests import forked, in_ranks, waited


def other_weights():
    model = network()
    with torch.no_grad():
        model[0].bias[0] += 1e-9
    return model


def records(order):
    inputs, labels = data().tensors
    return [(inputs[i], labels[i]) for i in order]


inputs, labels = data().tensors
DIFFERENT = {
    "the plan's seed": dict(plan=dict(seed=1)),
    "the plan's noise_multiplier": dict(plan=dict(noise_multiplier=1.5)),
    "the plan's params": dict(plan=dict(params=dict(lr=0.2))),
    "the number of records": dict(dataset=data(23)),
    "the records": dict(dataset=TensorDataset(inputs.flip(0), labels.flip(0))),
    "the model's initial weights": dict(model=other_weights()),
    "the model's parameters": dict(model=network().float()),
    "the option copies": dict(copies=2),
}


@pytest.mark.fault(
    "several processes: one has another plan, seed, data set, order of records, model or code than the first",
    happens="all of them refuse before anything is charged, with one line that says in what they differ",
    lost="nothing",
    costs="nothing",
)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_refused_before_anything_is_charged(what, tmp_path):
    changes = dict(DIFFERENT[what])
    other = plan("dp-sgd", **changes.pop("plan", {}))

    def train(rank):
        ledger = Ledger(tmp_path / "l.sqlite") if rank == 0 else None
        return trainer(plan("dp-sgd") if rank == 0 else other, ledger=ledger, **({} if rank == 0 else changes)).fit()

    for kind, text in in_ranks(2, train):
        assert kind == "Disagreement"
        assert f"rank 1 does not agree with rank 0 in {what}" in text
        assert "nothing was released" in text
        assert "23" not in text  # how many records there are is private
    assert [row.kind for row in Ledger(tmp_path / "l.sqlite").store.select()] == []


@pytest.mark.parametrize("kind", ["a list of records", "a view"])
def test_another_order_of_records_is_found_in_other_data_sets_too(kind):
    def train(rank):
        order = list(range(24)) if rank == 0 else [1, 0, *range(2, 24)]
        dataset = records(order) if kind == "a list of records" else Subset(data(), order)
        return trainer(plan("dp-sgd"), dataset=dataset)

    assert all("in the records" in text for _, text in in_ranks(2, train))


def make(folder, loss_fn=losses, seed=0, **options):
    """A run with a ledger and checkpoints, taken up if there is one."""
    callbacks = [*options.pop("callbacks", ()), Checkpoint(folder / "c.pt")]
    begun = (folder / "c.pt").exists()  # before the ranks meet: the first one may write it soon after
    training = fodp.Trainer(
        network(), loss_fn, data(), plan("fo-dp-sgd", seed=seed), callbacks=callbacks, run_id="run",
        ledger=lambda: Ledger(folder / "l.sqlite"), **options,
    )  # fmt: skip
    if begun:
        training.resume(folder / "c.pt")
    return training


class Breaks:
    """A loss that does something in one step on one rank."""

    def __init__(self, rank, step, act):
        self.rank, self.step, self.act, self.training = rank, step, act, None

    def __call__(self, model, batch):
        here = torch.distributed.get_rank() if torch.distributed.is_initialized() else None
        if here == self.rank and self.training is not None and self.training.step == self.step:
            self.act()
        return losses(model, batch)


def broken(folder, rank, act, seed=0):
    def work(_):
        loss_fn = Breaks(rank, 3, act)
        loss_fn.training = training = make(folder, loss_fn, seed)
        try:
            training.fit()
        except BaseException as error:
            return type(error).__name__, str(error), training.step, training.lost_steps
        return "no exception"

    return work


def fail():
    raise OSError("a file is gone")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def stalled():
    time.sleep(8)


@pytest.mark.fault(
    "several processes: one fails, is killed, or stalls for longer than the group's timeout (--rank-timeout)",
    happens="the others end: at once if it failed or was killed, else after that time; a checkpoint is written",
    lost="the step that was under way",
    costs="that step",
)
@pytest.mark.parametrize(
    ("act", "rank", "says"),
    [
        (fail, 1, "rank 1 has ended with an exception"),
        (fail, 0, "rank 0 has ended with an exception"),
        (killed, 1, "another rank was killed or has stalled"),
        (stalled, 1, "another rank was killed or has stalled"),
    ],
    ids=["fails", "the first fails", "killed", "stalls"],
)
def test_a_lost_rank_ends_the_others_and_the_run_is_resumed(tmp_path, act, rank, says):
    straight = make_straight()
    patience = 2 if act is stalled else 3600  # only a stall is waited for
    found = in_ranks(2, broken(tmp_path, rank, act), timeout=patience)
    kind, text, step, lost = found[1 - rank]
    assert kind == "RankLost"
    assert says in text
    assert "can be resumed" in text
    assert (step, lost) == (4, 1)  # the step that was under way is charged, and nothing of it is used
    if act is fail:
        assert found[rank] == ("OSError", "a file is gone", 4, 1)
    if act is killed:
        assert found[1] is None
    assert Ledger(tmp_path / "l.sqlite").steps("run") == 4
    outcomes = in_ranks(3, lambda _: (lambda t: (t.fit().reason, t.step, t.lost_steps, flat(t.model)))(make(tmp_path)))
    assert [outcome[:3] for outcome in outcomes] == [("finished", 8, 1)] * 3
    assert not torch.equal(outcomes[0][3], straight)  # a step was lost
    assert Ledger(tmp_path / "l.sqlite").steps("run") == 8


def make_straight():
    training = trainer(plan("fo-dp-sgd"))
    training.fit()
    return flat(training.model)


@pytest.mark.fault(
    "several processes: the first one, which keeps the ledger, is killed",
    happens="the others end at once, without a checkpoint of their own; the ledger has the steps that were reserved",
    lost="steps since the last checkpoint",
    costs="those steps",
)
def test_the_first_rank_is_killed(tmp_path):
    found = in_ranks(2, broken(tmp_path, 0, killed, seed=None))
    assert found[0] is None
    assert found[1][0] == "RankLost"
    used = Ledger(tmp_path / "l.sqlite").steps("run")
    assert used >= 4  # also the step that was under way
    resumed = in_ranks(2, lambda _: (lambda t: (t.fit().reason, t.step, t.lost_steps))(make(tmp_path, seed=None)))
    assert resumed[0] == resumed[1]
    assert resumed[0][2] >= 1
    assert Ledger(tmp_path / "l.sqlite").steps("run") == 8


def test_after_a_lost_rank_the_group_is_of_no_more_use(tmp_path):
    def work(rank):
        loss_fn = Breaks(1, 1, fail)
        loss_fn.training = training = make(tmp_path, loss_fn)
        with contextlib.suppress(Exception):
            training.fit()
        return training.fit()

    assert all("new process group" in text for _, text in in_ranks(2, work))


@pytest.mark.fault(
    "several processes: one is asked to stop (Ctrl-C, SIGTERM, SIGHUP)",
    happens="all of them stop after the same step, with a checkpoint",
    lost="nothing",
    costs="nothing",
)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path):
    def work(rank):
        loss_fn = Breaks(1, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        loss_fn.training = training = make(tmp_path, loss_fn)
        return training.fit()

    first, second = in_ranks(2, work)
    assert first == second
    assert (first.reason, first.steps, first.signal) == ("interrupted", 3, signal.SIGTERM)
    assert Ledger(tmp_path / "l.sqlite").steps("run") == 3


def test_callbacks_of_the_first_rank_end_all_and_a_changed_model_is_found():
    class Enough(Callback):
        def on_step(self, trainer):
            if trainer.step == 3:
                trainer.stop_early()

    class Meddles(Callback):
        def on_step(self, trainer):
            with torch.no_grad():
                next(trainer.model.parameters()).mul_(1.5)

    assert [r.reason for r in in_ranks(2, lambda _: trainer(plan("dp-sgd"), callbacks=[Enough()]).fit())] == [
        "stopped early",
        "stopped early",
    ]
    found = in_ranks(2, lambda _: trainer(plan("dp-sgd"), callbacks=[Meddles()]).fit())
    assert all("the weights of rank 1 are not those of rank 0" in text for _, text in found)


def test_the_budget_of_the_first_ranks_ledger_ends_all(tmp_path):
    def work(rank):
        def covers(account, step, covers=Account.covers):  # as if another run had taken the rest
            return step < 3 and covers(account, step)

        Account.covers = covers
        return make(tmp_path, seed=None).fit()

    first, second = in_ranks(2, work)
    assert first == second
    assert (first.reason, first.steps) == ("budget spent", 3)
    assert Ledger(tmp_path / "l.sqlite").steps("run") == 3
    found = in_ranks(2, lambda _: trainer(plan("dp-sgd"), ledger=lambda: spent(tmp_path)).fit())
    assert [kind for kind, _ in found] == ["NoRoom", "RankLost"]  # a BudgetError


def spent(folder):
    return Ledger(folder / "small.sqlite", dataset="d", budget=(0.1, 1e-5))


# --- the command line -----------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def command(count, arguments, ranks=None):
    """`fodp …` in processes as torchrun starts them; (exit code, stdout, stderr) of each."""
    port = free_port()

    def work(rank):
        from fodp.cli.main import main

        place = dict(RANK=rank, WORLD_SIZE=count, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ.update({name: str(value) for name, value in place.items()})
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(arguments(rank) if callable(arguments) else arguments)
            except SystemExit as end:
                code = end.code
        return code, out.getvalue(), err.getvalue()

    return waited([forked(rank, work) for rank in (ranks or range(count))])


TRAIN = ["train", "--dataset", "digits", "--noise-multiplier", "1", "--accountant", "rdp", "--quiet", "--lr", "0.5"]


def test_the_command_line_trains_once_whoever_is_started(tmp_path):
    pytest.importorskip("sklearn", reason="the embedded digits come with it")
    short = [*TRAIN, "--epochs", "0.5", "--seed", "3", "--json"]
    alone = command(1, [*short, "--out", str(tmp_path / "1")])[0]
    both = command(2, [*short, "--out", str(tmp_path / "2")])
    assert [code for code, _, _ in [alone, *both]] == [0, 0, 0], both
    assert both[1][1:] == ("", "")  # the second rank says nothing
    one, two = (json.loads(out.splitlines()[-1]) for _, out, _ in (alone, both[0]))
    for result in (one, two):
        del result["out"], result["seconds"]
    assert one.pop("final_loss") == pytest.approx(two.pop("final_loss"), rel=1e-5)
    assert one == two
    assert sorted(f.name for f in (tmp_path / "1").iterdir()) == sorted(f.name for f in (tmp_path / "2").iterdir())
    kinds = [[row.kind for row in Ledger(tmp_path / n / "ledger.sqlite").store.select()] for n in "12"]
    assert kinds[0].count("run") == kinds[1].count("run") == 1


def test_the_command_line_refuses_ranks_that_differ_in_one_line(tmp_path):
    pytest.importorskip("sklearn", reason="the embedded digits come with it")
    folder = tmp_path / "run"
    found = command(2, lambda rank: [*TRAIN, "--clip-norm", str(1 + rank), "--out", str(folder)])
    assert [code for code, _, _ in found] == [2, 2]
    assert found[0][2].count("\n") == 1
    assert "rank 1 does not agree with rank 0 in the plan's clip_norm" in found[0][2]
    assert found[1][1:] == ("", "")
    assert not folder.exists()
    found = command(2, lambda rank: [*TRAIN, *(["--method", "none"] if rank else []), "--out", str(folder)])
    assert "none" in found[1][2]  # what one rank alone cannot do it says itself
    assert "rank 1 has ended" in found[0][2]
    assert not folder.exists()


def test_a_rank_that_joins_twice_is_refused(tmp_path):
    from fodp.cli.ranks import joined

    port = free_port()

    def work(rank):
        place = dict(RANK=rank % 2, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ.update({name: str(value) for name, value in place.items()})
        try:
            with joined(20) as ranks:
                while ranks.is_first and not list(tmp_path.iterdir()):
                    time.sleep(0.01)  # the store is the first rank's
                return ranks.text(lambda: "hello")
        except fodp.ConfigurationError:
            (tmp_path / "refused").touch()
            raise

    found = waited([forked(rank, work) for rank in (0, 1, 3)])
    said = sorted(str(one) for one in found)
    assert [one for one in found if one == "hello"] == ["hello"] * 2, said
    assert any("rank 1 has joined twice" in one for one in said)
