"""What a sealed search costs: the price of the selection, for every candidate, never above the target."""

import math

import pytest

import fodp
from fodp.accounting.budget import Repetitions
from fodp.accounting.composition import rdp_curve
from fodp.accounting.renyi import epsilon_from_rdp
from fodp.errors import BudgetError, ConfigurationError
from fodp.tuning.search import SHAPES, calibrated, grid, statement


def template(**changes):
    words = dict(sampling_rate=0.1, steps=30, lot_size=100, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)
    return fodp.Plan(**{**words, "method": "dp-sgd", **changes})


def rates(*values):
    return [template(params=dict(lr=value)) for value in values]


@pytest.mark.rule(17)
@pytest.mark.parametrize("name", SHAPES)
def test_the_price_is_that_of_the_selection_and_meets_the_target_from_below(name):
    repetitions = Repetitions(5.0, SHAPES[name])
    search = calibrated(rates(0.1, 0.2), repetitions, 3.0)
    assert search.epsilon == search.search_epsilon == repetitions.epsilon(search.candidates[0].events(), 1e-5)
    assert 0.99 * 3 <= search.epsilon <= 3
    assert search.run_epsilon < search.epsilon  # so a run that was calibrated to the target by itself would be too dear
    alone = fodp.Plan.calibrated(
        target_epsilon=3.0, **{k: v for k, v in template().to_dict().items() if k != "noise_multiplier"}
    )
    assert repetitions.epsilon(alone.events(), 1e-5) > 3


def test_candidates_with_other_parameters_cost_at_most_what_is_charged_at_every_order():
    plans = [template(method="fo-dp-sgd", params=dict(beta=beta)) for beta in (0.3, 0.6, 0.9)]
    search = calibrated(plans, Repetitions(4.0), 3.0)
    charged = rdp_curve(search.events)[1]
    assert all((rdp_curve(plan.events())[1] <= charged).all() for plan in search.candidates)
    assert len({plan.noise_multiplier for plan in search.candidates}) == 3  # each has the noise that it needs
    assert search.epsilon <= 3


def test_costs_that_cross_have_no_price():
    """Of two plans with the same ε one may cost more at low orders and less at high ones."""
    plans = [template(sampling_rate=0.001, steps=20), template(sampling_rate=1.0, steps=20_000)]
    with pytest.raises(BudgetError, match="two searches"):
        calibrated(plans, Repetitions(4.0), 6.0)


@pytest.mark.rule(17)
def test_a_search_and_a_final_run_compose():
    search = calibrated(rates(0.1, 0.2), Repetitions(5.0), 4.0, fraction=0.2, final=rates(0.1, 0.2), search_target=1.5)
    assert 0.99 * 1.5 <= search.search_epsilon <= 1.5
    assert 0.99 * 4 <= search.epsilon <= 4
    both = search.repetitions.rdp(search.events) + rdp_curve(search.final[0].events())[1]
    assert search.epsilon == epsilon_from_rdp(both, 1e-5)
    assert search.epsilon > search.final[0].epsilon()
    text = statement(search)
    assert "charged as if on all of it" in text
    assert "both compose" in text


def test_the_statement_names_both_epsilons():
    search = calibrated(rates(0.1, 0.2), Repetitions(5.0), 3.0)
    text = statement(search)
    assert f"({fodp.accounting.rounded_up(search.epsilon)}, 1e-05)-differentially private as a whole" in text
    assert f"alone would have epsilon {fodp.accounting.rounded_up(search.run_epsilon)}" in text
    assert "geometric, mean 5" in text


def test_candidates_are_drawn_alike_and_with_replacement():
    search = calibrated(rates(0.1, 0.2, 0.4), Repetitions(400.0, math.inf), 8.0)
    draws = [place for _ in range(20) for place in search.draw()]
    counts = [draws.count(place) for place in range(3)]
    assert set(draws) == {0, 1, 2}
    assert all(abs(count - len(draws) / 3) < 6 * math.sqrt(2 / 9 * len(draws)) for count in counts)
    assert len({len(search.draw()) for _ in range(10)}) > 1


def test_what_the_plan_would_choose_is_not_left_to_a_search():
    with pytest.raises(ConfigurationError, match="--set"):
        calibrated([template(method="fo-noise")], Repetitions(4.0), 3.0)
    with pytest.raises(ConfigurationError, match="--set"):
        calibrated([template(method="fo-noise", params=dict(bands=4, order=None))], Repetitions(4.0), 3.0)


def test_bands_that_are_given_may_be_searched():
    search = calibrated(
        [template(method="fo-noise", params=dict(bands=2, lr=lr)) for lr in (1, 2)], Repetitions(4.0), 3.0
    )
    assert {plan.algorithm.turns for plan in search.candidates} == {2}
    assert search.epsilon <= 3


def test_the_grid_has_all_combinations():
    assert grid({"lr": [1, 2], "beta": [3]}) == [{"lr": 1, "beta": 3}, {"lr": 2, "beta": 3}]
    with pytest.raises(ConfigurationError, match="--vary"):
        grid({})
    with pytest.raises(ConfigurationError, match="vary less"):
        grid({"a": range(200), "b": range(200)})
