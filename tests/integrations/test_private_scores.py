"""Hugging Face's and Lightning's doors ask too whether what they score on is the data that is trained on."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

import fodp
from fodp import ConfigurationError

X = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
FULL = TensorDataset(X, (X[:, 0] > 0).long())
PRIVATE, PUBLIC = Subset(FULL, range(150)), Subset(FULL, range(150, 200))


@pytest.mark.rule(29)
def test_hugging_faces_evaluation_and_prediction(tmp_path):
    datasets = pytest.importorskip("datasets", reason="takes the extra hf")
    pytest.importorskip("transformers", reason="takes the extra hf")
    from hugging_face_for_tests import rows, trainer

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list([{**row, "text": f"{row['text']} {i}"} for i, row in enumerate(rows(80))])
    split = table.train_test_split(20, seed=0)
    private, public = split["train"], split["test"]
    words = dict(train=private, eval_data_is_public=True)
    forms = {
        "the training data": private.select([3]), "training data itself": private.filter(lambda row: row["labels"]),
        "most of these rows": private.map(lambda row: {"length": 1}), "the training": {"a": public, "b": private},
    }  # fmt: skip
    for says, form in forms.items():
        with pytest.raises(ConfigurationError, match=f"eval_dataset: .*{says}"):
            trainer(tmp_path, eval_dataset=form, **words)
    run = trainer(tmp_path, eval_dataset=public, **words)
    assert run.evaluate()["eval_loss"] > 0
    with pytest.raises(ConfigurationError, match="eval_dataset: "):
        run.evaluate(private.select(range(5)))
    with pytest.raises(ConfigurationError, match="rows that were trained on"):
        run.predict(private.select(range(5)))


@pytest.mark.rule(29)
def test_lightnings_validation_test_and_prediction():
    pl = pytest.importorskip("lightning.pytorch", reason="takes the extra lightning")
    from fodp.integrations.lightning import PrivateTraining

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, inputs):
            return self.layer(inputs)

        def training_step(self, batch, _):
            return F.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("score", F.cross_entropy(self(batch[0]), batch[1]))

        test_step = validation_step

        def predict_step(self, batch, _):
            return self(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plan = fodp.Plan(
        sampling_rate=0.1,
        steps=2,
        lot_size=15,
        clip_norm=1,
        noise_multiplier=1,
        delta=1e-5,
        accountant="rdp",
        method="fo-dp-sgd",
    )

    def fitted(*validation):
        trainer = pl.Trainer(
            callbacks=[PrivateTraining(plan, public_validation=True)], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        )  # fmt: skip
        module, loaders = Module(), [loader(data) for data in validation]
        trainer.fit(module, loader(PRIVATE), loaders or None)
        return trainer, module

    def loader(data):
        return DataLoader(data, batch_size=8)

    copy = TensorDataset(X[:40].clone(), FULL.tensors[1][:40])
    for refused in (PRIVATE, FULL, Subset(PRIVATE, [1]), copy):
        with pytest.raises(ConfigurationError, match="the validation data: "):
            fitted(PUBLIC, refused)
    trainer, module = fitted(PUBLIC)
    trainer.test(module, loader(PUBLIC), verbose=False)
    for scores in (trainer.test, trainer.validate, trainer.predict):
        with pytest.raises(ConfigurationError, match="this is the training data itself"):
            scores(module, loader(PRIVATE))
