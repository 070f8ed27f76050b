"""What stands in front of a private estimator: a step that looks at more than one row is private, fitted or not."""

import contextlib
import json
import warnings

import numpy as np
import pytest

import fodp
from fodp import ConfigurationError

pytest.importorskip("sklearn", reason="takes the extra sklearn")

import torch
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.cluster import FeatureAgglomeration
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.feature_selection import SelectKBest
from sklearn.frozen import FrozenEstimator
from sklearn.impute import MissingIndicator
from sklearn.kernel_approximation import RBFSampler
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    Binarizer,
    FunctionTransformer,
    KBinsDiscretizer,
    Normalizer,
    OneHotEncoder,
    PolynomialFeatures,
    SplineTransformer,
    StandardScaler,
    TargetEncoder,
    scale,
)
from sklearn.random_projection import GaussianRandomProjection

from fodp.sklearn import PrivateLogisticRegression, PrivateRegressor, seen

SIZE = 60
ROWS = np.random.default_rng(0).uniform(-1, 1, (SIZE, 3))
LABELS = (ROWS[:, 0] > 0).astype(int)
HOLES = np.where(ROWS > 0.9, np.nan, ROWS)
PUBLIC = dict(epsilon=8, delta=1e-5, public_size=SIZE, bounds=(-2, 2), epochs=1, batch=30)


def logistic(**other):
    return PrivateLogisticRegression(**{**PUBLIC, "classes": 2, **other})


def regressor(**other):
    return PrivateRegressor(**{**PUBLIC, "target_bounds": (-3, 3), "hidden": (), **other})


@pytest.fixture(autouse=True)
def rows_were_not_seen(monkeypatch):
    for name in ("PRIVATE", "PUBLIC"):
        monkeypatch.setattr(seen, name, seen.SeenRows())


def standardise(rows):
    return (rows - rows.mean(0)) / rows.std(0)


def filled(rows):
    return np.where(np.isnan(rows), np.nanmean(HOLES if len(rows) == 1 else rows, axis=0), rows)


def ranks(rows):
    return rows.argsort(axis=0).argsort(axis=0) / len(rows)


def clipped_at_percentiles(rows):
    return rows.clip(*np.percentile(rows, [2, 98], axis=0))


def tiny_share_of_the_mean(rows):
    return np.c_[rows + 1e-9 * rows.mean(0), 1e6 + rows[:, :1]]


def noisy(rows):
    return rows + np.random.default_rng().normal(size=rows.shape)


class Centred(TransformerMixin, BaseEstimator):
    """Somebody's own, which says nothing about itself."""

    def fit(self, rows, y=None):
        self.mean_ = rows.mean(0)
        return self

    def transform(self, rows):
        return rows


class CentredOnce(Centred):
    """Another result in a fit than afterwards."""

    def fit_transform(self, rows, y=None):
        return rows - rows.mean(0)


class Logarithm(TransformerMixin, BaseEstimator):
    def __init__(self, base=2.0):
        self.base = base

    def fit(self, rows, y=None):
        self.n_features_in_ = rows.shape[1]
        return self

    def transform(self, rows):
        return np.log(3 + rows) / np.log(self.base)


ENCODER = torch.nn.Sequential(torch.nn.Linear(3, 300), torch.nn.ReLU(), torch.nn.Linear(300, 4))


def encoded(rows):
    """A public network in float32, whose rounding is other for other numbers of rows."""
    with torch.no_grad():
        return ENCODER(torch.from_numpy(rows).float()).double().numpy()


def of_functions(*functions):
    return make_pipeline(*(FunctionTransformer(function) for function in functions))


LOOKS_AT_OTHERS = {
    "scale": of_functions(scale),
    "a lambda": of_functions(lambda rows: rows - rows.mean(0)),
    "percentiles": of_functions(clipped_at_percentiles),
    "ranks": of_functions(ranks),
    "the largest": of_functions(lambda rows: rows / np.abs(rows).max()),
    "the largest, if it is large": of_functions(lambda rows: rows / max(2, np.abs(rows).max())),
    "neighbours": of_functions(lambda rows: rows + np.roll(rows, 1, axis=0)),
    "the place": of_functions(lambda rows: rows.cumsum(axis=0)),
    "a share": of_functions(tiny_share_of_the_mean),
    "sparse": of_functions(sparse.csr_matrix, lambda rows: rows / rows.max(), lambda rows: rows.toarray()),
    "its own fit_transform": CentredOnce(),
    "within a column": ColumnTransformer([("a", FunctionTransformer(standardise), [0])], remainder="passthrough"),
    "in the remainder": ColumnTransformer([("a", "passthrough", [0])], remainder=FunctionTransformer(standardise)),
    "in a union": FeatureUnion([("a", Normalizer()), ("b", FunctionTransformer(standardise))]),
    "frozen": FrozenEstimator(FunctionTransformer(standardise)),
    "second": make_pipeline(Normalizer(), FunctionTransformer(standardise)),
}


@pytest.mark.rule(30)
@pytest.mark.parametrize("step", LOOKS_AT_OTHERS.values(), ids=LOOKS_AT_OTHERS.keys())
def test_a_step_that_gives_a_row_other_values_among_others_is_refused(step):
    with pytest.raises(ConfigurationError, match=r"other values alone than among others|fails on a part") as refused:
        make_pipeline(step, logistic()).fit(ROWS, LABELS)
    assert "PublicScaler" in str(refused.value)


@pytest.mark.rule(30)
def test_a_standardised_column_is_refused_before_anything_is_charged(tmp_path):
    ledger = fodp.Ledger(tmp_path / "people.sqlite", dataset="people")
    for pipeline in (
        Pipeline([("a", FunctionTransformer(standardise)), ("b", logistic(ledger=ledger))]),
        make_pipeline(FunctionTransformer(standardise), make_pipeline(Normalizer(), logistic(ledger=ledger))),
    ):
        with pytest.raises(ConfigurationError, match=r"stands FunctionTransformer\(standardise\)"):
            pipeline.fit(ROWS, LABELS)
    assert not list(ledger.store.select("run"))


@pytest.mark.rule(30)
def test_a_function_of_the_whole_target_is_refused():
    model = TransformedTargetRegressor(
        regressor(), func=standardise, inverse_func=lambda target: target, check_inverse=False
    )
    with pytest.raises(ConfigurationError, match=r"FunctionTransformer\(standardise\)"):
        model.fit(ROWS, ROWS[:, 0])
    with pytest.raises(ConfigurationError, match=r"FunctionTransformer\(standardise\)"):
        make_pipeline(Normalizer(), model).fit(ROWS, ROWS[:, 0])
    TransformedTargetRegressor(regressor(), func=np.log1p, inverse_func=np.expm1).fit(ROWS, ROWS[:, 0] + 1)


@pytest.mark.rule(30)
@pytest.mark.parametrize(
    "step",
    [
        Centred(),
        KBinsDiscretizer(n_bins=3, encode="ordinal"),
        TargetEncoder(),
        SelectKBest(k=1),
        FeatureAgglomeration(n_clusters=2),
        RBFSampler(gamma="scale", random_state=0),
        ColumnTransformer([("a", "passthrough", [0])], remainder=StandardScaler()),
        make_pipeline(Normalizer(), FeatureUnion([("a", PCA(1)), ("b", "passthrough")])),
    ],
    ids=lambda step: type(step).__name__,
)
def test_a_step_that_learns_is_refused_wherever_it_stands(step):
    with pytest.raises(ConfigurationError, match="which was fitted on the private rows without noise"):
        make_pipeline(step, logistic()).fit(ROWS, LABELS)


@pytest.mark.rule(30)
def test_gaps_that_are_filled_by_a_mean_are_refused():
    with pytest.raises(ConfigurationError, match=r"FunctionTransformer\(filled\)"):
        make_pipeline(FunctionTransformer(filled), logistic()).fit(HOLES, LABELS)


def test_a_step_that_draws_at_random_is_told_so():
    with pytest.raises(ConfigurationError, match="other values each time"):
        make_pipeline(FunctionTransformer(noisy), logistic()).fit(ROWS, LABELS)


def test_a_step_that_drops_rows_is_refused():
    with pytest.raises(ConfigurationError, match="which changes the number of rows"):
        make_pipeline(FunctionTransformer(lambda rows: rows[:-1]), logistic()).fit(ROWS, LABELS[:-1])


ROW_BY_ROW = {
    "a function": FunctionTransformer(np.tanh),
    "of each row": FunctionTransformer(lambda rows: rows / np.linalg.norm(rows, axis=1, keepdims=True)),
    "a network": FunctionTransformer(encoded),
    "somebody's own": Logarithm(),
    "a union": FeatureUnion([("a", Binarizer()), ("b", PolynomialFeatures(2))]),
    "columns": ColumnTransformer(
        [("a", Normalizer(), [0, 1]), ("b", OneHotEncoder(categories=[[-1, 0, 1]], handle_unknown="ignore"), [2])]
    ),
    "as a table": make_pipeline(Normalizer(), Binarizer()).set_output(transform="pandas"),
    "random, seeded": make_pipeline(RBFSampler(gamma=1.0, random_state=0), GaussianRandomProjection(2, random_state=0)),
    "indicators": MissingIndicator(features="all"),
    "sparse": of_functions(sparse.csr_matrix, lambda rows: rows.multiply(0.5).toarray()),
    "frozen": FrozenEstimator(StandardScaler().fit(ROWS + 1)),
    "with knots": SplineTransformer(knots=np.array([[-1.0] * 3, [0] * 3, [1] * 3])),
}


@pytest.mark.rule(30)
@pytest.mark.parametrize("step", ROW_BY_ROW.values(), ids=ROW_BY_ROW.keys())
def test_a_step_that_treats_each_row_by_itself_is_left_alone(step):
    if next(name for name, each in ROW_BY_ROW.items() if each is step) == "as a table":
        pytest.importorskip("pandas", reason="takes pandas")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline = make_pipeline(step, logistic()).fit(ROWS, LABELS)
    assert "does not cover" not in pipeline[-1].statement()


@pytest.mark.rule(30)
def test_a_sampler_of_another_package_is_refused():
    class Oversample(BaseEstimator):
        def fit_resample(self, rows, y):
            return np.r_[rows, rows], np.r_[y, y]

    class OtherPipeline(Pipeline):
        """As imbalanced-learn's: steps may make rows."""

        def fit(self, X, y=None):
            resampled = self.steps[0][1].fit_resample(X, y)
            self.steps[-1][1].fit(*resampled)
            return self

    with pytest.raises(ConfigurationError, match="Oversample, which makes or drops rows"):
        OtherPipeline([("more", Oversample()), ("model", logistic())]).fit(ROWS, LABELS)


@pytest.mark.rule(30)
def test_a_pipeline_that_keeps_its_steps_in_files_is_looked_at_too(tmp_path):
    for step, refused in ((StandardScaler(), True), (FunctionTransformer(scale), True), (Normalizer(), False)):
        pipeline = Pipeline([("step", step), ("model", logistic())], memory=str(tmp_path))
        with pytest.raises(ConfigurationError) if refused else contextlib.nullcontext():
            pipeline.fit(ROWS, LABELS)


def test_texts_and_tables_are_looked_at_too():
    pandas = pytest.importorskip("pandas", reason="takes pandas")
    texts = [f"word{n % 7} and word{n % 3}" for n in range(SIZE)]
    dense = FunctionTransformer(lambda rows: rows.toarray())
    make_pipeline(HashingVectorizer(n_features=8), dense, logistic()).fit(texts, LABELS)
    table = pandas.DataFrame({"age": ROWS[:, 0], "town": ["Ulm", "Rome"] * (SIZE // 2)})
    make_pipeline(FunctionTransformer(lambda rows: rows[["age"]] * 2), logistic()).fit(table, LABELS)
    for function in (lambda rows: pandas.get_dummies(rows), lambda rows: rows[["age"]] - rows["age"].mean()):
        with pytest.raises(ConfigurationError, match="in front of this estimator"):
            make_pipeline(FunctionTransformer(function), logistic()).fit(table, LABELS)


def test_what_was_learnt_on_purpose_stands_in_the_statement_and_on_the_card():
    for step, name in (
        (StandardScaler(), "StandardScaler"),
        (FunctionTransformer(scale), "FunctionTransformer(scale)"),
    ):
        model = logistic(allow_private_preprocessing=True)
        with pytest.warns(UserWarning, match="the guarantee does not cover") as said:
            make_pipeline(step, model).fit(ROWS + len(name), LABELS)
        assert said[0].filename == __file__
        assert name in json.dumps(model.privacy_card_["private_preprocessing"])
        assert model.statement().startswith("What follows does not cover the preprocessing")
        assert name in model.statement()
        assert model.plan().statement() in model.statement()
    plain = logistic(allow_private_preprocessing=True).fit(ROWS, LABELS)
    assert "private_preprocessing" not in plain.privacy_card_


@pytest.mark.rule(30)
def test_rows_that_were_standardised_by_hand_are_met_by_a_warning():
    for dtype in (np.float64, np.float32):
        by_hand = StandardScaler().fit_transform(ROWS).astype(dtype)
        with pytest.warns(UserWarning, match="scaled by numbers of their own") as said:
            logistic().fit(by_hand, LABELS)
        assert said[0].filename == __file__
    balanced = np.tile([[1.0, -1.0], [-1.0, 1.0]], (SIZE // 2, 1))
    others = (ROWS - StandardScaler().fit(ROWS[::2]).mean_) / StandardScaler().fit(ROWS[::2]).scale_
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logistic().fit(balanced, LABELS)
        logistic().fit(others, LABELS)


def test_a_private_estimator_in_front_is_not_fitted_a_second_time_by_the_look(tmp_path):
    ledger = fodp.Ledger(tmp_path / "people.sqlite", dataset="people")

    class Probabilities(TransformerMixin, BaseEstimator):
        def fit(self, rows, y=None):
            self.model_ = logistic(ledger=ledger).fit(rows, y)
            return self

        def transform(self, rows):
            return self.model_.predict_proba(rows)

    with pytest.raises(ConfigurationError, match="which could not be looked at"):
        make_pipeline(Probabilities(), logistic(ledger=ledger)).fit(ROWS, LABELS)
    assert len(list(ledger.store.select("run"))) == 1  # the fit in front; the second one was refused
