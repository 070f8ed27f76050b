"""Callbacks: scores are written once, at the epoch they belong to, and a run may end because of them."""

import csv
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.callbacks import Callback, Checkpoint, CSVLog, EarlyStopping, Evaluate, Metrics
from fodp.runs.scores import squared_error
from fodp.trainer import Trainer

PLAN = fodp.Plan(
    sampling_rate=0.25, steps=24, lot_size=10, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5, method="dp-sgd",
    accountant="rdp", seed=1, params=dict(lr=0.1),
)  # fmt: skip


def data(size=40, seed=0):
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def trainer(*callbacks, **words):
    torch.manual_seed(0)
    loss = words.pop("loss_fn", lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
    model = words.pop("model", None) or nn.Linear(4, 2)
    return Trainer(model, loss, words.pop("dataset", data()), PLAN, callbacks=callbacks, **words)


class Scripted(Callback):
    """Sets a score at some epochs; None leaves one out."""

    def __init__(self, *values, name="auc"):
        self.values, self.name, self.epoch = values, name, 0

    def on_epoch(self, trainer):
        value = self.values[self.epoch] if self.epoch < len(self.values) else None
        self.epoch += 1
        if value is not None:
            trainer.metrics[self.name] = value


def rows(path):
    return list(csv.DictReader(path.open()))


class TestCSVLog:
    def test_a_score_stands_in_the_epoch_it_was_computed_in_and_nowhere_else(self, tmp_path):
        trainer(CSVLog(tmp_path / "m.csv"), Evaluate(data(seed=1), every=3)).fit()
        assert [bool(row["accuracy"]) for row in rows(tmp_path / "m.csv")] == [False, False, True, False, False, True]

    def test_every_score_of_the_users_is_written(self, tmp_path):
        late = Scripted(None, None, 0.25, None, 0.25, math.inf)
        trainer(CSVLog(tmp_path / "m.csv"), late, Scripted(3, name="rank")).fit()
        found = rows(tmp_path / "m.csv")
        assert [row["auc"] for row in found] == ["", "", "0.25", "", "0.25", "inf"]
        assert [row["rank"] for row in found] == ["3.0", "", "", "", "", ""]
        assert [int(row["step"]) for row in found] == [4, 8, 12, 16, 20, 24]

    def test_columns_survive_a_resume(self, tmp_path):
        class Stop(Callback):
            def on_epoch(self, trainer):
                if trainer.step == 12:
                    trainer.interrupt()

        log = tmp_path / "m.csv"
        trainer(CSVLog(log), Scripted(None, 0.5), Stop(), Checkpoint(tmp_path / "c.pt")).fit()
        again = trainer(CSVLog(log), Scripted(0.75, name="rank"))
        again.resume(tmp_path / "c.pt")
        assert again.metrics == {"auc": 0.5}
        again.fit()
        found = rows(log)
        assert [row["auc"] for row in found] == ["", "0.5", "", "", "", ""]
        assert [row["rank"] for row in found] == ["", "", "", "0.75", "", ""]


def test_logs_come_after_scores_whatever_the_order_of_callbacks(tmp_path):
    """TensorBoard before Evaluate used to write each score one epoch late."""
    seen = []

    class Reader(Callback):
        order = 1

        def on_epoch(self, trainer):
            seen.append((trainer.step, trainer.metrics.get("auc"), set(trainer.metrics.new)))

    trainer(Reader(), Scripted(1, 2, None, 4)).fit()
    assert seen == [(4, 1, {"auc"}), (8, 2, {"auc"}), (12, 2, set()), (16, 4, {"auc"}), (20, 4, set()), (24, 4, set())]


def test_tensorboard_writes_a_score_at_its_own_step(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the tensorboard extra: make test-all")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fodp.callbacks import TensorBoard

    trainer(TensorBoard(tmp_path), Scripted(1, None, 3)).fit()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("auc")] == [(4, 1), (12, 3)]


class TestEarlyStopping:
    @pytest.mark.rule(23)
    @pytest.mark.parametrize(("mode", "values"), [("max", (0.1, 0.3, 0.2, 0.3)), ("min", (0.9, 0.5, 0.6, 0.5))])
    def test_it_ends_the_run_and_the_epsilon_is_the_plans(self, mode, values):
        stopped = trainer(EarlyStopping("auc", patience=2, mode=mode), Scripted(*values, 0.4))
        result = stopped.fit()
        assert (result.reason, result.steps) == ("stopped early", 16)
        assert result.epsilon == PLAN.epsilon() == stopped.stated_epsilon()
        assert result.epsilon > PLAN.epsilon(steps=16)

    def test_scores_that_get_better_do_not_end_it(self):
        assert trainer(EarlyStopping("auc", patience=1), Scripted(1, 2, 3, 4, 5, 6)).fit().reason == "finished"

    def test_only_new_scores_count(self):
        assert trainer(EarlyStopping("auc", patience=2), Scripted(1, None, None, None, 1)).fit().reason == "finished"

    def test_a_stopped_run_stays_stopped_when_resumed(self, tmp_path):
        callbacks = (EarlyStopping("auc", patience=1), Scripted(2, 1), Checkpoint(tmp_path / "c.pt"))
        assert trainer(*callbacks).fit().steps == 8
        again = trainer(EarlyStopping("auc", patience=1))
        again.resume(tmp_path / "c.pt")
        result = again.fit()
        assert (result.reason, result.steps, result.epsilon) == ("stopped early", 8, PLAN.epsilon())

    def test_a_score_that_never_comes_is_named(self):
        with pytest.warns(
            UserWarning, match="waits for 'acuracy'; so far the scores are accuracy, best_accuracy, loss"
        ):
            trainer(EarlyStopping("acuracy"), Evaluate(data(seed=1))).fit()

    @pytest.mark.parametrize("words", [dict(patience=0), dict(patience=1.5), dict(mode="up")])
    def test_wrong_words(self, words):
        with pytest.raises(fodp.PrivacyError):
            EarlyStopping(**words)


def test_a_regression_is_scored_by_a_metric_of_its_own():
    private, inputs = torch.randn(2, 40, 4, generator=torch.Generator().manual_seed(0))
    numbers = TensorDataset(inputs, inputs[:, 0])
    scored = trainer(
        Evaluate(numbers, metric=squared_error), dataset=TensorDataset(private, private[:, 0]), model=nn.Linear(4, 1),
        loss_fn=lambda model, batch: (model(batch[0]).flatten() - batch[1]) ** 2,
    )  # fmt: skip
    scored.fit()
    with torch.no_grad():
        expected = float(((scored.model(inputs).flatten() - inputs[:, 0]) ** 2).mean())
    assert dict(scored.metrics) == {"loss": pytest.approx(expected, rel=1e-5)}


def test_a_score_is_a_number():
    metrics = Metrics()
    metrics["tensor"] = torch.tensor(0.5)
    assert dict(metrics) == {"tensor": 0.5}
    assert metrics.new == {"tensor"}
    with pytest.raises(fodp.PrivacyError, match="the score 'x' must be a number"):
        metrics["x"] = "high"
