"""The first rank has the ledger: where a step may not be repeated, no rank uses it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.callbacks import Callback
from fodp.ledger import Ledger
from ranks_for_tests import in_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Save(Callback):
    def __init__(self, file):
        self.file = file

    def on_step(self, trainer):
        if trainer.step == 2:
            trainer.save(self.file)


@pytest.mark.rule(11)
def test_all_ranks_refuse_another_release_under_the_same_noise(tmp_path):
    def work(rank):
        def trainer(sign, callbacks=()):
            torch.manual_seed(0)
            rows = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
            plan = fodp.Plan(
                sampling_rate=0.5, steps=4, lot_size=15, clip_norm=1.0, noise_multiplier=4.0, delta=1e-5, seed=1,
                accountant="rdp", method="dp-sgd",
            )  # fmt: skip

            def losses(model, batch):
                return sign * F.cross_entropy(model(batch[0]), batch[1], reduction="none")

            return fodp.Trainer(
                nn.Linear(4, 2), losses,
                TensorDataset(rows, (rows[:, 0] > 0).long()), plan, callbacks=callbacks,
                ledger=lambda: Ledger(tmp_path / "l.sqlite"),
            )  # fmt: skip

        whole = trainer(1, [Save(tmp_path / "c.pt")])
        whole.fit()
        again = trainer(1)
        again.resume(tmp_path / "c.pt")
        again.fit()
        equal = torch.equal(again.model.weight, whole.model.weight)
        other = trainer(-1)
        other.resume(tmp_path / "c.pt")
        before = other.model.weight.clone()
        try:
            other.fit()
        except Exception as error:
            return equal, type(error).__name__, torch.equal(other.model.weight, before)

    first, second = in_ranks(2, work)
    assert first == (True, "LedgerError", True)
    assert second == (True, "RankLost", True)
