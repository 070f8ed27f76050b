"""`microbatch` bounds how many records are in memory, whatever the data set is, and changes nothing else."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import fodp

SIZE, RATE = 400, 0.5
INPUTS = torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(0))


class Record(torch.Tensor):
    """A tensor that can be counted."""


class Counting(Dataset):
    """A map-style data set that knows how many of its records are alive, and how many were at most."""

    def __init__(self, draws=False):
        self.draws, self.alive, self.most = draws, weakref.WeakSet(), 0

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        record = INPUTS[index].clone()
        if self.draws:
            record += torch.rand(8)
        record = record.as_subclass(Record)
        self.alive.add(record)
        self.most = max(self.most, len(self.alive))
        return record, int(INPUTS[index, 0] > 0)


def losses(model, batch):
    return F.cross_entropy(model(batch[0].as_subclass(torch.Tensor)), batch[1], reduction="none")


def trained(data, microbatch=None, method="dp-sgd", params=None, **options):
    plan = fodp.Plan(
        sampling_rate=RATE, steps=4, lot_size=200, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=0,
        accountant="rdp", method=method, params={"lr": 0.5, **(params or {})},
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 2))
    fodp.Trainer(model, losses, data, plan, microbatch=microbatch, **options).fit()
    gc.collect()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def jitter(batch):
    return batch[0] + 0.1 * torch.randn(len(batch[0]), 8), batch[1]


@pytest.mark.fault(
    "a lot that does not fit into memory",
    happens="with `microbatch` records are fetched, and augmented, as many at a time",
    lost="nothing",
    costs="a method that asks twice about a lot reads it twice",
)
@pytest.mark.parametrize("draws", [False, True], ids=["plain", "drawing"])
def test_of_a_map_style_data_set_a_micro_batch_is_alive(draws):
    whole, parts = Counting(draws), Counting(draws)
    expected = trained(whole)
    found = trained(parts, microbatch=16)
    assert whole.most > 150
    assert parts.most <= 2 * 16 + 2  # the next one is made while the last one goes
    assert torch.allclose(found, expected, atol=2e-6)


def same_sums(kind, method="dp-sgd", params=None, **options):
    data = Counting(draws=True) if kind == "map-style" else TensorDataset(INPUTS, (INPUTS[:, 0] > 0).long())
    expected = trained(data, method=method, params=params, **options)
    return torch.allclose(trained(data, 7, method, params, **options), expected, atol=5e-6)


@pytest.mark.rule(9)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("tensors", {}),
        ("map-style", dict(augment=jitter)),
        ("tensors", dict(augment=jitter, copies=3)),
        ("map-style", dict(copies=2)),
    ],
)
def test_the_sums_stay_the_same(kind, options):
    assert same_sums(kind, **options)


@pytest.mark.rule(9)
@pytest.mark.parametrize(("method", "params"), [("dp-sgd", dict(quantile=0.5)), ("dp-sam", {}), ("disk", {})])
def test_also_of_methods_that_ask_more_than_once(method, params):
    assert same_sums("map-style", method, params, augment=jitter, copies=2)
