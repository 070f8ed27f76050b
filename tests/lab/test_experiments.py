"""The runner of the experiments: nothing repeated, nothing lost; and what the fair comparison chooses."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch.utils.data import TensorDataset

from fodp.cli.main import main
from fodp.errors import PrivacyError
from fodp.methods import METHODS
from fodp_lab.paper import fair, runner, runtime
from fodp_lab.paper.catalog import DATASETS, EXPERIMENTS, quick
from fodp_lab.paper.catalog import METHODS as PAPER_METHODS
from fodp_lab.paper.code_version import code_version
from fodp_lab.paper.execute import execute, splits_for
from fodp_lab.paper.records import Records
from fodp_lab.paper.runner import Runner
from fodp_lab.paper.spec import NON_PRIVATE, RunSpec
from fodp_lab.paper.variants import VARIANTS, varied


def tiny(method="dp-sgd", seed=0, steps=6, **params):
    """A run on the embedded data that takes a moment."""
    return RunSpec(dataset="digits", method=method, params={"lr": 0.5, **params}, seed=seed, plan_steps=steps,
                   steps=steps, score_every=2, noise_multiplier=2.0)  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestExecute:
    def test_the_same_spec_gives_the_same_record(self):
        first, second = (execute(tiny()) for _ in range(2))
        for record in (first, second):
            del record["seconds"], record["at"]
        assert first == second
        assert first["code"] == code_version("dp-sgd")
        assert first["curve"]["steps"] == [2, 4, 6]
        assert first["best_accuracy"] >= first["final_accuracy"]
        assert first["final_epsilon"] == pytest.approx(tiny().plan().epsilon())
        assert execute(tiny(seed=1))["curve"] != first["curve"]

    def test_a_run_with_an_average_is_scored_by_it(self):
        """Iterates are those of the run without; of one step the average is the iterate."""
        plain, averaged = execute(tiny(steps=12)), execute(tiny(steps=12, average="power", average_power=1.0))
        assert averaged["curve"] != plain["curve"]
        assert averaged["final_loss"] != plain["final_loss"]
        assert averaged["params"]["average"] == "power"
        one, same = execute(tiny(steps=1)), execute(tiny(steps=1, average="ema"))
        assert (one["curve"], one["final_loss"]) == (same["curve"], same["final_loss"])

    def test_a_search_run_has_the_noise_of_the_full_run(self):
        full = RunSpec(dataset="digits", method="dp-sgd", params=dict(lr=0.5), plan_steps=20, steps=20,
                       target_epsilon=2.0, accountant="pld", score_every=5)  # fmt: skip
        short = execute(full.with_(steps=5))
        assert short["noise_multiplier"] == full.plan().noise_multiplier
        assert short["final_epsilon"] < full.plan().epsilon() <= 2
        assert short["curve"]["steps"] == [5]

    def test_the_twin_is_fo_dp_sgd(self, monkeypatch):
        from fodp_lab.paper import twin

        METHODS.pop(twin.Twin.name, None)  # importing it registers it; other tests must not see that
        monkeypatch.setitem(METHODS, twin.Twin.name, twin.Twin)
        fo, other = (execute(tiny(method, steps=12, beta=0.7)) for method in ("fo-dp-sgd", twin.Twin.name))
        assert fo["final_epsilon"] == pytest.approx(other["final_epsilon"])
        assert fo["curve"] == other["curve"]
        assert fo["final_loss"] == pytest.approx(other["final_loss"], abs=1e-4)

    def test_the_ceiling_has_no_privacy_and_says_so(self):
        record = execute(tiny(NON_PRIVATE, steps=60).with_(noise_multiplier=None))
        assert record["final_epsilon"] is None
        assert record["final_accuracy"] > 0.5


class TestRecords:
    def test_a_torn_last_line_costs_that_run_only(self, tmp_path):
        path = tmp_path / "r.jsonl"
        records = Records(path)
        for key in "abc":
            records.append({"key": key, "code": "1"})
        path.write_bytes(path.read_bytes()[:-9])
        torn = Records(path)
        assert [torn.get(key) is not None for key in "abc"] == [True, True, False]
        torn.append({"key": "c", "code": "1"})
        torn.append({"key": "d", "code": "1"})
        assert [Records(path).get(key) is not None for key in "abcd"] == [True] * 4

    def test_the_latest_counts_and_the_version_is_asked_for(self, tmp_path):
        records = Records(tmp_path / "r.jsonl")
        for code, value in (("old", 1), ("new", 2)):
            records.append({"key": "a", "code": code, "value": value})
        again = Records(tmp_path / "r.jsonl")
        assert again.get("a")["value"] == 2
        assert again.get("a", "old") is None
        assert len(lines(tmp_path / "r.jsonl")) == 2  # append-only


class Here:
    """A pool that computes in this process, at once."""

    jobs = 1

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(json.loads(json.dumps(function(*arguments))))
        return future

    def close(self, *, at_once):
        pass


@pytest.mark.usefixtures("table_of_methods")
class TestRunner:
    def test_nothing_is_computed_twice(self, tmp_path, monkeypatch):
        monkeypatch.setattr(runner, "open_pool", lambda *_: Here())
        path = tmp_path / "r.jsonl"
        a, b = tiny(), tiny(seed=1)
        with Runner(path, 1, quiet=True) as first:
            first.run([a, b, tiny()], "shared")  # the third is the first
        assert sorted(record["key"] for record in lines(path)) == sorted([a.key, b.key])  # in no fixed order
        assert first.records.get(a.key)["curve"] == execute(a)["curve"]

        asked = []
        monkeypatch.setattr(Runner, "_compute", lambda self, missing, done: asked.append(missing))
        with Runner(path, 1, quiet=True) as second:
            second.run([a, b, tiny(seed=2)], "again")
        monkeypatch.setattr(runner, "code_of", lambda spec: "changed")
        with Runner(path, 1, quiet=True) as third:
            third.run([a], "other code")
        assert asked == [[tiny(seed=2)], [a]]

    def test_a_second_runner_is_refused(self, tmp_path):
        path = tmp_path / "r.jsonl"
        with FileLock(f"{path}.lock"), Runner(path, 1, quiet=True) as second:
            with pytest.raises(PrivacyError, match="--out"):
                second.run([tiny()], "second")
            assert not path.exists()

    def test_killed_and_started_again(self, tmp_path, monkeypatch):
        path = tmp_path / "r.jsonl"
        script = tmp_path / "go.py"
        script.write_text(
            "import sys\n"
            "from fodp_lab.paper.runner import Runner\n"
            "from test_experiments import tiny\n"
            "if __name__ == '__main__':\n"
            "    with Runner(sys.argv[1], 1, quiet=True) as runner:\n"
            "        runner.run([tiny(seed=seed, steps=60) for seed in range(24)], 'killed')\n"
        )
        folder = os.path.dirname(__file__)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *filter(None, sys.path)])}
        words = [sys.executable, str(script), str(path)]
        process = subprocess.Popen(words, env=environment, start_new_session=True)
        end = time.monotonic() + 300
        while not (path.exists() and path.read_text().count("\n") >= 2):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kept = lines(path)[:2]
        before = path.read_text()
        assert len(Records(path)) < 24, "the kill came too late to show anything"
        monkeypatch.setattr(runner, "open_pool", lambda *_: Here())
        specs = [tiny(seed=seed, steps=60) for seed in range(24)]
        with Runner(path, 1, quiet=True) as again:
            again.run(specs, "again")
        assert path.read_text().startswith(before[: before.rindex("\n") + 1])  # nothing lost or rewritten
        whole = [record["key"] for record in Records(path)]
        assert sorted(whole) == sorted(spec.key for spec in specs)
        keys = [json.loads(line)["key"] for line in path.read_text().splitlines() if line.endswith("}")]
        assert len(keys) == len(set(keys)) == 24  # nothing repeated
        assert kept == lines(path)[:2]

    def test_a_record_of_other_code_is_not_kept(self, tmp_path, monkeypatch):
        path = tmp_path / "r.jsonl"
        monkeypatch.setattr(runner, "open_pool", lambda *_: Here())
        monkeypatch.setattr(runner, "code_of", lambda spec: "other")
        with pytest.raises(PrivacyError, match="install the same fodp"), Runner(path, 1, quiet=True) as one:
            one.run([tiny()], "old workers")
        assert not path.exists()


class TestCodeVersion:
    def test_speed_does_not_count(self, monkeypatch):
        found = code_version("fo-dp-sgd")
        code_version.cache_clear()
        monkeypatch.setattr("fodp.kernels.library", lambda: None)
        assert code_version("fo-dp-sgd") == found
        code_version.cache_clear()

    def test_each_method_has_its_own(self):
        assert len({code_version(name) for name in ("dp-sgd", "fo-dp-sgd", "dp-adam", "dp-sat")}) == 4

    @pytest.mark.parametrize(
        ("where", "change"),
        [
            ("fodp.memory.window.WindowMemory.mix_in_", lambda self, vector, share: vector),
            ("fodp.lots.poisson.poisson_indices", lambda words, rate: np.arange(len(words))),
            ("fodp.session.Session.heard", lambda self, query, released, *_: 2 * released),
        ],
        ids=["memory", "masks", "release"],
    )
    def test_what_the_code_does_counts(self, where, change, monkeypatch):
        found = code_version("fo-dp-sgd")
        code_version.cache_clear()
        monkeypatch.setattr(where, change)
        assert code_version("fo-dp-sgd") != found
        code_version.cache_clear()


class TestRuntime:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        """Two methods on the embedded data."""
        splits = splits_for("digits", "mlp")
        monkeypatch.setattr(runtime, "splits_for", lambda dataset, model: splits)
        few = {"a": ("dp-sgd", dict(lr=0.1)), "b": ("fo-dp-sgd", dict(lr=0.1))}
        monkeypatch.setattr(runtime, "METHODS", few)

    def test_a_stopped_measurement_goes_on_and_a_faster_code_is_measured_anew(self, tmp_path, monkeypatch):
        path, shown = tmp_path / "runtime.jsonl", []

        def killed(label):
            shown.append(label)
            if len(shown) == 5:  # in the third round
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            runtime.measure(path, killed, rounds=4, turn=3)
        kept = path.read_bytes()
        assert [record["round"] for record in lines(path)] == [0, 1]
        assert shown == ["a", "b", "b", "a", "a"]  # the methods take turns at being first
        shown.clear()
        runtime.measure(path, shown.append, rounds=4, turn=3)
        assert len(shown) == 8
        assert path.read_bytes().startswith(kept)
        assert [record["round"] for record in lines(path)] == [0, 1, 2, 3]
        assert all(record["seconds"].keys() == {"a", "b"} for record in lines(path))
        assert all(min(record["seconds"].values()) > 0 for record in lines(path))

        with monkeypatch.context() as patch:
            patch.setattr(runtime, "_trainer", lambda *_: pytest.fail("nothing is missing"))
            runtime.measure(path, shown.append, rounds=4, turn=3)
        monkeypatch.setattr(runtime, "speed_version", lambda: "faster")
        runtime.measure(path, shown.append, rounds=1, turn=3)
        assert len(lines(path)) == 5
        assert lines(path)[-1]["code"] == "faster"

    def test_one_process_measures_at_a_time(self, tmp_path):
        path = tmp_path / "runtime.jsonl"
        with FileLock(f"{path}.lock"), pytest.raises(PrivacyError, match="--out"):
            runtime.measure(path, print, rounds=1, turn=3)
        assert not path.exists()

    def test_the_version_is_that_of_the_code_that_trains(self, tmp_path, monkeypatch):
        monkeypatch.setattr("fodp.__file__", str(tmp_path / "__init__.py"))
        seen = set()
        for name in ("memory.py", "kernels/loops.c", "kernels/common.h", "methods/a.py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("new")
            seen.add(runtime.speed_version())
        assert len(seen) == 4
        for name in ("cli/a.py", "audit/a.py", "notes.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("new")
            assert runtime.speed_version() in seen


class TestVariants:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_a_variant_is_another_run_of_which_one_thing_differs(self, variant):
        plain, other = tiny(), tiny().with_(variant=variant)
        assert other.key != plain.key
        assert other.to_dict() == {**plain.to_dict(), "variant": variant}

    def test_no_variant_leaves_no_trace(self):
        """Records made before there were variants are still found."""
        assert "variant" not in tiny().to_dict()
        assert RunSpec(**tiny().to_dict()).key == tiny().key

    def test_what_differs(self):
        from fodp.data import CARDS, Splits
        from fodp.data.models import build

        card = replace(CARDS["cifar10"], train_size=4, test_size=3)
        pixels = torch.linspace(0, 1, 12 * 3072).view(12, 3, 1024)
        means, stds = (torch.tensor(numbers).view(3, 1) for numbers in (card.mean, card.std))
        images = ((pixels - means) / stds).flatten(1)
        parts = [TensorDataset(images[s], torch.zeros(len(images[s]))) for s in (slice(4), slice(4, 9), slice(9, 12))]
        splits = Splits(card, *parts)

        def of(variant):
            torch.manual_seed(0)
            model = build("mlp", card)
            return varied(variant, splits, model), model

        same, plain = of("")
        assert same is splits
        assert of("train[5000:10000]")[0].train is splits.validation
        assert torch.equal(of("tested on train[5000:7000]")[0].test.tensors[0], images[4:7])
        for variant, expected in (("pixels in [0, 1]", pixels), ("pixels in [-1, 1]", 2 * pixels - 1)):
            changed, model = of(variant)
            found = torch.cat([part.tensors[0] for part in (changed.train, changed.validation, changed.test)])
            torch.testing.assert_close(found, expected.flatten(1), atol=1e-5, rtol=0)
            assert torch.equal(model[1].weight, plain[1].weight)
        splits_again, glorot = of("Glorot weights")
        assert splits_again is splits
        bound = math.sqrt(6 / (3072 + 64))
        assert glorot[1].weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
        assert plain[1].weight.abs().max() < bound / 2
        assert not glorot[1].bias.any()
        with pytest.raises(KeyError):
            of("no such variant")


class TestCatalog:
    RUNS = tuple(spec for experiment in EXPERIMENTS.values() for spec in experiment.runs())

    def test_runs_are_shared(self):
        keys = {name: {spec.key for spec in e.runs()} for name, e in EXPERIMENTS.items()}
        assert {spec.key for spec in EXPERIMENTS["final-accuracy"].runs(3)} < keys["accuracy"]
        assert keys["beta-joint"] < keys["beta-tradeoff"]
        assert len(set().union(*keys.values())) < sum(map(len, keys.values())) - 60

    def test_the_papers_protocol(self):
        for spec in self.RUNS:
            assert (spec.steps, spec.sampling_rate, spec.delta, spec.accountant) == (6250, 0.04, 1e-5, "rdp-classic")
        assert {spec.dataset for spec in EXPERIMENTS["accuracy"].runs(1)} == set(DATASETS)
        assert len(EXPERIMENTS["accuracy"].rows) == 3 * len(PAPER_METHODS) == 24
        assert len(EXPERIMENTS["clipping"].rows) == 64

    def test_quick_is_the_same_but_short(self):
        short = {quick(spec).key: quick(spec) for spec in self.RUNS}
        assert len(short) == len({spec.key for spec in self.RUNS})
        assert {(spec.steps, spec.plan_steps) for spec in short.values()} == {(250, 250)}
        assert not short.keys() & {spec.key for spec in self.RUNS}  # never mistaken for a real one

    def test_only_names_experiments(self, capsys):
        assert main(["reproduce", "--only", "nonsense"]) == 2
        assert "window" in capsys.readouterr().err


class Scores:
    """Records that exist only in mind: the accuracy of a run is a function of its spec."""

    def __init__(self, comparison_rows, score, protocol):
        self.known, self.score = {}, score
        self.comparison = fair.Comparison(comparison_rows, self, protocol)

    def get(self, key, code=None):
        return self.known.get(key)

    def finish(self, rounds=4):
        for _, (_, specs) in zip(range(rounds), self.comparison.rounds(), strict=False):
            for spec in specs:
                self.known[spec.key] = {"final_accuracy": self.score(spec)}
        return self.comparison


class TestFair:
    SETTING = fair.SETTINGS[0]
    ROWS = tuple(row for row in fair.ROWS if row.label in ("DP-SGD", fair.FO, fair.TWIN, "DiSK", fair.CEILING))
    PROTOCOL = fair.Protocol(settings=fair.SETTINGS[:1])

    @staticmethod
    def score(spec):
        """Best at rate 0.1 in short runs and at 0.2 in full ones; FO likes β=0.4; the test set loves rate 1.6."""
        best = 0.1 if spec.steps < 1000 else 0.2
        if spec.scored_on == "test":
            best = 1.6
        return 0.5 - 0.1 * abs(math.log2(spec.params["lr"] / best)) - 0.01 * abs(spec.params.get("beta", 0.4) - 0.4)

    def choose(self, score=None, rounds=4):
        return Scores(self.ROWS, score or self.score, self.PROTOCOL).finish(rounds)

    def test_the_search_budget(self):
        comparison = self.choose()
        for row in self.ROWS:
            counts = [len(comparison.search(row, self.SETTING, stage)) for stage in (1, 2, 3)]
            assert counts == ([0, 0, 0] if row.like else [8, 3, len(row.values)])
            assert len(row.values) in (0, 2)

    def test_the_choice_is_made_on_validation_data_at_full_length(self):
        comparison = self.choose()
        for row in self.ROWS:
            for stage in (1, 2, 3):
                for spec in comparison.search(row, self.SETTING, stage):
                    assert (spec.scored_on, spec.seed) == ("validation", fair.SEARCH_SEED)
            assert comparison.choice(row, self.SETTING).params["lr"] == 0.2
            final = comparison.final(row, self.SETTING)
            assert [spec.seed for spec in final] == list(range(1, 11))
            assert {(spec.scored_on, spec.steps) for spec in final} == {("test", 1000)}

    def test_all_methods_get_the_same_budget_of_epsilon(self):
        comparison = self.choose()
        targets = {spec.target_epsilon for row in self.ROWS for spec in comparison.final(row, self.SETTING)
                   if row.label != fair.CEILING}  # fmt: skip
        assert targets == {self.SETTING.epsilon}

    def test_the_own_parameter_is_chosen_and_the_twin_follows(self):
        comparison = self.choose()
        choices = {row.label: comparison.choice(row, self.SETTING) for row in self.ROWS}
        assert choices[fair.FO].params["beta"] == 0.4
        assert choices[fair.TWIN] == choices[fair.FO]
        assert not choices[fair.FO].at_edge

    def test_ties_go_to_the_smaller_rate_and_edges_are_told(self):
        comparison = self.choose(lambda spec: 0.3)
        choice = comparison.choice(self.ROWS[0], self.SETTING)
        assert choice.params["lr"] == fair.SGD_RATES[0]
        assert choice.at_edge

    @pytest.mark.parametrize("rounds", [0, 1, 2])
    def test_no_final_row_before_the_search_is_complete(self, rounds):
        comparison = self.choose(rounds=rounds)
        row = comparison.rows[fair.FO]
        assert comparison.choice(row, self.SETTING) is None
        assert comparison.final(row, self.SETTING) == []
        assert comparison.accuracies(row, self.SETTING) == {}


class TestChallengers:
    def test_a_row_is_kept_beside_the_records(self, tmp_path):
        fair.challenge(tmp_path, "more momentum", "dp-sgd", {"momentum": 0.95}, None, ("my_methods",))
        fair.challenge(tmp_path, "my rate", "dp-sgd", {}, 0.07, ())
        rows = {row.label: row for row in fair.rows_in(tmp_path)}
        assert list(rows)[: len(fair.ROWS)] == [row.label for row in fair.ROWS]
        assert rows["more momentum"].rates == fair.SGD_RATES
        assert fair.modules_in(tmp_path) == ("my_methods",)
        comparison = Scores([rows["my rate"]], lambda spec: 0.3, TestFair.PROTOCOL).finish()
        assert comparison.search(rows["my rate"], TestFair.SETTING, 1) == []
        assert {spec.params["lr"] for spec in comparison.final(rows["my rate"], TestFair.SETTING)} == {0.07}

    def test_adam_rows_get_adam_rates(self, tmp_path):
        assert fair.challenge(tmp_path, "x", "dp-adam", {}, None, ()).rates == fair.ADAM_RATES

    def test_wrong_rows_are_refused(self, tmp_path):
        for label, method, params in (("DP-SGD", "dp-sgd", {}), ("x", "no-such", {}), ("x", "dp-sgd", {"typo": 1})):
            with pytest.raises(PrivacyError):
                fair.challenge(tmp_path, label, method, params, None, ())
        assert not list(tmp_path.iterdir())

    def test_challenge_belongs_to_fair(self, capsys):
        assert main(["reproduce", "--challenge", "dp-sgd"]) == 2
        assert "fodp reproduce fair" in capsys.readouterr().err
