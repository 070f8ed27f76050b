"""The steps at which the user's code is looked at: the first two that tell something, and rare public ones."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import fodp
import fodp.clipping.augmentation
import fodp.clipping.self_check
import fodp.sampling
import fodp.sources.examiner
import fodp.sources.pull
from fodp.lots.poisson import PoissonSampler
from fodp.sampling import Lot
from fodp.support.looks import Looks, is_rare
from sessions_for_tests import session

ROWS = 24
GENERATOR = torch.Generator().manual_seed(0)
DATA = (torch.randn(ROWS, 4, generator=GENERATOR), torch.arange(ROWS) % 2)
RARE = next(step for step in range(3, 2000) if is_rare(step))
SITES = ("the loss", "the loop", "augment", "the data set", "collate_fn")


class Records(Dataset):
    """The same data, read record by record."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return DATA[0][index], DATA[1][index]


def collate(records):
    return torch.stack([x for x, _ in records]), torch.stack([y for _, y in records])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plan(**changes):
    public = dict(sampling_rate=0.5, steps=2000, lot_size=12, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, seed=0)
    return fodp.Plan(**(public | dict(accountant="rdp", method="dp-sgd") | changes))


@pytest.fixture
def lots(monkeypatch):
    """How many records the lots of some steps have; all others have half of the data."""
    counts = {}

    def draw(self, step, name="mask", rate=None):
        return Lot(step, self.rate if rate is None else rate, name, torch.arange(counts.get(step, ROWS // 2)))

    monkeypatch.setattr(PoissonSampler, "draw", draw)
    return counts


@pytest.fixture
def looked(monkeypatch):
    """(site, step) of every look, in their order; `run` is the run that is under way."""
    seen, current = [], {}

    def spy(place, name, site):
        kind = type(vars(place).get(name)) if isinstance(place, type) else None
        original = getattr(place, name)

        def noted(*args):
            seen.append((site(*args), current["run"].number))
            return original(*args)

        monkeypatch.setattr(place, name, staticmethod(noted) if kind is staticmethod else noted)

    spy(fodp.clipping.self_check, "refuse_unsteady", lambda engine, _: "the loop" if engine._loop else "the loss")
    spy(fodp.clipping.augmentation.Augmentation, "_refuse_unsteady", lambda *_: "augment")
    spy(fodp.lots.reading.Fetcher, "_refuse_unsteady", lambda *_: "the data set")
    spy(fodp.sources.pull.Pull, "_refuse_mixing_collate", lambda *_: "collate_fn")
    return seen, current


def run_of(site, current, **options):
    if site in ("the data set", "collate_fn"):
        options["collate_fn"] = collate
    data = Records() if site in ("the data set", "collate_fn") else DATA
    if site == "augment":
        options["augment"] = lambda batch: batch
    if site == "the loop":
        options["engine"] = "loop"
    run = current["run"] = session(network(), losses, data, plan(), **options)
    return run


def steps_of(site, seen):
    return sorted({step for known, step in seen if known == site})


def first_steps(site, count=2):
    return list(range(4 if site == "collate_fn" else count))


@pytest.mark.rule(20)
@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize("site", SITES)
def test_the_first_two_steps_are_looked_at_and_rare_ones(site, microbatch, looked, lots):
    seen, current = looked
    run = run_of(site, current, microbatch=microbatch)
    for _ in range(6):
        run.take_step()
    run.go_to(RARE)
    run.take_step()
    run.take_step()
    assert steps_of(site, seen) == [*first_steps(site), RARE]


@pytest.mark.rule(20)
@pytest.mark.parametrize("site", SITES)
def test_steps_that_tell_nothing_do_not_count(site, looked, lots):
    """An empty lot, and one of a single record."""
    seen, current = looked
    lots.update({0: 0, 1: 1, 3: 0})
    run = run_of(site, current)
    for _ in range(9):
        run.take_step()
    told = [step for step in steps_of(site, seen) if step not in (0, 1, 3)]
    assert told == [2, 4, 5, 6] if site == "collate_fn" else told == [2, 4]


@pytest.mark.rule(20)
@pytest.mark.parametrize("site", SITES)
def test_a_resumed_run_looks_at_its_first_two_steps_again(site, looked, lots):
    seen, current = looked
    run = run_of(site, current)
    for _ in range(5):
        run.take_step()
    state = run.state_dict()
    seen.clear()
    resumed = run_of(site, current)
    resumed.load_state_dict(state)
    resumed.go_to(5)
    for _ in range(6):
        resumed.take_step()
    assert steps_of(site, seen) == [5 + step for step in first_steps(site)]


@pytest.mark.rule(20)
@pytest.mark.parametrize("microbatch", [None, 3])
def test_a_loop_of_ones_own_is_looked_at_in_its_first_two_steps(microbatch, monkeypatch, lots):
    seen = []
    look = fodp.sources.examiner.Examiner._look

    def noted(self, *args):
        seen.append(self.looks.step)
        return look(self, *args)

    monkeypatch.setattr(fodp.sources.examiner.Examiner, "_look", noted)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = fodp.make_private(model, optimizer, DATA, plan(steps=5), microbatch=microbatch)
    lots.update({0: 0, 1: 1})
    for lot in loader:
        for x, y in [lot] if microbatch is None else lot:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert sorted({step for step in seen if step > 1}) == [2, 3]


@pytest.mark.rule(20)
def test_the_second_step_is_looked_at_by_the_trainer():
    """A loss that mixes examples from the second step on: the sum moved by 38 C."""

    def later(model, batch):
        x = batch[0] - batch[0].mean(0) if trainer.step else batch[0]
        return losses(model, (x, batch[1]))

    trainer = fodp.Trainer(network(), later, DATA, plan(steps=4))
    with pytest.raises(fodp.PrivacyError, match="mixes the examples of a lot"):
        trainer.fit()
    assert trainer.step == 2


@pytest.mark.rule(20)
def test_an_augmentation_that_mixes_from_the_second_step_on_is_refused():
    def later(batch):
        return (batch[0] - batch[0].mean(0) if run.number else batch[0]), batch[1]

    run = session(network(), losses, DATA, plan(), augment=later, microbatch=3)
    run.take_step()
    with pytest.raises(fodp.PrivacyError, match="augment makes other rows of a record alone than in its lot"):
        run.take_step()


@pytest.mark.rule(18)
def test_a_data_set_that_remembers_from_the_second_step_on_is_refused():
    class Counting(Records):
        count = 0

        def __getitem__(self, index):
            self.count += run.number > 0
            return DATA[0][index] + 1e-6 * self.count, DATA[1][index]

    run = session(network(), losses, Counting(), plan(), microbatch=3)
    run.take_step()
    with pytest.raises(fodp.DataError, match="remembers what it has read"):
        run.take_step()


@pytest.mark.rule(28)
@pytest.mark.parametrize("start", [0, 1])
def test_a_collate_function_that_remembers_is_refused(start):
    mean = torch.ones(4)

    def normalised(records):
        nonlocal mean
        x, y = collate(records)
        if run is None or run.number < start:
            return x, y
        mean = 0.9999 * mean + 1e-4 * x.mean(0)
        return x / mean, y

    run = None
    run = session(network(), losses, Records(), plan(), collate_fn=normalised)
    for _ in range(start):
        run.take_step()
    with pytest.raises(fodp.DataError, match="collate_fn made another batch of one record"):
        run.take_step()


@pytest.mark.rule(28)
def test_an_augmentation_that_remembers_slowly_is_refused():
    mean = torch.ones(4)

    def normalised(batch):
        nonlocal mean
        mean = 0.9999 * mean + 1e-4 * batch[0].mean(0)
        return batch[0] / mean, batch[1]

    with pytest.raises(fodp.PrivacyError, match="augment made different rows of one record"):
        session(network(), losses, DATA, plan(), augment=normalised).take_step()


def test_looks_without_steps_go_by_calls():
    looks = Looks()
    assert [looks.due(None) and (looks.told(None) or True) for _ in range(3)] == [True, True, False]
    assert looks.due(None, again=True)


def test_a_look_that_has_told_something_is_the_only_one_of_its_step():
    looks = Looks()
    assert looks.due(7)
    assert looks.due(7)
    looks.told(7)
    assert not looks.due(7, again=True)
    assert looks.due(8)


def test_rare_steps_are_the_same_for_all():
    rare = [step for step in range(5000) if is_rare(step)]
    assert 5 < len(rare) < 60
    assert 0 not in rare
