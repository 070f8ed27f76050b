"""A ledger with one budget, runs that spend it, and processes that race for it."""

import multiprocessing
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.accounting import Event, Phase
from fodp.ledger import Ledger
from fodp.ledger.card import faults

STEP = Event(1.0, 35.0)
PHASES = (Phase((STEP,), 100),)
BUDGET = (1.0, 1e-5)
QUICK = ("--epochs=1", "--quiet", "--noise-multiplier=4", "--accountant=rdp", "--threads=1")  # of `fodp train`


def ledger(where, **options):
    """The ledger of a folder, or of an address."""
    return Ledger(where / "l.sqlite" if isinstance(where, Path) and where.is_dir() else where, **options)


def named(where, budget=BUDGET, **options):
    """The same for a data set with a budget."""
    return ledger(where, dataset="people", budget=budget, **options)


def spend(book, run, steps=5, phases=PHASES, settle=True, **said):
    """A run of some steps, from its beginning to its end."""
    account = book.open(run, phases, steps, **said)
    assert all(account.covers(step) for step in range(steps))
    if settle:
        account.settle(steps)
    return account


def fitting(book, steps):
    """How many runs of so many steps the whole budget has room for."""
    budget = book.budget("people")
    return int(budget.capacity / budget.costs(PHASES)[steps])


def raced(work, names):
    """What `work(name)` returns in processes that start together, by name."""
    fork = multiprocessing.get_context("fork")
    start, results = fork.Event(), fork.Queue()

    def race(name):
        start.wait()
        results.put((name, work(name)))

    racers = [fork.Process(target=race, args=(name,)) for name in names]
    for racer in racers:
        racer.start()
    start.set()
    outcomes = dict(results.get(timeout=60) for _ in racers)
    for racer in racers:
        racer.join()
        assert racer.exitcode == 0
    return outcomes


def plan(**changes):
    """A short seeded run."""
    base = dict(
        sampling_rate=0.25, steps=6, lot_size=20, clip_norm=1.0, noise_multiplier=6.0, delta=1e-5, seed=7,
        accountant="rdp", method="dp-sgd",
    )  # fmt: skip
    return fodp.Plan(**{**base, **changes})


def data(rows=80, number=0):
    """Rows of six numbers, in two classes."""
    inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(number))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def losses(model, batch):
    """Cross entropy of each example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def refuse_overspending(where, rest=lambda seconds: None):
    """Four processes open runs of three steps until the budget refuses: together they take what it holds, no more."""

    def grab(name):
        taken = 0
        try:
            book = named(where)
            for number in range(1000):
                account = book.open(f"{name}.{number}", (Phase((STEP,), 3),), 3)
                taken += sum(account.covers(step) for step in range(3))
                rest(0.005)
        except fodp.PrivacyError as error:
            return taken, str(error)
        return taken, "never refused"

    outcomes = raced(grab, "abcd").values()
    assert all("left and this needs" in message for _, message in outcomes), outcomes
    assert sum(taken > 0 for taken, _ in outcomes) >= 2  # it was a race
    book = named(where)
    assert fitting(book, 1) - 3 <= sum(taken for taken, _ in outcomes) <= fitting(book, 1)
    assert book.store.of_data("people").spent <= book.budget("people").capacity
    assert faults(book) == []
