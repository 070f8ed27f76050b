"""Models that FSDP2 has divided: real processes over gloo hold slices, and train as one process with all of it does."""

import math
import pickle

import pytest
import torch
from torch.utils.data import TensorDataset

import fodp
from fodp.ledger import Ledger
from fodp.methods import METHODS
from fodp.testing import PARTS
from fodp.training.callbacks import Callback, Checkpoint, Evaluate, WeightAverage
from methods_for_tests import StopAfter, data, flat, losses, network, plan, trainer
from ranks_for_tests import in_ranks

NUMBERS = 5 * 8 + 8 + 8 * 3 + 3
FEW = [
    ("fo-dp-sgd", dict(window=4)),
    ("fo-dp-sgd", dict(quantile=0.5, count_noise=20.0, shape="fan-in", width=4.0)),
    ("dp-sat", {}),
    ("fo-noise", dict(bands=3)),
    ("sa-dpsgd", dict(momentum=0.9)),
]
VARIANTS = [
    *((name, {}) for name in METHODS),
    *FEW,
    ("dp-sgd", dict(PARTS)),
    ("dp-sgd", dict(filter="fractional", clip="per-layer")),
    ("dp-sgd", dict(shape="fan-in", width=4.0, update="adamwbc", lr=0.01)),
    ("dp-sgd", dict(shape="fan-in", width=4.0, lr="auto")),
    ("dp-sam", dict(variant="per-example")),
    ("fo-dp-sgd", dict(tau=0.0, window=60, lam=0.2, compact="exponentials")),
    ("fo-dp-sgd", dict(compact="bfloat16", window=4)),
    ("disk", dict(clip="normalised", noise_schedule=((0, 2.0), (2, 1.0)))),
]


def sharded(dtype=torch.float64, by_layer=True):
    from torch.distributed.fsdp import fully_shard

    model = network(dtype)
    if by_layer:
        fully_shard(model[0])
    return fully_shard(model)


def whole(training):
    with training.run.whole():
        return flat(training.model)


def vectors(state):
    """All flat tensors of a state."""
    if isinstance(state, dict | list | tuple):
        return [v for part in (state.values() if isinstance(state, dict) else state) for v in vectors(part)]
    return [state] if isinstance(state, torch.Tensor) and state.dim() else []


def outcome(method, params, model=None, **options):
    training = trainer(plan(method, params, steps=4), model, **options)
    result = training.fit()
    return whole(training), result.epsilon, result.steps, training.run.noise_variance(), training


@pytest.mark.parametrize(("count", "variants"), [(2, VARIANTS), (3, FEW)])
def test_every_method_is_the_same_in_slices(count, variants):
    alone = [outcome(*variant) for variant in variants]

    def work(rank):
        found = []
        for method, params in variants:
            *numbers, training = outcome(method, params, sharded())
            run, size = training.run, training.run.size
            kept = vectors(run.state_dict(views=True)) + (list(run._correlated._past) if run._correlated else [])
            assert all(vector.shape == (size,) for vector in kept), method  # only slices are remembered
            if method.startswith("fo-") and run.state.__class__.__name__ == "FractionalMemory":
                assert run.state._table.shape[1] == size
            held = [v for state in training.optimizer.state.values() for v in state.values() if hasattr(v, "to_local")]
            assert all(v.to_local().numel() < NUMBERS // count + 8 for v in held)
            assert not any(type(p).__name__ != "DTensor" for p in training.model.parameters())
            found.append((*numbers, size))
        return found

    everywhere = in_ranks(count, work)
    for found in everywhere:
        assert isinstance(found, list), found
        for (method, params), one, many, first in zip(variants, alone, found, everywhere[0], strict=True):
            torch.testing.assert_close(many[0], one[0], rtol=1e-9, atol=1e-11, msg=f"{method} {params}")
            assert many[1] == first[1] == one[1]  # ε
            assert many[2] == one[2]
            assert many[3] == pytest.approx(one[3], rel=1e-9), method  # of weights by distances, whose last bits differ
            assert torch.equal(many[0], first[0])
    assert sum(found[0][4] for found in everywhere) == NUMBERS
