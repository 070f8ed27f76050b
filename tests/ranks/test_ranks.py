"""Two and three real processes over gloo train one model: as one process does, and with one release."""

import math
from unittest import mock

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import fodp
from fodp.methods import METHODS
from fodp.options import rate_rules
from fodp.processes import ALONE
from fodp.ranks import here
from fodp.release import FreshNoise
from fodp.step import Step
from fodp.testing import PARTS
from methods_for_tests import data, flat, losses, network, plan, trainer
from ranks_for_tests import in_ranks

FEW = [
    ("dp-sgd", dict(PARTS)),
    ("fo-dp-sgd", dict(quantile=0.5, count_noise=20.0)),
    ("dp-is", {}),
    ("dp-sam", {}),
    ("sa-dpsgd", {}),
]
VARIANTS = [
    *((name, {}) for name in METHODS), *FEW[:2],
    ("dp-sgd", dict(average="ema", average_decay=0.5)), ("fo-noise", dict(bands=2, average="tail", average_share=0.5)),
]  # fmt: skip


def outcome(method, params, **options):
    training = trainer(plan(method, params, steps=4), **options)
    result = training.fit()
    state = [
        v.detach().clone()
        for v in training.session.states["method"].state_dict().values()
        if isinstance(v, torch.Tensor)
    ]
    return flat(training.model), result.epsilon, result.steps, training.session.noise_variance(), state


@pytest.mark.parametrize(("count", "variants"), [(2, VARIANTS), (3, FEW)])
def test_every_method_is_the_same_on_one_two_and_three_ranks(count, variants):
    alone = [outcome(*variant) for variant in variants]
    everywhere = in_ranks(count, lambda rank: [outcome(*variant) for variant in variants])
    for rank, found in enumerate(everywhere):
        assert isinstance(found, list), found
        for (method, _), one, many, first in zip(variants, alone, found, everywhere[0], strict=True):
            torch.testing.assert_close(many[0], one[0], rtol=1e-9, atol=1e-11, msg=f"{method}, rank {rank}")
            assert many[1:4] == first[1:4] == one[1:4], method  # ε, steps, variance of the noise
            assert torch.equal(many[0], first[0])
            assert all(map(torch.equal, many[4], first[4]))


@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd"])
def test_a_rate_that_follows_releases_is_the_same_on_all_ranks(method, monkeypatch):
    def rates(_):
        monkeypatch.setattr(rate_rules, "_CHANCE", 0.0)  # so that few steps move it
        training = trainer(plan(method, dict(rate_rule="transcript"), steps=6))
        training.fit()
        return training.optimizer.param_groups[0]["lr"] / training.learning_rate, flat(training.model)

    alone = rates(0)
    for factor, reached in (everywhere := in_ranks(2, rates)):
        assert factor == pytest.approx(alone[0])
        assert factor != 1
        assert torch.equal(reached, everywhere[0][1])


def test_microbatches_exact_noise_dropout_copies_and_other_data_sets():
    inputs, labels = data().tensors

    class Records(torch.utils.data.Dataset):
        def __len__(self):
            return len(inputs)

        def __getitem__(self, index):
            return inputs[index] + torch.randn(5, dtype=torch.float64), labels[index]

    def points():
        dropped = torch.nn.Sequential(network(), torch.nn.Dropout(0.3))
        found = []
        for options in (
            dict(model=dropped, microbatch=2),
            dict(dataset=Records()),
            dict(dataset=Subset(Records(), range(3, 20))),
            dict(augment=lambda batch: (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]), copies=2),
        ):
            training = trainer(plan("dp-sgd", steps=2), **options)
            training.fit()
            found.append(flat(training.model))
        exact = trainer(plan("fo-dp-sgd", steps=2, exact_noise=True))
        exact.fit()
        return [*found, flat(exact.model)]

    alone = points()
    for found in in_ranks(2, lambda rank: points()):
        for one, many in zip(alone, found, strict=True):
            torch.testing.assert_close(many, one, rtol=1e-6, atol=1e-9)  # on a grid a last bit may be a whole cell


def test_one_release_has_the_noise_of_one_process_whatever_the_number_of_ranks():
    """No record is finite and contributes, so releases are noise: of σC, not of √R·σC, and the same everywhere."""
    inputs, labels = data().tensors
    silent = TensorDataset(inputs * math.nan, labels)

    def releases(rank):
        model = torch.nn.Linear(5, 4000).double()
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        run = trainer(plan("dp-sgd", seed=None, noise_multiplier=2.0, clip_norm=0.5), model, silent).session
        keys = run.streams._key, run.noise.noise.source._key
        return [run.take_step() for _ in range(2)], keys

    for count in (2, 3):
        everywhere = in_ranks(count, releases)
        shared = {keys[0] for _, keys in everywhere}
        assert len(shared) == 1  # one key for lots, ...
        assert everywhere[0][1][1] not in shared  # ... another for the noise, which the others do not know
        assert all(keys[1] != everywhere[0][1][1] for _, keys in everywhere[1:])
        first, second = everywhere[0][0]
        assert all(torch.equal(found[0], first) and torch.equal(found[1], second) for found, _ in everywhere)
        assert not torch.equal(first, second)
        assert first.std().item() == pytest.approx(1.0, abs=0.03)  # of 24,000: 6 standard errors


def queries(dataset):
    """What the first rank adds noise to, in the first step; the records in all ranks' lots."""
    run = trainer(plan("dp-sgd", clip_norm=0.5), dataset=dataset).session
    seen, lots = [], []
    add = FreshNoise.add

    class Watched(Step):
        def draw(self, *rest):
            lots.append(super().draw(*rest))
            return lots[-1]

    def watched(noise, query, *rest):
        seen.append(query.value.clone())
        return add(noise, query, *rest)

    run.steps_by(Watched)
    with mock.patch.object(FreshNoise, "add", watched):
        run.take_step()
    return seen, [lot.indices.tolist() for lot in lots], lots[0].count


def test_one_record_moves_the_sum_by_at_most_its_bound_and_has_one_owner():
    """A record that is not finite contributes nothing, as if it were not there, and nobody else's place changes."""
    _, ((*whole_lot,),), _ = queries(data())
    inputs, labels = data().tensors

    def without(record):
        changed = inputs.clone()
        changed[record] = math.nan
        return TensorDataset(changed, labels)

    some = whole_lot[:4]
    huge = inputs.clone()
    huge[whole_lot[0]] *= 1e6
    big = TensorDataset(huge, labels)

    def sums(rank):
        return queries(big), [queries(without(record)) for record in some]

    everywhere = in_ranks(3, sums)
    owners = [set(found[0][1][0]) for found in everywhere]
    assert sorted(set.union(*owners)) == sorted(whole_lot)
    assert sum(map(len, owners)) == len(whole_lot) == everywhere[1][0][2]
    assert all(found[0][0] == [] for found in everywhere[1:])  # noise is added on the first rank alone
    ordinary = in_ranks(3, lambda rank: queries(data()))[0][0][0]
    torch.testing.assert_close(ordinary, queries(data())[0][0], rtol=1e-12, atol=1e-14)
    for place, (values, _, _) in enumerate(everywhere[0][1]):
        moved = (values[0] - ordinary).norm().item()
        assert 0 < moved <= 0.5 * (1 + 1e-9), place
    moved = (everywhere[0][0][0][0] - everywhere[0][1][0][0][0]).norm().item()
    assert moved == pytest.approx(0.5, rel=1e-6)  # the huge one, against none


def test_a_loop_of_ones_own():
    def loop(rank=0):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = fodp.make_private(model, optimizer, data(), plan("fo-dp-sgd", steps=4))
        for batch in loader:
            optimizer.zero_grad()
            if len(batch[0]):
                losses(model, batch).mean().backward()
            optimizer.step()
        return flat(model), loader.epsilon()

    one = loop()
    for weights, epsilon in in_ranks(3, loop):
        torch.testing.assert_close(weights, one[0], rtol=1e-9, atol=1e-11)
        assert epsilon == one[1]


def test_resuming_with_two_then_three_then_one(tmp_path):
    from fodp.callbacks import Checkpoint
    from fodp.ledger import Ledger
    from methods_for_tests import StopAfter

    the_plan = plan("fo-dp-sgd", dict(quantile=0.5, count_noise=20.0))
    straight = trainer(the_plan)
    straight.fit()

    def go_on(rank=0, until=99):
        callbacks = [StopAfter(until), Checkpoint(tmp_path / "c.pt")]
        training = trainer(the_plan, callbacks=callbacks, ledger=lambda: Ledger(tmp_path / "l.sqlite"), run_id="run")
        if until > 3:
            training.resume(tmp_path / "c.pt")
        return training.fit().reason, training.step, flat(training.model)

    assert [found[:2] for found in in_ranks(2, lambda rank: go_on(rank, 3))] == [("interrupted", 3)] * 2
    assert [found[:2] for found in in_ranks(3, lambda rank: go_on(rank, 6))] == [("interrupted", 6)] * 3
    reason, steps, weights = go_on()
    assert (reason, steps) == ("finished", 8)
    torch.testing.assert_close(weights, flat(straight.model), rtol=1e-9, atol=1e-11)
    ledger = Ledger(tmp_path / "l.sqlite")
    kinds = [row.kind for row in ledger.store.select()]
    assert [kinds.count(kind) for kind in ("run", "resume", "settle")] == [1, 2, 3]  # once, not once a rank
    assert ledger.steps("run") == 8


def test_alone_without_a_group():
    assert here() is ALONE


def test_torchrun_without_a_group_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(fodp.ConfigurationError, match="no process group"):
        trainer(plan("dp-sgd"))


def test_a_run_made_before_its_group_is_refused():
    """It would release on each rank by itself, and state the epsilon of one release."""
    early = trainer(plan("dp-sgd"))
    said = in_ranks(2, lambda rank: early.fit())
    assert [kind for kind, _ in said] == ["ConfigurationError"] * 2
    assert "begun or ended after this run was made" in said[0][1]


@pytest.mark.rule(3)
def test_people_are_refused_whose_records_would_be_clipped_on_each_rank():
    def people(rank):
        the_plan = plan("dp-sgd", unit="person", records_per_person=2)
        trainer(the_plan, owners=torch.arange(len(data())) // 2)

    said = in_ranks(2, people)
    assert said[0] == said[1] == ("ConfigurationError", said[0][1])
    assert "the records of a person would be clipped on each" in said[0][1]


def test_models_that_sum_gradients_themselves_are_refused():
    def wrapped(rank):
        with pytest.raises(fodp.ConfigurationError, match=r"give the plain model"):
            trainer(plan("dp-sgd"), torch.nn.parallel.DistributedDataParallel(network()))
        return "refused"

    assert in_ranks(2, wrapped) == ["refused"] * 2


def test_audits_are_for_one_process():
    from fodp.audit.tape import record

    found = in_ranks(2, lambda rank: record(trainer(plan("dp-sgd"))))
    assert all(kind == "ConfigurationError" and "an audit is for one process" in text for kind, text in found)
