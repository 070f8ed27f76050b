"""State that a loss can reach outside of the model: what one pass leaves for the next is refused, in every engine."""

import collections
import dataclasses
import functools
import itertools
import re
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fodp
import fodp.clipping.reach
from sessions_for_tests import session

DATA = (torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def plan(**changes):
    public = dict(sampling_rate=0.5, steps=3, lot_size=12, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=0)
    return fodp.Plan(**(public | dict(accountant="rdp", method="dp-sgd") | changes))


def own(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def seen(batch):
    """A statistic of what a pass has seen."""
    return batch[0].detach().mean()


# --- ways to remember: each is a function that makes a loss ----------------------------------------------------

SLOW = 0.9999
CENTRE = nn.Module()
NUMBERS = {"mean": 1.0}
TENSOR = torch.ones(())
HISTORY = collections.deque([1.0], maxlen=50)
COUNTER = 0


class Centres:
    """An ordinary object whose method is the loss."""

    def __init__(self):
        self.kept = torch.ones(())

    def loss(self, model, batch):
        found = own(model, batch) / self.kept
        self.kept = SLOW * self.kept + (1 - SLOW) * seen(batch)
        return found

    __call__ = loss


@dataclasses.dataclass
class Field:
    """A dataclass with a list of tensors."""

    parts: list = dataclasses.field(default_factory=lambda: [torch.ones(())])

    def loss(self, model, batch):
        found = own(model, batch) / self.parts[0].clone()
        self.parts[0].mul_(SLOW).add_((1 - SLOW) * seen(batch))
        return found


class Slots:
    """Without a `__dict__`."""

    __slots__ = ("kept",)

    def __init__(self):
        self.kept = 1.0

    def loss(self, model, batch):
        found = own(model, batch) / self.kept
        self.kept = SLOW * self.kept + (1 - SLOW) * float(seen(batch))
        return found


class Shared:
    """Counts for all of its objects."""

    count = 0

    def loss(self, model, batch):
        type(self).count += 1
        return own(model, batch) * (2 if type(self).count > 10**5 else 1)


class FirstSeen:
    """Begins with what it sees first, as a data-dependent initialisation does."""

    def __init__(self):
        self.shift = None

    def loss(self, model, batch):
        if self.shift is None:
            self.shift = batch[0].detach().mean(0)
        return own(model, (batch[0] - self.shift, batch[1]))


class Whole(nn.Module):
    """Contains the model, and its method is the loss, as a LightningModule's is; it has no `forward`."""

    def __init__(self, kind):
        super().__init__()
        self.net, self.kind, self.number = network(), kind, 1.0
        self.register_buffer("centre", torch.ones(()))
        self.part = nn.Module()
        self.part.register_buffer("centre", torch.ones(()))

    def loss(self, model, batch):
        if self.kind == "number":
            found = own(model, batch) / self.number
            self.number = SLOW * self.number + (1 - SLOW) * float(seen(batch))
            return found
        centre = self.centre if self.kind == "buffer" else self.part.centre
        found = own(model, batch) / centre.clone()
        centre.mul_(SLOW).add_((1 - SLOW) * seen(batch))
        return found


def by_global_module():
    CENTRE.register_buffer("kept", torch.ones(()))

    def loss(model, batch):
        found = own(model, batch) / CENTRE.kept.clone()
        CENTRE.kept.mul_(SLOW).add_((1 - SLOW) * seen(batch))
        return found

    return loss


def divided_by_global(batch):
    return TENSOR.mul_(SLOW).add_((1 - SLOW) * seen(batch)).clone()


def by_a_function_it_calls():
    return lambda model, batch: own(model, batch) / divided_by_global(batch)


def by_global_number():
    def loss(model, batch):
        found = own(model, batch) / NUMBERS["mean"]
        NUMBERS["mean"] = SLOW * NUMBERS["mean"] + (1 - SLOW) * float(seen(batch))
        return found

    return loss


def by_history():
    def loss(model, batch):
        found = own(model, batch) / (sum(HISTORY) / len(HISTORY))
        HISTORY.append(1 + 1e-4 * float(seen(batch)))
        return found

    return loss


def by_threshold():
    def loss(model, batch):
        global COUNTER
        COUNTER += 1
        return own(model, batch) * (0.5 if COUNTER > 10_000 else 1.0)

    return loss


def by_length():
    history = []

    def loss(model, batch):
        history.append(0)
        return own(model, batch) * (0.5 if len(history) > 1000 else 1.0)

    return loss


def by_closure():
    kept = 1.0

    def outer(model, batch):
        def inner():
            nonlocal kept
            kept = SLOW * kept + (1 - SLOW) * float(seen(batch))
            return kept

        return own(model, batch) / inner()

    return outer


def by_array():
    kept = np.ones(1)

    def loss(model, batch):
        found = own(model, batch) / float(kept[0])
        kept[0] = SLOW * kept[0] + (1 - SLOW) * float(seen(batch))
        return found

    return loss


def by_default():
    def loss(model, batch, kept=[1.0]):  # noqa: B006  what people write
        kept[0] = SLOW * kept[0] + (1 - SLOW) * float(seen(batch))
        return own(model, batch) / kept[0]

    return loss


def by_attribute_of_the_function():
    def loss(model, batch):
        loss.kept = SLOW * getattr(loss, "kept", 1.0) + (1 - SLOW) * float(seen(batch))
        return own(model, batch) / loss.kept

    return loss


def by_partial():
    def loss(kept, model, batch):
        kept.mean = SLOW * kept.mean + (1 - SLOW) * float(seen(batch))
        return own(model, batch) / kept.mean

    return functools.partial(loss, types.SimpleNamespace(mean=1.0))


def by_iterator():
    numbers = itertools.count(1)
    return lambda model, batch: own(model, batch) * (1 + 1e-4 / next(numbers))


def by_generator():
    def means():
        kept = 1.0
        while True:
            kept = SLOW * kept + (1 - SLOW) * float((yield kept))

    going = means()
    next(going)
    return lambda model, batch: own(model, batch) / going.send(seen(batch))


def by_weak_reference():
    kept = Centres()
    known = weakref.ref(kept)
    loss = lambda model, batch: known().loss(model, batch)  # noqa: E731
    loss.alive = kept
    return loss


def by_cached_function():
    @functools.lru_cache
    def state():
        return torch.ones(())

    def loss(model, batch):
        kept = state()
        kept.mul_(SLOW).add_((1 - SLOW) * seen(batch))
        return own(model, batch) / kept.clone()

    return loss


def by_wrapped_function():
    kept = Centres()

    @functools.wraps(own)
    def loss(*args):
        return kept(*args)

    return loss


def by_what_is_in_a_set():
    met = set()

    def loss(model, batch):
        met.update(batch[0][:, 0].tolist())
        return own(model, batch) * (0.5 if len(met) > 1000 else 1.0)

    return loss


WAYS = {
    "a set, from a size on": by_what_is_in_a_set,
    "an object's method": lambda: Centres().loss,
    "an object that is called": Centres,
    "a field of a dataclass": lambda: Field().loss,
    "slots": lambda: Slots().loss,
    "an attribute of a class": lambda: Shared().loss,
    "the first thing seen": lambda: FirstSeen().loss,
    "a global module": by_global_module,
    "a function that it calls": by_a_function_it_calls,
    "a number in a global dict": by_global_number,
    "the last values": by_history,
    "a global count, from a threshold on": by_threshold,
    "a list, from a length on": by_length,
    "an inner function's closure": by_closure,
    "an array": by_array,
    "a default argument": by_default,
    "the function's attribute": by_attribute_of_the_function,
    "a partial": by_partial,
    "an iterator": by_iterator,
    "a generator": by_generator,
    "a weak reference": by_weak_reference,
    "a cached function": by_cached_function,
    "a wrapped function": by_wrapped_function,
}

REFUSED = r"writes into|leaves something in|two passes over one example"


def refusal(run):
    """What a step is refused with."""
    try:
        run.take_step()
    except fodp.PrivacyError as error:
        return str(error)
    return "nothing"


@pytest.mark.rule(24)
@pytest.mark.rule(28)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_loss_that_remembers_outside_of_the_model_is_refused(engine):
    heard = {name: refusal(session(network(), make(), DATA, plan(), engine=engine)) for name, make in WAYS.items()}
    assert not {name: said for name, said in heard.items() if not re.search(REFUSED, said)}


@pytest.mark.rule(28)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("kind", ["buffer", "buffer of a part", "number"])
def test_a_loss_of_a_module_that_contains_the_model_is_watched(kind, engine):
    whole = Whole(kind)
    with pytest.raises(fodp.PrivacyError, match=REFUSED):
        fodp.Trainer(whole.net, whole.loss, DATA, plan(), engine=engine).fit()
    assert (whole.centre, whole.part.centre, whole.number) == (1, 1, 1)


class Counts(nn.Module):
    """Contains the model, and counts examples in a buffer that no loss reads, from the second step on."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer("count", torch.zeros(()))

    def loss(self, model, batch):
        self.count += len(batch[0])
        return own(model, batch)


@pytest.mark.rule(28)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_buffers_of_a_module_that_contains_the_model_are_watched(engine):
    whole = Counts()
    with pytest.raises(fodp.PrivacyError, match="Counts, beside the model, writes into the buffer count"):
        session(whole.net, whole.loss, DATA, plan(), engine=engine).take_step()
    assert whole.count == 0


@pytest.mark.rule(28)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_memory_that_nothing_can_see_into_is_heard_of(engine, monkeypatch):
    """As that of a library in C: only that the loss of an example moves once others have passed."""
    monkeypatch.setattr("fodp.clipping.remembered.reached", lambda *_: fodp.clipping.reach.Reached())
    with pytest.raises(fodp.PrivacyError, match="two passes over one example"):
        session(network(), Centres().loss, DATA, plan(), engine=engine).take_step()


@pytest.mark.rule(28)
def test_a_write_that_begins_between_two_looks_is_refused_in_its_step():
    kept = Field()
    run = session(network(), lambda m, b: kept.loss(m, b) if run.number == 2 else own(m, b), DATA, plan())
    run.take_step()
    run.take_step()
    with pytest.raises(fodp.PrivacyError, match=r"writes into kept\.parts"):
        run.take_step()


@pytest.mark.rule(28)
def test_an_attribute_that_begins_to_move_between_two_looks_is_looked_at_in_the_next_step():
    kept = Centres()
    run = session(network(), lambda m, b: kept.loss(m, b) if run.number >= 3 else own(m, b), DATA, plan(steps=9))
    for _ in range(4):
        run.take_step()
    with pytest.raises(fodp.PrivacyError, match=REFUSED):
        run.take_step()


@pytest.mark.rule(28)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_flag_that_one_record_sets_late_is_looked_at_in_the_next_step(engine):
    flags = types.SimpleNamespace(seen=False)

    def loss(model, batch):
        found = own(model, batch) * (2.0 if flags.seen else 1.0)
        flags.seen = flags.seen or run.number == 3
        return found

    run = session(network(), loss, DATA, plan(steps=9), engine=engine)
    for _ in range(4):
        run.take_step()
    with pytest.raises(fodp.PrivacyError, match=r"leaves something in flags\.seen"):
        run.take_step()


@pytest.mark.rule(28)
def test_a_counter_of_collections_counts_what_it_counts():
    met = collections.Counter()

    def loss(model, batch):
        met["passes"] += 1
        calls.append(0)
        return own(model, batch)

    calls = []
    run = session(network(), loss, DATA, plan())
    for _ in range(3):
        run.take_step()
    assert met["passes"] <= len(calls)


# --- people who do no harm --------------------------------------------------------------------------------------


class Logs:
    """Keeps what it has seen in many ways, and reads none of them."""

    def __init__(self):
        self.history, self.parts, self.calls, self.last, self.mask = [], {}, 0, None, None
        self.masks, self.weight, self.best = {}, torch.tensor([1.0, 10.0]), float("inf")

    def loss(self, model, batch):
        if self.mask is None:  # as causal masks are made
            self.mask = torch.ones(1, 4)
        mask = self.masks.setdefault(batch[0].shape[1], self.mask)
        found = F.cross_entropy(model(batch[0] * mask), batch[1], self.weight, reduction="none")
        self.calls += 1
        self.history.append(float(found.detach().mean()))
        self.parts["cross entropy"] = self.last = found.detach()
        self.best = min(self.best, self.history[-1])
        return found


@functools.lru_cache
def scale(width):
    return torch.full((width,), 0.5)


def with_a_cache(model, batch):
    return own(model, (batch[0] * scale(batch[0].shape[1]), batch[1]))


@pytest.mark.rule(28)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("make", [lambda: Logs().loss, lambda: with_a_cache, lambda: own], ids=["logs", "cache", "own"])
def test_who_only_writes_is_not_refused(make, engine):
    fodp.Trainer(network(), make(), DATA, plan(), engine=engine).fit()


@pytest.mark.rule(28)
def test_a_log_stays_as_it_was_written():
    logs = Logs()
    run = session(network(), logs.loss, DATA, plan())
    for _ in range(3):
        run.take_step()
    assert len(logs.history) == logs.calls
    assert logs.best == min(logs.history)


@pytest.mark.rule(28)
def test_what_moves_between_steps_is_the_owners_business():
    kept = Field()
    run = session(network(), lambda m, b: own(m, b) / kept.parts[0], DATA, plan())
    for step in range(3):
        kept.parts[0].fill_(1.0 + step)
        run.take_step()
    assert run.number == 3
