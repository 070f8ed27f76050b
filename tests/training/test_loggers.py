"""Weights & Biases and MLflow are given ε, public scores and public numbers, and nothing of the private data."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.callbacks import Evaluate, MLflow, WandB
from fodp.support.extras import MissingExtra

PLAN = fodp.Plan(
    sampling_rate=0.25, steps=8, lot_size=10, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5, method="dp-sgd",
    accountant="rdp", seed=98765, params=dict(lr=0.1),
)  # fmt: skip


def fit(*callbacks):
    inputs = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    labels = (inputs[:, 0] > 0).long()
    trainer = fodp.Trainer(
        nn.Linear(4, 2),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        TensorDataset(inputs[:40], labels[:40]),
        PLAN,
        callbacks=[*callbacks, Evaluate(TensorDataset(inputs[40:], labels[40:]))],
    )
    trainer.fit()
    return trainer


@pytest.mark.parametrize(("make", "extra"), [(lambda: WandB("p"), "wandb"), (lambda: MLflow("m"), "mlflow")])
def test_what_is_missing_is_named(make, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(MissingExtra, match=rf"fodp\[{extra}\]"):
        make()


def test_mlflow_has_the_public_scores_at_their_steps_and_whole_minutes(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="takes the extra mlflow")
    log = MLflow(tmp_path / "runs")
    trainer = fit(log)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "runs").as_uri())
    run = client.get_run(log.run_id)
    assert set(run.data.metrics) == {"epsilon", "accuracy", "loss", "best_accuracy"}
    shown = client.get_metric_history(log.run_id, "epsilon")
    assert [point.step for point in shown] == [4, 8]
    assert all(point.timestamp % 60_000 == 0 for point in shown)
    assert run.info.start_time % 60_000 == run.info.end_time % 60_000 == 0
    assert run.data.metrics["epsilon"] == trainer.epsilon()
    assert run.data.params["noise_multiplier"] == "2.0"
    assert run.data.params["params.lr"] == "0.1"
    assert "98765" not in str(run.data.params)


def records(content):
    """Of a .wandb file: a header of 7 bytes, then LevelDB's log: blocks of 32 KB, pieces (crc, length, kind, data)."""
    place, piece = 7, b""
    while place + 7 <= len(content):
        if 2**15 - place % 2**15 < 7:
            place += 2**15 - place % 2**15
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        piece += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield piece
            piece = b""


def test_wandb_has_them_too_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="takes the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    from wandb.proto.wandb_internal_pb2 import Record

    fit(WandB("private", tmp_path))
    wandb.teardown()  # its service writes a little later
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, config = [], ""
    for data in records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or item.nested_key[0]: item.value_json for item in record.history.item})
        config += str(record.run.config) if record.WhichOneof("record_type") == "run" else ""
    assert [int(row["_step"]) for row in rows] == [4, 8]
    assert set(rows[0]) - {"_step", "_runtime", "_timestamp"} == {"epsilon", "accuracy", "loss", "best_accuracy"}
    assert float(rows[-1]["epsilon"]) == pytest.approx(PLAN.epsilon(), rel=0.02)
    assert float(rows[-1]["_timestamp"]) - float(rows[0]["_timestamp"]) < 1  # written together, when the fit has ended
    assert "noise_multiplier" in config
    assert "98765" not in config
