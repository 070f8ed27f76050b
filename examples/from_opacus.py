"""Coming from Opacus: an epoch there, the rest with FO-DP-SGD here, one account of both: pip install "fodp[opacus]"."""

import warnings

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fodp
from fodp.integrations.opacus import from_opacus

warnings.filterwarnings("ignore", "Full backward hook|Secure RNG")
inputs = torch.randn(2000, 10)
data = TensorDataset(inputs, (inputs[:, 0] > 0).long())


def train(model, optimizer, batches):
    for rows, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(rows), labels).backward()
        optimizer.step()


# What you have.
model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5),
    data_loader=DataLoader(data, batch_size=200),
    noise_multiplier=2.0,
    max_grad_norm=1.0,
)
train(model, optimizer, loader)

# What goes on: the same weights and momentum, the history charged first.
ledger = fodp.Ledger("people.sqlite", dataset="people", budget=(8, 1e-5))
on = from_opacus(
    engine, optimizer=optimizer, model=model, data_loader=loader, ledger=ledger, steps=40, delta=1e-5,
    sampling_rate=0.1, lot_size=200, method="fo-dp-sgd", params=dict(beta=0.9),
)  # fmt: skip
train(on.model, on.optimizer, on.loader)
print(on.plan.statement())
print(
    f"Opacus and the plan together: epsilon {on.total_epsilon():.2f}; of the budget {ledger.left('people'):.0%} is left"
)
