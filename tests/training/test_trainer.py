"""The trainer: repeatable, resumable at any step, honest about what it spent."""

import dataclasses
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.callbacks import Callback, Checkpoint, CSVLog, Evaluate, WeightAverage
from fodp.ledger import Ledger
from fodp.lots.reading import LotReading
from fodp.sources.pull import Reading
from fodp.state import checkpoint
from fodp.state.fitting import steps_within
from fodp.trainer import Trainer


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data(size=80, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def network(dropout=0.0):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))


def plan(**changes):
    base = dict(
        sampling_rate=0.25, steps=24, lot_size=20, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=0,
        accountant="rdp", method="fo-dp-sgd",
    )  # fmt: skip
    return fodp.Plan(**{**base, **changes})


def trainer(model=None, the_plan=None, optimizer=None, **options):
    return Trainer(model or network(), losses, data(), the_plan or plan(), optimizer, **options)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class StopAt(Callback):
    """Interrupts as Ctrl-C does, after a given step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer):
        if trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.rule(11)
@pytest.mark.parametrize("stop", [1, 7, 8, 23])
@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd"])
@pytest.mark.parametrize("kind", ["own", "adam", "scheduled"])
def test_a_seeded_run_resumes_bit_for_bit_at_any_step(tmp_path, stop, method, kind):
    def fresh(**options):
        model = network(dropout=0.3)
        optimizer = None if kind == "own" else torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) if kind == "scheduled" else None
        return trainer(model, plan(method=method), optimizer, scheduler=scheduler, **options)

    whole = fresh()
    assert whole.fit().reason == "finished"
    first = fresh(callbacks=[StopAt(stop), Checkpoint(tmp_path / "c.pt")])
    assert first.fit().reason == "interrupted"
    assert first.step == stop
    second = fresh(callbacks=[Callback(), Checkpoint(tmp_path / "c.pt")])
    second.resume(tmp_path / "c.pt")
    assert second.step == stop
    assert second.fit().reason == "finished"
    assert torch.equal(weights(second.model), weights(whole.model))


@pytest.mark.parametrize(("share", "saved"), [(1.0, [0, 4, 8, 12, 16, 20, 24]), (0.1, [0, 8, 16, 24])])
def test_checkpoints_take_their_share_of_the_time_at_most(tmp_path, monkeypatch, share, saved):
    """An epoch of four steps takes six seconds here, and saving one."""
    clock, steps = [0.0], []
    monkeypatch.setattr("fodp.runs.callbacks.time.perf_counter", lambda: clock[0])

    class Clock(Callback):
        def on_epoch(self, trainer):
            clock[0] += 6

    run = trainer(callbacks=[Clock(), Checkpoint(tmp_path / "c.pt", share=share)])
    monkeypatch.setattr(fodp.Trainer, "steps_per_epoch", 4)
    run.save = lambda path: (steps.append(run.step), clock.__setitem__(0, clock[0] + 1))
    run.fit()
    assert steps == saved


@pytest.mark.rule(11)
def test_a_resumed_run_splits_its_lots_as_before(tmp_path, monkeypatch):
    monkeypatch.setattr("fodp.clipping.engine._RECORDED_AT_ONCE", 100)
    whole, first = trainer(), trainer(callbacks=[StopAt(7), Checkpoint(tmp_path / "c.pt")])
    whole.fit()
    first.fit()
    monkeypatch.undo()
    second = trainer()
    second.resume(tmp_path / "c.pt")
    second.fit()
    assert second.source.engine.rows_at_once == first.source.engine.rows_at_once < 10
    assert torch.equal(weights(second.model), weights(whole.model))


@pytest.mark.rule(11)
def test_a_secure_run_that_lost_steps_ends_early_and_says_so(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    first = trainer(the_plan=plan(seed=None), ledger=ledger, callbacks=[StopAt(10)])
    first.fit()
    first.save(tmp_path / "c.pt")
    for _ in range(4):  # these steps are used, but no checkpoint knows of them: the process died
        first.take_step()
    second = trainer(the_plan=plan(seed=None), ledger=Ledger(tmp_path / "ledger.sqlite"))
    second.resume(tmp_path / "c.pt")
    assert second.lost_steps >= 4
    outcome = second.fit()
    assert outcome.steps == 24
    assert outcome.lost_steps == second.lost_steps
    assert outcome.epsilon == pytest.approx(plan().epsilon())


@pytest.mark.rule(11)
def test_a_secure_run_does_not_resume_without_its_ledger(tmp_path):
    """Only the ledger knows what was released after the checkpoint was written."""
    first = trainer(the_plan=plan(seed=None), ledger=Ledger(tmp_path / "one.sqlite"), callbacks=[StopAt(10)])
    first.fit()
    first.save(tmp_path / "c.pt")
    for ledger in (None, Ledger(tmp_path / "another.sqlite")):
        with pytest.raises(fodp.PrivacyError, match="only with its ledger"):
            trainer(the_plan=plan(seed=None), ledger=ledger).resume(tmp_path / "c.pt")


@pytest.mark.rule(11)
def test_a_seeded_replay_is_not_charged_twice(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    first = trainer(ledger=ledger, callbacks=[StopAt(10)])
    first.fit()
    first.save(tmp_path / "c.pt")
    for _ in range(4):
        first.take_step()
    second = trainer(ledger=ledger)
    second.resume(tmp_path / "c.pt")
    assert second.step == 10
    assert second.lost_steps == 0


@pytest.mark.rule(11)
def test_spend_is_written_down_before_a_release_is_used(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    seen = []

    class Watch(Callback):
        def on_step(self, trainer):
            other = Ledger(tmp_path / "ledger.sqlite")  # as another process would read it
            seen.append(other.steps(trainer.run_id) >= trainer.step)
            other.close()

    trainer(ledger=ledger, callbacks=[Watch()]).fit()
    assert len(seen) == 24
    assert all(seen)


@pytest.mark.rule(13)
def test_a_secure_checkpoint_holds_no_key(tmp_path):
    secure = trainer(the_plan=plan(seed=None))
    secure.fit()
    secure.save(tmp_path / "c.pt")
    assert secure.session.streams._key not in (tmp_path / "c.pt").read_bytes()


@pytest.mark.rule(12)
def test_nothing_private_reaches_checkpoint_or_log(tmp_path):
    """The keys that leave a run are a closed list; lot sizes, norms and training losses are not on it."""
    done = trainer(callbacks=[Evaluate(data(30, seed=1)), CSVLog(tmp_path / "m.csv")])
    done.fit()
    done.save(tmp_path / "c.pt")
    assert set(checkpoint.load(tmp_path / "c.pt")) == {
        "format", "made_with", "digest", "run", "ledger",
        "plan", "step", "planned", "lost_steps", "model", "optimizer", "scheduler", "state", "metrics",
        "callbacks",
    }  # fmt: skip
    assert (tmp_path / "m.csv").read_text().splitlines()[0] == "epoch,step,epsilon,accuracy,loss,best_accuracy"
    assert set(done.metrics) == {"accuracy", "loss", "best_accuracy"}


class TestCheckpointFiles:
    def saved(self, tmp_path):
        done = trainer(callbacks=[StopAt(5)])
        done.fit()
        done.save(tmp_path / "c.pt")
        return tmp_path / "c.pt"

    def test_missing(self, tmp_path):
        with pytest.raises(fodp.PrivacyError, match="no checkpoint"):
            trainer().resume(tmp_path / "none.pt")

    @pytest.mark.parametrize("keep", [0, 10, 500, 2000])
    def test_truncated(self, tmp_path, keep):
        path = self.saved(tmp_path)
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(fodp.PrivacyError, match="damaged"):
            trainer().resume(path)

    @pytest.mark.filterwarnings("ignore:Detected pickle protocol")
    def test_code_is_not_executed(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return (os.system, (f"touch {tmp_path}/owned",))

        (tmp_path / "evil.pt").write_bytes(pickle.dumps({"format": 1, "x": Evil()}))
        torch.save({"format": 1, "x": Evil()}, tmp_path / "evil2.pt")
        for name in ("evil.pt", "evil2.pt"):
            with pytest.raises(fodp.PrivacyError, match="damaged"):
                trainer().resume(tmp_path / name)
        assert not (tmp_path / "owned").exists()

    def test_of_another_format(self, tmp_path, monkeypatch):
        self.saved(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "FORMAT", 99)
            checkpoint.save(tmp_path / "c.pt", {})
        with pytest.raises(fodp.PrivacyError, match="format 99"):
            trainer().resume(tmp_path / "c.pt")

    def test_of_another_plan(self, tmp_path):
        path = self.saved(tmp_path)
        with pytest.raises(fodp.PrivacyError, match=r"noise_multiplier was 1\.0, now 0\.5"):
            trainer(the_plan=plan(noise_multiplier=0.5)).resume(path)

    def test_of_another_model(self, tmp_path):
        path = self.saved(tmp_path)
        with pytest.raises(fodp.PrivacyError, match="another model"):
            trainer(nn.Linear(6, 2)).resume(path)

    def test_of_another_choice_of_scheduler(self, tmp_path):
        path = self.saved(tmp_path)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        with pytest.raises(fodp.PrivacyError, match="scheduler"):
            trainer(model, optimizer=optimizer, scheduler=scheduler).resume(path)

    def test_a_failed_write_leaves_the_old_one(self, tmp_path, monkeypatch):
        path = self.saved(tmp_path)
        before = path.read_bytes()

        def broken(*args):
            raise OSError("disk full")

        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(fodp.PrivacyError, match="disk full"):
            trainer().save(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


class TestOptimizers:
    @pytest.mark.rule(15)
    def test_parameter_groups_and_schedulers_act(self):
        model = network()
        before = [p.detach().clone() for p in model.parameters()]
        groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[3].parameters(), "lr": 0.1}]
        optimizer = torch.optim.SGD(groups)
        rates = []

        class Watch(Callback):
            def on_step(self, trainer):
                rates.append(optimizer.param_groups[1]["lr"])

        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        trainer(model, optimizer=optimizer, scheduler=scheduler, callbacks=[Watch()]).fit()
        after = list(model.parameters())
        assert torch.equal(before[0], after[0])
        assert not torch.equal(before[2], after[2])
        assert rates == pytest.approx([0.1 * 0.9 ** (i + 1) for i in range(24)])

    @pytest.mark.rule(15)
    @pytest.mark.parametrize("method", ["dp-sgd", "dp-adam", "dp-adam-ac"])
    def test_a_scheduler_can_be_made_for_the_methods_own_optimizer(self, method):
        stopping = trainer(
            the_plan=plan(method=method),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 3)),
        )
        iterates = []

        class Watch(Callback):
            def on_step(self, trainer):
                iterates.append(weights(trainer.model))

        stopping.callbacks.append(Watch())
        stopping.fit()
        assert not torch.equal(iterates[1], iterates[2])
        assert torch.equal(iterates[2], iterates[-1])

    @pytest.mark.rule(15)
    def test_frozen_layers_stay(self):
        model = network()
        model[0].requires_grad_(False)
        frozen = model[0].weight.clone()
        trainer(model).fit()
        assert torch.equal(model[0].weight, frozen)

    @pytest.mark.rule(14)
    def test_foreign_missing_and_unsuited_optimizers_are_refused(self):
        model, other = network(), network()
        with pytest.raises(fodp.PrivacyError, match="not this model's"):
            trainer(model, optimizer=torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
        with pytest.raises(fodp.PrivacyError, match=r"lacks the trainable parameter 3\.weight"):
            trainer(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))
        with pytest.raises(fodp.PrivacyError, match="LBFGS"):
            trainer(model, optimizer=torch.optim.LBFGS(model.parameters()))
        stray = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 5)
        with pytest.raises(fodp.PrivacyError, match="another optimizer"):
            trainer(model, scheduler=stray)


class TestTarget:
    def test_stops_before_exceeding(self):
        target = plan().epsilon(steps=10) + 1e-6
        limited = trainer(target_epsilon=target)
        outcome = limited.fit()
        assert (outcome.reason, outcome.steps) == ("target reached", 10)
        assert outcome.epsilon <= target < plan().epsilon(steps=11)

    def test_a_generous_target_changes_nothing(self):
        assert steps_within(plan(), 1e3) == 24

    def test_an_impossible_target_is_refused(self):
        with pytest.raises(fodp.PrivacyError, match="not even one step"):
            trainer(target_epsilon=1e-3)

    def test_epsilon_while_training_is_an_upper_bound_and_exact_at_epochs(self):
        rows = []

        class Watch(Callback):
            def on_step(self, trainer):
                rows.append((trainer.step, trainer.epsilon()))

        trainer(callbacks=[Watch()]).fit()
        for step, shown in rows:
            exact = plan().epsilon(steps=step)
            assert shown >= exact - 1e-9
            if step % 4 == 0:
                assert shown == pytest.approx(exact)


class TestAugmentation:
    def test_copies_are_averaged_before_clipping(self):
        """Augmenting with the identity changes nothing, however many copies."""
        plain, copied = trainer(), trainer(augment=lambda batch: batch, copies=3)
        plain.fit()
        copied.fit()
        assert torch.allclose(weights(plain.model), weights(copied.model), atol=1e-5)

    def test_augmentation_acts_and_repeats_in_seeded_mode(self):
        def jitter(batch):
            return batch[0] + torch.randn_like(batch[0]), batch[1]

        first, second, plain = (trainer(augment=a, copies=2) for a in (jitter, jitter, None))
        for each in (first, second, plain):
            each.fit()
        assert torch.equal(weights(first.model), weights(second.model))
        assert not torch.equal(weights(first.model), weights(plain.model))


class TestAverages:
    def test_tail_average_is_the_mean_of_the_last_iterates(self):
        iterates = []

        class Watch(Callback):
            def on_step(self, trainer):
                iterates.append(weights(trainer.model))

        average = WeightAverage(tail=0.25)
        trainer(callbacks=[Watch(), average]).fit()
        assert torch.allclose(weights(average.model), torch.stack(iterates[18:]).mean(0), atol=1e-6)

    def test_exponential_average(self):
        iterates = []

        class Watch(Callback):
            def on_step(self, trainer):
                iterates.append(weights(trainer.model))

        average = WeightAverage(decay=0.9)
        trainer(callbacks=[Watch(), average]).fit()
        expected = iterates[0]
        for iterate in iterates[1:]:
            expected = 0.9 * expected + 0.1 * iterate
        assert torch.allclose(weights(average.model), expected, atol=1e-6)

    def test_survives_a_resume(self, tmp_path):
        whole = WeightAverage(decay=0.9)
        trainer(callbacks=[whole]).fit()
        first = WeightAverage(decay=0.9)
        trainer(callbacks=[first, StopAt(9), Checkpoint(tmp_path / "c.pt")]).fit()
        second = WeightAverage(decay=0.9)
        resumed = trainer(callbacks=[second])
        resumed.resume(tmp_path / "c.pt")
        resumed.fit()
        assert torch.equal(weights(second.model), weights(whole.model))

    def test_another_choice_of_callbacks_on_resuming_mixes_nothing_up(self, tmp_path):
        whole = WeightAverage(decay=0.9)
        trainer(callbacks=[whole]).fit()
        first = [Evaluate(data(40, seed=1)), CSVLog(tmp_path / "m.csv"), WeightAverage(decay=0.9)]
        trainer(callbacks=[*first, StopAt(9), Checkpoint(tmp_path / "c.pt")]).fit()
        second = WeightAverage(decay=0.9)
        resumed = trainer(callbacks=[second])
        resumed.resume(tmp_path / "c.pt")
        resumed.fit()
        assert torch.equal(weights(second.model), weights(whole.model))

    def test_evaluation_can_use_it(self):
        average = WeightAverage(decay=0.9)
        scored = trainer(callbacks=[average, Evaluate(data(40, seed=1), average=average)])
        scored.fit()
        assert 0 <= scored.metrics["accuracy"] <= 1


def test_evaluation_leaves_modes_and_randomness_alone():
    plain, scored = trainer(network(0.5)), trainer(network(0.5), callbacks=[Evaluate(data(40, seed=1))])
    plain.fit()
    scored.fit()
    assert torch.equal(weights(plain.model), weights(scored.model))
    assert scored.model.training


def test_the_callers_random_state_is_untouched():
    torch.manual_seed(11)
    expected = torch.rand(3)
    busy = trainer(network(0.5))
    torch.manual_seed(11)
    busy.fit()
    assert torch.equal(torch.rand(3), expected)


def test_csv_keeps_one_line_per_epoch_also_after_a_resume(tmp_path):
    log = tmp_path / "m.csv"
    trainer(callbacks=[StopAt(10), CSVLog(log), Checkpoint(tmp_path / "c.pt")]).fit()
    again = trainer(callbacks=[CSVLog(log)])
    again.resume(tmp_path / "c.pt")
    again.fit()
    steps = [int(line.split(",")[1]) for line in log.read_text().splitlines()[1:]]
    assert steps == [4, 8, 12, 16, 20, 24]


def test_fit_works_outside_the_main_thread():
    done = []
    thread = threading.Thread(target=lambda: done.append(trainer().fit().reason))
    thread.start()
    thread.join()
    assert done == ["finished"]


def test_dropout_and_several_epochs_learn_something():
    model = network(0.1)
    params = dict(lr=1.0)
    scored = trainer(
        model, plan(steps=100, noise_multiplier=0.4, params=params), callbacks=[Evaluate(data(200, seed=1))]
    )
    scored.fit()
    assert scored.metrics["accuracy"] > 0.8


def test_tensorboard_gets_epsilon_and_scores(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the tensorboard extra: make test-all")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fodp.callbacks import TensorBoard

    scored = trainer(callbacks=[Evaluate(data(40, seed=1)), TensorBoard(tmp_path)])
    scored.fit()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"epsilon", "accuracy", "loss", "best_accuracy"}
    last = events.Scalars("epsilon")[-1]
    assert last.step == 24
    assert last.value == pytest.approx(plan().epsilon(), rel=1e-5)


def test_tensorboard_is_optional(tmp_path):
    """Without the package the message names it; with it, scalars are written."""
    code = (
        "from fodp.callbacks import TensorBoard\n"
        "import sys\n"
        "sys.modules['tensorboard'] = None\n"
        f"TensorBoard({str(tmp_path)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "tensorboard" in done.stderr


@pytest.mark.rule(1)
def test_gradients_left_in_frozen_layers_are_not_applied():
    """A backward pass of the owner's, then a layer is frozen: what lies in its .grad has no noise."""
    model = network()
    (model(torch.randn(8, 6)).sum()).backward()
    first = next(model.parameters())
    first.requires_grad_(False)
    before = first.clone()
    training = trainer(model, plan(noise_multiplier=1000.0), torch.optim.SGD(model.parameters(), lr=0.1))
    training.take_step()
    assert torch.equal(first, before)


def test_numbers_of_numpy_do_not_make_a_checkpoint_that_cannot_be_read(tmp_path):
    chosen = plan(noise_multiplier=np.linspace(1, 2, 3)[1], params=dict(lr=np.logspace(-2, 0, 3)[1]))
    first = trainer(the_plan=chosen)
    first.take_step()
    first.metrics["accuracy"] = np.float64(0.5)
    first.optimizer.param_groups[0]["lr"] = np.float64(0.1)
    first.save(tmp_path / "c.pt")
    second = trainer(the_plan=chosen)
    second.resume(tmp_path / "c.pt")
    assert second.step == 1
    assert second.metrics == {"accuracy": 0.5}


@pytest.mark.rule(12)
def test_a_secure_checkpoint_does_not_say_how_lots_were_split(tmp_path):
    for seed in (None, 3):
        training = trainer(the_plan=plan(seed=seed), ledger=Ledger(tmp_path / f"{seed}.sqlite"))
        training.fit()
        assert (training.session.state_dict()["source"] is None) == (seed is None)


class TestIdentityOfARun:
    def test_the_ledger_knows_a_run_by_the_given_name(self, tmp_path):
        ledger = Ledger(tmp_path / "l.sqlite")
        trainer(ledger=ledger, run_id="monday").fit()
        assert ledger.steps("monday") == plan().steps

    @pytest.mark.rule(11)
    @pytest.mark.parametrize("seed", [0, None])
    def test_a_name_that_took_steps_is_not_begun_again(self, tmp_path, seed):
        """Its steps are charged already, so that a second run under its name would release them for nothing."""
        ledger = Ledger(tmp_path / "l.sqlite")
        first = trainer(the_plan=plan(seed=seed), ledger=ledger, run_id="monday", callbacks=[StopAt(5)])
        first.fit()
        second = trainer(the_plan=plan(seed=seed), ledger=ledger, run_id="monday")
        with pytest.raises(fodp.PrivacyError, match=r"'monday' that used 5 steps: resume it"):
            second.fit()
        assert second.step == 0
        first.save(tmp_path / "c.pt")
        second.resume(tmp_path / "c.pt")
        assert second.fit().reason == "finished"

    @pytest.mark.parametrize("name", ["", "  ", 7])
    def test_a_name_is_a_name(self, name):
        with pytest.raises(fodp.PrivacyError, match="run_id must be a name"):
            trainer(run_id=name)

    def test_a_ledger_given_as_a_function_is_opened_by_the_fit(self, tmp_path):
        made = trainer(ledger=lambda: Ledger(tmp_path / "l.sqlite"))
        assert not (tmp_path / "l.sqlite").exists()
        made.fit()
        assert made.ledger is made.ledger is not None
        assert made.ledger.steps(made.run_id) == plan().steps

    def test_an_end_fixed_beforehand_has_its_own_epsilon(self):
        short = trainer(last_step=5)
        assert short.fit().epsilon == plan().epsilon(steps=5)
        assert short.step == 5
        assert trainer(last_step=5, target_epsilon=plan().epsilon(steps=3) + 1e-6).last_step == 3
        with pytest.raises(fodp.PrivacyError, match="last_step must be at most 24"):
            trainer(last_step=25)


class TestOptimizersOfOnesOwn:
    @pytest.mark.rule(14)
    def test_a_learning_rate_in_params_beside_an_optimizer_is_refused(self):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(fodp.ConfigurationError, match=r"lr=5\.0 in params and an optimizer of yours do not"):
            trainer(model, plan(params=dict(lr=5.0)), optimizer)
        with pytest.raises(fodp.ConfigurationError, match=r"lr=5\.0 in params"):
            fodp.make_private(model, optimizer, data(), plan(params=dict(lr=5.0)))
        trainer(model, plan(method="dp-sgd", params=dict(filter="momentum")), optimizer)  # it acts


CUT_SHORT = r"shape \(1\): .*reduction='none'"
WRONG_LOSSES = [
    (nn.CrossEntropyLoss(), r"loss_fn\(model, batch\), and CrossEntropyLoss takes outputs and targets.*def loss_fn"),
    (nn.CrossEntropyLoss, r"loss_fn\(model, batch\)"),
    (F.cross_entropy, r"and cross_entropy takes outputs and targets"),
    (lambda outputs: outputs, r"loss_fn\(model, batch\), and <lambda> cannot be"),
    (None, r"must be a function loss_fn\(model, batch\), got None"),
    (lambda model, batch: None, "a NoneType: return the losses"),
    (lambda model, batch: losses(model, batch).mean(), r"shape \(\): .*reduction='none'"),
    (lambda model, batch: (losses(model, batch), 1), "a tuple: return the losses alone"),
    (lambda model, batch: losses(model, batch)[:1], CUT_SHORT),
    (
        lambda model, batch: F.binary_cross_entropy_with_logits(
            model(batch[0]), F.one_hot(batch[1], 2).float(), reduction="none"
        ),
        r"shape \(lot, (2|lot)\): one loss per example: take \.mean\(1\) or \.sum\(1\)",
    ),
]


@pytest.mark.rule(14)
@pytest.mark.parametrize(("loss_fn", "message"), WRONG_LOSSES)
def test_a_loss_of_another_form_is_answered_before_a_release(loss_fn, message, tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    with pytest.raises(fodp.ConfigurationError, match=f"(?s){message}"):
        Trainer(network(), loss_fn, data(), plan(seed=None), ledger=ledger, run_id="wrong").fit()
    if message != CUT_SHORT:  # shows with an example only
        assert ledger.steps("wrong") is None  # nothing was charged


@pytest.mark.parametrize(
    "make",
    [
        lambda model, loader: Trainer(model, losses, loader, plan()),
        lambda model, loader: fodp.make_private(model, torch.optim.SGD(model.parameters()), loader, plan()),
    ],
    ids=["Trainer", "make_private"],
)
def test_a_loader_is_not_a_data_set(make):
    loader = torch.utils.data.DataLoader(data(), batch_size=8)
    with pytest.raises(fodp.ConfigurationError, match=r"pass its data set, loader\.dataset"):
        make(network(), loader)


def test_what_people_print_is_short(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite", dataset="mine")
    training = trainer(ledger=ledger, last_step=3)
    assert repr(ledger) == f"Ledger('{tmp_path}/l.sqlite', dataset='mine')"
    assert repr(training).startswith("<Trainer of Sequential, step 0 of 3, Plan(sampling_rate=0.25, ")
    assert len(repr(training.fit())) < 200


class TestOtherVersions:
    def saved(self, folder, monkeypatch, seed, **versions):
        ledger = Ledger(folder / "l.sqlite")
        first = trainer(the_plan=plan(seed=seed), ledger=ledger, callbacks=[StopAt(4)])
        first.fit()
        with monkeypatch.context() as other:
            for module, version in versions.items():
                other.setattr(f"{module}.__version__", version)
            first.save(folder / "c.pt")
        again = trainer(the_plan=plan(seed=seed), ledger=Ledger(folder / "l.sqlite"))
        again.resume(folder / "c.pt")
        return again.fit().reason

    @pytest.mark.parametrize("fodp_version", ["0.1.9", "0.2.0", "0.0.3"])
    def test_a_secure_run_goes_on_with_any_version_that_reads_it(self, tmp_path, monkeypatch, fodp_version):
        assert self.saved(tmp_path, monkeypatch, None, fodp=fodp_version, torch="2.0.0") == "finished"

    @pytest.mark.rule(11)
    def test_a_seeded_run_only_with_the_minor_version_and_the_torch_that_wrote_it(self, tmp_path, monkeypatch):
        assert self.saved(tmp_path, monkeypatch, 0, fodp="0.1.9") == "finished"

    @pytest.mark.rule(11)
    @pytest.mark.parametrize("versions", [dict(fodp="0.2.0"), dict(fodp="1.1.0"), dict(torch="2.0.0")], ids=str)
    def test_a_seeded_run_is_not_replayed_by_other_code(self, tmp_path, monkeypatch, versions):
        with pytest.raises(fodp.PrivacyError, match=r"was written with .* bit for bit"):
            self.saved(tmp_path, monkeypatch, 0, **versions)


def test_what_a_reading_knows_are_keywords_of_the_trainer():
    known = inspect.signature(Trainer.__init__).parameters
    fields = {field.name for field in dataclasses.fields(Reading)}
    assert fields < set(known)
    assert "reading" not in known
    assert trainer(microbatch=5, copies=1).source is not None
    with pytest.raises(fodp.ConfigurationError, match="here it is microbatch"):
        trainer(microbatch_size=5)


def test_what_a_reading_of_lots_knows_are_keywords_of_make_private_too():
    known = inspect.signature(fodp.make_private).parameters
    fields = {field.name for field in dataclasses.fields(LotReading)}
    assert fields == {"collate_fn", "num_workers", "pin_memory", "microbatch", "allow_non_finite"}
    assert fields < set(known)
    assert fields < {field.name for field in dataclasses.fields(Reading)}
    assert all(known[name].default == getattr(LotReading(), name) for name in fields)
    assert "reading" not in known
    for word in ("owners", "copies", "augment", "engine", "reading"):  # these are the Trainer's
        with pytest.raises(fodp.ConfigurationError, match=f"make_private has no argument '{word}'"):
            fodp.make_private(None, None, None, None, **{word: 1})


WRONG = {
    "collate_fn": (3, "collate_fn must be a function"),
    "num_workers": (-1, "num_workers must be a whole number of at least 0"),
    "pin_memory": (1, "pin_memory must be True or False"),
    "microbatch": (1.5, "microbatch must be a whole number"),
    "allow_non_finite": ("no", "allow_non_finite must be True or False"),
    "scheduler": (3, "scheduler must be"),
}


@pytest.mark.parametrize("sample", [3, (torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64))], ids=["3", "width"])
def test_a_public_sample_that_the_loss_does_not_take_is_refused_before_anything_is_charged(tmp_path, sample):
    ledger = Ledger(tmp_path / "spent.db", dataset="d", budget=(500, 1e-5))
    kronecker = plan(method="dp-sgd", params=dict(shape="kronecker"))
    with pytest.raises(fodp.ConfigurationError, match=r"^public_sample must be a batch .* Nothing was released or"):
        trainer(the_plan=kronecker, ledger=ledger, public_sample=sample).fit()
    assert not ledger.store.count()


@pytest.mark.parametrize("word", [*WRONG, "augment", "copies", "public_score"])
def test_wrong_values_are_refused_in_one_line_before_anything_is_charged(tmp_path, word):
    value, message = WRONG.get(word, (0, f"{word} must be"))
    ledger = Ledger(tmp_path / "spent.db", dataset="d", budget=(50, 1e-5))
    with pytest.raises(fodp.ConfigurationError, match=f"^{message}[^\n]*$"):
        trainer(ledger=ledger, **{word: value})
    if word in WRONG:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(fodp.ConfigurationError, match=f"^{message}[^\n]*$"):
            fodp.make_private(model, optimizer, data(), plan(), ledger=ledger, **{word: value})
    assert ledger.budget("d") is None  # nothing was written down
