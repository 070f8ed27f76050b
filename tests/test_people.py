"""Plans whose unit is a person: lots of people, some records of each, one person moves a sum by at most C."""

import copy
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fodp
from fodp import PrivacyError
from fodp.lots.people import Owners, PeopleSampler
from fodp.methods import METHODS
from fodp.noise import Streams, keyed_from
from fodp.step import Step
from models_for_tests import clipped, gradients_by_hand
from people_for_tests import (
    CLIP,
    NAMES,
    OWNERS,
    SIZES,
    losses,
    network,
    people_plan,
    records,
    without,
)
from sessions_for_tests import session

ALLOWED = CLIP * (1 + 1e-4)  # rounding of whole sums


def run_of(model=None, data=None, owners=OWNERS, plan=None, loss_fn=losses, **options):
    model = network() if model is None else copy.deepcopy(model)
    with keyed_from(bytes(32)):
        return session(
            model, loss_fn, records() if data is None else data, plan or people_plan(), owners=owners, **options
        )


def by_person(lot):
    """The places of the records that a lot uses, by their owner's name."""
    used = {}
    for place in lot.indices.tolist():
        used.setdefault(OWNERS[place], []).append(place)
    return used


# --- lots ----------------------------------------------------------------------------------------------------


@pytest.mark.rule(1)
@pytest.mark.parametrize("most", [1, 3, 100])
def test_a_lot_has_at_most_so_many_records_of_each_of_its_people(most):
    sampler = PeopleSampler(Owners(OWNERS, len(OWNERS)), 0.5, most, Streams.seeded(0))
    for step in range(50):
        lot = sampler.draw(step)
        used = by_person(lot)
        assert lot.count == len(used)
        assert list(used) == list(dict.fromkeys(OWNERS[i] for i in lot.indices.tolist()))  # side by side
        for name, places in used.items():
            assert len(set(places)) == len(places) == min(most, NAMES.count(name))


def test_people_join_at_the_rate_and_their_records_are_used_alike():
    sampler, turns = PeopleSampler(Owners(OWNERS, len(OWNERS)), 0.3, 2, Streams.seeded(1)), 4000
    joined, used = dict.fromkeys(NAMES, 0), np.zeros(len(OWNERS))
    for step in range(turns):
        lot = sampler.draw(step)
        used[lot.indices.numpy()] += 1
        for name in by_person(lot):
            joined[name] += 1
    spread = np.sqrt(0.3 * 0.7 / turns)
    assert all(abs(count / turns - 0.3) < 5 * spread for count in joined.values())
    for place, name in enumerate(OWNERS):
        chance = 0.3 * min(1, 2 / NAMES.count(name))
        assert abs(used[place] / turns - chance) < 5 * np.sqrt(chance / turns)


@pytest.mark.rule(18)
@pytest.mark.parametrize("gone", ["person 0", "person 3", "person 9"])
def test_what_is_drawn_for_a_person_does_not_depend_on_the_others(gone):
    _, left = without(gone)
    everyone, fewer = (PeopleSampler(Owners(o, len(o)), 0.5, 2, Streams.seeded(2)) for o in (OWNERS, left))
    kept = [i for i, owner in enumerate(OWNERS) if owner != gone]
    for step in range(20):
        lot, less = everyone.draw(step), fewer.draw(step)
        there = torch.tensor([OWNERS[i] != gone for i in lot.indices.tolist()], dtype=torch.bool)
        assert lot.indices[there].tolist() == [kept[i] for i in less.indices.tolist()]
        assert torch.equal(lot.records[there], less.records)  # the numbers under which records draw


@pytest.mark.rule(18)
def test_the_order_of_people_in_the_data_changes_nothing_of_their_draws():
    lots = [PeopleSampler(Owners(o, len(o)), 0.5, 2, Streams.seeded(2)).draw(0) for o in (NAMES, NAMES[::-1])]
    joined = [{o[i] for i in lot.indices.tolist()} for o, lot in zip((NAMES, NAMES[::-1]), lots, strict=True)]
    assert joined[0] == joined[1]


def test_secure_lots_are_drawn_once():
    sampler = PeopleSampler(Owners(OWNERS, len(OWNERS)), 0.5, 2, Streams.secure())
    sampler.draw(0)
    with pytest.raises(PrivacyError, match="already drawn"):
        sampler.draw(0)


@pytest.mark.parametrize(
    "names",
    [list(range(4)), np.arange(4), torch.arange(4), [np.int32(i) for i in range(4)], np.arange(4, dtype=np.uint64)],
    ids=lambda names: type(names).__name__,
)
def test_whole_numbers_of_every_kind_are_the_same_names(names):
    assert np.array_equal(Owners(names, 4).blocks, Owners([0, 1, 2, 3], 4).blocks)


def test_texts_of_every_kind_are_the_same_names():
    assert np.array_equal(Owners(np.array(["a", "b"]), 2).blocks, Owners(["a", "b"], 2).blocks)
    assert not np.array_equal(Owners(["1"], 1).blocks, Owners([1], 1).blocks)


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([1, 2, 3], "one owner for each of the 4 records, got 3"),
        ([1, "a", 2, 3], "all of them texts"),
        ([1.0, 2.0, 3.0, 4.0], "Got float"),
        ([1, None, 2, 3], "a name of its own"),
        ([True, False, True, True], "Got bool"),
        ("abcd", "must be a list"),
        (7, "must be a list"),
        (np.zeros((4, 1), int), "Got list"),
    ],
)
def test_owners_that_are_no_names_are_refused(names, message):
    with pytest.raises(PrivacyError, match=message):
        Owners(names, 4)


@pytest.mark.rule(14)
def test_a_plan_for_people_takes_owners_and_a_plan_for_records_none():
    with pytest.raises(PrivacyError, match="give owners"):
        run_of(owners=None)
    record = people_plan(unit="record", records_per_person=None)
    with pytest.raises(PrivacyError, match="the plan's unit is a record"):
        run_of(plan=record)


# --- one person moves the sum by at most C ---------------------------------------------------------------------


def by_hand(model, lot, plan):
    """The sum of a lot's people, each clipped as one: no part of fodp's clipping is used."""
    data, total = records(torch.float64), 0
    twin = copy.deepcopy(model).double()
    for places in by_person(lot).values():
        rows = gradients_by_hand(twin, losses, tuple(column[places] for column in data.tensors))
        one = rows.sum(0) if plan.person_gradient == "sum" else rows.mean(0)
        total = total + clipped(one[None], plan.clip_norm)[0]
    return total


@pytest.mark.rule(4)
@pytest.mark.parametrize("person_gradient", ["mean", "sum"])
@pytest.mark.parametrize("options", [dict(), dict(engine="loop"), dict(microbatch=1), dict(microbatch=5)], ids=str)
@pytest.mark.parametrize("clip_norm", [1.0, 0.1, 100.0])
def test_a_sum_is_that_of_people_clipped_one_by_one(person_gradient, options, clip_norm):
    plan = people_plan(person_gradient=person_gradient, clip_norm=clip_norm)
    run = run_of(plan=plan, **options)
    step = Step(run, 0)
    lot = step.draw()
    found = step.gradients(lot).clipped_sum(clip_norm)
    assert found.bound == clip_norm
    assert len(by_person(lot)) > 2
    assert torch.allclose(found.value.double(), by_hand(network(), lot, plan), atol=2e-5 * clip_norm)


GONE = [f"person {i}" for i, size in enumerate(SIZES) if size in (1, 4, 7)]


def moved(gone, plan=None, model=None, **options):
    """How far the first step's sum moves, in C, when a person with all of their records is taken away."""
    data, left = without(gone)
    plan = plan or people_plan(sampling_rate=1.0, records_per_person=3)
    whole = run_of(model, plan=plan, **options).take_step()
    less = run_of(model, data=data, owners=left, plan=plan, **options).take_step()
    return ((whole - less).norm() / plan.clip_norm).item()


@pytest.mark.rule(18)
@pytest.mark.filterwarnings("ignore:per-example gradients")
@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("person_gradient", ["mean", "sum"])
@pytest.mark.parametrize("options", [dict(), dict(engine="loop"), dict(microbatch=4)], ids=str)
def test_a_person_moves_the_sum_by_at_most_c(gone, person_gradient, options):
    """With a model that draws: what others draw must not change."""
    plan = people_plan(sampling_rate=1.0, clip_norm=0.05, person_gradient=person_gradient)
    assert 0.01 < moved(gone, plan, network(nn.Dropout(0.5)), **options) <= ALLOWED


def jitter(batch):
    return batch[0] + torch.randn_like(batch[0]), batch[1]


@pytest.mark.rule(18)
@pytest.mark.parametrize("copies", [1, 3])
def test_a_person_moves_the_sum_of_an_augmented_lot_by_at_most_c(copies):
    plan = people_plan(sampling_rate=1.0, clip_norm=0.05)
    model = network(nn.Dropout(0.5))
    assert 0.01 < moved(GONE[1], plan, model, augment=jitter, copies=copies) <= ALLOWED
    sums = [
        run_of(model, plan=plan, augment=jitter, copies=copies, **o).take_step()
        for o in (dict(), dict(microbatch=2), dict(engine="loop"))
    ]
    assert torch.allclose(sums[0], sums[1], atol=1e-6)
    assert torch.allclose(sums[0], sums[2], atol=1e-6)


@pytest.mark.parametrize("person_gradient", ["mean", "sum"])
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_copies_are_averaged_within_a_record(person_gradient, engine):
    """Copies of a record that are all the same are that record, also where records are summed."""
    plan = people_plan(person_gradient=person_gradient)
    once, thrice = (run_of(plan=plan, copies=copies, engine=engine).take_step() for copies in (1, 3))
    assert torch.allclose(once, thrice, atol=1e-5)


@pytest.mark.rule(2)
def test_an_empty_lot_is_noise_alone():
    plan = people_plan(sampling_rate=1e-9, noise_multiplier=1.0)
    assert run_of(plan=plan).take_step().std() > 0.5


@pytest.mark.rule(5)
def test_a_person_with_a_record_that_is_not_finite_contributes_nothing():
    data, name = records(), GONE[1]
    data.tensors[0][OWNERS.index(name)] = float("nan")
    plan = people_plan(sampling_rate=1.0, records_per_person=100)
    gone, left = without(name)
    whole, less = run_of(data=data, plan=plan).take_step(), run_of(data=gone, owners=left, plan=plan).take_step()
    assert torch.allclose(whole, less, atol=1e-5)


# --- records of one person may know of each other, those of two may not ------------------------------------------


def centred(model, batch):
    """A loss that compares each record with the mean of its person's records."""
    x, y, owner = batch
    same = (owner[:, None] == owner).float()
    return losses(model, (x - same @ x / same.sum(1, keepdim=True), y))


def numbered():
    numbers = torch.tensor([int(name.split()[1]) for name in OWNERS])
    return TensorDataset(*records().tensors, numbers)


@pytest.mark.rule(20)
def test_a_loss_may_mix_the_records_of_one_person():
    plan = people_plan(sampling_rate=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = run_of(data=numbered(), plan=plan, loss_fn=centred)
        found = fast.take_step()
    assert fast.source.engine.path == "layers"
    assert torch.allclose(
        found, run_of(data=numbered(), plan=plan, loss_fn=centred, engine="loop").take_step(), atol=1e-5
    )


@pytest.mark.rule(20)
def test_a_loss_that_mixes_people_takes_the_loop():
    def mixed(model, batch):
        return losses(model, (batch[0] - batch[0].mean(0), batch[1]))

    run = run_of(plan=people_plan(sampling_rate=1.0), loss_fn=mixed)
    with pytest.warns(UserWarning, match="one example at a time"):
        run.take_step()
    assert run.source.engine.path == "loop"


# --- every method ------------------------------------------------------------------------------------------------


def trainer_of(method, steps=4, **options):
    plan = people_plan(method=method, noise_multiplier=1.0, steps=steps, seed=7, **options)
    return fodp.Trainer(
        network(), losses, records(), plan, owners=OWNERS,
        public_score=(lambda: 1.0) if plan.algorithm.has_acceptance_test else None,
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_people_and_resumes_bit_for_bit(method, tmp_path):
    whole = trainer_of(method)
    assert whole.fit().reason == "finished"
    first, second = trainer_of(method), trainer_of(method)
    first.course.last_step = 2
    first.fit()
    first.save(tmp_path / "half.pt")
    second.resume(tmp_path / "half.pt")
    second.fit()
    assert torch.equal(whole.session.parameters(), second.session.parameters())


def test_ascent_is_taken_by_person():
    plan = people_plan(method="dp-sam", params=dict(rho=0.5), sampling_rate=1.0)
    sums = [run_of(plan=plan, **o).take_step() for o in (dict(), dict(microbatch=2), dict(engine="loop"))]
    assert torch.allclose(sums[0], sums[1], atol=1e-5)
    assert torch.allclose(sums[0], sums[2], atol=1e-5)


@pytest.mark.rule(11)
def test_a_checkpoint_of_people_is_not_gone_on_with_for_records(tmp_path):
    first = trainer_of("dp-sgd")
    first.course.last_step = 2
    first.fit()
    first.save(tmp_path / "half.pt")
    plan = people_plan(noise_multiplier=1.0, steps=4, seed=7, unit="record", records_per_person=None)
    with pytest.raises(PrivacyError, match=r"another plan: (person_gradient|records_per_person|unit)"):
        fodp.Trainer(network(), losses, records(), plan).resume(tmp_path / "half.pt")


def test_a_loop_of_ones_own_refuses_people():
    model = network()
    with pytest.raises(PrivacyError, match="a loop of your own do not go together"):
        fodp.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), records(), people_plan())


# --- words -------------------------------------------------------------------------------------------------------


@pytest.mark.rule(12)
def test_the_statement_and_the_card_say_who_is_protected():
    trainer = trainer_of("dp-sgd")
    assert "one person with all of their records is added or removed" in trainer.statement()
    assert "at most 3 of their records, drawn at random" in trainer.statement()
    assert "example" not in trainer.statement()
    card = trainer.privacy_card()
    assert card["unit"] == "one person with all of their records, added or removed"
    assert card["records_per_person"] == 3
    assert "person" not in str(people_plan(unit="record", records_per_person=None).to_dict())


def test_a_plan_of_people_goes_through_a_dictionary():
    plan = people_plan(person_gradient="sum")
    assert fodp.Plan(**plan.to_dict()) == plan
    assert "unit='person'" in repr(plan)


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(records_per_person=None), "needs records_per_person"),
        (dict(records_per_person=0), "records_per_person must be a whole number of at least 1"),
        (dict(records_per_person=2.5), "records_per_person must be a whole number"),
        (dict(unit="household"), "unit must be one of record, person"),
        (dict(unit="record"), "add unit='person'"),
        (dict(person_gradient="median"), "person_gradient must be one of mean, sum"),
    ],
)
def test_a_plan_with_half_a_unit_is_refused(changes, message):
    with pytest.raises(PrivacyError, match=message):
        people_plan(**changes)


def test_epsilon_does_not_depend_on_how_many_records_are_used():
    assert people_plan(records_per_person=1).epsilon() == people_plan(records_per_person=50).epsilon()


# --- ledgers -------------------------------------------------------------------------------------------------------


def spent(tmp_path, unit, name="data"):
    people = (
        dict(unit="person", records_per_person=3) if unit == "person" else dict(unit="record", records_per_person=None)
    )
    ledger = fodp.Ledger(tmp_path / "ledger.db", dataset=name, budget=(50.0, 1e-5), allow_other_name=True)
    plan = people_plan(noise_multiplier=1.0, **people)
    owners = OWNERS if unit == "person" else None
    fodp.Trainer(network(), losses, records(), plan, ledger=ledger, owners=owners).fit()
    return ledger


@pytest.mark.rule(17)
@pytest.mark.parametrize(("first", "second"), [("person", "record"), ("record", "person")])
def test_a_ledger_does_not_add_people_and_records(first, second, tmp_path):
    spent(tmp_path, first)
    with pytest.raises(PrivacyError, match=f"is about a {first}, and the unit of this run is a {second}"):
        spent(tmp_path, second)
    spent(tmp_path, second, name="data, the other unit")
    assert spent(tmp_path, first).unit("data") == first


def test_a_selection_is_about_one_unit_too(tmp_path):
    from fodp.accounting.budget import Repetitions

    ledger, phases = spent(tmp_path, "person"), people_plan(noise_multiplier=5.0).events()
    ledger.charge_selection(phases, Repetitions(2), unit="person")
    with pytest.raises(PrivacyError, match="is about a person, and the unit of this run is a record"):
        ledger.charge_selection(phases, Repetitions(2))


def test_the_card_of_a_ledger_says_who_is_protected(tmp_path):
    from fodp.ledger.card import card, faults, summary

    ledger = spent(tmp_path, "person")
    (record,) = summary(ledger, "data")
    assert record["unit"] == "person"
    assert "one person with all of their records is added or removed" in card(record)
    assert "people with several examples" not in card(record)
    assert faults(ledger) == []


def test_the_table_of_what_m_costs_is_its_formula():
    people = [1] * 5 + [5] * 4 + [100]
    several = [n for n in people if n > 1]
    page = (Path(__file__).parent.parent / "docs" / "people.md").read_text(encoding="utf-8")
    for m in (1, 2, 4, 8, 16):
        used = sum(min(m, n) for n in people)
        spread = math.sqrt(sum(max(0.0, (n - m) / (m * (n - 1))) for n in several) / len(several))
        assert f"| {m} | {10 * used} | {used / sum(people):.2f} | {spread:.2f} |" in page
