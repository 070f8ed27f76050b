"""scikit-learn's door: estimators that behave as theirs do, and a sentence for every habit that voids the guarantee."""

import functools
import pickle
import warnings

import numpy as np
import pytest
import torch

import fodp
from fodp import BudgetError, ConfigurationError, DataError

pytest.importorskip("sklearn", reason="takes the extra sklearn")

import joblib
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.decomposition import PCA
from sklearn.ensemble import BaggingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.model_selection import (
    GridSearchCV,
    RandomizedSearchCV,
    cross_val_predict,
    cross_val_score,
    learning_curve,
    train_test_split,
)
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    PolynomialFeatures,
    StandardScaler,
)
from sklearn.utils.estimator_checks import check_estimator

from fodp.sklearn import PrivateClassifier, PrivateLogisticRegression, PrivateRegressor

PUBLIC = dict(epsilon=8, delta=1e-5, public_size=400, classes=2, bounds=(-2, 2), epochs=2)


def rows(size=400, seed=0):
    found = np.random.default_rng(seed).uniform(-1, 1, (size, 3))
    return found, (found[:, 0] > 0).astype(int)


def logistic(**other):
    return PrivateLogisticRegression(**{**PUBLIC, **other})


@pytest.fixture(autouse=True)
def quiet_about_seeds():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "random_state makes masks")
        warnings.filterwarnings("ignore", "this is private fit number")
        warnings.filterwarnings("ignore", "these are rows that a private fit")
        yield


class TestAccuracy:
    """Without tuning; what docs/scikit-learn.md states, for one seed."""

    def test_digits_at_epsilon_three(self):
        split = train_test_split(*load_digits(return_X_y=True), test_size=0.2, random_state=0)
        for kind in (PrivateLogisticRegression, PrivateClassifier):
            model = kind(epsilon=3, delta=1e-5, public_size=1400, classes=10, bounds=(0, 16), random_state=0)
            assert model.fit(split[0], split[2]).score(split[1], split[3]) > 0.9
            assert model.epsilon_ <= 3

    def test_breast_cancer_at_epsilon_three(self):
        rows, labels = load_breast_cancer(return_X_y=True)
        split = train_test_split(rows, labels, test_size=0.2, random_state=0)
        ten = [(0, 40), (0, 50), (0, 300), (0, 4000), (0, 0.25), (0, 0.5), (0, 0.6), (0, 0.3), (0, 0.5), (0, 0.15)]
        errors = [(0, 4), (0, 6), (0, 30), (0, 700), (0, 0.05), (0, 0.2), (0, 0.6), (0, 0.08), (0, 0.1), (0, 0.05)]
        worst = [(0, 50), (0, 60), (0, 350), (0, 6000), (0, 0.3), (0, 1.5), (0, 1.8), (0, 0.4), (0, 0.8), (0, 0.3)]
        bounds = [*ten, *errors, *worst]
        for kind in (PrivateLogisticRegression, PrivateClassifier):
            model = kind(epsilon=3, delta=1e-5, public_size=450, classes=2, bounds=bounds, random_state=0)
            assert model.fit(split[0], split[2]).score(split[1], split[3]) > 0.9

    def test_a_regression(self):
        inputs, _ = rows(1000)
        target = 3 * inputs[:, 0] - inputs[:, 1] ** 2
        public = dict(epsilon=3, delta=1e-5, public_size=1000, bounds=(-1, 1), random_state=0)
        model = PrivateRegressor(target_bounds=(-5, 5), **public).fit(inputs, target)
        assert model.score(rows(500, seed=1)[0], 3 * rows(500, seed=1)[0][:, 0] - rows(500, seed=1)[0][:, 1] ** 2) > 0.7
        assert np.abs(model.predict(100 * inputs)).max() <= 5

    def test_noise_of_a_thousand_leaves_chance(self):
        """ε so small that the noise multiplier is above 1000."""
        inputs, labels = rows()
        scores = []
        for seed in range(5):
            model = logistic(epsilon=0.0005, random_state=seed)
            assert model.plan().noise_multiplier > 1000
            scores.append(model.fit(inputs, labels).score(*rows(seed=1)))
        assert 0.2 < np.mean(scores) < 0.8
        assert logistic(epsilon=8, random_state=0, epochs=50).fit(inputs, labels).score(*rows(seed=1)) > 0.9


def test_without_a_word_the_method_is_the_recipe_and_sizes_are_those_of_a_plan():
    """As in every door; the rate follows from public numbers, with a ratio of the estimator's own."""
    ratios = set()
    for model in (logistic(), PrivateClassifier(**PUBLIC), PrivateRegressor(epsilon=8, public_size=400)):
        plan = model.plan()
        same = fodp.Plan.calibrated(
            target_epsilon=8, public_size=400, batch=200, epochs=model.epochs, delta=1e-5,
            params=dict(auto_ratio=plan.params["auto_ratio"]),
        )  # fmt: skip
        assert plan == same
        ratios.add(plan.params["auto_ratio"])
    assert len(ratios) == 2  # classes, numbers
    large = logistic(public_size=60000, batch=512, epochs=20, delta=None).plan()
    assert (large.lot_size, large.steps, large.delta) == (512, round(20 * 60000 / 512), 2e-6)
    with pytest.raises(ConfigurationError, match="batch 500 is more than public_size 400"):
        logistic(batch=500).plan()


def test_another_method_keeps_the_mean_of_the_second_half_unless_told_otherwise():
    inputs, labels = rows()
    usual, same, other = (
        logistic(random_state=0, method="fo-dp-sgd", params=params).fit(inputs, labels).coef_
        for params in (None, dict(average="tail", average_share=0.5), dict(average="power"))
    )
    assert np.array_equal(same, usual)
    assert np.abs(other - usual).max() > 1e-3


class TestGuarantee:
    def test_a_second_fit_does_not_go_on_from_the_first(self):
        """Its ε is that of one fit, also where `hidden` hands out one and the same module."""
        module = torch.nn.Linear(2, 2)
        before = module.weight.detach().clone()
        logistic_like = PrivateClassifier(
            epsilon=8, delta=1e-5, public_size=400, classes=2, bounds=(-1, 1), random_state=0, hidden=lambda *_: module
        )
        inputs, labels = rows()
        logistic_like.fit(inputs[:, :2], labels)
        assert torch.equal(module.weight, before)

    def test_epsilon_and_events_are_those_of_the_plan_and_nothing_comes_from_the_rows(self):
        model = logistic()
        plan = model.plan()
        for size in (100, 399, 800):
            model.fit(*rows(size))
            assert model.plan_ == plan
            assert model.epsilon_ == plan.epsilon() <= 8
            assert model.plan_.events() == plan.events()
            assert model.n_iter_ == plan.steps
        assert model.statement() == plan.statement()
        assert model.privacy_card_["randomness"] == "secure"

    def test_every_fit_is_charged_to_the_ledger_until_its_budget_is_spent(self, tmp_path):
        ledger = fodp.Ledger(tmp_path / "people.sqlite", dataset="people", budget=(14, 1e-5))
        model = logistic(ledger=ledger)
        model.fit(*rows())
        clone(model).fit(*rows())
        with pytest.raises(BudgetError):
            clone(model).fit(*rows())
        used = [ledger.steps(entry.run) for entry in ledger.store.select("run")]
        assert used == [model.plan_.steps] * 2

    def test_features_are_clipped_to_their_bounds(self):
        model = logistic(random_state=0).fit(*rows())
        far = np.array([[1e9, -1e9, 2.0]])
        assert np.array_equal(model.predict_proba(far), model.predict_proba([[2.0, -2.0, 2.0]]))

    def test_coefficients_are_those_of_the_features_as_they_came(self):
        inputs, labels = rows()
        model = logistic(random_state=0, bounds=[(-1, 1), (-2, 3), (-1, 4)]).fit(inputs, labels)
        logits = inputs @ model.coef_.T + model.intercept_
        assert np.allclose(
            np.exp(logits) / np.exp(logits).sum(1, keepdims=True), model.predict_proba(inputs), atol=1e-6
        )

    def test_without_a_seed_two_fits_differ(self):
        first, second = (logistic().fit(*rows()).coef_ for _ in range(2))
        assert not np.array_equal(first, second)

    @pytest.mark.parametrize(
        ("missing", "said"),
        [
            (dict(public_size=None), "state public_size="),
            (dict(classes=None), "declare classes="),
            (dict(classes=[1]), "two or more different labels"),
            (dict(bounds=None), r"declare bounds=\(low, high\)"),
            (dict(bounds=(2, -2)), "low below high"),
            (dict(bounds=[(0, 1)] * 2), "one pair for each of the 3"),
            (dict(bounds=("a", "b")), "bounds must be a pair"),
            (dict(random_state=-1), "random_state"),
            (dict(epsilon="x"), "^epsilon must be a finite number, got 'x'$"),
            (dict(epsilon=-1), "^epsilon must be above 0, got -1$"),
            (dict(schema={"columns": {"a": {"bounds": [0, 1]}}}), "DataFrame|not both"),
        ],
    )
    def test_what_is_not_declared_is_refused_before_anything_is_charged(self, missing, said, tmp_path):
        ledger = fodp.Ledger(tmp_path / "l.sqlite")
        with pytest.raises(ConfigurationError, match=said):
            logistic(ledger=ledger, **missing).fit(*rows())
        assert not list(ledger.store.select("run"))

    def test_labels_that_were_not_declared_are_refused(self):
        with pytest.raises(DataError, match=r"the label of row 0 .* is none of the declared classes"):
            logistic().fit(rows(4)[0], [7, 7, 8, 9])

    def test_a_regression_declares_its_target(self):
        inputs, labels = rows()
        with pytest.raises(ConfigurationError, match="declare target_bounds"):
            PrivateRegressor(epsilon=1, delta=1e-5, public_size=9, bounds=(0, 1)).fit(inputs, labels)

    def test_labels_may_be_words_and_declared_ones_need_not_occur(self):
        inputs, labels = rows()
        model = logistic(classes=["yes", "no", "unknown"], epochs=50).fit(inputs, np.array(["no", "yes"])[labels])
        assert model.classes_.tolist() == ["no", "unknown", "yes"]
        assert model.predict_proba(inputs).shape == (400, 3)
        assert set(model.predict(inputs)) <= {"no", "yes"}


class TestSearches:
    """All of them fit again and again and look at scores on private rows."""

    @pytest.mark.parametrize(
        ("search", "name"),
        [
            (lambda m, x, y: GridSearchCV(m, {"lr": [0.1, 1]}, cv=2).fit(x, y), "GridSearchCV"),
            (lambda m, x, y: GridSearchCV(m, {"lr": [0.1, 1]}, cv=2, error_score="raise").fit(x, y), "GridSearchCV"),
            (lambda m, x, y: RandomizedSearchCV(m, {"lr": [0.1, 1]}, n_iter=2, cv=2).fit(x, y), "RandomizedSearchCV"),
            (lambda m, x, y: cross_val_score(m, x, y, cv=2), "cross_val_score"),
            (lambda m, x, y: cross_val_predict(m, x, y, cv=2), "cross_val_predict"),
            (lambda m, x, y: learning_curve(m, x, y, cv=2), "learning_curve"),
            (lambda m, x, y: cross_val_score(make_pipeline(Normalizer(), m), x, y, cv=2), "cross_val_score"),
            (lambda m, x, y: CalibratedClassifierCV(m, cv=2).fit(x, y), "CalibratedClassifierCV"),
            (lambda m, x, y: BaggingClassifier(m, n_estimators=2).fit(x, y), "BaggingClassifier"),
            (lambda m, x, y: OneVsRestClassifier(m).fit(x, y), "OneVsRestClassifier"),
        ],
    )
    def test_refused_with_the_way_that_has_a_price(self, search, name, tmp_path):
        ledger = fodp.Ledger(tmp_path / "l.sqlite")
        with pytest.raises(ConfigurationError, match=rf"(?s){name} fits on parts.*fodp tune"):
            search(logistic(ledger=ledger), *rows(40))
        assert not list(ledger.store.select("run"))

    def test_a_search_whose_fits_run_elsewhere_is_seen_too(self):
        """Threads here, whose calls begin with the same function of scikit-learn's as those of its processes."""
        search = GridSearchCV(logistic(), {"lr": [0.1, 1]}, cv=2, n_jobs=2)
        with (
            joblib.parallel_config("threading"),
            pytest.raises(ConfigurationError, match="fits on parts of the private data"),
        ):
            search.fit(*rows(40))

    def test_a_loop_without_a_ledger_is_told_that_its_fits_add_up(self, tmp_path):
        inputs = rows(seed=11)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "random_state")
            logistic().fit(*inputs)
        with pytest.warns(UserWarning, match="private fit number 2 on the same rows"):
            logistic(lr=1.0).fit(*inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logistic(ledger=fodp.Ledger(tmp_path / "l.sqlite")).fit(*inputs)


class TestPipelines:
    @pytest.mark.parametrize(
        ("step", "named"),
        [
            (StandardScaler(), "StandardScaler"),
            (PCA(2), "PCA"),
            (make_pipeline(Normalizer(), MinMaxScaler()), "MinMaxScaler"),
            (FeatureUnion([("a", Normalizer()), ("b", PCA(1))]), "PCA"),
            (ColumnTransformer([("a", StandardScaler(), [0])], remainder="passthrough"), "StandardScaler"),
            (SimpleImputer(), "SimpleImputer"),
            (OneHotEncoder(sparse_output=False, handle_unknown="ignore"), "OneHotEncoder"),
        ],
    )
    def test_what_learns_from_the_rows_in_front_is_refused(self, step, named):
        with pytest.raises(ConfigurationError, match=f"{named}, which was fitted on the private rows without noise"):
            make_pipeline(step, logistic()).fit(*rows())

    @pytest.mark.parametrize(
        "step",
        [
            Normalizer(),
            FunctionTransformer(np.tanh),
            PolynomialFeatures(2),
            SimpleImputer(strategy="constant", fill_value=0),
            FrozenEstimator(StandardScaler().fit(rows(seed=5)[0])),
            "passthrough",
        ],
    )
    def test_what_learns_nothing_is_left_alone(self, step):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipeline = make_pipeline(step, logistic())
            inputs, labels = rows(seed=hash(str(step)) % 10**6)
            assert pipeline.fit(inputs, labels).predict(inputs).shape == (400,)

    def test_a_transformed_target_too(self):
        inputs, labels = rows()
        model = PrivateRegressor(
            epsilon=9, delta=1e-5, public_size=400, bounds=(-1, 1), target_bounds=(-3, 3), epochs=2
        )
        with pytest.raises(ConfigurationError, match="in front of this estimator stands StandardScaler"):
            TransformedTargetRegressor(model, transformer=StandardScaler()).fit(inputs, labels)


class TestWarnings:
    def test_a_seed_and_a_large_delta_are_met_by_a_sentence(self):
        with pytest.warns(UserWarning, match="random_state makes masks and noise repeatable"):
            logistic(random_state=0).fit(*rows())
        with pytest.warns(UserWarning, match="delta 0.01 is not below 1/400"):
            logistic(delta=0.01).fit(*rows())

    def test_a_score_on_private_rows(self):
        model = logistic().fit(*rows())
        with pytest.warns(UserWarning, match="rows that a private fit was given"):
            model.score(*rows())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.score(*rows(seed=3))


DECLARED = "labels are declared, and the check has others"
WRONG = {
    PrivateLogisticRegression: {
        "check_dtype_object": DECLARED,
        "check_classifiers_classes": DECLARED,
        "check_classifiers_train": "three classes are declared and have a column each; the check has two",
    },
    PrivateRegressor: {},
}


class TestHouseRules:
    def test_clone_keeps_the_declared_numbers_and_the_ledger(self, tmp_path):
        ledger = fodp.Ledger(tmp_path / "l.sqlite")
        model = logistic(ledger=ledger, bounds=[(-1, 1)] * 3)
        copy = clone(model.fit(*rows()))
        assert copy.get_params() == model.get_params()
        assert copy.ledger is ledger
        assert not hasattr(copy, "model_")
        assert model.set_params(lr=0.5).lr == 0.5

    def test_pickles(self, tmp_path):
        model = logistic(ledger=functools.partial(fodp.Ledger, str(tmp_path / "l.sqlite"))).fit(*rows())
        again = pickle.loads(pickle.dumps(model))
        assert np.array_equal(again.predict_proba(rows()[0]), model.predict_proba(rows()[0]))
        assert again.epsilon_ == model.epsilon_
        with pytest.raises(ConfigurationError, match=r"functools\.partial"):
            pickle.dumps(logistic(ledger=fodp.Ledger(tmp_path / "l.sqlite")))

    def test_a_table_by_its_public_schema(self):
        pandas = pytest.importorskip("pandas", reason="takes pandas")
        size = 400
        table = pandas.DataFrame(
            {"age": np.arange(size) % 90, "town": ["Ulm", "Rome"] * (size // 2), "id": range(size)}
        )
        ill = pandas.Series(np.where(table["age"] > 40, "yes", "no"))
        columns = {"age": {"bounds": [0, 110]}, "town": {"values": ["Ulm", "Bonn"]}}
        model = logistic(
            bounds=None, public_size=None, schema={"public_size": 400, "columns": columns}, classes=["no", "yes"],
            epochs=50, random_state=0,
        )  # fmt: skip
        assert model.fit(table, ill).score(table, ill) > 0.8
        assert model.feature_names_in_.tolist() == ["age", "town"]
        assert model.predict({"age": [5, 100], "town": ["Ulm", "Rome"]}).tolist() == ["no", "yes"]

    def test_a_model_of_ones_own(self):
        from torch import nn

        model = PrivateClassifier(
            **PUBLIC, hidden=lambda i, o: nn.Sequential(nn.Linear(i, 4), nn.ReLU(), nn.Linear(4, o))
        )
        assert len(list(model.fit(*rows()).model_.parameters())) == 4
        with pytest.raises(ConfigurationError, match=r"must return a torch\.nn\.Module"):
            PrivateClassifier(**PUBLIC, hidden=lambda i, o: None).fit(*rows())

    @pytest.mark.parametrize(
        "model",
        [
            PrivateLogisticRegression(
                epsilon=1000, delta=1e-5, public_size=100, classes=3, bounds=(-10, 10), epochs=5, random_state=0
            ),
            PrivateRegressor(
                epsilon=1000, delta=1e-5, public_size=100, target_bounds=(-3, 3), bounds=(-3, 3), epochs=5, hidden=(),
                random_state=0,
            ),
        ],
        ids=lambda model: type(model).__name__,
    )  # fmt: skip
    def test_scikit_learns_own_checks(self, model):
        """All pass but those listed, which fail for the reason beside them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = check_estimator(model, expected_failed_checks=WRONG[type(model)], on_skip=None)
        status = {kind: {row["check_name"] for row in found if row["status"] == kind} for kind in ("xfail", "skipped")}
        assert status["xfail"] == set(WRONG[type(model)])
        assert status["skipped"] <= {"check_array_api_input"}
