"""Is this the private data? One function answers, in every door of Python that takes data as public."""

import functools
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

import fodp
from fodp import ConfigurationError
from fodp.callbacks import Callback, Evaluate
from fodp.identity.private_data import declare_public, refuse_private
from fodp.ledger import Ledger
from fodp.runs.scores import accuracy

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(300, 5, generator=GENERATOR)
Y = (X[:, 0] > 0).long()
FULL = TensorDataset(X, Y)
PRIVATE = TensorDataset(X[:200], Y[:200])
PUBLIC = TensorDataset(X[200:], Y[200:])
ROWS = [(x, int(y)) for x, y in FULL]


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


def trainer(private=PRIVATE, the_plan=None, **options):
    return fodp.Trainer(nn.Linear(5, 2), losses, private, the_plan or plan(), **options)


class Wrapper(Dataset):
    """Changes what it shows, and holds as many records as its base."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, label = self.data[index]
        return inputs + 1, label


class First(Dataset):
    """The first records of something whose attribute nobody knows."""

    def __init__(self, thing, count):
        self.thing, self.count = thing, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.thing[index]


class Chosen(Dataset):
    """Its own rows of tensors that another split has too."""

    def __init__(self, places):
        self.inputs, self.labels, self.places = X, Y, places

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        return self.inputs[self.places[index]], self.labels[self.places[index]]


class Doubled(TensorDataset):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return 2 * inputs, label


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def copied(count):
    return TensorDataset(X[:count].clone(), Y[:count].clone())


SAME = {
    "itself": (PRIVATE, PRIVATE),
    "a Subset": (PRIVATE, Subset(PRIVATE, [3, 4])),
    "what it is a Subset of": (Subset(FULL, range(200)), FULL),
    "a ConcatDataset": (PRIVATE, ConcatDataset([PUBLIC, PRIVATE])),
    "overlapping subsets": (Subset(FULL, range(200)), Subset(FULL, range(199, 250))),
    "a view of the same memory": (PRIVATE, TensorDataset(X.view(-1, 5)[50:60], Y[50:60])),
    "a NumPy view": (PRIVATE, (torch.from_numpy(X.numpy()[:50]), Y[:50].clone())),
    "a wrapper": (PRIVATE, Wrapper(PRIVATE)),
    "a wrapper of a subset": (PRIVATE, Wrapper(Subset(PRIVATE, range(20)))),
    "a class derived from tensors": (PRIVATE, Doubled(X[150:], Y[150:])),
    "a loader": (PRIVATE, DataLoader(PRIVATE)),
    "data sets by name": (PRIVATE, {"a": PUBLIC, "b": PRIVATE}),
    "a chain of streams": (PRIVATE, ChainDataset([Stream(PUBLIC), Stream(PRIVATE)])),
    "rows of a list": (ROWS[:200], ROWS[190:210]),
    "an array": (X.numpy()[:200], X.numpy()[100:]),
}
COPIES = {
    "a clone": (PRIVATE, copied(200)),
    "in another order": (PRIVATE, TensorDataset(X[:200].flip(0).clone(), Y[:200].flip(0))),
    "a part of it": (PRIVATE, copied(20)),
    "in another type": (PRIVATE, (X[:200].double().numpy() + 0, Y[:200].numpy() + 0)),
    "with other labels": (PRIVATE, TensorDataset(X[:50].clone(), 1 - Y[:50])),
    "as a list": (PRIVATE, [(x.clone(), int(y)) for x, y in PRIVATE]),
    "as records by name": (PRIVATE, [{"label": int(y), "inputs": x.tolist()} for x, y in PRIVATE]),
    "a batch of parts": ([(dict(x=x), y) for x, y in PRIVATE], (dict(x=X[:50].clone()), Y[:50].clone())),
    "the first ones": (PRIVATE, First(PRIVATE, 30)),
    "with few others": (PRIVATE, ConcatDataset([copied(100), PUBLIC])),
}
OTHERS = {
    "a split": tuple(random_split(FULL, [200, 100], torch.Generator().manual_seed(1))),
    "other rows of one tensor": (PRIVATE, PUBLIC),
    "rows in turn": (TensorDataset(X[::2], Y[::2]), TensorDataset(X[1::2], Y[1::2])),
    "wrapped splits": (Wrapper(PRIVATE), Wrapper(PUBLIC)),
    "their own rows of common tensors": (Chosen(range(200)), Chosen(range(200, 300))),
    "lists": (ROWS[:200], ROWS[200:]),
    "a batch of parts": ([(dict(x=x), y) for x, y in PRIVATE], (dict(x=X[200:]), Y[200:])),
    "one equal row": (PRIVATE, ConcatDataset([copied(1), PUBLIC])),
    "rows of few values": (
        TensorDataset(torch.randint(2, (200, 4)), torch.zeros(200)),
        TensorDataset(torch.randint(2, (50, 4)), torch.zeros(50)),
    ),
    "constant rows": (TensorDataset(torch.zeros(99, 3)), TensorDataset(torch.zeros(9, 3))),
    "the four rows of XOR": (
        TensorDataset(torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]).repeat(9, 1)),
        TensorDataset(torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]])),
    ),
}


@pytest.mark.rule(29)
@pytest.mark.parametrize("form", [*SAME, *COPIES])
def test_the_private_data_in_any_form_is_refused(form):
    private, public = (SAME | COPIES)[form]
    says = "is the training data itself" if form in SAME else "most of these rows"
    with pytest.raises(ConfigurationError, match=f"the door: .*{says}.*gets no noise: hold rows out before training"):
        refuse_private("the door", public, private)


@pytest.mark.rule(29)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", OTHERS)
def test_other_rows_are_taken_without_a_word(form):
    private, public = OTHERS[form]
    refuse_private("the door", public, private)


@pytest.mark.filterwarnings("error")
def test_the_splits_of_digits_are_taken_without_a_word():
    splits = fodp.data.load("digits")
    refuse_private("the test split", splits.test, splits.train)


@pytest.mark.rule(29)
def test_a_tenth_of_private_rows_is_warned_of():
    mixed = ConcatDataset([copied(10), PUBLIC])
    with pytest.warns(UserWarning, match="the door: some of these rows are in the training data"):
        refuse_private("the door", mixed, PRIVATE)


def test_rows_that_are_said_to_be_public_are_taken_but_never_the_private_data():
    public = declare_public(copied(50))
    refuse_private("the door", public, PRIVATE)
    refuse_private("the door", declare_public([(x.clone(), y) for x, y in PRIVATE]), PRIVATE)
    with pytest.raises(ConfigurationError, match="the training data itself"):
        refuse_private("the door", declare_public(Subset(PRIVATE, [1])), PRIVATE)


class Drawing(Dataset):
    """Draws when it is read, from everybody's generators and from its own."""

    def __init__(self):
        self.numbers = np.random.default_rng(0)
        self.own = torch.Generator().manual_seed(0)
        self.data = [0.0] * 40

    def __len__(self):
        return 40

    def __getitem__(self, index):
        own = self.numbers.random() + float(torch.rand((), generator=self.own))
        drawn = own + random.random() + np.random.random()  # noqa: NPY002  what people use
        return X[index] + drawn + torch.rand(()), Y[index]


def test_a_look_moves_no_generator():
    data = Drawing()

    def states():
        return [
            str(random.getstate()), str(np.random.get_state()),  # noqa: NPY002
            str(data.numbers.bit_generator.state),
            str(torch.get_rng_state().tolist()), str(data.own.get_state().tolist()),
        ]  # fmt: skip

    before = states()
    refuse_private("the door", First(data, 20), PUBLIC)
    assert states() == before


def test_a_look_reads_few_records_of_what_is_read_one_by_one():
    class Counted(Chosen):
        read = 0

        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            self.read += 1
            return X[index % 300], Y[index % 300]

    data = Counted(range(5))
    refuse_private("the door", PUBLIC, data)
    assert 0 < data.read <= 1000


# --- the doors -------------------------------------------------------------------------------------------------------


@pytest.mark.rule(29)
@pytest.mark.parametrize("public", [PRIVATE, Subset(PRIVATE, [1]), copied(50)], ids=["itself", "a part", "a copy"])
def test_evaluate_refuses_the_private_data_before_anything_is_charged(tmp_path, public):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    run = trainer(callbacks=[Evaluate(public)], ledger=ledger)
    with pytest.raises(ConfigurationError, match="Evaluate"):
        run.fit()
    assert run.step == 0
    assert not ledger.steps(run.run_id)


@pytest.mark.filterwarnings("error")
def test_evaluate_takes_rows_that_were_held_out():
    run = trainer(callbacks=[Evaluate(PUBLIC)])
    assert run.fit().reason == "finished"
    assert run.fit().reason == "finished"
    assert run.metrics["accuracy"] >= 0


class OwnScore(Callback):
    def __init__(self, data):
        self.data = data

    def on_epoch(self, trainer):
        trainer.metrics["mine"] = accuracy(trainer.model, self.data)[0]


class OfASplit(Callback):
    def __init__(self, splits):
        self.splits = splits

    def on_epoch(self, trainer):
        trainer.metrics["mine"] = accuracy(trainer.model, self.splits.train)[0]


class OfAGlobal(Callback):
    def on_epoch(self, trainer):
        trainer.metrics["mine"] = accuracy(trainer.model, PRIVATE)[0]


@pytest.mark.rule(29)
def test_a_callback_of_ones_own_and_a_metric_are_looked_at():
    def metric(model, _):
        return {"loss": accuracy(model, PRIVATE)[1]}

    partial = functools.partial(lambda data, model, _: {"loss": accuracy(model, data)[1]}, PRIVATE)
    refused = [OwnScore(PRIVATE), OwnScore(DataLoader(PRIVATE)), OwnScore(X[:50]), Evaluate(PUBLIC, metric=metric),
               Evaluate(PUBLIC, metric=partial), OfASplit(SPLITS), OfAGlobal(), OwnScore(copied(150))]  # fmt: skip
    for callback in refused:
        with pytest.raises(ConfigurationError, match="has the training data in its hands"):
            trainer(callbacks=[callback]).fit()
    whole = {"all": X}  # some of it public

    def fine(model, public):
        return {"loss": float(whole["all"][200:].sum()) + accuracy(model, public)[1]}

    trainer(callbacks=[OwnScore(PUBLIC), Evaluate(PUBLIC, metric=fine)]).fit()


class Holder:
    def __init__(self):
        self.train, self.validation = PRIVATE, PUBLIC


SPLITS = Holder()


@pytest.mark.rule(29)
def test_a_public_score_with_the_private_data_in_its_closure_is_refused():
    model = nn.Linear(5, 2)
    options = dict(the_plan=plan(method="sa-dpsgd"))
    private = PRIVATE

    def helper():
        return accuracy(model, private)[1]

    for score in (lambda: accuracy(model, private)[1], lambda: accuracy(model, SPLITS.train)[1], lambda: helper()):
        with pytest.raises(ConfigurationError, match="public_score has the training data"):
            trainer(public_score=score, **options)

    def fine():
        model.train(False)  # a name like that of a split
        score = float(F.cross_entropy(model(X[200:]), Y[200:]).detach()) + accuracy(model, SPLITS.validation)[1]
        model.train()
        return score

    trainer(public_score=fine, **options).fit()


@pytest.mark.rule(29)
def test_a_public_sample_of_private_rows_is_refused():
    kronecker = plan(method="dp-sgd", params=dict(shape="kronecker", lr=0.1))
    for sample in ((X[:50], Y[:50]), [X[:50], Y[:50]], (X[:50].clone(), Y[:50])):
        with pytest.raises(ConfigurationError, match="public_sample: "):
            trainer(the_plan=kronecker, public_sample=sample)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(the_plan=kronecker, public_sample=(X[200:], Y[200:]))
