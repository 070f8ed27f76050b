"""Tables by a public schema: what becomes of each cell, and that nothing comes from the rows but the rows."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fodp import PrivacyError
from fodp.data import from_table, read_schema
from fodp.data.tables import encode_inputs

SCHEMA = {
    "public_size": 500,
    "missing": ["?"],
    "columns": {
        "age": {"bounds": [0, 100], "fill": 25},
        "town": {"values": ["Ulm", "Bonn"]},
        "shoe": {"values": [38, 39], "fill": 39},
        "pay": {"bounds": [-1, 1]},
        "ill": {"values": ["no", "yes"]},
    },
}
CSV = """id,age,town,shoe,pay,ill
1,50,Ulm,38,0.5,no
2, 200 ,Rome,39.0,-7,yes
3,?,,?,0,no
"""
ROWS = [  # age | Ulm Bonn other | 38 39 other | pay
    [0.0, 1, 0, 0, 1, 0, 0, 0.5],
    [1.0, 0, 0, 1, 0, 1, 0, -1.0],
    [-0.5, 0, 0, 1, 0, 1, 0, 0.0],
]


def changed(path, value):
    """The schema with one entry replaced, or taken out if the value is None."""
    schema = json.loads(json.dumps(SCHEMA))
    *way, last = path
    place = schema
    for key in way:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return schema


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text(CSV)
    return tmp_path / "t.csv"


class TestCells:
    def test_a_file(self, table):
        splits = from_table(table, SCHEMA, "ill")
        assert splits.train.tensors[0].tolist() == ROWS
        assert splits.train.tensors[0].dtype == torch.float32
        assert splits.train.tensors[1].tolist() == [0, 1, 0]
        assert (len(splits.test), len(splits.validation)) == (0, 0)
        card = splits.card
        assert (card.name, card.train_size, card.classes, card.shape) == ("t.csv", 500, 2, (8,))
        assert card.class_names == ("no", "yes")

    def test_pandas_and_a_dictionary(self, table):
        pandas = pytest.importorskip("pandas", reason="needs pandas")
        frame = pandas.read_csv(table, skipinitialspace=True, na_values=["?"])
        assert frame["shoe"].dtype == float  # 39.0, as pandas has whole numbers beside missing ones
        expected = torch.tensor(ROWS)
        assert torch.equal(from_table(frame, SCHEMA, "ill").train.tensors[0], expected)
        assert torch.equal(from_table(frame.convert_dtypes(), SCHEMA, "ill").train.tensors[0], expected)
        columns = {name: frame[name].tolist() for name in frame}
        assert torch.equal(from_table(columns, SCHEMA, "ill").train.tensors[0], expected)

    def test_numbers_to_predict_are_scaled_by_their_bounds(self, table):
        splits = from_table(table, SCHEMA, "pay")
        assert splits.train.tensors[1].tolist() == [0.5, -1.0, 0.0]
        assert splits.card.is_regression
        assert splits.card.target_bounds == (-1.0, 1.0)
        assert splits.card.classes == 1

    def test_files_as_people_have_them(self, tmp_path):
        plain = from_table(_written(tmp_path, "a.csv", CSV), SCHEMA, "ill").train.tensors[0]
        for name, text in {
            "bom.csv": "\ufeff" + CSV,
            "crlf.csv": CSV.replace("\n", "\r\n"),
            "gap.csv": CSV + "\n\n",
            "quoted.csv": CSV.replace("Rome", '"Rome, Italy"'),
            "tabs.tsv": CSV.replace(",", "\t"),
        }.items():
            assert torch.equal(from_table(_written(tmp_path, name, text), SCHEMA, "ill").train.tensors[0], plain), name

    def test_inputs_without_a_target_are_encoded_alike(self, table):
        splits = from_table(table, SCHEMA, "ill")
        rows = {"age": [50], "town": ["Ulm"], "shoe": [38.0], "pay": [0.5]}
        assert encode_inputs(rows, splits.card).tolist() == ROWS[:1]


def _written(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder / name


@pytest.mark.rule(1)
def test_nothing_comes_from_the_rows_but_the_rows(tmp_path):
    """Whoever joins or leaves the table changes neither the card nor anybody else's numbers."""
    few = from_table(_written(tmp_path, "t.csv", CSV), SCHEMA, "ill")
    extreme = "4,1e9,Atlantis,77,-1e9,yes\n5,0,Bonn,38,1,no\n"
    more = from_table(_written(tmp_path, "t.csv", CSV + extreme), SCHEMA, "ill")
    assert few.card == more.card
    assert torch.equal(more.train.tensors[0][:3], few.train.tensors[0])
    assert more.train.tensors[0].abs().max() <= 1
    without_first = CSV.replace("1,50,Ulm,38,0.5,no\n", "")
    less = from_table(_written(tmp_path, "t.csv", without_first), SCHEMA, "ill")
    assert less.card == few.card
    assert torch.equal(less.train.tensors[0], few.train.tensors[0][1:])


@pytest.mark.rule(1)
def test_the_size_must_be_said_and_said_once(table):
    nameless = changed(["public_size"], None)
    with pytest.raises(PrivacyError, match="reveal who is in them"):
        from_table(table, nameless, "ill")
    assert from_table(table, nameless, "ill", public_size=400).card.train_size == 400
    with pytest.raises(PrivacyError, match="say one of them"):
        from_table(table, SCHEMA, "ill", public_size=400)


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CSV.replace("200", "old"), "line 3, column 'age' of .* is not a number"),
        (CSV.replace("200", "nan"), "line 3, column 'age' of .* is not a number"),
        (CSV.replace("-7", "?"), "line 3, column 'pay' of .* is missing: give the column a fill"),
        (CSV.replace("yes", "perhaps"), "line 3, column 'ill' of .* is none of the 2 classes"),
        (CSV.replace("yes", "?"), "line 3, column 'ill' of .* is missing"),
        (CSV.replace(",yes", ""), "line 3 of .* has 5 cells, the header 6"),
        (CSV.replace("town", "city"), "has no column 'town', which the schema names"),
        (CSV.replace("town", "age"), "columns 2 and 3 of .* have one name: rename one"),
        ("1,39.0,Rome,3\n", "none of the schema's names; its first line must be a header"),
        ("old,39.0,39.0,3\n", "columns 2 and 3 of .* have one name"),
        (CSV.replace("Ulm", '"Ulm'), "cannot read"),
        ("", "is empty"),
        (CSV.splitlines()[0] + "\n", "at least one row"),
    ],
)
def test_what_does_not_parse_is_refused_with_its_line_and_column(tmp_path, text, words):
    with pytest.raises(PrivacyError, match=words) as caught:
        from_table(_written(tmp_path, "t.csv", text), SCHEMA, "ill")
    message = str(caught.value).replace(str(tmp_path), "")
    assert not any(cell in message for cell in ("old", "perhaps", "Rome", "39.0"))  # it may be copied into a log


def test_what_is_no_table(tmp_path):
    (tmp_path / "latin.csv").write_bytes(CSV.replace("Ulm", "Köln").encode("latin1"))
    for table, words in (
        (tmp_path / "nowhere.csv", "No such file"),
        (tmp_path, "cannot read"),
        (tmp_path / "latin.csv", "not UTF-8"),
        (7, "columns, got int"),
        ([["a secret", 7]], "columns, got a list of rows"),
        ({"age": [1], "town": [1, 2]}, "one length"),
    ):
        with pytest.raises(PrivacyError, match=words):
            from_table(table, SCHEMA, "ill")


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["columns"], None, "must describe columns"),
        (["columns"], {}, "must describe columns"),
        (["colums"], {}, "says 'colums', which is none of"),
        (["public_size"], 0, "public_size"),
        (["public_size"], "many", "public_size"),
        (["missing"], "?", "list of texts"),
        (["columns", "age"], 3, "bounds or values"),
        (["columns", "age"], {}, "either bounds"),
        (["columns", "age", "values"], ["a"], "either bounds"),
        (["columns", "age", "scale"], "log", "says 'scale'"),
        (["columns", "age", "bounds"], [3], "low, high"),
        (["columns", "age", "bounds"], [3, 3], "low below a high"),
        (["columns", "age", "bounds"], [3, float("inf")], "finite"),
        (["columns", "age", "bounds"], ["0", "9"], "number"),
        (["columns", "age", "fill"], "young", "fill"),
        (["columns", "town", "values"], [], "list of categories"),
        (["columns", "town", "values"], ["a", "a "], "'a' is there twice"),
        (["columns", "town", "fill"], "Rome", "one of its values"),
        (["columns", "ill", "values"], ["no"], "at least two values"),
        (["columns", "ill", "fill"], "no", "cannot be learnt from"),
    ],
)
def test_a_wrong_schema_is_refused_before_the_table_is_read(path, value, words):
    with pytest.raises(PrivacyError, match=words):
        from_table(Path("nowhere.csv"), changed(path, value), "ill")


def test_targets_that_are_none(table):
    with pytest.raises(PrivacyError, match="column of the schema"):
        from_table(table, SCHEMA, "id")
    with pytest.raises(PrivacyError, match="beside the target"):
        from_table(table, {"public_size": 9, "columns": {"ill": {"values": ["no", "yes"]}}}, "ill")


def test_schema_files(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    lines = ["public_size = 500", 'missing = ["?"]']
    for name, column in SCHEMA["columns"].items():
        lines += [f"[columns.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in column.items())]
    (tmp_path / "s.toml").write_text("\n".join(lines))
    schema = read_schema(SCHEMA)
    assert read_schema(tmp_path / "s.json") == read_schema(tmp_path / "s.toml") == schema
    assert read_schema(schema.to_dict()) == read_schema(schema) == schema
    for name, text in {"bad.json": "{", "bad.toml": "= 3", "list.json": "[]"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(PrivacyError, match=name):
            read_schema(tmp_path / name)
    with pytest.raises(PrivacyError, match="nowhere"):
        read_schema(tmp_path / "nowhere.toml")


def test_columns_may_be_arrays():
    generator = np.random.default_rng(0)
    ages, towns = generator.integers(0, 120, 100_000), generator.choice(["Ulm", "Bonn", "Rome"], 100_000)
    columns = {"age": ages, "town": towns, "shoe": ages, "pay": ages / 60 - 1, "ill": np.where(ages > 60, "yes", "no")}
    rows = from_table(columns, SCHEMA, "ill").train.tensors[0]
    assert rows.shape == (100_000, 8)
    assert (rows[:, 1:4].sum(dim=1) == 1).all()
