"""`fodp bench --ranks`: what is counted is what the formulas say, and the page's tables are made of the results."""

import json

import pytest

from fodp.cli.main import main
from fodp.errors import PrivacyError
from fodp_lab.bench import ranks, ranks_page
from fodp_lab.bench.needs import BILLION, Setting, settings
from scaling_page import DOCS, page

ROW = {"workload": "mlp", "ranks": 2, "lot": 200, "steps": 5, "parameters": 10, "bytes": {"reduce": 40},
       "strong": {"wall_ms": 2.0, "processor_ms": 1.0}, "weak": {"wall_ms": 3.0, "processor_ms": 1.5},
       "window_bytes": 320, "load": 1.0}  # fmt: skip
CONDITIONS = {"processor": "a processor", "cores": 2, "torch": "2"}


def test_the_committed_tables_are_generated():
    assert page() == (DOCS / "scaling.md").read_text(encoding="utf-8")


def test_committed_rows_are_complete_and_send_what_the_formula_says():
    rows = json.loads((DOCS / "scaling.json").read_text())["rows"]
    assert {(row["workload"], row["ranks"]) for row in rows} == {(n, r) for n in ranks.NAMES for r in (1, 2, 3)}
    for row in rows:
        size = 4 * row["parameters"]
        assert row["window_bytes"] == ranks.WINDOW * size
        assert row["bytes"] == ({} if row["ranks"] == 1 else {"reduce": size, "broadcast": size, "all_gather": 144})


def test_two_processes_are_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ranks, "MOST_RANKS", 2)
    assert main(["bench", "--ranks", "--workload=mlp", "--rounds=2", f"--out={tmp_path}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "scaling.json").read_text())
    one, two = found["rows"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert two["bytes"]["reduce"] == two["bytes"]["broadcast"] == 4 * two["parameters"]
    assert min(way[clock] for row in (one, two) for way in (row["strong"], row["weak"]) for clock in way) > 0
    assert main(["bench", "--ranks", "--markdown", str(tmp_path / "scaling.json")]) == 0
    assert "the paper's MLP, 199,082 parameters, lot 200 | 1 |" in capsys.readouterr().out


def test_needs_are_the_formulas():
    whole = Setting("in full", BILLION, BILLION)
    assert whole.held() == {"parameters": 4e9, "sum": 4e9, "releases": 9 * 4e9, "optimizer": 8e9}  # K+1 releases
    assert whole.sent() == 8e9
    assert settings() == [whole, Setting("LoRA", BILLION, 10_000_000)]
    few = settings()[1].held()
    assert few == {"parameters": 4e9, "sum": 4e7, "releases": 36e7, "optimizer": 8e7}


def test_a_page_without_markers_and_results_that_are_none_are_refused():
    with pytest.raises(PrivacyError, match="no place for 'measured'"):
        ranks_page.put_into("no markers", {"measured": ""})
    with pytest.raises(PrivacyError, match="measure again"):
        ranks_page.measured({"rows": [{}]})


def test_tables_go_between_their_markers_again_and_again():
    begin, end = (line.format("a") for line in (ranks_page.BEGIN, ranks_page.END))
    once = ranks_page.put_into(f"above\n{begin}\n{end}\nbelow\n", {"a": "| table |"})
    assert once == f"above\n{begin}\n\n| table |\n\n{end}\nbelow\n"
    assert ranks_page.put_into(once, {"a": "| table |"}) == once


def test_a_row_says_what_was_measured():
    text = ranks_page.measured({"conditions": CONDITIONS, "rows": [ROW]})
    assert "|  | 2 | 2.0 / 1.0 | 3.0 / 1.5 | 40, 0, 0 | 0.0 |" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--workload", "conv"], "--workload"), (["--rounds", "0"], "--rounds"), (["--zoo"], "one at a time"),
     (["--markdown", "missing.json"], "missing.json")],
)  # fmt: skip
def test_wrong_words_get_one_line(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--ranks", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
