"""Rules for layers of one's own: they act in the Trainer and in make_private, and wrong ones are caught."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp.clipping.engine import Engine
from fodp.clipping.layers.rules import RULES
from fodp.clipping.layers.uses import Product
from fodp.trainer import Trainer
from methods_for_tests import data, losses, plan
from models_for_tests import clipped, gradients_by_hand


class Scale(nn.Module):
    """A factor for every feature."""

    def __init__(self, features):
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, features))
        self.shift = nn.Parameter(torch.zeros(features))

    def forward(self, inputs):
        return inputs * self.factor + self.shift


class LoudScale(Scale):
    """Not what the rule of Scale is for."""

    def forward(self, inputs):
        return 3 * super().forward(inputs)


def right(layer, inputs, back):
    return {"factor": inputs * back, "shift": back}


def network(kind=Scale):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), kind(8), nn.Linear(8, 3)).double()


@pytest.fixture(autouse=True)
def rules_as_they_were():
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.mark.rule(4)
def test_a_rule_gives_the_gradients_of_the_loop_and_is_what_the_engine_takes():
    called = []
    fodp.register_rule(Scale, lambda *given: called.append(1) or right(*given))
    batch = data().tensors
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fodp.clipped_sum(network(), losses, batch, 0.5)
    assert called
    expected = clipped(gradients_by_hand(network(), losses, batch), 0.5).sum(0)
    torch.testing.assert_close(found, expected)


def test_the_trainer_takes_it():
    fodp.register_rule(Scale, right)
    trained, slow = network(), network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(trained, losses, data(), plan("dp-sgd")).fit()
    Trainer(slow, losses, data(), plan("dp-sgd"), engine="loop").fit()
    for mine, reference in zip(trained.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(mine, reference)


def loop_of_ones_own(kind=Scale):
    model = network(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = fodp.make_private(model, optimizer, data(), plan("dp-sgd"))
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def test_make_private_takes_it():
    fodp.register_rule(Scale, right)
    mine, reference = loop_of_ones_own(), network()
    Trainer(reference, losses, data(), plan("dp-sgd", dict(lr=0.1))).fit()
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Bare(nn.Module):
    """Without a rule: functions are watched because of it."""

    def __init__(self, features):
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(0, 1, features))

    def forward(self, inputs):
        return inputs + self.shift


def beside_a_layer_without_a_rule(kind=Scale):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), kind(8), Bare(8), nn.Linear(8, 3)).double()


@pytest.mark.rule(4)
def test_a_rule_is_taken_where_another_layer_has_none():
    called = []
    fodp.register_rule(Scale, lambda *given: called.append(1) or right(*given))
    model, batch = beside_a_layer_without_a_rule(), data().tensors
    clipper = fodp.Clipper(model, losses)
    found = clipper.clipped_sum(batch, 0.5)
    assert clipper.path == "functions"
    assert called
    torch.testing.assert_close(found, clipped(gradients_by_hand(model, losses, batch), 0.5).sum(0))


@pytest.mark.rule(4)
def test_a_wrong_rule_is_caught_there_too():
    fodp.register_rule(Scale, WRONG["half of it"])
    model, batch = beside_a_layer_without_a_rule(), data().tensors
    with pytest.warns(UserWarning, match="one example at a time"):
        found = fodp.clipped_sum(model, losses, batch, 0.5)
    torch.testing.assert_close(found, clipped(gradients_by_hand(model, losses, batch), 0.5).sum(0))


@pytest.mark.rule(4)
def test_a_layer_inside_one_with_a_rule_keeps_its_own_way():
    class Outer(nn.Module):
        """Holds a factor itself, and a layer without a rule."""

        def __init__(self):
            super().__init__()
            self.factor, self.inner = nn.Parameter(torch.linspace(0.5, 1.5, 8)), Bare(8)

        def forward(self, inputs):
            return self.inner(inputs) * self.factor

    fodp.register_rule(Outer, lambda layer, inputs, back: {"factor": layer.inner(inputs).detach() * back})
    torch.manual_seed(1)
    model, batch = nn.Sequential(nn.Linear(5, 8), Outer(), nn.Linear(8, 3)).double(), data().tensors
    clipper = fodp.Clipper(model, losses)
    found = clipper.clipped_sum(batch, 0.5)
    assert clipper.path == "functions"
    torch.testing.assert_close(found, clipped(gradients_by_hand(model, losses, batch), 0.5).sum(0))


WRONG = {
    "half of it": lambda layer, inputs, back: {"factor": inputs * back / 2, "shift": back},
    "of the mean": lambda layer, inputs, back: {"factor": inputs.mean(0) * back, "shift": back},
    "of nothing": lambda layer, inputs, back: {"factor": 0 * back, "shift": back},
}


@pytest.mark.rule(4)
@pytest.mark.parametrize("rule", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_rule_is_caught(rule):
    fodp.register_rule(Scale, rule)
    trained, slow = network(), network()
    with pytest.warns(UserWarning, match="one example at a time"):
        Trainer(trained, losses, data(), plan("dp-sgd")).fit()
    Trainer(slow, losses, data(), plan("dp-sgd"), engine="loop").fit()
    for mine, reference in zip(trained.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(mine, reference)
    with pytest.raises(fodp.PrivacyError, match="keep the examples of a lot apart"):
        loop_of_ones_own()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda layer, inputs, back: {"factor": inputs * back}, "gradients of factor, shift by name, got factor"),
        (lambda layer, inputs, back: {**right(layer, inputs, back), "weight": back}, "got factor, shift, weight"),
        (lambda layer, inputs, back: {"factor": (inputs * back).sum(0), "shift": back}, "one gradient of factor"),
        (lambda layer, inputs, back: inputs * back, "by name, got Tensor"),
    ],
)
def test_a_rule_of_another_form_is_refused(rule, message):
    fodp.register_rule(Scale, rule)
    with pytest.raises(fodp.ConfigurationError, match=message):
        fodp.clipped_sum(network(), losses, data().tensors, 0.5)


def test_it_holds_for_exactly_the_type():
    fodp.register_rule(Scale, right)
    batch = data().tensors
    found = fodp.clipped_sum(network(LoudScale), losses, batch, 0.5)  # by another way, and right
    torch.testing.assert_close(found, clipped(gradients_by_hand(network(LoudScale), losses, batch), 0.5).sum(0))
    loop_of_ones_own(LoudScale)


def test_a_use_does_too_and_a_frozen_parameter_may_be_left_out():
    class Plain(nn.Module):
        """A linear layer of one's own, whose bias is frozen."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)))
            self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, inputs):
            return inputs @ self.weight.t() + self.bias

    fodp.register_rule(Plain, lambda layer, inputs, back: {"weight": Product(inputs, back)})
    batch = data(dtype=torch.float32).tensors
    engine = Engine(Plain(), losses)
    assert engine.uses(batch) is not None
    torch.testing.assert_close(
        fodp.clipped_sum(Plain(), losses, batch, 0.5),
        clipped(gradients_by_hand(Plain(), losses, batch), 0.5).sum(0).float(),
    )


@pytest.mark.parametrize(
    ("kind", "rule", "message"),
    [
        (nn.Linear, right, "Linear has a rule already"),
        (Scale(3), right, "for a class of layers"),
        (TensorDataset, right, "for a class of layers"),
        (Scale, None, "a rule is a function"),
    ],
)
def test_what_cannot_be_registered(kind, rule, message):
    with pytest.raises(fodp.ConfigurationError, match=message):
        fodp.register_rule(kind, rule)
