"""Audits and ledgers with input nobody thought of: a result, or one clear line."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fodp.ledger import Ledger
from fodp.ledger.card import summary
from odd_input_for_tests import mostly_plain, odd, plain, run, text

small = st.integers(-2, 40).map(str)


def json_of(out: str) -> dict:
    """The last line, which must be JSON that any program reads."""
    return json.loads(out.splitlines()[-1], parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


# ---- audit ---------------------------------------------------------------------------------------------------

AUDIT = {
    "noise-multiplier": mostly_plain, "delta": mostly_plain, "clip-norm": mostly_plain, "lr": mostly_plain,
    "sampling-rate": odd, "seed": st.one_of(small, odd), "trials": st.one_of(small, odd),
    "canaries": st.one_of(small, odd), "confidence": mostly_plain, "attack": text, "set": text, "run": text,
}  # fmt: skip


@settings(max_examples=15)
@given(data=st.data(), attack=st.sampled_from(["mechanism", "sampling", "replay", "one-run"]))
def test_an_audit_ends_in_a_verdict_or_in_one_line(data, attack):
    names = data.draw(st.lists(st.sampled_from(sorted(AUDIT)), min_size=1, max_size=2, unique=True))
    words = {"epochs": "0.1", "trials": "20", "canaries": "20", "noise-multiplier": "2", "accountant": "rdp"}
    words |= {"model": "logistic", **{name: data.draw(AUDIT[name], label=name) for name in names}}
    options = [f"--{name}={value}" for name, value in words.items()]
    code, out, _ = run("audit", f"--attack={attack}", "--json", "--quiet", "--threads=1", *options)
    if code == 0:
        assert json_of(out)["consistent"]


@pytest.mark.parametrize("option", ["--trials=-1", "--trials=0", "--canaries=0", "--canaries=-3"])
def test_a_count_is_refused_even_by_an_attack_that_does_not_use_it(option):
    code, _, err = run("audit", "--attack", "sampling", option)
    assert code == 2
    assert option.split("=")[0] in err


def test_an_audit_that_cannot_be_written_down_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr("fodp.audit.audit", lambda *_, **__: pytest.fail("the audit was made"))
    (tmp_path / "file").write_text("")
    for place in ("file", "file/folder"):
        code, _, err = run("audit", "--out", str(tmp_path / place))
        assert code == 2
        assert "cannot be written" in err


def test_options_beside_a_run_that_is_audited_are_refused_by_name(tmp_path):
    code, _, err = run("audit", "--run", str(tmp_path), "--clip-norm", "2")
    assert code == 2
    assert "leave out --clip-norm" in err


# ---- ledger --------------------------------------------------------------------------------------------------

SELECT = {"mean": mostly_plain, "shape": mostly_plain, "sampling-rate": mostly_plain, "noise-multiplier": mostly_plain,
          "steps": st.one_of(small, odd), "budget": st.one_of(st.tuples(plain, odd).map(",".join), text),
          "dataset-name": text}  # fmt: skip


@settings(max_examples=30)
@given(data=st.data())
def test_a_selection_is_charged_or_refused_in_one_line(data):
    names = data.draw(st.lists(st.sampled_from(sorted(SELECT)), max_size=3, unique=True))
    words = {"mean": "3", "sampling-rate": "0.1", "noise-multiplier": "4", "steps": "10", "dataset-name": "d"}
    words |= {"budget": "4,1e-5", **{name: data.draw(SELECT[name], label=name) for name in names}}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "l.sqlite"
        options = [f"--{name}={value}" for name, value in words.items()]
        code, out, _ = run("ledger", "select", str(file), "--json", *options)
        if code == 0:
            assert json_of(out)["runs"] >= 0
            assert run("ledger", "check", str(file))[0] == 0
            shown = json_of(run("ledger", "show", str(file), "--json")[1])
            assert shown[0]["selections"][0]["epsilon"] >= 0
        elif file.exists():  # a refusal charges nothing
            assert not any(record["selections"] for record in summary(Ledger(file, create=False)))


@settings(max_examples=40)
@given(action=st.sampled_from(["show", "check", "export"]), content=st.one_of(st.none(), st.binary(max_size=40)),
       name=st.one_of(st.none(), text), file=st.one_of(st.just("l.sqlite"), text))  # fmt: skip
def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_is(action, content, name, file):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "l.sqlite"
        if content is not None:
            path.write_bytes(content)
        said = [] if name is None or action == "check" else [f"--dataset-name={name}"]
        code, _, _ = run("ledger", action, str(path) if file == "l.sqlite" else f"{folder}/no/{file}", *said)
        assert code == 2
        assert (path.read_bytes() if path.exists() else None) == content
