"""Records that no model can be trained on, through Lightning: named by number, before anything is charged."""

import pytest

pytest.importorskip("lightning", reason="fodp[lightning]")

import lightning.pytorch as pl
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fodp
from bad_data_for_tests import CLASSES, GOOD, IN_MEMORY, READ, WIDTH
from fodp.integrations.lightning import PrivateTraining


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        return self.layer(inputs)

    def training_step(self, batch, number):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(data, book):
    plan = fodp.Plan(
        sampling_rate=0.5, steps=8, lot_size=20, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5, seed=0,
        method="dp-sgd", accountant="rdp",
    )  # fmt: skip
    trainer = pl.Trainer(
        callbacks=[PrivateTraining(plan, ledger=book)], logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(data, batch_size=4))


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    "kind", ["label out of range", "float labels", "double inputs", "another width", "None in a list"]
)
def test_data_in_memory_is_refused_before_anything_is_charged(tmp_path, kind):
    data, words = IN_MEMORY[kind]
    book = fodp.Ledger(tmp_path / "l.sqlite")
    with pytest.raises(fodp.DataError, match=words):
        train(data, book)
    assert not any(entry.of_run.steps for entry in book.store.select("run"))


@pytest.mark.parametrize("kind", READ)
def test_a_record_that_is_read_is_named_when_it_is_drawn(tmp_path, kind):
    data, words = READ[kind]
    with pytest.raises(fodp.DataError, match=words):
        train(data, fodp.Ledger(tmp_path / "l.sqlite"))


def test_honest_data_is_taken(tmp_path):
    train(GOOD["TensorDataset"], fodp.Ledger(tmp_path / "l.sqlite"))
