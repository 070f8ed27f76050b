"""Records that no model can be trained on: refused with the record's number and the remedy, in a Trainer and in a loop
of one's own, before anything is charged where the data is in memory; what a record holds is never said."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from bad_data_for_tests import CLASSES, GOOD, IN_MEMORY, INPUTS, LABELS, READ, WIDTH, WITH_A_LOSS, Rows, labelled
from fodp.inputs.bad_records import BadRecord


@pytest.fixture(autouse=True)
def no_loop_of_another_test():
    """A loader that a test has dropped in an exception listens until it is collected."""
    gc.collect()


def losses(model, batch):
    inputs, labels = batch
    inputs = torch.stack(inputs, 1).float() if isinstance(inputs, list) else inputs
    return F.cross_entropy(model(inputs), labels, reduction="none")


def plan(**changes):
    return fodp.Plan(
        **dict(sampling_rate=0.5, steps=2, lot_size=20, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5, seed=0)
        | dict(method="dp-sgd", accountant="rdp")
        | changes
    )


def trained(data, book, **options):
    run = fodp.Trainer(nn.Linear(WIDTH, CLASSES), losses, data, plan(**options), ledger=book)
    run.fit()


def looped(data, book, loss=F.cross_entropy, **options):
    model = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = fodp.make_private(model, optimizer, data, plan(**options), ledger=book)
    for inputs, labels in loader:
        inputs = torch.stack(inputs, 1).float() if isinstance(inputs, list) else inputs
        optimizer.zero_grad()
        loss(model(inputs), labels).backward()
        optimizer.step()


DOORS = {"Trainer": trained, "make_private": looped}


def charged(book):
    return sum(entry.of_run.steps or 0 for entry in book.store.select("run"))


def said(error):
    """All that is shown of an error on a terminal, but for the user's own exception."""
    assert error.__cause__ is not None or error.__suppress_context__ or error.__context__ is None
    return str(error)


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("door", "kind"),  # a loop of one's own shows its loss with the first lot only
    [*((door, kind) for door in DOORS for kind in IN_MEMORY), *(("Trainer", kind) for kind in WITH_A_LOSS)],
)
@pytest.mark.fault(
    "data in memory that no model can be trained on: labels out of range, other types or widths, `None`, columns",
    happens="refused before the first release, with the record's number and the remedy",
    lost="nothing",
    costs="nothing",
)
def test_data_in_memory_is_refused_before_anything_is_charged(tmp_path, door, kind):
    data, words = (IN_MEMORY | WITH_A_LOSS)[kind]
    book = fodp.Ledger(tmp_path / "l.sqlite")
    with pytest.raises(fodp.DataError, match=words) as raised:
        DOORS[door](data, book)
    assert charged(book) == 0
    assert "7." not in said(raised.value)


@pytest.mark.rule(14)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", READ)
@pytest.mark.fault(
    "a record that no model can be trained on, in data that is read record by record",
    happens="refused when it is drawn, with its number; another `fit()` goes on without that lot",
    lost="the step that drew it",
    costs="that step stays charged",
)
def test_a_record_that_is_read_is_named_when_it_is_drawn(tmp_path, door, kind):
    data, words = READ[kind]
    book = fodp.Ledger(tmp_path / "l.sqlite")
    with pytest.raises(fodp.DataError, match=words) as raised:
        DOORS[door](data, book, steps=8)
    assert 0 <= charged(book) <= 8
    assert "secret" not in said(raised.value)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", GOOD)
def test_honest_data_is_taken(tmp_path, door, kind):
    DOORS[door](GOOD[kind], fodp.Ledger(tmp_path / "l.sqlite"))


def test_a_trainer_goes_on_after_a_bad_record():
    data, _ = READ["label out of range"]
    run = fodp.Trainer(nn.Linear(WIDTH, CLASSES), losses, data, plan(steps=8))
    for _ in range(8):
        with contextlib.suppress(BadRecord):
            result = run.fit()
            break
    assert result.reason == "finished"
    assert 0 < result.lost_steps < 8


def test_a_loop_that_was_refused_is_closed_and_gives_everything_back():
    model = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = fodp.make_private(model, optimizer, labelled(7), plan())

    def train():
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    with pytest.raises(fodp.DataError, match="Nothing was released or charged, and this loader is closed"):
        train()
    assert not torch.overrides._get_current_function_mode_stack()
    with pytest.raises(fodp.ConfigurationError, match="closed"):
        next(iter(loader))
    fodp.make_private(model, optimizer, TensorDataset(INPUTS, LABELS), plan())[2].close()


def test_labels_that_a_loop_makes_itself_are_its_own_business(tmp_path):
    """The data holds other numbers than the loss is given, and classes that count from 1."""

    def shifted(scores, labels):
        return F.cross_entropy(scores, labels - 1)

    looped(TensorDataset(INPUTS, LABELS + 1), fodp.Ledger(tmp_path / "l.sqlite"), loss=shifted)


def test_a_mode_of_the_users_own_stays_where_it_is(tmp_path):
    class Mine(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def moded(scores, labels):
        return F.cross_entropy(scores, labels)

    model = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = fodp.make_private(model, optimizer, Rows([*zip(INPUTS, LABELS.tolist(), strict=True)]), plan())
    for inputs, labels in loader:
        with Mine() as mine:
            moded(model(inputs), labels).backward()
            optimizer.step()
            assert torch.overrides._get_current_function_mode_stack()[-1] is mine
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_person_is_no_reason_to_name_another_record():
    owners = [number // 2 for number in range(len(LABELS))]
    run = fodp.Trainer(
        nn.Linear(WIDTH, CLASSES), losses, READ["raises"][0],
        plan(unit="person", records_per_person=2, steps=8), owners=owners,
    )  # fmt: skip
    with pytest.raises(fodp.DataError, match="record 17 of the data set cannot be read"):
        run.fit()


@pytest.mark.parametrize("function", ["gather", "index"])
def test_a_loss_of_ones_own_is_asked_record_by_record(function):
    def own(model, batch):
        scores = model(batch[0]).log_softmax(1)
        if function == "gather":
            return -scores.gather(1, batch[1][:, None])[:, 0]
        return -scores[torch.arange(len(scores)), batch[1]]

    run = fodp.Trainer(nn.Linear(WIDTH, CLASSES), own, labelled(7), plan())
    with pytest.raises(fodp.DataError, match="record 17 of the data set makes the model or the loss raise"):
        run.fit()


def test_words_beyond_an_embedding():
    words = torch.randint(10, (40, 5), generator=torch.Generator().manual_seed(0))
    words[17, 3] = 10

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, CLASSES)

        def forward(self, rows):
            return self.head(self.table(rows).mean(1))

    run = fodp.Trainer(Bag(), losses, TensorDataset(words, LABELS), plan())
    with pytest.raises(fodp.DataError, match="outside of 0 to 9, the rows of an embedding"):
        run.fit()
