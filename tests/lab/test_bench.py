"""The benchmark measures what it says, and the committed page is what the committed numbers give."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fodp
from fodp.cli.main import main
from fodp.data.models import cross_entropy
from fodp_lab.bench import floor, measure, measurements, on_device, performance_page, plots, scaling, steps, worker
from fodp_lab.bench.contenders import CONTENDERS, PEERS, TERMS, Contender, build
from fodp_lab.bench.targets import DP_SGD, FO_8, FO_32, FO_32_FIXED, PLAIN, TARGETS, TITLES, Target
from fodp_lab.bench.workloads import CLASSES, WORKLOADS, Workload

DOCS = Path(__file__).parents[2] / "docs"


class TestStatistics:
    @pytest.mark.parametrize(("count", "low", "high"), [(3, 0, 2), (5, 0, 4), (6, 0, 5), (9, 1, 7), (20, 5, 14)])
    def test_interval_of_the_median_by_the_binomial_tables(self, count, low, high):
        assert measure.median_interval(list(range(count))[::-1]) == ((count - 1) / 2, low, high)

    def test_ratios_are_taken_within_a_round(self):
        # The machine slows down tenfold half-way; every round still says 1.5.
        under = [1.0, 1.1, 0.9, 10.0, 11.0, 9.0]
        assert measure.paired([1.5 * t for t in under], under) == pytest.approx((1.5, 1.5, 1.5))

    @pytest.mark.parametrize(
        ("at_least", "low", "high", "verdict"),
        [
            (False, 1.0, 2.0, "met"),
            (False, 1.9, 2.1, "unclear"),
            (False, 2.1, 2.2, "missed"),
            (True, 2.0, 3.0, "met"),
            (True, 1.9, 2.1, "unclear"),
            (True, 1.0, 1.9, "missed"),
        ],
    )
    def test_verdict_needs_the_whole_interval(self, at_least, low, high, verdict):
        assert Target("mlp", "a", "b", 2.0, at_least).verdict(low, high) == verdict

    @pytest.mark.parametrize("power", [1.0, 1.5])
    def test_fit_finds_the_power_beside_a_fixed_cost(self, power):
        xs = [1, 3, 10, 30, 100]
        found = scaling.fit(xs, [5 + 0.2 * x**power for x in xs])
        assert found["exponent"] == pytest.approx(power)
        assert found["fixed_ms"] == pytest.approx(5)


class TestWorkloads:
    def test_every_workload_has_a_title_and_targets(self):
        assert set(WORKLOADS) == set(TITLES) == {t.workload for t in TARGETS}

    @pytest.mark.parametrize(
        ("name", "batch", "least", "most"),
        [
            ("mlp", 200, 199_082, 199_082),
            ("conv", 256, 450_000, 550_000),
            ("transformer", 64, 790_000, 950_000),
            ("embedding", 256, 320_170, 320_170),
        ],
    )
    def test_models_are_as_large_as_said(self, name, batch, least, most):
        workload = WORKLOADS[name]
        model = workload.model()
        assert workload.batch == batch
        assert least <= sum(p.numel() for p in model.parameters()) <= most
        assert model(workload.inputs(2)).shape == (2, CLASSES)
        assert fodp.check(model) == []

    def test_data_is_the_same_for_everyone(self):
        first, second = (WORKLOADS["embedding"].data() for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class TestByHand:
    def test_its_clipped_sum_is_the_library_s(self):
        torch.manual_seed(0)
        model = WORKLOADS["mlp"].model()
        batch = torch.randn(20, 3072), torch.randint(CLASSES, (20,))
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        out = [torch.empty_like(p) for p in model.parameters()]
        floor.clipped_sum(layers, *batch, out)
        expected = fodp.clipped_sum(model, cross_entropy, batch, floor.CLIP_NORM)
        torch.testing.assert_close(torch.cat([part.flatten() for part in out]), expected)

    def test_its_memory_is_the_library_s(self):
        torch.manual_seed(0)
        window, exact = floor._Window(8, 50), fodp.FractionalMemory(window=8, zeta=1e-12)
        for _ in range(200):  # until the trend has forgotten that it began at zero
            query = torch.randn(50)
            release = query.clone()
            u = exact.read()
            window.mix_into(release)
            exact.write(release)
        torch.testing.assert_close(release, query + (1 - floor.BETA) * u)


@pytest.mark.parametrize("contender", [c for c in CONTENDERS if "mlp" in c.workloads], ids=lambda c: c.name)
def test_every_contender_trains(contender):
    if contender.is_peer:
        pytest.importorskip(contender.kind.replace("-", "_"), reason=f"{contender.kind} is not installed (extra bench)")
    made = []
    mlp = WORKLOADS["mlp"]

    def model():
        made.append(mlp.model())
        return made[-1]

    small = type(mlp)(20, 400, model, mlp.inputs)
    step, size = build(contender.kind, small, contender.settings)
    before = torch.cat([p.detach().flatten().clone() for p in made[0].parameters()])
    step()
    step()
    after = torch.cat([p.detach().flatten() for p in made[0].parameters()])
    assert size == len(before)
    assert torch.isfinite(after).all()
    if contender.kind != "jax-privacy":  # it trains a copy
        moved = (after - before).norm() / len(after) ** 0.5
        # Two steps of noise σC/L and learning rate 0.05; the memory adds little to it. Plain training moves less.
        assert 0 < moved < 0.05 * 1.1 / 20 * 2**0.5 * 1.3


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_opacus_does_the_same_work(mode, monkeypatch):
    """Without noise and with everyone in the lot, its step is ours: a comparison of equals."""
    pytest.importorskip("opacus", reason="opacus is not installed (extra bench)")
    from fodp_lab.bench import peers

    monkeypatch.setattr(peers, "NOISE_MULTIPLIER", 0.0)
    mlp = WORKLOADS["mlp"]
    torch.manual_seed(0)
    model = mlp.model()
    everyone = type(mlp)(20, 20, lambda: model, mlp.inputs)
    expected = fodp.clipped_sum(model, cross_entropy, everyone.data(), peers.CLIP_NORM)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    step, _ = peers.opacus(everyone, mode)
    step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close((before - after) / peers.LEARNING_RATE * 20, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The command itself, in its smallest form: four contenders, twice, each time in a new process."""
    folder, printed = tmp_path_factory.mktemp("bench"), io.StringIO()
    few = [contender for contender in CONTENDERS if contender.name in (PLAIN, DP_SGD, FO_8, FO_32)]
    words = ["--quick", "--rounds=2", "--no-peers", "--workload=embedding", "--json", f"--out={folder}"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr("fodp_lab.bench.contenders.CONTENDERS", few)
        assert main(["bench", *words]) == 0
    return json.loads(printed.getvalue().splitlines()[-1]), folder


class TestMeasuring:
    def test_all_take_part_in_every_round(self, smoke):
        measured = smoke[0]["workloads"]["embedding"]
        assert {PLAIN, DP_SGD, FO_8, FO_32} == set(measured["contenders"])
        assert all(len(row["milliseconds"]) == 2 for row in measured["contenders"].values())
        assert all(t > 0.05 for row in measured["contenders"].values() for t in row["milliseconds"])
        assert measured["parameters"] == 320_170

    def test_memory_is_each_process_s_own(self, smoke):
        rows = smoke[0]["workloads"]["embedding"]["contenders"]
        if rows[PLAIN]["peak_mb"] is None:
            pytest.skip("no /proc on this system")
        assert all(row["peak_mb"] >= row["idle_mb"] > 50 for row in rows.values())
        # 31 further rows of 320,170 floats are 38 MB, 7 of them 9 MB.
        assert rows[FO_32]["peak_mb"] - rows[FO_8]["peak_mb"] == pytest.approx(29, abs=15)

    def test_writes_results_and_a_picture(self, smoke):
        printed, folder = smoke
        assert measurements.load(folder / "performance.json") == printed
        assert (folder / "performance.png").stat().st_size > 10_000

    def test_the_page_shows_targets_and_times(self, smoke):
        page = performance_page.markdown(smoke[0])
        assert "| embedding | dp-sgd / plain SGD | ≤ 1.3 |" in page
        assert "| embedding | opacus, best mode / dp-sgd | ≥ 2 |  | not measured |" in page
        assert "### embedding: embedding (20k x 16), mean, linear, 320,170 parameters, batch 256" in page

    def test_a_peer_that_fails_is_named_and_the_others_go_on(self):
        peer = Contender("opacus nonsense", "opacus", dict(mode="nonsense"))
        plain = next(c for c in CONTENDERS if c.name == PLAIN)
        measured = measure.table("embedding", [peer, plain], 1, 1, 0.01, 1, lambda text: None)
        assert set(measured["contenders"]) == {PLAIN}
        assert "Error" in measured["failed"]["opacus nonsense"]

    def test_every_round_has_new_processes(self, monkeypatch):
        """What chance does to a process is not taken for its speed; memory is that of the first, which settled."""
        made = []

        class Process:
            parameters, idle_mb, wall_seconds, processor_seconds, fastest = 1, 1.0, 1.0, 1.0, 1.0

            def __init__(self, spec):
                made.append(self)
                self.asked, self.closed = [], False
                self.seconds = float(len(made))  # some are slower than others, always

            def wait_until_ready(self):
                pass

            def steps(self, count):
                assert not self.closed
                self.asked.append(count)
                self.peak_mb = float(sum(self.asked))
                return [self.seconds] * count

            def close(self):
                self.closed = True

        monkeypatch.setattr(measure, "Worker", Process)
        plain = next(c for c in CONTENDERS if c.name == PLAIN)
        row = measure.table("embedding", [plain], 4, 3, 2.0, 33, lambda text: None)["contenders"][PLAIN]
        assert row["milliseconds"] == [1000.0, 2000.0, 3000.0, 4000.0]
        assert row["peak_mb"] == 33 + 3 * 2
        assert [process.asked for process in made] == [[33, 2, 2, 2]] + 3 * [[plain.warm_up, 2, 2, 2]]
        assert all(process.closed for process in made)

    def test_a_contender_of_ours_that_fails_stops_everything(self):
        broken = Contender("broken", "private", dict(method="no-such-method", seed=0, params={}))
        with pytest.raises(measure.WorkerError, match="no-such-method"):
            measure.table("embedding", [broken], 1, 1, 0.01, 1, lambda text: None)


class TestResults:
    def row(self, *milliseconds, kind="private", window=0, idle=100.0, peak=100.0):
        return dict(milliseconds=list(milliseconds), kind=kind, window=window, idle_mb=idle, peak_mb=peak)

    def measured(self):
        rows = {
            PLAIN: self.row(1, 2, kind="plain", peak=200.0),
            DP_SGD: self.row(1.1, 2.2, peak=281.0),
            FO_8: self.row(1.2, 2.4, window=8, peak=284.0),
            "opacus hooks": self.row(50, 60, kind="opacus"),
            "opacus ghost": self.row(3.3, 6.6, kind="opacus"),
        }
        return {"workloads": {"mlp": dict(parameters=2**17, batch=200, contenders=rows, memory={}, failed={})}}

    def test_every_kind_of_contender_is_drawn(self, tmp_path):
        measured = self.measured()
        for contender in CONTENDERS:
            measured["workloads"]["mlp"]["contenders"].setdefault(contender.name, self.row(1, 2, kind=contender.kind))
        plots.draw(measured, tmp_path)
        assert (tmp_path / performance_page.PLOT).exists()

    def test_results_of_another_machine_are_found_before_measuring(self, tmp_path, capsys, monkeypatch):
        (tmp_path / "performance.json").write_text(json.dumps({"conditions": {"processor": "another"}}))
        monkeypatch.setattr("fodp_lab.commands.bench._parts", lambda *_: pytest.fail("has begun to measure"))
        assert main(["bench", "--quick", "--out", str(tmp_path)]) == 2
        assert "give another --out folder" in capsys.readouterr().err

    def test_opacus_is_judged_by_its_best_mode(self):
        judged = {row.target.over: row for row in measurements.judge(self.measured())}
        best = judged["opacus, best mode"]
        assert (best.note, best.verdict) == ("opacus ghost", "met")
        assert best.ratio == pytest.approx(3)
        assert judged[FO_32].verdict == "not measured"

    def test_memory_may_be_a_factor_of_plain_plus_the_window(self):
        rows = {row.contender: row for row in measurements.memory_rows(self.measured())}
        assert rows[DP_SGD].allowed_mb == pytest.approx(280)
        assert rows[DP_SGD].verdict == "missed"
        assert rows[FO_8].allowed_mb == pytest.approx(284)  # eight rows of half a MB
        assert rows[FO_8].verdict == "met"

    def test_parts_come_together_but_only_under_the_same_conditions(self, tmp_path):
        path = tmp_path / "performance.json"
        measurements.merge(path, {"workloads": {"mlp": {"a": 1}}})
        measurements.merge(path, {"paper_run": []})
        merged = measurements.merge(path, {"workloads": {"conv": {"b": 2}}})
        assert merged == measurements.load(path)
        assert merged["workloads"] == {"mlp": {"a": 1}, "conv": {"b": 2}}
        assert merged["paper_run"] == []
        path.write_text(json.dumps({**merged, "conditions": {**merged["conditions"], "torch": "1.0"}}))
        with pytest.raises(fodp.PrivacyError, match=r"torch 1\.0"):
            measurements.merge(path, {})

    def test_the_committed_page_is_generated_from_the_committed_numbers(self, capsys):
        assert main(["bench", "--markdown", str(DOCS / "performance.json")]) == 0
        assert capsys.readouterr().out == (DOCS / "performance.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workload", "nonsense"], "nonsense"),
        (["--rounds", "0"], "--rounds"),
        (["--markdown", "missing.json"], "missing.json"),
        (["--paper-run"], "FODP_DATA"),
        (["--scaling", "--paper-run"], "not allowed"),
    ],
)
def test_wrong_words_get_one_line(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FODP_DATA", raising=False)
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_peers_are_an_extra():
    text = (DOCS.parent / "pyproject.toml").read_text()
    assert all(f'"{peer}>=' in text for peer in PEERS)


@pytest.mark.parametrize("method", ["adp-adamw", "dp-is", "block-dp-sgd"])
def test_plans_without_end_have_noise_to_their_end(method):
    """A public schedule of noise, or of refreshes, must last for as many steps as a benchmark's plan has."""
    step, size = steps.private(WORKLOADS["mlp"], method, 0, {})
    step()
    assert size == 199_082


def test_the_memory_of_exponentials_is_counted_as_it_is():
    (row,) = (contender for contender in CONTENDERS if contender.name == FO_32_FIXED)
    step, _ = steps.private(WORKLOADS["mlp"], **row.settings)
    assert len(step.__self__.session.states["method"].decays) == TERMS == row.rows


class TestOnADevice:
    def test_a_device_that_is_not_there_is_refused_in_words(self, capsys):
        if torch.cuda.is_available():
            pytest.skip("this machine has CUDA, so that it is not refused")
        assert main(["bench", "--device", "cuda"]) == 2
        assert "--device cuda: this machine, or this build of PyTorch" in capsys.readouterr().err
        assert main(["train", "--dataset", "digits", "--target-epsilon", "4", "--device", "cuda"]) == 2
        assert "--device cuda" in capsys.readouterr().err
        assert main(["bench", "--device", "a phone"]) == 2
        assert "must be the name of a device" in capsys.readouterr().err

    def test_what_does_not_go_with_it_is_refused(self, capsys):
        assert main(["bench", "--device", "cpu", "--scaling"]) == 2
        assert "leave out --scaling" in capsys.readouterr().err

    def test_plain_and_private_steps_take_a_device(self):
        """The CPU by the way of other devices: bursts by the clock."""
        small = Workload(4, 20, lambda: nn.Linear(3, CLASSES), lambda n: torch.randn(n, 3))
        for contender in on_device.contenders("mlp"):
            step, size = build(contender.kind, small, {**contender.settings, "device": "cpu"})
            seconds = worker._burst(step, 2, {"device": "cpu"})
            assert size == 40
            assert len(seconds) == 2
            assert seconds[0] > 0

    def test_the_table_has_what_was_measured_and_what_failed(self):
        rows = {PLAIN: on_device._row([1e-3], [1e-3]), DP_SGD: on_device._row([3e-3], [1e-3])}
        results = {"device": "a device", "torch": "2", "fodp": "1", "noise_ns": 0.5,
                   "workloads": {"mlp": {"rows": rows, "failed": {FO_8: "out of memory"}}}}  # fmt: skip
        page = on_device.markdown(results)
        assert "| mlp | dp-sgd | 3.00 [3.00, 3.00] | 3.00 |" in page
        assert "out of memory" in page
        assert "0.5 ns a normal" in page

    def test_noise_is_timed_where_it_is_made(self):
        assert on_device.noise_ns(torch.device("cpu"), 1000) > 0
