"""A training loop of your own, made private: three names change. Takes fodp alone."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp

inputs = torch.randn(3000, 10)
labels = (inputs[:, 0] + inputs[:, 1] > 0).long()
private, public = TensorDataset(inputs[:2000], labels[:2000]), (inputs[2000:], labels[2000:])

model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

# Public numbers, fixed before the data is touched: of about 2000 records each joins a step with probability 0.1.
plan = fodp.Plan.calibrated(
    target_epsilon=3, delta=1e-5, sampling_rate=0.1, steps=100, lot_size=200, clip_norm=1.0, method="fo-dp-sgd"
)
model, optimizer, loader = fodp.make_private(model, optimizer, private, plan)
for batch, targets in loader:  # Poisson lots; their sizes and losses are private, so print none of them
    optimizer.zero_grad()
    loader.backward(F.cross_entropy(model(batch), targets, reduction="none"))  # one loss per example
    optimizer.step()  # clip, sum, add noise, then your optimizer's step

accuracy = (model(public[0]).argmax(1) == public[1]).float().mean()
print(f"accuracy {accuracy:.2f} on public data, epsilon {loader.epsilon():.2f} at delta {plan.delta:g}")
