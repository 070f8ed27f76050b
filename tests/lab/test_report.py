"""The report: statistics, verdicts that follow the records, generated texts, and the committed results."""

import csv
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fodp.cli.main import main
from fodp_lab.judging import verdicts
from fodp_lab.judging.claims import CLAIMS, judge_all
from fodp_lab.judging.results import Line, Results
from fodp_lab.judging.statistics import difference, holm, paired, summarize
from fodp_lab.judging.verdicts import (
    BETTER,
    EQUAL,
    NOT_DECIDABLE,
    NOT_REPRODUCED,
    OPEN,
    REPRODUCED,
    WORSE,
    Pair,
    compare,
)
from fodp_lab.paper import fair
from fodp_lab.paper.catalog import DP_SGD, EXPERIMENTS, FO, PRINTED_FINAL, RUNTIME
from fodp_lab.paper.records import Records
from fodp_lab.paper.spec import RunSpec
from fodp_lab.report import charts, figures, page, sentences, tables
from fodp_lab.report.files import texts, write
from records_for_tests import record, write_fair, write_paper, write_runtime

COMMITTED = Path(__file__).parents[2] / "results"


class TestStatistics:
    @pytest.mark.parametrize("label", PRINTED_FINAL)
    def test_the_papers_intervals_are_student_t_of_five_seeds(self, label):
        mean, std, low, high = PRINTED_FINAL[label]
        five = np.array([-1.2, -0.4, 0.1, 0.3, 1.2])
        sample = mean + std * (five - five.mean()) / five.std(ddof=1)
        s = summarize(sample)
        assert (s.n, s.mean, s.std) == (5, pytest.approx(mean), pytest.approx(std))
        assert (s.low, s.high) == (pytest.approx(low, abs=1.1e-4), pytest.approx(high, abs=1.1e-4))

    def test_paired_is_scipys_test_over_the_common_seeds(self):
        a, b = {1: 0.4, 2: 0.5, 3: 0.45, 9: 0.0}, {1: 0.35, 2: 0.41, 3: 0.44, 7: 1.0}
        d = paired(a, b)
        expected = stats.ttest_rel([0.4, 0.5, 0.45], [0.35, 0.41, 0.44])
        interval = expected.confidence_interval(0.95)
        assert d.n == 3
        assert d.p == pytest.approx(expected.pvalue)
        assert (d.low, d.high) == (pytest.approx(interval.low), pytest.approx(interval.high))

    def test_equal_and_shifted_samples(self):
        assert difference([0.0, 0.0, 0.0]).p == 1
        assert difference([0.1, 0.1, 0.1]).p == 0
        assert difference([0.1]) is None
        assert math.isnan(summarize([0.3]).std)

    def test_holm(self):
        assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
        assert holm([0.5, 0.9]) == [1.0, 1.0]
        assert holm([]) == []

    def test_holm_keeps_the_level_where_uncorrected_tests_do_not(self):
        rng = np.random.default_rng(0)
        p = rng.random((2000, 10))
        assert np.mean([min(holm(list(row))) < 0.05 for row in p]) < 0.065
        assert np.mean(p.min(axis=1) < 0.05) > 0.3


def by_seed(mean, spread=0.001, n=5):
    return {seed: mean + spread * (-1, 1, -0.5, 0.5, 0)[seed] for seed in range(n)}


def pair(mean, spread=0.001, n=5):
    return Pair("a", "b", by_seed(0.3 + mean, spread, n), by_seed(0.3, 0, n))


class TestVerdicts:
    @pytest.mark.parametrize(
        ("pairs", "status"),
        [
            ([pair(0.02)], REPRODUCED),
            ([pair(-0.02)], NOT_REPRODUCED),
            ([pair(0.0)], NOT_REPRODUCED),  # equal in practice
            ([pair(0.0, spread=0.05)], NOT_DECIDABLE),
            ([pair(0.02), pair(0.03)], REPRODUCED),
            ([pair(0.02), pair(-0.02)], NOT_REPRODUCED),
            ([pair(0.02), pair(0.0, spread=0.05)], NOT_DECIDABLE),
            ([pair(0.02), pair(0.02, n=1)], NOT_DECIDABLE),
        ],
    )
    def test_better(self, pairs, status):
        verdict = verdicts.all_better(pairs)
        assert verdict.status == status
        assert verdict.reason

    def test_many_comparisons_need_stronger_evidence(self):
        weak = pair(0.02, spread=0.015)
        alone = verdicts.all_better([weak]).status
        assert (alone, verdicts.all_better([weak] * 10).status) == (REPRODUCED, NOT_DECIDABLE)

    def line(self, label, values, panel=""):
        runs = {seed: {"final_accuracy": v, "curve": {"steps": [25, 50], "accuracy": [v, v]}, "final_epsilon": 1.0}
                for seed, v in values.items()}  # fmt: skip
        return Line(panel, label, RunSpec(dataset="cifar10", method="dp-sgd", params=dict(lr=0.8)), runs)

    def test_numbers(self):
        line = self.line("x", by_seed(0.32, 0.01))
        assert verdicts.overlaps([(line, (0.33, 0.01, 0.31, 0.34))]).status == REPRODUCED
        assert verdicts.overlaps([(line, (0.40, 0.01, 0.39, 0.41))]).status == NOT_REPRODUCED
        assert verdicts.overlaps([(line, (0.33, 0.001, 0.329, 0.331))]).status == NOT_DECIDABLE  # ours is too wide
        assert verdicts.mean_inside(line, 0.325, 0.34).status == NOT_REPRODUCED  # outside, though only just
        assert verdicts.mean_inside(line, 0.31, 0.33).status == REPRODUCED
        outside = verdicts.mean_inside(line, 0.40, 0.41)
        assert outside.status == NOT_REPRODUCED
        assert "below" in outside.reason
        assert "do not overlap" in outside.reason
        assert verdicts.mean_inside(self.line("x", {0: 0.3}), 0.2, 0.4).status == NOT_DECIDABLE

    @pytest.mark.parametrize(("others", "status"), [
        ((0.2, 0.25), REPRODUCED), ((0.2, 0.32), NOT_REPRODUCED), ((0.2, 0.305), NOT_DECIDABLE),
    ])  # fmt: skip
    def test_one_seed(self, others, status):
        panels = {str(i): [self.line(FO, {0: 0.3}), self.line("other", {0: v})] for i, v in enumerate(others)}
        assert verdicts.first_everywhere(panels, FO).status == status

    def test_equal_epsilon_compares_at_equal_epsilon(self):
        """The same accuracy at every ε is no difference, though one run is far slower in epochs."""
        rng = np.random.default_rng(0)
        lines = []
        for noise in (1.1, 2.0):
            spec = RunSpec(dataset="cifar10", method="dp-sgd", params=dict(lr=0.8), noise_multiplier=noise)
            runs = {seed: record(spec.with_(seed=seed), 0.3, rng) for seed in range(3)}
            line = Line("", "x", spec, runs)
            for seed, run in runs.items():
                run["curve"]["accuracy"] = [0.1 + 0.01 * e + 0.01 * seed for e in line.epsilons]
            lines.append(line)
        same = verdicts.equal_epsilon(*lines)
        assert max(abs(same.high[s] - same.low[s]) for s in same.high) < 1e-4
        by_epoch = verdicts.trajectory(*lines)
        assert min(by_epoch.high[s] - by_epoch.low[s] for s in by_epoch.high) > 0.02

    def test_ratio_of_times(self):
        r = verdicts.ratio([2.0, 2.2, 4.1], [1.0, 1.1, 2.0])
        assert r.mean == pytest.approx(2.0, rel=0.02)
        assert r.low < r.mean < r.high
        assert verdicts.ratio([1.0], [1.0]) is None


class TestClaims:
    def test_every_experiment_of_the_paper_has_a_claim(self):
        without = {"baseline-rates", "learning-rate", "reference", "sensitivity", "order"}  # ours, and one of no claim
        assert {claim.experiment for claim in CLAIMS} == ({*EXPERIMENTS, RUNTIME, "fair"} - without)
        assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
        assert {claim.rule for claim in CLAIMS} <= set(verdicts.RULES)

    def test_nothing_recorded_decides_nothing(self, tmp_path):
        assert {v.status for v in judge_all(Results(tmp_path)).values()} == {NOT_DECIDABLE}

    @pytest.mark.parametrize(("gain", "status"), [(0.04, REPRODUCED), (-0.04, NOT_REPRODUCED)])
    def test_verdicts_follow_the_records(self, tmp_path, gain, status):
        def top(spec):
            return 0.3241 + gain * (spec.method == "fo-dp-sgd")

        write_paper(tmp_path, top, only=("final-accuracy", "memory-design"))
        found = judge_all(Results(tmp_path))
        for name in ("final-gain", "final-best", "memory-fo", "memory-fo-best"):
            assert found[name].status == status, found[name]
        assert found["final-fo"].status == (REPRODUCED if gain > 0 else NOT_REPRODUCED)
        assert found["final-baseline"].status == REPRODUCED
        assert found["window-none"].status == NOT_DECIDABLE

    def test_runtime(self, tmp_path):
        write_runtime(tmp_path, {FO: 1.05, "DP-Adam": 1.3, "DP-SAM": 1.9, "DP-SAT": 1.01})
        found = judge_all(Results(tmp_path))
        assert found["runtime-overhead"].status == REPRODUCED
        assert found["runtime-faster"].status == NOT_REPRODUCED  # DP-SAT is faster
        assert found["runtime-comparable"].status == REPRODUCED

    def test_runtimes_are_those_of_the_latest_complete_measurement(self, tmp_path):
        write_runtime(tmp_path, {}, turns=4, code="old", day="2026-01-01")
        write_runtime(tmp_path, {FO: 2.0}, turns=3, code="new", day="2026-01-02")
        assert {r["code"] for r in Results(tmp_path).rounds} == {"old"}  # the new one was interrupted
        write_runtime(tmp_path, {FO: 2.0}, turns=4, code="new", day="2026-01-02")
        results = Results(tmp_path)
        assert sum(results.runtime[FO]) == pytest.approx(8, rel=0.05)
        table = tables.tables_of(results, RUNTIME)[0].markdown()
        assert "4 turns of 250 steps, 40 epochs" in table
        assert "2026-01-02, code `new`" in table
        assert "`new`" in texts(results, {})["REPRODUCTION.md"]

    def test_epsilon_falls_with_beta(self, tmp_path):
        write_paper(tmp_path, lambda spec: 0.1, seeds=1, only=("beta-joint",))
        assert judge_all(Results(tmp_path))["joint-epsilon"].status == REPRODUCED


class TestReference:
    """The sentence about the miss of β=1 follows the records."""

    @pytest.mark.parametrize(
        ("base", "shift", "spread", "words"),
        [
            (0.3241, 0.02, 0.001, "no miss to explain"),
            (0.3120, 0.02, 0.001, "is explained"),
            (0.3370, -0.02, 0.001, "is explained"),
            (0.3120, -0.02, 0.001, "away from the paper's interval"),
            (0.3120, 0.0001, 0.001, "as far as these seeds can tell"),
            (0.3120, 0.02, 0.1, "as far as these seeds can tell"),
        ],
    )
    def test_explained_or_not(self, tmp_path, base, shift, spread, words):
        records = Records(tmp_path / "paper.jsonl")
        for spec in EXPERIMENTS["reference"].runs():
            moved = shift + spread * (spec.seed - 1) if spec.variant == "pixels in [0, 1]" else 0.0
            records.append(record(spec, 0.3, np.random.default_rng(0)) | {"final_accuracy": base + moved})
        told = " ".join(sentences.about(Results(tmp_path), "reference"))
        assert words in told
        assert ("pixels in [0, 1] by " in told) == (words in ("is explained", "away from the paper's interval"))

    def test_some_runs_decide_nothing(self, tmp_path):
        write_paper(tmp_path, lambda spec: 0.3, seeds=1, only=("reference",))
        assert sentences.about(Results(tmp_path), "reference") == ["The runs are not complete."]
        assert sentences.about(Results(tmp_path / "none"), "reference") == ["The runs are not complete."]


def test_the_fair_rule(tmp_path):
    shifts = {"DiSK": 0.03, "DP-SAM": -0.03, "DP-SAT": 0.0}
    protocol = fair.Protocol(settings=fair.SETTINGS[:1], rates=2, best=1)
    rows = [row for row in fair.ROWS if row.label in ("DP-SGD", "not private", *shifts)]
    methods = {row.method: shifts.get(row.label, 0.05) for row in rows}
    records, rng = Records(tmp_path / "fair.jsonl"), np.random.default_rng(0)
    comparison = fair.Comparison(rows, records, protocol)
    for _, specs in comparison.rounds():
        for spec in specs:
            shift = 0.0 if spec.method == "dp-sgd" else methods[spec.method]
            top = 0.3 + shift + 0.02 * math.sin(spec.seed)
            records.append({**record(spec, top, rng), "final_accuracy": top + rng.normal(0, 0.003)})
    found = {c.label: c for c in compare(comparison, protocol.settings[0])}
    assert {label: found[label].verdict for label in shifts} == {"DiSK": BETTER, "DP-SAM": WORSE, "DP-SAT": EQUAL}
    assert found["DP-SGD"].difference is None
    assert found["not private"].p is None
    assert found["DiSK"].summary.n == 10
    assert OPEN not in {c.verdict for c in found.values()}


@pytest.mark.parametrize(("plain", "said"), [(0.4, ""), (0.3, "above it: 1, DiSK the"), (0.2, "above it: 2, DiSK the")])
def test_plain_sgd_is_called_a_ceiling_only_if_no_private_row_is_above_it(tmp_path, plain, said):
    ends = {"none": plain, "disk": 0.35, "dp-sgd": 0.25}
    write_fair(
        tmp_path, lambda spec: ends[spec.method], ("DP-SGD", "DiSK", "not private"), fair.Protocol(fair.SETTINGS[:1])
    )
    line = sentences.fair_findings(Results(tmp_path))[0]
    assert "Without privacy" in line
    assert said in line
    assert ("no ceiling" in line) == bool(said)


@pytest.mark.parametrize(("method", "caveat"), [("block-dp-sgd", True), ("disk", False)])
def test_a_recommendation_tells_its_caveat(tmp_path, method, caveat):
    few = ("DP-SGD", "DiSK", "Block-DP-SGD", "not private")
    write_fair(tmp_path, lambda spec: 0.3 + 0.1 * (spec.method == method), few, fair.Protocol(fair.SETTINGS))
    advice = " ".join(sentences.practitioner(Results(tmp_path)))
    assert "That is what to use" in advice
    assert ("had been tried on these test images" in advice) == caveat


FEW = ("DP-SGD", "FO-DP-SGD", "exact twin of FO", "not private")
ONE_SETTING = fair.Protocol(settings=fair.SETTINGS[:1])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with made-up records of everything, some of it missing."""
    folder = tmp_path_factory.mktemp("results")
    some = ("final-accuracy", "window", "insertion", "sensitivity", "clipping")
    write_paper(folder, lambda spec: 0.3, seeds=3, only=some)
    write_fair(folder, lambda spec: 0.3 + 0.1 * (spec.method == "none"), FEW, ONE_SETTING)
    write_runtime(folder, {"DP-SAM": 1.9})
    return folder


class TestFiles:
    def test_everything_is_written(self, made, tmp_path, capsys):
        for file in made.glob("*.jsonl"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        assert main(["report", "--out", str(tmp_path), "--json"]) == 0
        done = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert {"clipping-sigma1.5", "clipping-sigma2", "final-accuracy", "window", "runtime"} <= set(done["figures"])
        for name in done["figures"]:
            assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000
            assert "<svg" in (tmp_path / "figures" / f"{name}.svg").read_text()
        for name in done["files"]:
            assert (tmp_path / name).read_text()

    def test_texts_are_a_function_of_the_records(self, made):
        results = [Results(made), Results(made)]
        first, second = (texts(r, charts.draw(r)) for r in results)
        assert first == second
        assert not [name for name, text in first.items() if str(made) in text]

    def test_what_is_missing_is_said(self, made):
        results = Results(made)
        generated = texts(results, charts.draw(results))
        assert "Not complete:" in generated["REPRODUCTION.md"]
        assert "24 of 40 runs recorded" in generated["tables/final-accuracy.md"]
        assert "0 of 40 runs recorded" not in generated["tables/accuracy.md"]  # cifar10 is shared with final-accuracy
        for name in (*EXPERIMENTS, RUNTIME, "fair"):
            assert f"`{name}`" in generated["REPRODUCTION.md"]

    def test_every_figure_is_linked(self, made):
        results = Results(made)
        drawn = charts.draw(results)
        text = texts(results, drawn)["REPRODUCTION.md"]
        assert sorted(re.findall(r"figures/([\w.-]+)\.png", text)) == sorted(drawn)

    def test_a_row_of_the_csv_names_its_variant(self, tmp_path):
        write_paper(tmp_path, lambda spec: 0.3, seeds=1, only=("reference",))
        rows = list(csv.DictReader(io.StringIO(tables.runs_as_csv(Results(tmp_path)))))
        told = [row["parameters"] for row in rows]
        assert len(set(told)) == len(told) == len(EXPERIMENTS["reference"].rows)
        assert "lr=0.8 (Glorot weights)" in told

    def test_quick_runs_say_so(self, tmp_path):
        from fodp_lab.paper.catalog import quick

        rng = np.random.default_rng(0)
        records = Records(tmp_path / "paper.jsonl")
        for spec in EXPERIMENTS["window"].runs(2):
            records.append(record(quick(spec), 0.3, rng))
        results = Results(tmp_path)
        assert results.quick
        assert {v.status for v in judge_all(results).values()} == {NOT_DECIDABLE}
        assert {line for name in (*EXPERIMENTS, "fair") for line in sentences.about(results, name)} == {
            "These are the short runs of `--quick`, whose numbers mean nothing."
        }
        assert "--quick" in texts(results, charts.draw(results))["REPRODUCTION.md"]

    def test_the_newest_record_of_a_run_counts(self, tmp_path):
        write_paper(tmp_path, lambda spec: 0.3, only=("window",))
        spec = EXPERIMENTS["window"].rows[0].spec.with_(seed=0)
        newer = record(spec, 0.3, np.random.default_rng(0), code="newer") | {"final_accuracy": 0.99}
        with (tmp_path / "paper.jsonl").open("a") as file:
            file.write(json.dumps(newer) + "\n")
        results = Results(tmp_path)
        assert results.line("window", "K=1").final[0] == 0.99
        assert results.versions("code")["newer"] == 1
        assert "`newer` (1)" in texts(results, {})["REPRODUCTION.md"]

    def test_a_folder_without_records_is_one_clear_line(self, tmp_path, capsys):
        assert main(["report", "--out", str(tmp_path)]) == 2
        assert "fodp reproduce" in capsys.readouterr().err

    def test_figures_are_repeatable(self, made, tmp_path):
        results = Results(made)
        chart = [charts.draw(results)["window"]]
        for name in ("a", "b"):
            figures.save(chart, tmp_path / name)
        for end in ("png", "svg"):
            assert (tmp_path / "a" / f"window.{end}").read_bytes() == (tmp_path / "b" / f"window.{end}").read_bytes()


@pytest.fixture(scope="module")
def written(made):
    """The page of the made-up records."""
    results = Results(made)
    return page.html(results, judge_all(results), charts.draw(results))


class TestPage:
    def test_it_asks_for_nothing_and_runs_nothing(self, made, written):
        assert "<script" not in written
        assert "default-src 'none'" in written
        assert not re.findall(r"https?://|src=|@import|\son\w+=|url\((?!#)", written)
        beside = {"tables/runs.csv", *(path.name for path in made.glob("*.jsonl"))}
        assert set(re.findall(r'href="(?!#|data:)([^"]*)"', written)) == beside

    def test_every_reference_within_it_leads_somewhere(self, written):
        ids = re.findall(r'\sid="([^"]*)"', written)
        assert len(set(ids)) == len(ids)
        inside = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)|aria-\w+by="([^"]*)"', written)
        assert {name for names in inside for name in names if name} <= set(ids)

    def test_every_panel_is_drawn_and_told(self, made, written):
        drawn = charts.draw(Results(made))
        assert re.findall(r'<figure id="chart-([^"]*)"', written) == [
            chart.name for name in tables.names() for chart in charts.charts_of(drawn, name)
        ]
        told = re.findall(
            r'<svg viewBox="[^"]*" role="img".*?<title[^>]*>(.*?)</title><desc[^>]*>(.*?)</desc>', written
        )
        assert len(told) == sum(len(chart.panels) for chart in drawn.values())
        assert all(title and description for title, description in told)
        assert any("test accuracy against epoch. At the end: K=1 0.3" in description for _, description in told)
        assert '<g class="mark"><title>K=32</title><path' in written

    def test_charts_take_their_colours_from_the_page(self, written):
        """Dark or light, whatever the reader has: no black ink, no white paper."""
        style = written.split("<style>")[1].split("</style>")[0]
        assert not re.search(r"(fill|stroke): (#000000|#ffffff|black|white)", style)
        assert not re.search(r' style="', written)
        used, defined = set(re.findall(r"var\((--\w+)\)", written)), set(re.findall(r"(--\w+):", style))
        assert used <= defined

    def test_names_cannot_break_out_of_the_page(self, tmp_path):
        """A challenger's label is a user's text, in tables, legends and charts."""
        evil = "</svg></style><script>alert(1)</script>"
        fair.challenge(tmp_path, evil, "dp-sgd", {}, 0.1, ())
        write_fair(tmp_path, lambda spec: 0.3, (*FEW, evil), ONE_SETTING)
        results = Results(tmp_path)
        written = page.html(results, judge_all(results), charts.draw(results))
        assert "<script" not in written
        assert written.count("alert(1)") > 3

    def test_one_seed_is_enough(self, tmp_path):
        write_paper(tmp_path, lambda spec: 0.3, seeds=1, only=("final-accuracy", "memory-design"))
        results = Results(tmp_path)
        drawn = charts.draw(results)
        ours = drawn["final-accuracy"].panels[0].marks[0]
        assert ours.low == ours.y
        assert "nan" not in "".join(figures.panels(drawn["final-accuracy"])).lower()
        figures.save([drawn["final-accuracy"]], tmp_path)

    def test_curves_are_thinned_to_their_last_point(self):
        curve = charts.Mark("a", charts.INK, [float(i) for i in range(1, 1001)], [i / 1000 for i in range(1000)])
        alone = charts.Panel("", "x", "y", (curve,))
        (svg,) = figures.panels(charts.Chart("c", "c", "lines", (alone,)))
        points = re.search(r'<g class="mark"><title>a</title><path d="([^"]*)"', svg)[1]
        assert points.count(" ") < 2 * 126 + 2
        assert f"{curve.y[-1]:.3f}" in svg


def test_the_fair_rule_is_published_by_optimised_python_too():
    """It once was a docstring, which -OO takes away."""
    optimised = compile(Path(fair.__file__).read_text(encoding="utf-8"), "fair.py", "exec", optimize=2)
    assert fair.RULE in optimised.co_consts
    assert "fixed before the runs" in fair.RULE


def test_a_table_without_runs_is_a_table(tmp_path):
    table = tables.tables_of(Results(tmp_path), "final-accuracy")[0]
    assert {row[0] for row in table.rows} == set(PRINTED_FINAL)
    assert DP_SGD in table.markdown()
    assert "no runs recorded" in tables.tables_of(Results(tmp_path), RUNTIME)[0].markdown()


def test_committed_texts_are_what_the_committed_records_give():
    results = Results(COMMITTED)
    drawn = charts.draw(results)
    page_too = {"report.html": page.html(results, judge_all(results), drawn)}
    for name, text in (texts(results, drawn) | page_too).items():
        assert (COMMITTED / name).read_text(encoding="utf-8") == text, f"{name} is stale: run `fodp report`"


def test_write_names_what_it_wrote(made, tmp_path):
    (tmp_path / "runtime.jsonl").write_bytes((made / "runtime.jsonl").read_bytes())
    done = write(tmp_path)
    assert done["figures"] == [RUNTIME]
    assert (tmp_path / "report.html").exists()
