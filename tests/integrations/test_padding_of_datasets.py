"""A data set of Hugging Face with a transform that pads: looked at through every door, and harmless with a mask."""

import pytest
import torch
from torch.nn import functional as F

import fodp
from fodp import DataError

datasets = pytest.importorskip("datasets", reason="Hugging Face's data sets come with an extra")
pytest.importorskip("transformers", reason="Hugging Face's models come with an extra")

from hugging_face_for_tests import bert, plan, rows, tokenizer, trainer, transformers  # noqa: E402

DEPENDS = "depends on how far other records of its lot make"


def tokenised(masked, longest_first=True):
    """What `datasets.with_transform(tokenise, padding=True)` gives."""
    found = sorted(rows(40), key=lambda row: len(row["input_ids"]), reverse=longest_first)
    plain = datasets.Dataset.from_list([{k: row[k] for k in ("input_ids", "labels")} for row in found])

    def tokenise(batch):
        padded = tokenizer().pad({"input_ids": batch["input_ids"]}, padding=True, return_tensors="pt")
        kept = {"input_ids": padded["input_ids"], "labels": torch.tensor(batch["labels"])}
        return kept | ({"attention_mask": padded["attention_mask"]} if masked else {})

    return plain.with_transform(tokenise)


def loss(model, batch):
    named = {name: batch[name] for name in batch if name != "labels"}
    return F.cross_entropy(model(**named).logits, batch["labels"], reduction="none")


@pytest.mark.rule(33)
@pytest.mark.parametrize("longest_first", [True, False], ids=["longest-first", "longest-last"])
def test_by_the_trainer(longest_first):
    fodp.Trainer(bert(), loss, tokenised(True, longest_first), plan()).fit()
    with pytest.raises(DataError, match=DEPENDS):
        fodp.Trainer(bert(), loss, tokenised(False, longest_first), plan()).fit()


@pytest.mark.rule(33)
@pytest.mark.parametrize("longest_first", [True, False], ids=["longest-first", "longest-last"])
def test_by_hugging_faces_trainer(longest_first, tmp_path):
    options = dict(data_collator=transformers.default_data_collator, remove_unused_columns=False)
    trainer(tmp_path / "masked", train=tokenised(True, longest_first), **options).train()
    with pytest.raises(DataError, match=DEPENDS):
        trainer(tmp_path / "plain", train=tokenised(False, longest_first), **options).train()


@pytest.mark.rule(33)
@pytest.mark.parametrize("longest_first", [True, False], ids=["longest-first", "longest-last"])
def test_by_a_loop_of_ones_own(longest_first):
    def looped(masked):
        model = bert()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = fodp.make_private(model, optimizer, tokenised(masked, longest_first), plan())
        for batch in loader:
            optimizer.zero_grad()
            named = {name: batch[name] for name in batch if name != "labels"}
            F.cross_entropy(model(**named).logits, batch["labels"]).backward()
            optimizer.step()

    looped(True)
    with pytest.raises(DataError, match=DEPENDS):
        looped(False)
