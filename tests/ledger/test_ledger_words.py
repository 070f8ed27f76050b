"""A ledger that is asked about a name it does not know, or given a budget in another form, says what it expects."""

import math

import pytest

import fodp
from fodp.ledger import Ledger


@pytest.mark.rule(14)
def test_a_typing_error_has_no_limitless_budget(tmp_path):
    book = Ledger(tmp_path / "l.sqlite", dataset="people", budget=(3, 1e-5))
    assert book.left("people") == 1.0  # all of it, which its first run fixes
    with pytest.raises(fodp.LedgerError, match="knows no data set 'poeple'; it knows none: mend the name"):
        book.left("poeple")
    plan = fodp.Plan(
        sampling_rate=0.1,
        steps=2,
        lot_size=4,
        clip_norm=1.0,
        noise_multiplier=2.0,
        delta=1e-5,
        accountant="rdp",
        method="fo-dp-sgd",
    )
    book.open("run", plan.events(), 2).covers(0)
    assert 0 < book.left("people") < 1
    with pytest.raises(fodp.LedgerError, match="'poeple'; it knows people"):
        book.left("poeple")


def test_a_data_set_without_a_budget_is_infinite_as_ever(tmp_path):
    assert Ledger(tmp_path / "l.sqlite", dataset="people").left("people") == math.inf


@pytest.mark.rule(14)
@pytest.mark.parametrize("budget", [3, "3,1e-5", (3,), {"epsilon": 3, "delta": 1e-5}, (3, 1e-5, 1)])
def test_a_budget_in_another_form(tmp_path, budget):
    with pytest.raises(fodp.ConfigurationError, match=r"budget is a pair \(epsilon, delta\), such as \(3, 1e-5\)"):
        Ledger(tmp_path / "l.sqlite", dataset="people", budget=budget)
