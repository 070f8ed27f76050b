"""Real Hugging Face objects: tables on disk, tokenized batches, collators, models that fail on an empty batch."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fodp
from fodp.lots.reading import Fetcher
from fodp.own_loop import make_private

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
ROWS, STEPS = 30, 3


def plan(**changes):
    base = dict(sampling_rate=0.2, steps=STEPS, lot_size=6, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=0)
    return fodp.Plan(**{**base, "method": "dp-sgd", **changes})


def records():
    return [
        {"input_ids": [1 + (index + k * (1 + index // 20)) % 20 for k in range(3 + index % 5)], "label": index % 2}
        for index in range(ROWS)
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    words = tmp_path_factory.mktemp("words") / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(20))]))
    return transformers.BertTokenizerFast(vocab_file=str(words))


def bert():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=25, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=16,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)


def gpt():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=25, n_positions=16, n_embd=16, n_layer=1, n_head=2, pad_token_id=0)
        return transformers.GPT2ForSequenceClassification(config)


def loss_fn(model, batch):
    labels = batch["labels"]
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return F.cross_entropy(logits, labels, reduction="none")


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def trained(model, data, the_plan, collate_fn, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fodp.Trainer(model, loss_fn, data, the_plan, optimizer, collate_fn=collate_fn, **options).fit()
    return flat(model)


def looped(model, data, the_plan, collate_fn, own_loss=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = make_private(model, optimizer, data, the_plan, collate_fn=collate_fn)
    for batch in loader:
        optimizer.zero_grad()
        (model(**batch).loss if own_loss else loss_fn(model, batch).mean()).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("make", [bert, gpt])
def test_a_padding_collator_serves_trainer_and_loop_alike(make, tokenizer):
    collate = transformers.DataCollatorWithPadding(tokenizer)
    by_trainer = trained(make(), records(), plan(), collate)
    assert torch.allclose(looped(make(), records(), plan(), collate), by_trainer, atol=1e-5)
    assert torch.allclose(looped(make(), records(), plan(), collate, own_loss=True), by_trainer, atol=1e-5)


@pytest.mark.rule(2)
@pytest.mark.parametrize("make", [bert, gpt])
def test_empty_lots_do_not_crash_a_hugging_face_model(make, tokenizer):
    empty, collate = plan(sampling_rate=1e-9), transformers.DataCollatorWithPadding(tokenizer)
    expected = trained(make(), records(), empty, collate)
    for own_loss in (False, True):
        assert torch.equal(looped(make(), records(), empty, collate, own_loss), expected)


@pytest.mark.parametrize("form", ["encoding", "output"])
def test_objects_of_transformers_stay_what_they_are(form, tokenizer):
    def collate(given):
        batch = transformers.DataCollatorWithPadding(tokenizer)(given)
        if form == "encoding":
            return batch
        masks = batch["attention_mask"].double()
        return transformers.modeling_outputs.BaseModelOutput(
            last_hidden_state=batch["input_ids"].double(), hidden_states=(masks, batch["labels"])
        )

    kinds = set()

    def loss(model, batch):
        kinds.add(type(batch))
        if form == "encoding":
            words, mask = batch.input_ids.double(), batch.attention_mask
        else:
            words, mask = batch.last_hidden_state, batch.hidden_states[0]
        return model(((words * mask).sum(1) / mask.sum(1))[:, None]).squeeze(1)

    model = nn.Linear(1, 1).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the loop would be one
        fodp.Trainer(model, loss, records(), plan(), collate_fn=collate, microbatch=4).fit()
    assert [kind.__name__ for kind in kinds] == ["BatchEncoding" if form == "encoding" else "BaseModelOutput"]


def test_an_arrow_table_is_read_a_lot_at_a_time():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    table = datasets.Dataset.from_list(records())
    fetcher = Fetcher(table, collate_fn=lambda found: [record["input_ids"] for record in found])
    asked = []

    class Counted:
        def __len__(self):
            return len(table)

        def __getitem__(self, index):
            return table[index]

        def __getitems__(self, indices):
            asked.append(len(indices))
            return table.__getitems__(indices)

    counted = Fetcher(Counted(), collate_fn=lambda found: [record["input_ids"] for record in found])
    indices = torch.tensor([3, 4, 20])
    assert fetcher.fetch(indices) == counted.fetch(indices) == [records()[i]["input_ids"] for i in (3, 4, 20)]
    assert asked == [3]


def test_a_streamed_table_is_refused_with_the_fix():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    stream = datasets.Dataset.from_list(records()).to_iterable_dataset()
    with pytest.raises(fodp.DataError, match=r"iterable data set, which cannot be Poisson sampled; load its records"):
        fodp.Trainer(bert(), loss_fn, stream, plan(), collate_fn=lambda found: found)
