"""An ordinary LightningModule and LightningDataModule, trained privately: pip install "fodp[lightning]"."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fodp
from fodp.integrations.lightning import PrivateTraining


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(
            self(batch[0]), batch[1], reduction="none"
        )  # one loss per example; private: do not log it

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class People(pl.LightningDataModule):
    def setup(self, stage):
        inputs = torch.randn(3000, 10)
        labels = (inputs[:, 0] + inputs[:, 1] > 0).long()
        self.private = TensorDataset(inputs[:2000], labels[:2000])
        self.public = TensorDataset(inputs[2000:], labels[2000:])

    def train_dataloader(self):
        return DataLoader(self.private, batch_size=64, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.public, batch_size=500)


plan = fodp.Plan.calibrated(
    target_epsilon=3, delta=1e-5, sampling_rate=0.1, steps=100, lot_size=200, clip_norm=1.0, method="fo-dp-sgd"
)
private = PrivateTraining(plan, ledger=fodp.Ledger("people.sqlite"), public_validation=True)
trainer = pl.Trainer(callbacks=[private], accelerator="cpu", logger=False, enable_progress_bar=False)
trainer.fit(Classifier(), datamodule=People())
print(private.statement())
print(f"accuracy {trainer.callback_metrics['accuracy']:.2f} on public data, epsilon {private.epsilon():.2f}")
