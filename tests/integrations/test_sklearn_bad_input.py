"""Rows and labels that do not fit: refused by number and with a remedy, never by content, before any charge."""

import traceback

import numpy as np
import pytest
from scipy import sparse

import fodp
from fodp import ConfigurationError, DataError

pytest.importorskip("sklearn", reason="takes the extra sklearn")

from fodp.sklearn import PrivateClassifier, PrivateLogisticRegression, PrivateRegressor

pytestmark = pytest.mark.filterwarnings("ignore:this is private fit number")
SECRET = 0.123456789
ROWS = np.random.default_rng(5).uniform(-1, 1, (12, 3))
LABELS = (ROWS[:, 0] > 0).astype(int)
PUBLIC = dict(epsilon=8, delta=1e-5, public_size=12, bounds=(-2, 2), epochs=1, batch=6)


def logistic(**other):
    return PrivateLogisticRegression(**{**PUBLIC, "classes": 2, **other})


def regressor(**other):
    return PrivateRegressor(**{**PUBLIC, "target_bounds": (-3, 3), "hidden": (), **other})


def with_cell(value, row=7, place=2):
    rows = ROWS.astype(object)
    rows[row, place] = value
    return rows


def with_label(value, row=7):
    labels = LABELS.astype(object)
    labels[row] = value
    return labels


def refused(kind, said, fit):
    """The refusal is of this kind and says this, and neither it nor what led to it shows a record."""
    with pytest.raises(kind, match=said) as found:
        fit()
    told = "".join(traceback.format_exception(found.value, chain=False)[-1:]) + repr(found.value.__context__)
    assert "Smith" not in told
    assert str(SECRET)[:6] not in told


BAD_ROWS = {
    "NaN": (with_cell(float("nan")), DataError, r"row 7 .*feature 2 is NaN .*SimpleImputer"),
    "None": (with_cell(None), DataError, r"row 7 .*feature 2 is NaN"),
    "infinity": (with_cell(float("inf")), DataError, r"row 7 .*feature 2 is infinity"),
    "a text": (with_cell("Smith"), DataError, r"row 7 .*feature 2 is a text.*schema="),
    "all texts": (np.array([["Smith", "1"]] * 12), DataError, "row 0 .*feature 0 is a text"),
    "a dictionary": (with_cell({"Smith": SECRET}), TypeError, "row 7 .*feature 2 is of type dict"),
    "complex": (ROWS + 1j * SECRET, DataError, "row 0 .*Complex data not supported"),
    "one dimension": (np.full(12, SECRET), DataError, "expected a 2D array.*got a 1D array. Reshape your data"),
    "a number": (SECRET, DataError, "expected a 2D array.*got a scalar array"),
    "ragged": ([[SECRET, 1.0], [SECRET]], DataError, "row 1 has another number of features"),
    "rows and labels": ((ROWS, LABELS), DataError, "takes the rows and the targets as two arguments"),
    "three dimensions": (ROWS[:, :, None], ValueError, "dim 3"),
    "no rows": (ROWS[:0], ValueError, "0 sample"),
    "no features": (ROWS[:, :0], ValueError, "0 feature"),
    "sparse": (sparse.csr_matrix(ROWS), TypeError, "toarray"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_do_not_fit(name):
    rows, kind, said = BAD_ROWS[name]
    refused(kind, said, lambda: logistic().fit(rows, LABELS))


@pytest.mark.parametrize("name", ["NaN", "a text", "one dimension", "ragged"])
def test_rows_that_do_not_fit_a_fitted_model(name):
    rows, kind, said = BAD_ROWS[name]
    model = logistic().fit(ROWS, LABELS)
    refused(kind, said, lambda: model.predict(rows))
    refused(
        ValueError,
        "X has 2 features, but PrivateLogisticRegression is expecting 3",
        lambda: model.score(ROWS[:, :2], LABELS),
    )


BAD_LABELS = {
    "another one": (with_label(5), r"label of row 7 .*none of the declared classes \[0, 1\]"),
    "fractions": (with_label(SECRET), r"label of row 7 .*is no whole number.*PrivateRegressor"),
    "texts": (with_label("Smith"), r"label of row 7 .*is a text and the declared classes are numbers, \[0, 1\]"),
    "NaN": (with_label(float("nan")), "label of row 7 .*is missing"),
    "None": (with_label(None), "label of row 7 .*is missing"),
    "infinity": (with_label(float("inf")), "label of row 7 .*is infinity"),
    "a dictionary": (with_label({"Smith": 1}), "label of row 7 .*none of the declared classes"),
    "too few": (LABELS[:-1], r"one target for each row: the first without its partner is 11"),
    "two columns": (np.c_[LABELS, LABELS], "1d array"),
    "none": (None, "requires y to be passed"),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_labels_that_do_not_fit(name, tmp_path):
    labels, said = BAD_LABELS[name]
    ledger = fodp.Ledger(tmp_path / "people.sqlite", dataset="people")
    refused(ValueError if name == "two columns" else DataError, said, lambda: logistic(ledger=ledger).fit(ROWS, labels))
    assert not list(ledger.store.select("run"))


@pytest.mark.parametrize("value", ["Smith", None, float("nan"), float("-inf"), {"Smith": 1}])
def test_targets_that_are_no_numbers(value):
    refused(DataError, "target of row 7 .*is no finite number", lambda: regressor().fit(ROWS, with_label(value)))


def test_tables_are_named_by_column_and_place_not_by_their_index():
    pandas = pytest.importorskip("pandas", reason="takes pandas")
    table = pandas.DataFrame(ROWS, columns=["age", "pay", "size"], index=[f"Smith {n}" for n in range(12)])
    gone, text = table.copy(), table.astype(object)
    gone.iloc[7, 1], text.iloc[7, 1] = np.nan, "Smith"
    refused(DataError, r"row 7 .*feature 1 \('pay'\) is NaN", lambda: logistic().fit(gone, LABELS))
    refused(DataError, r"row 7 .*feature 1 \('pay'\) is a text", lambda: logistic().fit(text, LABELS))
    labels = pandas.Series(LABELS).astype("Int64")
    labels[7] = pandas.NA
    refused(DataError, "label of row 7 .*is missing", lambda: logistic().fit(table, labels))
    model = logistic().fit(table, LABELS)
    refused(ValueError, "same order", lambda: model.predict(table[["size", "pay", "age"]]))
    refused(ValueError, "unseen at fit time", lambda: model.predict(table.rename(columns={"age": "years"})))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(classes=1), "classes must be a whole number of at least 2"),
        (dict(classes=["a"]), "two or more different labels"),
        (dict(classes=[0, 0]), "two or more different labels"),
        (dict(classes=[0, float("nan")]), "two or more different labels"),
        (dict(classes=[0, "a"]), "all texts or all numbers"),
        (dict(classes="ab"), "two or more different labels"),
        (dict(ledger="people.sqlite"), r"ledger must be a fodp\.Ledger"),
        (dict(params=[1]), "params must be a dictionary"),
        (dict(epochs=0), "epochs must be above 0"),
    ],
)
def test_declarations_that_do_not_fit(given, said):
    with pytest.raises(ConfigurationError, match=said):
        logistic(**given).fit(ROWS, LABELS)


@pytest.mark.parametrize("hidden", [64, "64", None])
def test_sizes_of_layers_that_are_none(hidden):
    with pytest.raises(ConfigurationError, match=r"hidden must be the sizes of hidden layers, \(64,\)"):
        PrivateClassifier(**PUBLIC, classes=2, hidden=hidden).fit(ROWS, LABELS)


def test_what_is_not_declared_is_named_at_once():
    with pytest.raises(
        ConfigurationError, match=r"(?s)declare classes=.*; and state public_size=.*; and declare bounds="
    ):
        PrivateClassifier(epsilon=1, delta=1e-5).fit(ROWS, LABELS)
    with pytest.raises(ConfigurationError, match=r"(?s)declare target_bounds=.*; and state public_size="):
        PrivateRegressor(epsilon=1, delta=1e-5, bounds=(0, 1)).fit(ROWS, LABELS)
    with pytest.raises(ConfigurationError, match=r"target_bounds must be a pair \(low, high\), low below high"):
        regressor(target_bounds=5).fit(ROWS, LABELS)


@pytest.mark.parametrize("labels", [LABELS, LABELS.astype(float), LABELS > 0, LABELS.tolist(), LABELS.astype(object)])
def test_labels_of_any_type_that_names_a_declared_class_are_taken(labels):
    assert logistic().fit(ROWS, labels).classes_.tolist() == [0, 1]
