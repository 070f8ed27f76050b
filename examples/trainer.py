"""fodp's own Trainer: scores on public data, a checkpoint, a ledger with a budget. Takes fodp alone."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.callbacks import Checkpoint, CSVLog, Evaluate

inputs = torch.randn(3000, 10)
labels = (inputs[:, 0] + inputs[:, 1] > 0).long()
private, public = TensorDataset(inputs[:2000], labels[:2000]), TensorDataset(inputs[2000:], labels[2000:])


def loss_fn(model, batch):  # one loss per example
    rows, targets = batch
    return F.cross_entropy(model(rows), targets, reduction="none")


plan = fodp.Plan.calibrated(
    target_epsilon=3, delta=1e-5, sampling_rate=0.1, steps=100, lot_size=200, clip_norm=1.0, method="fo-dp-sgd",
    params=dict(lr=1.0, beta=0.9),
)  # fmt: skip
trainer = fodp.Trainer(
    nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2)),
    loss_fn,
    private,
    plan,
    callbacks=[Evaluate(public), CSVLog("metrics.csv"), Checkpoint("checkpoint.pt")],
    ledger=fodp.Ledger("people.sqlite", dataset="people", budget=(8, 1e-5)),
)
result = trainer.fit()  # after a crash: trainer.resume("checkpoint.pt"), then fit()
print(trainer.statement())
print(f"accuracy {trainer.metrics['accuracy']:.2f} on public data, epsilon {result.epsilon:.2f}")
