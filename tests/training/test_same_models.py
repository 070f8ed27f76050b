"""One engine for both: `make_private` takes the models that the Trainer takes without its loop, and trains the same."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

import fodp
from fodp.own_loop import make_private
from models_for_tests import FAST, LAYERS, LOOPED, build, probe

COUNT = 5
# One row for each kind of layer: the rules are the Trainer's, and its tests have all rows.
ONE_OF_EACH = list({name.partition("-")[0]: name for name in LAYERS}.values())
PLAN = fodp.Plan(
    sampling_rate=1.0,
    steps=1,
    lot_size=COUNT,
    clip_norm=1.0,
    noise_multiplier=1e-3,
    delta=1e-5,
    method="dp-sgd",
    seed=0,
)


def optimizer_of(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def by_the_trainer(table, name):
    model, x = build(table, name, COUNT, torch.float64)
    trainer = fodp.Trainer(model, probe, (x,), PLAN, optimizer_of(model))
    for _ in range(PLAN.steps):
        trainer.take_step()  # without an ε, which such little noise would make slow
    return parameters_to_vector(model.parameters()).detach()


def by_a_loop(table, name, **options):
    model, x = build(table, name, COUNT, torch.float64)
    model, optimizer, loader = make_private(model, optimizer_of(model), (x,), PLAN, **options)
    for lot in loader:
        for batch in lot if options else [lot]:
            probe(model, batch).mean().backward()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


@pytest.mark.rule(4)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [*ONE_OF_EACH, *FAST])
def test_the_same_models_train_the_same_in_a_loop_of_ones_own(name):
    table = LAYERS if name in LAYERS else FAST
    assert torch.allclose(by_a_loop(table, name), by_the_trainer(table, name), atol=1e-7)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", ["conv2d", "embedding", "gru", "attention", "tied-embedding-linear", "rms-norm"])
def test_the_same_models_train_in_parts(name):
    table = LAYERS if name in LAYERS else FAST
    assert torch.allclose(by_a_loop(table, name, microbatch=2), by_the_trainer(table, name), atol=1e-7)


@pytest.mark.rule(20)
@pytest.mark.parametrize("name", sorted(LOOPED))
def test_what_takes_the_trainers_loop_is_refused_with_its_name(name):
    with pytest.raises(fodp.ConfigurationError, match=r"fodp\.Trainer"):
        by_a_loop(LOOPED, name)
