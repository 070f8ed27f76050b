"""A scaler with public numbers, in the place of the fitted ones."""

import warnings

import numpy as np
import pytest

from fodp import ConfigurationError

pytest.importorskip("sklearn", reason="takes the extra sklearn")

from sklearn.compose import TransformedTargetRegressor
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from fodp.sklearn import PrivateRegressor, PublicScaler

ROWS = np.random.default_rng(0).uniform(0, 100, (50, 2))


@pytest.mark.parametrize("scaler", [PublicScaler(bounds=(-3, 3)), PublicScaler(mean=1, scale=2)], ids=str)
def test_scikit_learns_own_checks_pass(scaler):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(scaler, on_skip=None)
    assert {row["status"] for row in found} <= {"passed", "skipped"}


def test_a_row_is_scaled_by_the_declared_numbers_and_back():
    scaler = PublicScaler(bounds=[(0, 100), (0, 50)]).fit(ROWS)
    assert scaler.transform([[50, 80], [-9, 25]]).tolist() == [[0, 1], [-1, 0]]
    assert scaler.inverse_transform([[0, 1]]).tolist() == [[50, 50]]
    line = PublicScaler(mean=[1, 2], scale=10).fit(ROWS)
    assert np.allclose(line.inverse_transform(line.transform(ROWS)), ROWS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "declare bounds"),
        (dict(bounds=(0, 1), mean=1), "not both"),
        (dict(bounds=(1, 0)), "low below high"),
        (dict(mean=[1, 2, 3]), "one for each of the 2 features"),
        (dict(mean="a"), "one for each of the 2 features"),
        (dict(scale=0), "scale must be above 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(given, said):
    with pytest.raises(ConfigurationError, match=said):
        PublicScaler(**given).fit(ROWS)


@pytest.mark.rule(30)
def test_it_stands_in_front_of_private_estimators_and_around_their_target_without_a_word():
    model = PrivateRegressor(
        epsilon=8, delta=1e-5, public_size=50, bounds=(-1, 1), target_bounds=(-1, 1), epochs=1, hidden=()
    )
    pipeline = make_pipeline(PublicScaler(bounds=(0, 100)), model)
    both = TransformedTargetRegressor(pipeline, transformer=PublicScaler(mean=50, scale=50))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert both.fit(ROWS, ROWS[:, 0]).predict(ROWS).shape == (50,)
    assert "private_preprocessing" not in both.regressor_[-1].privacy_card_
