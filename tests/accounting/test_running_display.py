"""ε while a run goes on: a bound for the steps so far, and never above what the whole run will state."""

import csv
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp import accounting
from fodp.callbacks import Callback, CSVLog

PLANS = {
    "pld": dict(sampling_rate=0.1, steps=400, noise_multiplier=3.3),
    "short": dict(sampling_rate=0.1, steps=40, noise_multiplier=1.5),
    "rdp": dict(sampling_rate=0.1, steps=40, noise_multiplier=1.5, accountant="rdp"),
    "turns": dict(sampling_rate=0.05, steps=40, noise_multiplier=1.5, method="fo-noise"),
}


def plan(kind):
    return fodp.Plan(**{"lot_size": 100, "clip_norm": 1.0, "delta": 1e-5, "method": "dp-sgd", **PLANS[kind]})


@pytest.mark.rule(23)
@pytest.mark.parametrize("kind", PLANS)
def test_no_step_shows_more_than_the_plan(kind):
    the_plan = plan(kind)
    whole, steps = the_plan.epsilon(), the_plan.steps
    running = accounting.RunningEpsilon(the_plan.events(), the_plan.delta, the_plan.accountant)
    asked = [0, 1, steps // 2, *range(steps - 12, steps + 1)]
    shown = [running.after(step) for step in asked]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in itertools.pairwise(shown))  # nor falls at the end
    assert shown[0] == 0.0
    assert max(shown) == shown[-1] == whole
    for step in (1, steps // 2, steps - 2, steps - 1):
        assert the_plan.epsilon(steps=step) <= running.after(step) * (1 + 1e-9)  # and it is a bound


class Shown(Callback):
    """What the display shows after each step."""

    def __init__(self):
        self.values = []

    def on_step(self, trainer):
        self.values.append(trainer.epsilon())


@pytest.mark.rule(23)
@pytest.mark.parametrize("end", [dict(), dict(last_step=33), dict(target_epsilon=2.1)], ids=str)
def test_no_file_or_display_of_a_run_shows_more_than_its_end(end, tmp_path):
    torch.manual_seed(0)
    data, model = TensorDataset(torch.randn(60, 3), torch.randint(2, (60,))), nn.Linear(3, 2)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    shown = Shown()
    trainer = fodp.Trainer(model, loss, data, plan("short"), callbacks=[shown, CSVLog(tmp_path / "metrics.csv")], **end)
    result = trainer.fit()
    assert result.epsilon == plan("short").epsilon(steps=result.steps)
    with (tmp_path / "metrics.csv").open() as file:
        logged = [float(row["epsilon"]) for row in csv.DictReader(file)]
    for values in (shown.values, logged):
        assert max(values) == values[-1] == result.epsilon
    assert len(shown.values) == result.steps
