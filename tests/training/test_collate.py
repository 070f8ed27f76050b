"""Data as people have it: a `collate_fn`, padded texts, mappings, nested batches and ragged lists, empty lots."""

import functools
import multiprocessing
import os
import random
import signal
from collections import OrderedDict, UserDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import fodp
from fodp import DataError
from fodp.own_loop import make_private

ROWS, STEPS = 40, 4


def plan(**changes):
    base = dict(sampling_rate=0.2, steps=STEPS, lot_size=8, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=0)
    return fodp.Plan(**{**base, "method": "dp-sgd", **changes})


class Texts(Dataset):
    """Texts of three to nine words, none of which is 0."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        words = torch.arange(3 + index % 7) * 5 + index
        return {"words": words % 11 + 1, "label": index % 2, "name": f"text {index}"}


class Encoding(UserDict):
    """A mapping with attributes, as a tokenizer's BatchEncoding is one."""

    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


def padded(records, length=None):
    """What a tokenizer makes of texts: padded to the longest, with a mask. Fails on an empty list, as they do."""
    longest = length or max(len(record["words"]) for record in records)
    words = torch.stack([F.pad(record["words"], (0, longest - len(record["words"]))) for record in records])
    return words, (words != 0).long(), torch.tensor([record["label"] for record in records])


def as_dict(records):
    return dict(zip(("words", "mask", "label"), padded(records), strict=True))


def ragged(records):
    return [record["words"] for record in records], tuple(record["label"] for record in records)


Batch = namedtuple("Batch", ["inputs", "label"])

FORMS = {
    "tuple": padded,
    "dict": as_dict,
    "ordered": lambda records: OrderedDict(as_dict(records)),
    "encoding": lambda records: Encoding(as_dict(records)),
    "nested": lambda records: {"in": {"pair": list(padded(records)[:2])}, "label": (padded(records)[2], None)},
    "named": lambda records: Batch(padded(records)[:2], padded(records)[2]),
    "texts": lambda records: {**as_dict(records), "name": [record["name"] for record in records], "version": 3},
    "ragged": ragged,
}


def unpacked(batch):
    """Words, mask and label of any of the forms."""
    if isinstance(batch, Encoding):
        return batch.words, batch.mask, batch.label  # by attribute: it must still be one
    if isinstance(batch, Batch):
        return *batch.inputs, batch.label
    if isinstance(batch, dict):
        return (*batch["in"]["pair"], batch["label"][0]) if "in" in batch else tuple(batch.values())[:3]
    if len(batch) == 3:
        return batch
    words = nn.utils.rnn.pad_sequence([torch.zeros(1, dtype=torch.long), *batch[0]], batch_first=True)[1:]
    return words, (words != 0).long(), torch.tensor(batch[1], dtype=torch.long)


class Reader(nn.Module):
    def __init__(self, masked=True):
        super().__init__()
        self.masked, self.words, self.head = masked, nn.Embedding(13, 6), nn.Linear(6, 2)

    def forward(self, words, mask):
        seen = self.words(words)
        if not self.masked:
            return self.head(seen.mean(1))
        there = mask.unsqueeze(-1)
        return self.head((seen * there).sum(1) / there.sum(1).clamp(min=1))


def loss_fn(model, batch):
    words, mask, label = unpacked(batch)
    return F.cross_entropy(model(words, mask), label, reduction="none")


def fitted(collate_fn, model=None, data=None, the_plan=None, **options):
    torch.manual_seed(0)
    model = Reader() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = fodp.Trainer(
        model, loss_fn, data or Texts(), the_plan or plan(), optimizer, collate_fn=collate_fn, **options
    )
    trainer.fit()
    return trainer.session.parameters()


def looped(collate_fn, the_plan=None, model=None, **options):
    torch.manual_seed(0)
    model = Reader() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = make_private(
        model, optimizer, Texts(), the_plan or plan(), collate_fn=collate_fn, **options
    )
    for batch in loader:
        optimizer.zero_grad()
        words, mask, label = unpacked(batch)
        F.cross_entropy(model(words, mask), label).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@functools.cache
def to_public_length():
    return fitted(lambda records: padded(records, length=9))


# Texts that the loss itself pads are given to it one at a time, and it says so.
@pytest.mark.filterwarnings("ignore:per-example gradients run one example at a time")
@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_form_of_batch_trains_the_same_model(form):
    expected = to_public_length()
    assert torch.allclose(fitted(FORMS[form], microbatch=3), expected, atol=1e-5)
    assert torch.allclose(looped(FORMS[form]), expected, atol=1e-5)


@pytest.mark.rule(2)
@pytest.mark.parametrize("form", sorted(FORMS))
def test_empty_lots_are_steps_of_noise_alone(form):
    empty = plan(sampling_rate=1e-9, delta=1e-6)
    before = fitted(padded, the_plan=empty)
    assert torch.equal(fitted(FORMS[form], the_plan=empty), before)
    assert torch.equal(looped(FORMS[form], empty), before)


@pytest.mark.filterwarnings("ignore:per-example gradients run one example at a time")
def test_copies_of_padded_records_are_averaged():
    def doubled(batch):  # the same rows twice: the mean of both is the record's own gradient
        return batch

    expected = to_public_length()
    assert torch.allclose(fitted(as_dict, augment=doubled, copies=2), expected, atol=1e-5)
    assert torch.allclose(fitted(ragged, augment=doubled, copies=2), expected, atol=1e-5)


@pytest.mark.rule(20)
def test_a_mean_over_padded_positions_is_refused_by_the_trainer():
    for microbatch in (None, 4):
        with pytest.raises(DataError, match="how far other records of its lot make collate_fn pad it"):
            fitted(padded, model=Reader(masked=False), microbatch=microbatch)
    fitted(lambda records: padded(records, length=9), model=Reader(masked=False))  # a public length


@pytest.mark.rule(20)
@pytest.mark.parametrize("mixed", [lambda x: x - x.mean(0), lambda x: x / x.norm()], ids=["centred", "scaled"])
@pytest.mark.parametrize("form", [tuple, lambda batch: Encoding(x=batch[0], y=batch[1])], ids=["tuple", "encoding"])
def test_a_collate_function_that_normalises_by_the_lot_is_refused_in_every_form(mixed, form):
    data = torch.utils.data.TensorDataset(torch.randn(ROWS, 4), torch.randint(2, (ROWS,)))

    def collate(records):
        return form([mixed(torch.stack([x for x, _ in records])), torch.stack([y for _, y in records])])

    def loss(model, batch):
        x, y = batch.values() if isinstance(batch, Encoding) else batch
        return F.cross_entropy(model(x), y, reduction="none")

    model = nn.Linear(4, 2)
    with pytest.raises(DataError, match="another batch of a record alone than in its lot"):
        fodp.Trainer(model, loss, data, plan(), collate_fn=collate).fit()
    _, _, loader = make_private(model, torch.optim.SGD(model.parameters(), 0.1), data, plan(), collate_fn=collate)
    with pytest.raises(DataError, match="another batch of a record alone than in its lot"):
        next(iter(loader))


@pytest.mark.rule(20)
def test_a_number_that_tells_of_the_whole_lot_is_refused():
    def with_longest(records):
        return {**as_dict(records), "longest": max(len(record["words"]) for record in records)}

    with pytest.raises(DataError, match="not the same in every batch, so it tells of the whole lot"):
        fitted(with_longest)


@pytest.mark.rule(20)
@pytest.mark.parametrize(
    "told", [lambda records: len(records), lambda records: (-1) ** len(records), lambda records: str(len(records))]
)
def test_a_constant_is_constant_also_in_lots_that_nobody_looks_at(monkeypatch, told):
    """The comparison of first lots sees nothing in those of one record; a number is held against the first one."""
    monkeypatch.setattr("fodp.sources.pull.LOTS_COMPARED", 0)
    with pytest.raises(DataError, match="tells of the whole lot"):
        fitted(lambda records: {**as_dict(records), "told": told(records)})


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda records: {**as_dict(records), "positions": torch.arange(9)[None]}, "same for two records as for three"),
        (lambda records: {**as_dict(records), "all": torch.cat([r["words"] for r in records])}, "first dimension"),
        (lambda records: {**as_dict(records), "time first": padded(records)[0].t()}, "first dimension"),
        (lambda records: {**as_dict(records), "array": np.ones(len(records))}, "arrays of NumPy's"),
        (lambda records: 3, "looks as one of three does"),
    ],
    ids=["shared", "concatenated", "time-first", "array", "nothing"],
)
def test_batches_whose_rows_cannot_be_told_are_refused_before_anything_is_charged(collate, message, tmp_path):
    ledger = fodp.Ledger(tmp_path / "ledger.db")
    with pytest.raises(DataError, match=message):
        fitted(collate, ledger=ledger, run_id="refused")
    assert ledger.steps("refused") is None


@pytest.mark.rule(20)
def test_a_part_that_has_a_row_for_the_first_record_only_is_refused():
    """Rows of others would be taken for a record's, and one record more would shift them all."""
    points = [(torch.ones(1 + index % 4, 3), torch.tensor(index % 2)) for index in range(ROWS)]

    def collate(records):
        return {"points": torch.cat([r[0] for r in records]), "label": torch.stack([r[1] for r in records])}

    def loss(model, batch):
        return F.cross_entropy(model(batch["points"])[: len(batch["label"])], batch["label"], reduction="none")

    with pytest.raises(DataError, match="without one row, or item, for each record"):
        fodp.Trainer(nn.Linear(3, 2), loss, points, plan(), collate_fn=collate).fit()


# --- worker processes ----------------------------------------------------------------------------------------


class Drawing(Texts):
    """Draws when it is read, from PyTorch's, NumPy's and Python's generators; and reads many at once."""

    def __getitem__(self, index):
        shift = int(torch.randint(3, ())) + int(np.random.randint(3)) + random.randrange(3)  # noqa: NPY002
        return {**super().__getitem__(index), "words": super().__getitem__(index)["words"] % 5 + 1 + shift}


def worker_processes():
    return multiprocessing.active_children()


@pytest.mark.rule(9)
@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize("data", [Texts, Drawing])
def test_workers_read_ahead_and_change_no_bit(data, microbatch):
    before = torch.get_rng_state()
    found = [fitted(as_dict, data=data(), microbatch=microbatch, num_workers=n) for n in (0, 2)]
    assert torch.equal(*found)
    assert not worker_processes()
    torch.set_rng_state(before)


@pytest.mark.rule(11)
def test_a_seeded_run_with_workers_resumes_bit_for_bit(tmp_path):
    def make(**options):
        torch.manual_seed(0)
        return fodp.Trainer(Reader(), loss_fn, Texts(), plan(), collate_fn=as_dict, **options)

    whole = make()
    whole.fit()
    first = make(num_workers=1, callbacks=[StopAfter(2)])
    first.fit()
    first.save(tmp_path / "run.pt")
    assert not worker_processes()
    second = make(num_workers=2)
    second.resume(tmp_path / "run.pt")
    second.fit()
    assert torch.equal(second.session.parameters(), whole.session.parameters())
    first.fit()  # the same object goes on, too, with fresh workers
    assert torch.equal(first.session.parameters(), whole.session.parameters())


class StopAfter(fodp.callbacks.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer):
        if trainer.step == self.step:
            trainer.interrupt()


class Deadly(Texts):
    """Its reader dies, or raises, at one record in the worker, once."""

    def __init__(self, path, kill):
        self.path, self.kill = path, kill

    def __getitem__(self, index):
        if index == 5 and torch.utils.data.get_worker_info() is not None and not self.path.exists():
            self.path.write_text("once")
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such record")
        return super().__getitem__(index)


@pytest.mark.rule(11)
@pytest.mark.parametrize(("kill", "error"), [(True, RuntimeError), (False, ValueError)])
def test_a_worker_that_dies_costs_the_step_and_the_next_fit_goes_on(kill, error, tmp_path):
    secure = plan(sampling_rate=1.0, seed=None)  # a secure run never draws a lot twice, also those drawn ahead
    data = Deadly(tmp_path / "once", kill)
    trainer = fodp.Trainer(Reader(), loss_fn, data, secure, collate_fn=as_dict, num_workers=1)
    with pytest.raises(error):
        trainer.fit()
    assert trainer.lost_steps == 1
    assert not worker_processes()
    assert trainer.fit().reason == "finished"
    assert not worker_processes()


@pytest.mark.rule(14)
def test_workers_that_make_no_sense_are_refused():
    with pytest.raises(fodp.ConfigurationError, match="set num_workers too"):
        fitted(as_dict, pin_memory=True)
    with pytest.raises(fodp.PrivacyError, match="num_workers"):
        fitted(as_dict, num_workers=-1)


class AtOnce(Texts):
    """As an Arrow table: many records in one call."""

    def __init__(self):
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(len(indices))
        return [self[index] for index in indices]


def test_records_are_read_a_lot_at_a_time_where_the_data_set_can():
    data = AtOnce()
    assert torch.equal(fitted(as_dict, data=data), fitted(as_dict))
    assert max(data.calls) > 3


def test_a_data_set_that_loses_records_on_the_way_is_refused():
    class Losing(AtOnce):
        def __getitems__(self, indices):
            return super().__getitems__(indices)[1:]

    with pytest.raises(DataError, match="it must return one for each") as refused:
        fitted(as_dict, data=Losing())
    assert not any(letter.isdigit() for letter in str(refused.value))  # the number of records in a lot is private


@pytest.mark.rule(20)
def test_a_data_set_that_mixes_the_records_it_reads_together_is_refused():
    class Mixing(AtOnce):
        def __getitems__(self, indices):
            return [{**self[index], "label": len(indices) % 2} for index in indices]

    with pytest.raises(DataError, match="was not the same"):
        fitted(as_dict, data=Mixing())
