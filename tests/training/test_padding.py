"""What a batch pads to must have no effect, whoever pads: a collate function, or a data set that batches by itself."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import fodp
from fodp import DataError
from fodp.lots.poisson import PoissonSampler
from fodp.noise import Streams
from fodp.own_loop import make_private

ROWS, RATE, DEPENDS = 40, 0.2, "depends on how far other records of its lot make"
DOORS = ["Trainer", "make_private"]


def plan(steps=5, **changes):
    base = dict(sampling_rate=RATE, steps=steps, lot_size=8, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=0)
    return fodp.Plan(**{**base, "method": "dp-sgd", **changes})


def texts(lengths):
    return [(torch.arange(n) * 5 + i) % 11 + 1 for i, n in enumerate(lengths)]


LONGEST_FIRST = [30, *(12 - i // 5 for i in range(ROWS - 1))]
LENGTHS = {"first": LONGEST_FIRST, "last": LONGEST_FIRST[::-1], "mixed": [3 + i * 7 % 10 for i in range(ROWS)]}


def padded(words):
    longest = max(map(len, words))
    return torch.stack([F.pad(w, (0, longest - len(w))) for w in words])


class Batching(Dataset):
    """Pads what it reads together, as a data set of Hugging Face with a transform does."""

    def __init__(self, lengths):
        self.words = texts(lengths)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        rows = padded([self.words[i] for i in indices])
        return [(row, i % 2) for row, i in zip(rows, indices, strict=True)]


class Reader(nn.Module):
    """A mean over a text's own words, or over all positions."""

    def __init__(self, masked=True, extra=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.masked, self.extra, self.words, self.head = masked, extra, nn.Embedding(13, 6), nn.Linear(6, 2)

    def pooled(self, words):
        seen, there = self.words(words), (words != 0).unsqueeze(-1)
        if not self.masked:
            return seen.mean(1)
        return (seen * there).sum(1) / there.sum(1) * (1 + self.extra * (words == 0).sum(1, keepdim=True))

    def forward(self, words):
        return self.head(self.pooled(words))


def run(door, data, model, collate_fn=None, the_plan=None, **options):
    """Train by one of the doors."""
    the_plan, optimizer = the_plan or plan(), torch.optim.SGD(model.parameters(), 0.1)
    if door == "Trainer":

        def loss(model, batch):
            return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

        return fodp.Trainer(model, loss, data, the_plan, optimizer, collate_fn=collate_fn, **options).fit()
    model, optimizer, loader = make_private(model, optimizer, data, the_plan, collate_fn=collate_fn)
    for words, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(words), labels).backward()
        optimizer.step()
    return None


def collate(records):
    return padded([words for words, _ in records]), torch.tensor([label for _, label in records])


def records(lengths):
    return [(words, i % 2) for i, words in enumerate(texts(lengths))]


@pytest.mark.rule(33)
@pytest.mark.parametrize("order", LENGTHS)
@pytest.mark.parametrize("door", DOORS)
def test_a_data_set_that_pads_what_it_reads_together_is_looked_at(door, order):
    data = Batching(LENGTHS[order])
    with pytest.raises(DataError, match=f"{DEPENDS} __getitems__ of the Batching pad it"):
        run(door, data, Reader(masked=False))
    run(door, data, Reader())  # with a mask padding does nothing, wherever the longest is


@pytest.mark.rule(33)
def test_longest_first_is_refused_as_longest_last():
    run("Trainer", Batching([9] * ROWS), Reader(masked=False))  # a public length: nothing to see
    with pytest.raises(DataError, match=DEPENDS):
        run("Trainer", Batching(LENGTHS["first"]), Reader(masked=False))


@pytest.mark.rule(33)
@pytest.mark.parametrize("door", DOORS)
def test_an_effect_of_padding_below_a_percent_is_refused(door):
    """A hundredth of each example's gradient, in a lot of 4,000, is forty times what one example may change."""
    with pytest.raises(DataError, match=f"{DEPENDS} collate_fn pad it"):
        run(door, records(LENGTHS["mixed"]), Reader(extra=1e-5), collate)


class Rough(Reader):
    """Rounds coarsely in float32: sums of large numbers in another order, whose difference is small."""

    def pooled(self, words):
        there = (words != 0).unsqueeze(-1)
        large = self.words(words) + 1000
        return (large * there).sum(1) / there.sum(1) - 1000


@pytest.mark.rule(33)
@pytest.mark.parametrize("door", DOORS)
def test_rounding_that_vanishes_in_double_precision_is_no_effect(door, monkeypatch):
    rough = records([5 + i * 37 % 200 for i in range(ROWS)])
    run(door, rough, Rough(), collate)
    monkeypatch.setattr("fodp.clipping.self_check._vanishes_in_double", lambda *_: False)
    with pytest.raises(DataError, match=DEPENDS):  # so there was something to ask float64 about
        run(door, rough, Rough(), collate)


def late_record(steps=40):
    """A record that none of the first six lots holds, with the step at which it first comes."""
    sampler = PoissonSampler(ROWS, RATE, Streams.seeded(0))
    lots = [set(sampler.draw(step).indices.tolist()) for step in range(steps)]
    missing = sorted(set(range(ROWS)) - set().union(*lots[:6]))
    return next((i, step) for i in missing for step, lot in enumerate(lots) if i in lot and len(lot) > 1)


@pytest.mark.rule(33)
@pytest.mark.parametrize("microbatch", [None, 3])
def test_a_long_record_that_comes_late_is_looked_at_when_it_comes(microbatch):
    late, step = late_record()
    lengths = [20 if i == late else 9 for i in range(ROWS)]
    run("Trainer", Batching(lengths), Reader(masked=False), the_plan=plan(step), microbatch=microbatch)
    with pytest.raises(DataError, match=DEPENDS):
        run("Trainer", Batching(lengths), Reader(masked=False), the_plan=plan(step + 2), microbatch=microbatch)
    run("Trainer", Batching(lengths), Reader(), the_plan=plan(step + 2), microbatch=microbatch)


@pytest.mark.rule(33)
def test_a_long_record_that_comes_late_is_looked_at_in_a_loop_of_ones_own():
    late, step = late_record()
    lengths = [20 if i == late else 9 for i in range(ROWS)]
    run("make_private", Batching(lengths), Reader(masked=False), the_plan=plan(step))
    with pytest.raises(DataError, match=DEPENDS):
        run("make_private", Batching(lengths), Reader(masked=False), the_plan=plan(step + 2))


@pytest.mark.rule(33)
def test_a_head_that_starts_at_zero_hides_nothing_in_a_loop_of_ones_own():
    """Outputs are zero with any padding; their gradients are not."""
    model = Reader(masked=False)
    nn.init.zeros_(model.head.weight)
    with pytest.raises(DataError, match=DEPENDS):
        run("make_private", records(LENGTHS["mixed"]), model, collate, plan(1))


class Tagger(nn.Module):
    """An output for each word, made of that word alone: what padding does is the loss's matter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(13, 6), nn.Linear(6, 13)

    def forward(self, words):
        return self.head(self.words(words).tanh())


def each_word(outputs, words):
    return F.cross_entropy(outputs.transpose(1, 2), words, reduction="none")


def in_a_row(outputs, words):
    return F.cross_entropy(outputs.reshape(-1, 13), words.reshape(-1), reduction="none").reshape(words.shape)


def told(words):
    return torch.arange(words.shape[1]) < (words != 0).sum(1, keepdim=True)


OVER_PADDING = {
    "a mean over all positions": lambda outputs, words: each_word(outputs, words).mean(1),
    "positions that count": lambda outputs, words: each_word(outputs, words).sum(1) / 9,
    "the last position": lambda outputs, words: F.cross_entropy(outputs[:, -1], words[:, 0], reduction="none"),
    "shapes that the loss names": lambda outputs, words: in_a_row(outputs, words).mean(1),
    "a mask that is made": lambda outputs, words: (each_word(outputs, words) * told(words)).mean(1),
    "a width": lambda outputs, words: (each_word(outputs, words) * (words != 0)).sum(1) / words.shape[1],
}
OF_WORDS_ALONE = {
    "a mean over words": lambda outputs, words: (each_word(outputs, words) * (words != 0)).sum(1) / (words != 0).sum(1),
    "a sum over words": lambda outputs, words: (in_a_row(outputs, words) * told(words)).sum(1) / 9,
    "shifted": lambda outputs, words: (each_word(outputs[:, :-1], words[:, 1:]) * (words[:, 1:] != 0)).sum(1) / 9,
}


@pytest.mark.rule(33)
@pytest.mark.parametrize(
    ("kind", "one_by_one"),
    [*((kind, False) for kind in [*OVER_PADDING, *OF_WORDS_ALONE]), ("a mean over all positions", True)],
)
def test_a_loss_of_ones_own_that_minds_padding_is_refused(kind, one_by_one):
    """The model does not mind it, so that nothing shows in its outputs: one long text moves the sum by 41 C."""
    model = Tagger()
    loss = (OVER_PADDING | OF_WORDS_ALONE)[kind]
    refused = pytest.raises(fodp.ConfigurationError, match="how far other examples of the lot make it padded")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _, _, loader = make_private(model, optimizer, Batching(LENGTHS["mixed"]), plan(2))
    with refused if kind in OVER_PADDING else contextlib.nullcontext():
        for words, _ in loader:
            losses = loss(model(words), words)
            loader.backward(losses) if one_by_one else losses.mean().backward()
            optimizer.step()
    loader.close()


@pytest.mark.rule(33)
def test_padding_that_makes_a_loss_infinite_is_an_effect():
    """Such a record counts as zero beside a long one, and not alone: a rehearsal of the first records finds nothing."""

    class Fragile(Reader):
        def forward(self, words):
            return super().forward(words) / (words.shape[1] <= 20)  # one over zero

    with pytest.raises(DataError, match=DEPENDS):
        run("Trainer", records(LENGTHS["last"]), Fragile(), collate, plan(1, sampling_rate=1.0))


@pytest.mark.rule(33)
@pytest.mark.parametrize("door", DOORS)
def test_what_truncates_to_the_shortest_or_sorts_is_refused(door):
    def shortest(records):
        least = min(len(words) for words, _ in records)
        return torch.stack([words[:least] for words, _ in records]), torch.tensor([label for _, label in records])

    def by_length(records):
        return collate(sorted(records, key=lambda record: len(record[0])))

    with pytest.raises(DataError, match=DEPENDS):
        run(door, records(LENGTHS["mixed"]), Reader(), shortest)
    with pytest.raises(DataError, match="keep their order"):
        run(door, records(LENGTHS["mixed"]), Reader(), by_length)


@pytest.mark.rule(33)
def test_what_a_lot_scales_by_a_little_is_refused():
    """A thousandth, in a lot of thousands, is more than the clip norm."""
    data = TensorDataset(torch.randn(ROWS, 4), torch.randint(2, (ROWS,)))

    def scaled(rows):
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        return x * (1 + 1e-5 * len(rows)), y

    with pytest.raises(DataError, match="another batch of a record alone than in its lot"):
        run("Trainer", data, nn.Linear(4, 2), scaled)


@pytest.mark.rule(33)
def test_no_private_number_stands_in_a_refusal():
    with pytest.raises(DataError) as refused:
        run("Trainer", Batching(LENGTHS["first"]), Reader(masked=False))
    assert not any(letter.isdigit() for letter in str(refused.value))
