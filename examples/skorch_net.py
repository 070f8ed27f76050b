"""skorch: its networks predict and score, fodp trains the module inside: pip install "fodp[skorch]"."""

import numpy as np
import torch
from skorch import NeuralNetClassifier
from torch import nn
from torch.nn import functional as F

import fodp

rows = np.random.default_rng().normal(size=(3000, 10)).astype(np.float32)
labels = (rows[:, 0] + rows[:, 1] > 0).astype(np.int64)
net = NeuralNetClassifier(
    nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2)), criterion=nn.CrossEntropyLoss, classes=[0, 1]
).initialize()

plan = fodp.Plan.calibrated(
    target_epsilon=3,
    delta=1e-5,
    sampling_rate=0.1,
    steps=100,
    lot_size=200,
    clip_norm=1.0,
    params=dict(lr=1.0),
    method="fo-dp-sgd",
)
private = (torch.from_numpy(rows[:2000]), torch.from_numpy(labels[:2000]))
trainer = fodp.Trainer(
    net.module_,
    lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
    private,
    plan,
)
trainer.fit()  # not net.fit, whose loop knows no plan
print(f"accuracy {net.score(rows[2000:], labels[2000:]):.2f} on public rows, epsilon {trainer.stated_epsilon():.2f}")
