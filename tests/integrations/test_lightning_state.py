"""Lightning: losses one by one, and nothing of a private lot in the module or its checkpoint."""

import logging
import warnings

import pytest
import torch
from torch.nn import functional as F

from fodp import PrivacyError

pytest.importorskip("lightning", reason="takes the extra lightning")
pytest.importorskip("torchmetrics", reason="takes the extra lightning")

import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint

from test_lightning import Module, WithoutForward, fit, flat


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        yield


class OneByOne(Module):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


class OneByOneInADict(WithoutForward):
    def training_step(self, batch, batch_idx):
        return {"loss": F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")}


@pytest.mark.rule(27)
@pytest.mark.parametrize("kind", [OneByOne, OneByOneInADict])
def test_one_loss_per_example_is_the_same_run(kind):
    assert torch.allclose(flat(fit(module=kind())[0]), flat(fit()[0]), atol=1e-5)


class Weighted(Module):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], weight=torch.tensor([1.0, 10.0]))


class ByHand(Module):
    def training_step(self, batch, batch_idx):
        weights = torch.tensor([1.0, 10.0])[batch[1]]
        return (F.cross_entropy(self(batch[0]), batch[1], reduction="none") * weights).sum() / weights.sum()


@pytest.mark.rule(27)
@pytest.mark.parametrize(
    ("kind", "words"), [(Weighted, "return them"), (ByHand, "mixes the examples of the lot.*return them")]
)
def test_a_weighted_mean_is_refused(kind, words):
    with pytest.raises(PrivacyError, match=words):
        fit(module=kind())


class Mean(WithoutForward):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        self.seen.copy_(batch[0].mean(0))
        return super().training_step(batch, batch_idx)


class Rebound(Mean):
    def training_step(self, batch, batch_idx):
        self.seen = batch[0].mean(0)
        return WithoutForward.training_step(self, batch, batch_idx)


class CountsLate(Mean):
    def training_step(self, batch, batch_idx):
        return WithoutForward.training_step(self, batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += len(batch[0])


class Prototype(WithoutForward):
    """A parameter that does not train, beside the model."""

    def __init__(self):
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def training_step(self, batch, batch_idx):
        self.seen.data = batch[0].mean(0)
        return super().training_step(batch, batch_idx)


class AtTheEndOfTheEpoch(Mean):
    def training_step(self, batch, batch_idx):
        self.last = batch[0].mean(0)
        return WithoutForward.training_step(self, batch, batch_idx)

    def on_train_epoch_end(self):
        self.seen.copy_(self.last)


class AtTheEnd(AtTheEndOfTheEpoch):
    on_train_epoch_end = Module.on_train_epoch_end

    def on_fit_end(self):
        self.seen.copy_(self.last)


class Metric(Module):
    def __init__(self):
        super().__init__()
        self.metric = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        self.metric(F.cross_entropy(self(batch[0]), batch[1]))
        return super().training_step(batch, batch_idx)


class Extra(Module):
    count = 0

    def training_step(self, batch, batch_idx):
        self.count += len(batch[0])
        return super().training_step(batch, batch_idx)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


@pytest.mark.rule(28)
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Mean, "buffer seen"),
        (Rebound, "buffer seen"),
        (CountsLate, "buffer seen"),
        (Prototype, "parameter seen"),
        (AtTheEndOfTheEpoch, "buffer seen"),
        (AtTheEnd, "buffer seen"),
        (Metric, "state metric.mean_value"),
        (Extra, "extra state"),
    ],
)
def test_what_the_module_keeps_of_a_private_batch_is_refused_and_in_no_checkpoint(kind, what, tmp_path):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    module = kind()
    with pytest.raises(PrivacyError, match=f"{kind.__name__} keeps the {what}"):
        fit(module=module, more=[saves], options=dict(enable_checkpointing=True))
    for path in tmp_path.glob("*.ckpt"):
        assert not torch.load(path, weights_only=False)["state_dict"]["seen"].any()
    assert kind is Extra or not any(buffer.any() for buffer in module.buffers())


class Scores(Module):
    """What may change: a metric of public validation data, averages of the weights, a list for oneself."""

    def __init__(self):
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.average = torch.optim.swa_utils.AveragedModel(self.net).requires_grad_(False)
        self.register_buffer("ema_steps", torch.zeros(()))
        self.outputs = []

    def training_step(self, batch, batch_idx):
        self.outputs.append(super().training_step(batch, batch_idx))
        return self.outputs[-1]

    def on_train_batch_end(self, *_):
        self.average.update_parameters(self.net)
        self.ema_steps += 1

    def validation_step(self, batch, batch_idx):
        self.metric.update((self(batch[0]).argmax(1) == batch[1]).float())
        self.log("accuracy", self.metric)


@pytest.mark.rule(28)
def test_what_is_made_of_weights_or_public_data_may_change():
    assert fit(module=Scores(), public_state=["ema_"])[1].steps == 10
    with pytest.raises(PrivacyError, match="keeps the buffer ema_steps"):
        fit(module=Scores())


class Plateau(Module):
    follows = "accuracy"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.follows}}


class PlateauOfTheTrainingLoss(Plateau):
    follows = "train_loss"


@pytest.mark.rule(14)
def test_a_scheduler_follows_public_scores_only():
    assert fit(module=Plateau())[1].steps == 10
    with pytest.raises(PrivacyError, match="a scheduler follows 'train_loss'"):
        fit(module=PlateauOfTheTrainingLoss())
    with pytest.raises(PrivacyError, match="ReduceLROnPlateau wants a score"):
        fit(module=Plateau(), public_validation=False, options=dict(limit_val_batches=0))
