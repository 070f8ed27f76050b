"""Lightning's door: an ordinary module trains privately, and what contradicts the plan is met by a sentence."""

import csv
import itertools
import logging
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import fodp
from fodp import ConfigurationError, LedgerError, PrivacyError

pytest.importorskip("lightning", reason="takes the extra lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger

from fodp.integrations.lightning import PrivateTraining

PLAN = fodp.Plan(
    sampling_rate=0.25, steps=10, lot_size=50, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, accountant="rdp",
    seed=3, params=dict(beta=0.9, window=3), method="fo-dp-sgd",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        yield


def data(size=200, seed=0):
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
        self.stepping_batches = None

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        self.stepping_batches = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class WithoutForward(Module):
    forward = pl.LightningModule.forward

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(data(), batch_size=7, shuffle=True)

    def val_dataloader(self):
        return DataLoader(data(100, seed=1), batch_size=50)


def trainer(*callbacks, **options):
    defaults = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return pl.Trainer(callbacks=list(callbacks), accelerator="cpu", **{**defaults, **options})


def fit(plan=PLAN, module=None, *, more=(), options=None, **words):
    """A fit with a data module; returns module, callback and trainer."""
    module = Module() if module is None else module
    private = PrivateTraining(plan, **{"public_validation": True, **words})
    running = trainer(private, *more, **(options or {}))
    running.fit(module, datamodule=Data())
    return module, private, running


def flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class TestGuarantee:
    def test_the_fit_is_the_loop_that_make_private_makes(self):
        """Same lots, same releases, same schedule: a door, no second loop."""
        module, private, running = fit()
        twin = Module()
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        _, _, loader = fodp.make_private(twin, optimizer, data(), PLAN)
        for number, (inputs, labels) in enumerate(loader, 1):
            optimizer.zero_grad()
            F.cross_entropy(twin(inputs), labels).backward()
            optimizer.step()
            if number % 4 == 0:
                schedule.step()
        assert torch.equal(flat(module), flat(twin))
        assert private.steps == running.global_step == PLAN.steps
        assert private.epsilon() == PLAN.epsilon()
        assert private.statement() == PLAN.statement()
        assert module.stepping_batches == PLAN.steps
        loader.close()

    def test_the_ledger_has_the_events_of_the_plan(self, tmp_path):
        ledger = fodp.Ledger(tmp_path / "l.sqlite", dataset="people", budget=(50, 1e-5))
        fit(fodp.Plan(**{**PLAN.to_dict(), "seed": None}), ledger=ledger)
        (run,) = ledger.store.select("run")
        assert run.data["phases"] == [[[[0.25, 1 / 0.9]], 10]]
        assert ledger.steps(run.run) == 10
        assert ledger.left("people") < 1

    def test_noise_of_a_thousand_leaves_chance(self):
        scores = []
        for seed in range(3):
            plan = fodp.Plan(**{**PLAN.to_dict(), "noise_multiplier": 1000.0, "seed": seed})
            scores.append(float(fit(plan)[2].callback_metrics["accuracy"]))
        assert 0.2 < sum(scores) / 3 < 0.8
        plan = fodp.Plan(**{**PLAN.to_dict(), "noise_multiplier": 0.3, "steps": 60})
        assert fit(plan)[2].callback_metrics["accuracy"] > 0.85

    def test_empty_lots_are_steps(self):
        plan = fodp.Plan(**{**PLAN.to_dict(), "sampling_rate": 0.003, "lot_size": 1})
        module, private, _ = fit(plan)
        assert private.steps == 10
        assert flat(module).isfinite().all()

    def test_a_module_whose_part_is_called(self):
        assert fit(module=WithoutForward())[1].steps == PLAN.steps

    def test_what_training_logs_is_dropped_with_a_line_and_epsilon_is_logged(self, tmp_path):
        with pytest.warns(UserWarning, match="'train_loss' is logged in training_step and dropped"):
            _, _, running = fit(options=dict(logger=CSVLogger(tmp_path), log_every_n_steps=1))
        assert set(running.callback_metrics) == {"accuracy", "epsilon"}
        with open(f"{running.logger.log_dir}/metrics.csv") as file:
            rows = list(csv.DictReader(file))
        assert set(rows[0]) == {"accuracy", "epoch", "epsilon", "step"}
        shown = [float(row["epsilon"]) for row in rows if row["epsilon"]]
        assert shown == sorted(shown)
        for step, epsilon in enumerate(shown, 1):
            assert epsilon >= PLAN.epsilon(steps=step)
        assert shown[-1] == pytest.approx(PLAN.epsilon(), rel=0.02)

    def test_a_name_that_is_public_may_be_logged(self):
        class Logs(Module):
            def training_step(self, batch, batch_idx):
                self.log("lr", 0.5)
                return super().training_step(batch, batch_idx)

        assert "lr" in fit(module=Logs(), public_logs=["lr"])[2].callback_metrics

    def test_a_fit_that_stops_early_has_the_epsilon_of_the_plan(self):
        stop = EarlyStopping("accuracy", mode="max", patience=1, min_delta=1.0)
        _, private, _ = fit(more=[stop])
        assert private.steps == 8
        assert private.epsilon() == PLAN.epsilon()

    def test_everything_is_given_back(self):
        module, _, running = fit()
        assert type(running.precision_plugin).__name__ == "Precision"
        assert not module._forward_pre_hooks
        module, private, _ = fit(module=module)  # again: a fit of its own
        assert private.steps == PLAN.steps

    def test_so_is_it_after_a_fit_that_failed(self):
        class Breaks(Module):
            def training_step(self, batch, batch_idx):
                raise RuntimeError("no")

        module = Breaks()
        with pytest.raises(RuntimeError, match="no"):
            fit(module=module)
        assert not module._forward_pre_hooks


class Crash(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            raise RuntimeError("the power went off")


class TestCheckpoints:
    def crashed(self, folder, plan=PLAN, **words):
        with pytest.raises(RuntimeError, match="power"):
            fit(
                plan,
                more=[Crash(7), ModelCheckpoint(folder, filename="at{step}", save_top_k=-1, every_n_train_steps=5)],
                options=dict(enable_checkpointing=True),
                **words,
            )
        return str(next(folder.glob("*.ckpt")))

    def resumed(self, path, plan=PLAN, **words):
        module, private = Module(), PrivateTraining(plan, public_validation=True, **words)
        running = trainer(private)
        running.fit(module, datamodule=Data(), ckpt_path=path)
        return module, private, running

    def test_a_seeded_run_goes_on_bit_for_bit(self, tmp_path):
        module, private, running = self.resumed(self.crashed(tmp_path))
        assert running.global_step == private.steps == 10
        assert torch.equal(flat(module), flat(fit()[0]))

    def test_a_secure_run_goes_on_with_its_ledger_and_loses_what_was_used_after_the_checkpoint(self, tmp_path):
        plan, ledger = fodp.Plan(**{**PLAN.to_dict(), "seed": None}), fodp.Ledger(tmp_path / "l.sqlite")
        path = self.crashed(tmp_path, plan, ledger=ledger)
        (run,) = [entry.run for entry in ledger.store.select("run")]
        used = ledger.steps(run)
        assert used == 7
        _, private, running = self.resumed(path, plan, ledger=ledger)
        assert private.steps == 10
        assert running.global_step == 8
        assert private.epsilon() == plan.epsilon()
        assert ledger.steps(run) == 10

    def test_without_its_ledger_it_does_not(self, tmp_path):
        plan = fodp.Plan(**{**PLAN.to_dict(), "seed": None})
        path = self.crashed(tmp_path, plan)
        with pytest.raises(PrivacyError, match="goes on only with its ledger"):
            self.resumed(path, plan)
        path = self.crashed(tmp_path / "b", plan, ledger=fodp.Ledger(tmp_path / "l.sqlite"))
        with pytest.raises(LedgerError):
            self.resumed(path, plan, ledger=fodp.Ledger(tmp_path / "other.sqlite"))

    @pytest.mark.parametrize("what", ["step", "weights", "memory"])
    def test_one_that_was_changed_is_refused(self, what, tmp_path):
        path = self.crashed(tmp_path)
        saved = torch.load(path)
        loop = saved["callbacks"]["PrivateTraining"]["loop"]
        if what == "step":
            loop["step"] = 2
        elif what == "weights":
            saved["state_dict"]["net.0.bias"] += 1
        else:
            loop["state"]["noise_stds"] = [0.0]
        torch.save(saved, path)
        with pytest.raises(PrivacyError, match="digest differs"):
            self.resumed(path)

    def test_so_is_another_plan(self, tmp_path):
        path = self.crashed(tmp_path)
        with pytest.raises(PrivacyError, match="another plan"):
            self.resumed(path, fodp.Plan(**{**PLAN.to_dict(), "noise_multiplier": 2.0}))

    def test_a_checkpoint_has_the_privacy_card_and_no_private_score(self, tmp_path):
        saved = torch.load(self.crashed(tmp_path))
        assert saved["callbacks"]["PrivateTraining"]["privacy_card"]["epsilon"] == PLAN.epsilon()
        assert "train_loss" not in str(saved["callbacks"])


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Module):
    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[3])]


class OwnStep(Module):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class NoOnePart(WithoutForward):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(2, 2)


class SkipsSteps(Module):
    def training_step(self, batch, batch_idx):
        return None


class BatchNorm(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.repeat((torch.zeros(4), torch.tensor(0)))


class TestRefusals:
    """Each before anything is charged."""

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (dict(accumulate_grad_batches=2), "accumulate_grad_batches.*one lot is one step"),
            (dict(gradient_clip_val=1.0), "gradient_clip_val.*plan's clip_norm"),
            (dict(precision="bf16-mixed"), "precision.*32-true"),
            (dict(precision="64-true"), "precision.*32-true"),
            (dict(devices=2, strategy="ddp"), "devices.*use one"),
            (dict(fast_dev_run=True), "fast_dev_run.*spends epsilon"),
            (dict(limit_train_batches=3), "limit_train_batches.*the plan says"),
            (dict(overfit_batches=2), "limit_train_batches.*the plan says"),
            (dict(reload_dataloaders_every_n_epochs=1), "one data set"),
            (dict(detect_anomaly=True), "detect_anomaly.*empty lot"),
            (dict(max_steps=9), "max_steps is 9 and the plan has 10"),
            (dict(max_epochs=7), "max_epochs is 7 and the plan has 10 steps, 3 epochs of 4"),
        ],
    )
    def test_of_the_trainer(self, options, said, tmp_path, monkeypatch):
        ledger = fodp.Ledger(tmp_path / "l.sqlite")
        private = PrivateTraining(PLAN, public_validation=True, ledger=ledger)
        running = trainer(private, **options)
        running.strategy.connect(Module())
        with pytest.raises(ConfigurationError, match=said):
            private.setup(running, Module(), "fit") if "devices" in options else running.fit(
                Module(), datamodule=Data()
            )
        assert not list(ledger.store.select("run"))

    @pytest.mark.parametrize("options", [dict(max_epochs=3), dict(max_steps=10), dict(max_epochs=-1, max_steps=10)])
    def test_a_length_that_agrees_with_the_plan_is_none(self, options):
        assert fit(options=options)[1].steps == 10

    @pytest.mark.parametrize(
        ("callback", "said"),
        [
            (GradientAccumulationScheduler({0: 2}), "accumulate"),
            (LearningRateFinder(), "training loss"),
            (ThroughputMonitor(batch_size_fn=len), "how large its lot was"),
        ],
    )
    def test_of_other_callbacks(self, callback, said):
        with pytest.raises(ConfigurationError, match=said):
            fit(more=[callback])

    @pytest.mark.parametrize(
        ("module", "said"),
        [
            (Manual, "automatic optimization"),
            (TwoOptimizers, "only supported with manual optimization"),  # so says Lightning; and manual is refused
            (OwnStep, r"OwnStep\.optimizer_step is overridden"),
            (NoOnePart, "define forward"),
            (SkipsSteps, "without a backward"),
            (BatchNorm, "BatchNorm"),
        ],
    )
    def test_of_the_module(self, module, said):
        with pytest.raises((PrivacyError, RuntimeError), match=said):
            fit(module=module())

    @pytest.mark.parametrize(
        ("loader", "said"),
        [
            (DataLoader(data(), sampler=WeightedRandomSampler([1.0] * 200, 200)), "WeightedRandomSampler"),
            (DataLoader(data(), batch_sampler=[[0, 1]]), "list"),
            (DataLoader(Endless()), "IterableDataset"),
            ([DataLoader(data()), DataLoader(data())], "one torch"),
        ],
    )
    def test_of_the_training_loader(self, loader, said):
        with pytest.raises(ConfigurationError, match=said):
            trainer(PrivateTraining(PLAN)).fit(Module(), loader)

    def test_validation_data_that_nobody_called_public(self):
        with pytest.raises(ConfigurationError, match="public_validation=True"):
            fit(public_validation=False)
        assert fit(public_validation=False, options=dict(limit_val_batches=0))[1].steps == 10

    def test_a_second_fit_under_the_epsilon_of_one(self):
        module, private, _ = fit()
        with pytest.raises(ConfigurationError, match="has taken 10 private steps already"):
            trainer(private).fit(module, datamodule=Data())

    def test_hooks_that_hear_gradients_without_noise(self):
        module = Module()
        heard = []
        next(module.parameters()).register_hook(heard.append)
        with pytest.raises(ConfigurationError, match="would be given gradients without noise"):
            fit(module=module)
        assert heard == []

    def test_what_is_no_plan(self):
        with pytest.raises(ConfigurationError, match=r"takes a fodp\.Plan"):
            PrivateTraining(3)


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        ("loss_reduction", "avg", "loss_reduction must be one of mean, sum; got 'avg'"),
        ("public_validation", "no", "public_validation must be True or False, got 'no'"),
        ("public_logs", "lr", "public_logs must be a list of names, got 'lr'"),
        ("public_state", "ema.", "public_state must be a list of names, got 'ema.'"),
        ("public_state", 3, "public_state must be a list of names, got 3"),
    ],
)
def test_wrong_values_are_refused_where_they_would_let_too_much_pass(word, value, said):
    with pytest.raises(ConfigurationError, match=f"^{re.escape(said)}$"):
        PrivateTraining(PLAN, **{word: value})


def test_an_average_of_the_plan_is_refused():
    """Lightning scores and saves the module itself, the last iterate."""
    averaged = fodp.Plan(**{**PLAN.to_dict(), "params": dict(average="ema")})
    with pytest.raises(ConfigurationError, match=r"set average=.none. .a plan without a method averages by itself."):
        PrivateTraining(averaged)
