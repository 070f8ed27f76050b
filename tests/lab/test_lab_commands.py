"""The laboratory's commands: found when installed, and a result or one clear line whatever they are given."""

import re
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fodp.cli.main import main
from fodp_lab.commands import bench as bench_command
from fodp_lab.paper.catalog import NAMES
from fodp_lab.paper.runner import Runner
from odd_input_for_tests import mostly_plain, odd, run, text

small = st.integers(-2, 40).map(str)


def test_the_help_lists_them(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for name in ("reproduce", "report", "bench"):
        assert re.search(rf"^    {name}\b", said, re.MULTILINE)
    assert "Not installed" not in said


def test_help_of_reproduce_names_every_experiment(capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    said = capsys.readouterr().out
    assert [name for name in NAMES if name not in said] == []


# ---- reproduce and report ------------------------------------------------------------------------------------

REPRODUCE = {"only": st.one_of(st.sampled_from(NAMES), text), "seeds": st.one_of(small, odd), "lr": mostly_plain,
             "jobs": st.one_of(small, odd), "challenge": st.one_of(st.sampled_from(["dp-sgd", "disk"]), text),
             "label": text, "ray": st.one_of(st.sampled_from(["local", "auto", "host:6379"]), text),
             "set": st.one_of(st.just("momentum=0.5"), text), "import": text}  # fmt: skip


@settings(max_examples=60)
@given(data=st.data(), suite=st.one_of(st.sampled_from(["paper", "fair"]), text))
def test_experiments_begin_or_are_refused_in_one_line(data, suite):
    """Nothing is trained: what is tested is what comes before the first run."""
    names = data.draw(st.lists(st.sampled_from(sorted(REPRODUCE)), max_size=3, unique=True))
    options = [f"--{name}={data.draw(REPRODUCE[name], label=name)}" for name in names]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        began: list[str] = []
        patch.setattr(Runner, "run", lambda self, specs, title: began.append(title))
        patch.setattr("fodp_lab.paper.runtime.measure", lambda *_: began.append("runtime"))
        patch.setattr("fodp_lab.paper.fair.Comparison.rounds", lambda self: iter([("fair", [])]))
        code, _, _ = run("reproduce", "--no-report", "--quiet", f"--out={folder}/r", *options, "--", suite)
        assert bool(began) == (code == 0)


@pytest.mark.parametrize("name", ["paper", "fair", "runtime"])
@pytest.mark.parametrize("line", ['{"key": 0}', '{"key": "a", "code": "b", "at": "c", "curve": []}'])
def test_a_record_that_lacks_something_is_refused_by_its_line_and_kept(tmp_path, name, line):
    file = tmp_path / f"{name}.jsonl"
    file.write_text(f'{{"ke\n\n{line}\n')
    code, _, err = run("report", f"--out={tmp_path}")
    assert code == 2
    assert "line 3" in err
    assert str(file) in err
    assert file.read_text() == f'{{"ke\n\n{line}\n'


# ---- bench ---------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(words=st.lists(st.one_of(
    st.tuples(st.sampled_from(["--rounds", "--workload", "--markdown", "--out"]), st.one_of(odd, text)).map("=".join),
    st.sampled_from(["--quick", "--scaling", "--paper-run", "--all", "--no-peers", "--json", "--ranks"]),
), max_size=3))  # fmt: skip
def test_a_benchmark_begins_or_is_refused_in_one_line(words):
    """Nothing is measured."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in (
            "scaling.scaling",
            "paper_run.paper_run",
            "measurements.merge",
            "plots.draw",
            "performance_page.show",
        ):
            patch.setattr(f"fodp_lab.bench.{name}", lambda *_: {})
        patch.setattr(bench_command, "_workload", lambda *_: {})
        patch.setattr("fodp_lab.bench.ranks.measured", lambda *_: iter([]))
        patch.setattr("fodp_lab.bench.ranks_page.measured", lambda *_: "")
        run("bench", *words)
