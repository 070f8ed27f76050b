"""Audits of plans whose unit is a person: people are added and removed, and mistakes with them are found."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fodp
from fodp import audit
from fodp.clipping import chunks, engine
from fodp.lots import people
from fodp.methods import METHODS
from people_for_tests import OWNERS, losses, network, people_plan, records


@pytest.fixture(scope="module")
def plan() -> fodp.Plan:
    return people_plan(noise_multiplier=2.0, steps=6, sampling_rate=0.3, seed=0, person_gradient="sum", clip_norm=0.1)


@pytest.mark.rule(8)
@pytest.mark.parametrize("secure", [False, True])
def test_a_correct_pipeline_is_consistent(plan, secure):
    replayed = audit.replay_neighbours(plan, network(), losses, records(), secure=secure, steps=3)
    assert replayed.consistent, replayed.faults
    assert replayed.numbers["worst_ratio"] > 0.9


@pytest.mark.rule(18)
@pytest.mark.parametrize("method", METHODS)
def test_a_person_moves_the_queries_of_every_method_by_at_most_their_bound(method):
    tried = people_plan(method=method, noise_multiplier=2.0, steps=2, seed=0, person_gradient="sum", clip_norm=0.1)
    found = audit.replay_neighbours(tried, network(), losses, records(), secure=False, steps=2)
    assert found.consistent, found.faults


@pytest.mark.rule(8)
def test_lots_of_people_are_poisson_lots(plan):
    assert audit.check_sampling(plan, steps=60).consistent


def test_painted_gradients_of_people_show_no_more_than_promised(plan):
    assert audit.attack_mechanism(plan, trials=640).consistent


def test_canaries_are_people(plan):
    canaries = audit.random_canaries(records(), 40, classes=2)
    found = audit.attack_training(plan, network(), losses, records(), canaries, owners=OWNERS, looks=2)
    assert found.consistent


@pytest.mark.rule(18)
@pytest.mark.filterwarnings("ignore:per-example gradients")
def test_records_that_are_clipped_before_they_are_summed_are_found(plan, monkeypatch):
    for module in (engine, chunks):
        monkeypatch.setattr(module, "sizes_of", lambda batch: None)
    found = audit.replay_neighbours(plan, network(), losses, records(), secure=False, steps=2)
    assert any("declared bound" in fault for fault in found.faults)


@pytest.mark.rule(18)
def test_draws_that_depend_on_other_people_are_found(plan, monkeypatch):
    def by_place(self, *names):
        original(self, *names)
        self.blocks = np.arange(2 * self.count, dtype="<u8").reshape(-1, 2).view(np.uint8)

    original = people.Owners.__init__
    monkeypatch.setattr(people.Owners, "__init__", by_place)
    found = audit.replay_neighbours(plan, network(), losses, records(), secure=True, steps=2)
    assert any("declared bound" in fault for fault in found.faults)


def test_a_pipeline_of_ones_own_is_given_the_owners(plan):
    given = []

    def make(model, loss_fn, dataset, plan, owners):
        given.append((len(dataset), len(owners)))
        return fodp.Trainer(model, loss_fn, dataset, plan, owners=owners)

    data = TensorDataset(torch.randn(30, 6), torch.randint(2, (30,)))
    assert audit.replay_neighbours(plan, network(), losses, data, make, secure=False, steps=1).consistent
    assert (24, 24) in given
    assert (22, 22) in given  # without a person with two records
