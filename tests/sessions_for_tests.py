"""Sessions as the Trainer and `make_private` make them."""

import torch

from fodp import Trainer
from fodp.sources.pull import Pull


def session(model, loss_fn, dataset, plan, **options):
    """What carries the plan out on this model and data."""
    return Trainer(model, loss_fn, dataset, plan, **options).session


def private_columns(source):
    """All of the private data, with zeros for what is no number: what a method must never look at."""
    fetcher = source.fetcher
    rows = fetcher.fetch(torch.arange(fetcher.size))
    return tuple(column.nan_to_num() if column.is_floating_point() else column for column in rows)


def measured_by(monkeypatch, choose):
    """The shape kronecker looks at `choose(all private rows, step, what makes the public records of a step)`."""
    public_records = Pull.public_records

    def private(source, shape):
        public, rows = public_records(source, shape), private_columns(source)
        return lambda step: choose(rows, step, public)

    monkeypatch.setattr(Pull, "public_records", private)
