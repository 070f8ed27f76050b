"""Models that people have take a fast path, and it gives what the one-example loop gives."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fodp.cli.main import main
from fodp_lab.bench import zoo_table
from fodp_lab.bench.zoo import ZOO, look

DOCS = Path(__file__).parents[2] / "docs"

# Taken one by one, for now: rows of a packed sequence are sorted by length and have no dimension of their own.
LOOPED = {"LSTM, packed"}


@pytest.mark.rule(4)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore")
def test_a_real_model_is_fast_and_right(name: str) -> None:
    try:
        row = look(name)
    except Exception as missing:
        if find_spec("transformers") is None or find_spec("peft") is None:
            pytest.skip(f"{missing}")
        raise
    assert row.path == "loop" if name in LOOPED else row.path in ("layers", "functions"), row
    assert row.error < 1e-9, row


def results(**rows: dict[str, Any]) -> dict[str, Any]:
    return {"conditions": {"torch": "1"}, "load": [1.0, 2.0], "rounds": 3, "size": {}, "zoo": rows}


def test_rows_that_were_measured_later_join_those_that_are_there() -> None:
    before, new = results(GRU={"private": 1.0}, VAE={"private": 2.0}), results(VAE={"private": 3.0})
    new["load"] = [0.5, 0.5]
    found = zoo_table.merged(before, new)
    assert found["zoo"] == {"GRU": {"private": 1.0}, "VAE": {"private": 3.0}}
    assert found["load"] == [0.5, 2.0]
    other = new | {"conditions": {"torch": "2"}}
    assert zoo_table.merged(before, other) == other


def test_a_row_is_measured_in_a_process_of_its_own() -> None:
    row = zoo_table._apart(zoo_table.measure, "VAE", 1, False)
    assert row.path == "layers"
    assert row.error < 1e-9
    assert row.private > 0
    assert row.plain_mb > 0
    with pytest.raises(RuntimeError, match="measuring nobody ended with exit code 1"):
        zoo_table._apart(zoo_table.measure, "nobody", 1, False)


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--zoo", "--markdown", str(DOCS / "zoo.json")]) == 0
    assert capsys.readouterr().out == (DOCS / "zoo.md").read_text()


def test_every_model_has_a_row_on_the_page() -> None:
    page = (DOCS / "zoo.md").read_text()
    assert [name for name in ZOO if f"| {name} |" not in page] == []


@pytest.mark.skipif(find_spec("transformers") is None or find_spec("peft") is None, reason="takes fodp[hf]")
def test_a_model_that_is_not_in_the_zoo_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--zoo", "--model", "ELIZA"]) != 0
    assert "--model must be a name in docs/zoo.md" in capsys.readouterr().err
