"""Watched functions: where the examples lie, and that a wrong rule for one is caught."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fodp.clipping import Engine, clipped_sum
from fodp.clipping.fallback import Place
from fodp.clipping.layers import functions
from fodp.clipping.layers.combine import scaled
from models_for_tests import FAST, build, clipped, gradients_by_hand, probe

# structure -> a function that it uses
USED: dict[str, Any] = {
    "own-layer": torch.Tensor.mul,
    "functional-reuse": F.linear,
    "addmm": torch.addmm,
    "class-token": torch.Tensor.expand,
    "norm-time-first": F.layer_norm,
    "rms-norm": F.rms_norm,
    "embedding-bag": F.embedding_bag,
    "frozen-batch-norm": F.batch_norm,
    "instance-norm": F.instance_norm,
    "prelu": torch.prelu,
}


def mistaken(rule: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*given: Any) -> Any:
        found = rule(*given)
        return None if found is None else [(tensor, scaled(use, 0.9)) for tensor, use in found]

    return wrong


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", USED)
def test_a_wrong_rule_for_a_function_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(functions.RULES, USED[name], mistaken(functions.RULES[USED[name]]))
    model, x = build(FAST, name, 5, torch.float64)
    truth = gradients_by_hand(model, probe, x)
    with pytest.warns(UserWarning, match="one example at a time"):
        found = clipped_sum(model, probe, x, 0.5)
    torch.testing.assert_close(found, clipped(truth, 0.5).sum(0))


@pytest.mark.rule(4)
@pytest.mark.parametrize("place", [Place(0), Place(1), Place(0, apart=True)])
def test_rows_of_an_example_come_together_wherever_they_lie(place: Place) -> None:
    lot = torch.arange(3 * 4 * 2).reshape(3, 4, 2)
    lies = {Place(0): lot.flatten(0, 1), Place(1): lot.transpose(0, 1), Place(0, apart=True): lot.mT.permute(2, 0, 1)}
    tensor = lies[place] if not place.apart else lot.transpose(0, 1).flatten(0, 1)
    rows = place.rows(tensor, 3)
    assert torch.equal(rows.reshape(3, -1), lot.reshape(3, -1))


@pytest.mark.rule(4)
def test_a_part_that_only_some_lots_reach_is_learned_when_it_is_reached() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.s = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.a(x) * self.s
            return hidden if x.amax() < 50 else hidden + self.s.square()

    torch.manual_seed(0)
    model, x = Branching().double(), torch.randn(5, 6).double()
    engine = Engine(model, probe)
    for lot in (x, x, x + 100):
        assert engine.uses(lot) is not None
    assert engine.path == "functions"
