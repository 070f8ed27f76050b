"""Searches of scikit-learn: refused in our words on private rows, run on rows that are declared public."""

import math
import warnings

import numpy as np
import pytest

import fodp
from fodp import ConfigurationError, DataError

pytest.importorskip("sklearn", reason="takes the extra sklearn")

from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import AdaBoostClassifier, StackingClassifier, VotingClassifier
from sklearn.feature_selection import RFE
from sklearn.frozen import FrozenEstimator
from sklearn.inspection import permutation_importance
from sklearn.model_selection import (
    FixedThresholdClassifier,
    GridSearchCV,
    TunedThresholdClassifierCV,
    cross_val_score,
    cross_validate,
    permutation_test_score,
    validation_curve,
)
from sklearn.multioutput import ClassifierChain, MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from sklearn.semi_supervised import SelfTrainingClassifier

from fodp.sklearn import PrivateLogisticRegression, seen

SIZE = 60
ROWS = np.random.default_rng(1).uniform(-1, 1, (SIZE, 3))
OTHERS = np.random.default_rng(2).uniform(-1, 1, (SIZE, 3))
LABELS = (ROWS[:, 0] > 0).astype(int)
PUBLIC = dict(epsilon=8, delta=1e-5, public_size=SIZE, classes=2, bounds=(-2, 2), epochs=1, batch=30)


def logistic(**other):
    return PrivateLogisticRegression(**{**PUBLIC, **other})


@pytest.fixture(autouse=True)
def rows_were_not_seen(monkeypatch):
    for name in ("PRIVATE", "PUBLIC"):
        monkeypatch.setattr(seen, name, seen.SeenRows())


SEARCHES = {
    "cross_val_score": lambda model: cross_val_score(model, ROWS, LABELS, cv=2),
    "cross_validate": lambda model: cross_validate(model, ROWS, LABELS, cv=2, error_score=0.0),
    "permutation_test_score": lambda model: permutation_test_score(model, ROWS, LABELS, cv=2, n_permutations=1),
    "validation_curve": lambda m: validation_curve(m, ROWS, LABELS, param_name="lr", param_range=[1, 2], cv=2),
    "GridSearchCV": lambda model: GridSearchCV(model, {"lr": [1.0]}, cv=2).fit(ROWS, LABELS),
    "GridSearchCV of models": lambda model: GridSearchCV(
        make_pipeline(Normalizer(), model), {"privatelogisticregression": [logistic(), logistic(lr=0.1)]}, cv=2
    ).fit(ROWS, LABELS),
    "VotingClassifier": lambda model: VotingClassifier([("a", model)]).fit(ROWS, LABELS),
    "StackingClassifier": lambda model: StackingClassifier([("a", model)], cv=2).fit(ROWS, LABELS),
    "MultiOutputClassifier": lambda model: MultiOutputClassifier(model).fit(ROWS, np.c_[LABELS, LABELS]),
    "ClassifierChain": lambda model: ClassifierChain(model).fit(ROWS, np.c_[LABELS, LABELS]),
    "TunedThresholdClassifierCV": lambda model: TunedThresholdClassifierCV(model, cv=2).fit(ROWS, LABELS),
    "SelfTrainingClassifier": lambda model: SelfTrainingClassifier(model).fit(ROWS, np.where(LABELS, 1, -1)),
    "RFE": lambda model: RFE(model).fit(ROWS, LABELS),
}


@pytest.mark.rule(17)
@pytest.mark.parametrize("name", SEARCHES)
def test_the_reason_is_ours_whatever_error_score_is(name, tmp_path):
    ledger = fodp.Ledger(tmp_path / "people.sqlite", dataset="people")
    for model in (logistic(ledger=ledger), make_pipeline(Normalizer(), logistic(ledger=ledger))):
        with pytest.raises(
            ConfigurationError, match=rf"^{name.split()[0]} fits on parts .*data_is_public=True"
        ) as said:
            SEARCHES[name](model)
        assert "fits failed" not in str(said.value)
        if name in ("GridSearchCV of models", "TunedThresholdClassifierCV", "RFE"):
            break  # these take no pipeline here
    assert not list(ledger.store.select("run"))


def test_weighted_fits_of_boosting_do_not_come_about():
    with pytest.raises(
        ValueError, match=r"AdaBoostClassifier fits on parts|doesn't support sample_weight|sample weight"
    ):
        AdaBoostClassifier(logistic(), n_estimators=2).fit(ROWS, LABELS)


def test_copies_and_single_fits_are_not_taken_for_searches():
    search = clone(GridSearchCV(logistic(), {"lr": [1.0]}))
    assert search.estimator.get_params() == logistic().get_params()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FixedThresholdClassifier(logistic(), threshold=0.4).fit(ROWS, LABELS)


class TestPublicRows:
    def test_searches_run_and_nothing_is_claimed_or_charged(self):
        model = make_pipeline(StandardScaler(), logistic(data_is_public=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            search = GridSearchCV(model, {"privatelogisticregression__lr": [0.1, 1.0]}, cv=2).fit(ROWS, LABELS)
            assert len(cross_val_score(model, ROWS, LABELS, cv=2)) == 2
            search.score(ROWS, LABELS)
        best = search.best_estimator_[-1]
        assert np.isfinite(search.cv_results_["mean_test_score"]).all()
        assert best.epsilon_ == math.inf
        assert best.privacy_card_["epsilon"] is None
        assert best.privacy_card_["delta"] is None
        assert best.privacy_card_["data_is_public"] is True
        assert best.statement().startswith("No privacy is claimed")
        assert best.plan_ == clone(best).set_params(data_is_public=False).plan()  # the private fit's, with its noise

    def test_a_ledger_beside_them_is_refused(self, tmp_path):
        ledger = fodp.Ledger(tmp_path / "people.sqlite", dataset="people")
        with pytest.raises(ConfigurationError, match="has nothing to charge"):
            logistic(data_is_public=True, ledger=ledger).fit(ROWS, LABELS)

    @pytest.mark.parametrize("name", ["data_is_public", "allow_private_preprocessing"])
    def test_a_word_that_is_not_true_or_false_is_refused(self, name):
        with pytest.raises(ConfigurationError, match=f"{name} must be True or False, got 'no'"):
            logistic(**{name: "no"}).fit(ROWS, LABELS)

    @pytest.mark.rule(29)
    def test_rows_of_a_private_fit_cannot_be_declared_public(self):
        logistic().fit(ROWS, LABELS)
        for part in (slice(None), slice(None, None, -1), slice(0, SIZE // 2)):
            with pytest.raises(ConfigurationError, match="were given to a private fit in this process"):
                logistic(data_is_public=True).fit(ROWS[part], LABELS[part])
        logistic(data_is_public=True).fit(OTHERS, LABELS)

    @pytest.mark.rule(29)
    def test_rows_that_were_searched_as_public_cannot_be_private_later(self):
        cross_val_score(logistic(data_is_public=True), ROWS, LABELS, cv=2)
        with pytest.raises(ConfigurationError, match="were declared public in this process"):
            logistic().fit(ROWS, LABELS)
        logistic().fit(OTHERS, LABELS)

    def test_equal_rows_by_chance_are_no_sign(self):
        """Of eight possible rows, other people have the same."""
        few = np.random.default_rng(3).integers(0, 2, (2, SIZE, 3)).astype(float)
        logistic().fit(few[0], LABELS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logistic(data_is_public=True).fit(few[1], LABELS)


class TestOutputsOnPrivateRows:
    @pytest.mark.rule(12)
    def test_a_score_on_a_part_of_the_private_rows_is_met_by_a_warning_at_the_users_line(self):
        model = logistic().fit(ROWS, LABELS)
        for rows in (ROWS[::2], np.r_[ROWS, OTHERS[:20]]):
            with pytest.warns(UserWarning, match="their score is a private number") as said:
                model.score(rows, np.zeros(len(rows)))
            assert said[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.score(np.r_[ROWS[:10], OTHERS], np.zeros(SIZE + 10))

    @pytest.mark.rule(12)
    def test_so_is_what_learns_from_outputs_on_them(self):
        model = logistic().fit(ROWS, LABELS)
        with pytest.warns(UserWarning, match="CalibratedClassifierCV computes from this model's outputs"):
            CalibratedClassifierCV(FrozenEstimator(model)).fit(ROWS, LABELS)
        with pytest.warns(UserWarning, match="their score is a private number"):
            permutation_importance(model, ROWS, LABELS, n_repeats=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            CalibratedClassifierCV(FrozenEstimator(model)).fit(OTHERS, LABELS)


def test_large_tables_are_known_by_a_sample_of_their_rows():
    rows = np.random.default_rng(4).normal(size=(20_000, 2))
    known = seen.SeenRows()
    known.add(rows)
    assert sum(marks.kept.nbytes for marks in known.parts.values()) <= 8 * 4096
    assert known.know(rows[5000:5400])
    assert known.know(rows[::-1])
    assert not known.know(rows + 1)
    assert not known.know(rows[:3])  # too few to say


def test_bad_rows_in_a_public_search_are_scikit_learns_to_report():
    with pytest.raises(ValueError, match="label of row"):
        cross_val_score(logistic(data_is_public=True), ROWS, LABELS + 5, cv=2, error_score="raise")
    with pytest.raises(DataError):
        logistic(data_is_public=True).fit(ROWS, LABELS + 5)
