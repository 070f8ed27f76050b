"""One example that is in the data many times is one example: repeats are looked for, whatever form they have."""

import enum
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import fodp
from fodp import DataError
from fodp.identity.repeats import refuse_repeated, warn_of_equal_rows
from fodp.ledger import Ledger

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(100, 5, generator=GENERATOR)
Y = (X[:, 0] > 0).long()
ROWS = [(x, int(y)) for x, y in zip(X, Y, strict=True)]
RARE = ROWS[:10]


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plan(**changes):
    base = dict(
        sampling_rate=0.1,
        steps=2,
        lot_size=20,
        clip_norm=1,
        noise_multiplier=1,
        delta=1e-5,
        accountant="rdp",
        method="fo-dp-sgd",
    )
    return fodp.Plan(**base | changes)


def trainer(data, the_plan=None, **options):
    return fodp.Trainer(nn.Linear(5, 2), losses, data, the_plan or plan(), **options)


class Round(Dataset):
    """Goes round and round a few records, with an augmentation if one is given."""

    def __init__(self, times, augment=lambda x: x):
        self.times, self.augment = times, augment

    def __len__(self):
        return self.times * len(X)

    def __getitem__(self, index):
        return self.augment(X[index % len(X)]), Y[index % len(X)]


class Weighted(Dataset):
    """Draws its records by weight, as a WeightedRandomSampler does."""

    def __init__(self, weights):
        self.drawn = np.random.default_rng(0).choice(len(X), 200, p=weights / weights.sum())

    def __len__(self):
        return len(self.drawn)

    def __getitem__(self, index):
        return X[self.drawn[index]], Y[self.drawn[index]]


class Folded(TensorDataset):
    """Says that it is made of tensors, and shows ten rows of them again and again."""

    def __getitem__(self, index):
        return super().__getitem__(index % 10)


class Shifted(Dataset):
    """A view under a name that nobody knows."""

    def __init__(self, looked_at):
        self.looked_at = looked_at

    def __len__(self):
        return len(self.looked_at)

    def __getitem__(self, index):
        inputs, label = self.looked_at[index]
        return inputs + 1, label


class Colour(enum.Enum):
    RED = 1


class Held(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


TENSORS = TensorDataset(X, Y)
AGAIN = {
    "a list": ROWS + RARE * 9,
    "a tuple": tuple(ROWS + RARE),
    "new tuples of old tensors": ROWS + [(x, y) for x, y in RARE],
    "new views": [(X[i], int(Y[i])) for i in [0, 1, 2, 3, 3]],
    "records by name": [{"x": x, "y": y} for x, y in ROWS] + [{"x": x, "y": y} for x, y in RARE],
    "a wrapper of a list": Held(ROWS + RARE),
    "a list of a list": Subset(ROWS + RARE * 9, range(120)),
    "one data set twice": ConcatDataset([TENSORS, TENSORS]),
    "a data set and a view of it": ConcatDataset([TENSORS, Shifted(TENSORS)]),
    "one memory twice": ConcatDataset([TENSORS, TensorDataset(X[:5], Y[:5])]),
}
SIGNS = {
    "i % n": Round(10),
    "i % n, augmented": Round(10, lambda x: x + torch.randn(5)),
    "i % n, derived from tensors": Folded(X, Y),
    "by weight": Weighted(np.linspace(0.1, 1, 100)),
    "joined tensors": TensorDataset(torch.cat([X, X[:10].repeat(9, 1)]), torch.cat([Y, Y[:10].repeat(9)])),
    "indexed tensors": TensorDataset(X[torch.arange(400) % 20], Y[torch.arange(400) % 20]),
    "copied rows": ROWS + [(x.clone(), y) for x, y in RARE] * 1 + [(x.clone(), y) for x, y in RARE],
    "texts": [(" ".join(f"w{(i % 30 + 1) ** k % 997}" for k in range(1, 9)), 1) for i in range(300)],
}
SINGLE = {
    "a list": ROWS,
    "one input with two labels": [(x, y) for x, y in ROWS] + [(x, 1 - y) for x, y in ROWS],
    "words": ["good", "bad"] * 20,
    "texts with labels that they share": [(f"text {i % 50}", Y[0]) for i in range(60)],
    "kinds": [(i % 7, Colour.RED) for i in range(60)],
    "numbers": [(float(i % 7), i % 2) for i in range(100)],
    "a row that one column decides": [(i % 90 / 64, float(i % 3), i % 90 > 40) for i in range(1000)],
    "mostly blank rows": TensorDataset(torch.cat([X, torch.zeros(50, 5)]), torch.cat([Y, torch.zeros(50)])),
    "one row": TensorDataset(torch.zeros(50, 3), torch.zeros(50)),
    "XOR": TensorDataset(
        torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]).repeat(25, 1), torch.tensor([0, 1, 1, 0] * 25)
    ),
    "rows of few values": TensorDataset(torch.randint(2, (2000, 12), generator=GENERATOR).float(), torch.zeros(2000)),
    "a pair in many": TensorDataset(torch.cat([X, X[:1]]), torch.cat([Y, Y[:1]])),
    "a common part": [(X, x, y) for x, y in ROWS],
}


@pytest.mark.rule(31)
@pytest.mark.parametrize("form", AGAIN)
def test_a_record_at_two_places_is_refused(form):
    with pytest.raises(DataError, match=r"a second time.*unit='person'"):
        refuse_repeated(AGAIN[form])


@pytest.mark.rule(31)
@pytest.mark.parametrize("form", SIGNS)
def test_equal_rows_that_occur_often_are_warned_of(form):
    refuse_repeated(SIGNS[form])
    with pytest.warns(UserWarning, match=r"occur again and again.*unit='person'"):
        warn_of_equal_rows(SIGNS[form])


@pytest.mark.rule(31)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", SINGLE)
def test_single_records_and_rows_that_are_equal_by_chance_are_taken(form):
    refuse_repeated(SINGLE[form])
    warn_of_equal_rows(SINGLE[form])


@pytest.mark.rule(31)
def test_the_doors_look_before_anything_is_charged(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(DataError, match="a second time"):
        trainer(ROWS + RARE * 9, ledger=ledger)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(DataError, match="a second time"):
        fodp.make_private(model, optimizer, ROWS + RARE * 9, plan(), ledger=ledger)
    with pytest.warns(UserWarning, match="again and again"):
        trainer(Round(10))
    with pytest.warns(UserWarning, match="again and again"):
        fodp.make_private(model, optimizer, Round(10), plan())
    assert not ledger.store.select()


@pytest.mark.rule(31)
def test_repeats_of_one_owners_rows_are_that_persons():
    people = plan(unit="person", records_per_person=3)
    rows, owners = ROWS + RARE * 2, [*range(100), *range(10), *range(10)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(rows, people, owners=owners)
        trainer(Round(3), people, owners=torch.arange(300) % 100)
    with pytest.raises(DataError, match="a second time"):
        trainer(rows, people, owners=[*range(100), *range(10), *range(100, 110)])
    with pytest.warns(UserWarning, match="again and again"):
        trainer(Round(3), people, owners=np.arange(300))


@pytest.mark.rule(31)
def test_tables_of_hugging_face():
    datasets = pytest.importorskip("datasets", reason="takes the extra hf")
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    other = datasets.Dataset.from_dict({"x": (X + 1).tolist(), "y": Y.tolist()})
    split = table.train_test_split(0.3, seed=0)
    for single in (table, table.shuffle(seed=0), table.select(range(5, 20)), split["train"],
                   datasets.concatenate_datasets([table, other]), ConcatDataset([split["train"], split["test"]]),
                   datasets.concatenate_datasets([table.select(range(10)), table.select(range(10, 20))])):  # fmt: skip
        refuse_repeated(single)
    for again in (table.select([0, 1, 1]), datasets.concatenate_datasets([table, table]),
                  datasets.concatenate_datasets([split["train"], table.select(range(40))]),
                  ConcatDataset([split["train"], table]), table.select([2, 2]).with_format("torch")):  # fmt: skip
        with pytest.raises(DataError, match="a second time"):
            refuse_repeated(again)
    flat = table.select([*range(100), *list(range(10)) * 9]).flatten_indices()
    with pytest.warns(UserWarning, match="again and again"):
        warn_of_equal_rows(flat)
