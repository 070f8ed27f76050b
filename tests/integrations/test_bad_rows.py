"""Rows that no model can be trained on, through Hugging Face's Trainer: named by number, before anything is charged."""

from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="fodp[hf]")
datasets = pytest.importorskip("datasets", reason="fodp[hf]")

import fodp  # noqa: E402
from fodp.integrations.transformers import PrivateTrainer  # noqa: E402
from hugging_face_for_tests import WORDS, bert  # noqa: E402

BAD = 17


def rows(**changes: Any) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        dict(input_ids=[4 + i % 2, 6, 7], attention_mask=[1, 1, 1], labels=i % 2) for i in range(40)
    ]
    made[BAD].update(changes)
    return made


# name -> (rows, what is said)
KINDS = {
    "label out of range": (rows(labels=7), "record 17 of the data set has a label outside of 0 to 1"),
    "None": (rows(labels=None), "record 17 of the data set has None where a value is expected"),
    "ragged": (rows(input_ids=[4], attention_mask=[1]), "record 17 of the data set has another form"),
    "a word too many": (rows(input_ids=[4, 6, len(WORDS)]), "record 17 of the data set has a whole number outside"),
    "float labels": ([dict(row, labels=0.5) for row in rows()], "number of a class as a whole number"),
}


def train(data: Any, folder: Any) -> fodp.Ledger:
    book = fodp.Ledger(folder / "l.sqlite")
    plan = fodp.Plan(
        sampling_rate=0.5, steps=2, lot_size=20, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5, method="dp-sgd",
        accountant="rdp",
    )  # fmt: skip
    args = transformers.TrainingArguments(
        output_dir=str(folder / "out"), report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        logging_strategy="no", max_grad_norm=0.0,
    )  # fmt: skip
    PrivateTrainer(bert(num_labels=2), args, train_dataset=data, plan=plan, ledger=book).train()
    return book


@pytest.mark.rule(14)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_refused_before_anything_is_charged(tmp_path, kind):
    bad, words = KINDS[kind]
    with pytest.raises(fodp.DataError, match=words):
        train(datasets.Dataset.from_list(bad), tmp_path)
    book = fodp.Ledger(tmp_path / "l.sqlite")
    assert not any(entry.of_run.steps for entry in book.store.select("run"))


def test_honest_rows_are_taken(tmp_path):
    train(datasets.Dataset.from_list(rows()), tmp_path)
    train(datasets.Dataset.from_list(rows()).shuffle(seed=0), tmp_path)


def test_arguments_of_another_kind(tmp_path):
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[])
    plan = fodp.Plan(sampling_rate=0.5, steps=2, lot_size=20, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5)
    with pytest.raises(fodp.ConfigurationError, match=r"PrivateTrainer takes \(model, args\) in this order"):
        PrivateTrainer(args, bert(), train_dataset=rows(), plan=plan)
    with pytest.raises(fodp.ConfigurationError, match=r"ledger must be a fodp\.Ledger, or a function .* got 'l.db'"):
        PrivateTrainer(bert(), args, train_dataset=rows(), plan=plan, ledger="l.db")
