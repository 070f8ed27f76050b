"""The command line as a newcomer meets it: it works, and wrong input gets one helpful line."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from itertools import cycle

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fodp
from fodp.cli import waiting
from fodp.cli.main import main
from fodp.methods import METHODS, recipe

QUICK = ["--epochs", "1", "--quiet", "--noise-multiplier", "2", "--accountant", "rdp", "--seed", "0", "--threads", "1"]


def run(capsys, *arguments):
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_answers_at_once():
    times = []
    for _ in range(5):
        before = os.times()
        done = subprocess.run([sys.executable, "-m", "fodp.cli.main", "--help"], capture_output=True, check=True)
        after = os.times()  # processor time: what else runs on the machine is not the help's fault
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert b"train" in done.stdout
    assert min(times) < 0.5


def test_help_does_not_load_torch():
    code = "import sys; from fodp.cli.main import build_parser; build_parser(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class TestAccounting:
    WORDS = ("--sampling-rate", "0.04", "--steps", "6250", "--delta", "1e-5", "--beta", "0.9", "--accountant", "rdp")

    def test_epsilon_as_json(self, capsys):
        code, out, _ = run(capsys, "epsilon", "--noise-multiplier", "1.1", *self.WORDS, "--json")
        assert code == 0
        assert json.loads(out)["epsilon"] == pytest.approx(18.70, rel=0.004)

    @pytest.mark.parametrize("accountant", ["pld", "rdp"])
    def test_a_second_opinion_agrees(self, capsys, accountant):
        words = ("epsilon", "--noise-multiplier", "1.1", *self.WORDS, "--accountant", accountant, "--second-opinion")
        _, out, _ = run(capsys, *words, "--json")
        found = json.loads(out)
        assert found["second_opinion"] == pytest.approx(found["epsilon"], rel=0.005)
        assert found["second_opinion"] != found["epsilon"]
        _, out, _ = run(capsys, *words)
        assert "second opinion: epsilon 1" in out

    def test_a_second_opinion_on_a_method_counts_all_its_releases(self, capsys):
        words = ("--noise-multiplier", "2", "--sampling-rate", "0.04", "--steps", "500", "--method", "dp-sam")
        found = json.loads(run(capsys, "epsilon", *words, "--second-opinion", "--json")[1])
        assert found["second_opinion"] == pytest.approx(found["epsilon"], rel=0.005)

    def test_epsilon_says_what_it_covers(self, capsys):
        _, out, _ = run(capsys, "epsilon", "--noise-multiplier", "1.1", *self.WORDS)
        assert "Adjacency: add or remove one example." in out
        assert "(Poisson sampling)" in out

    @pytest.mark.rule(10)
    def test_calibrate_never_exceeds(self, capsys):
        _, out, _ = run(capsys, "calibrate", "--target-epsilon", "3", *self.WORDS, "--json")
        assert 2.97 <= json.loads(out)["epsilon"] <= 3


def test_methods_lists_the_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    _, out, _ = run(capsys, "methods", "--json")
    assert {row["name"] for row in json.loads(out)} == set(METHODS)
    code, out, _ = run(capsys, "methods")
    assert code == 0
    for words in ("fo-dp-sgd", "queries", "costs", "when to use it", "Partohaghighi", "one gradient", "second query"):
        assert words in out
    _, out, _ = run(capsys, "methods", "dp-is")
    for words in (
        "Wei, Bao",
        "σ of the gradient query",
        "normaliser_noise=50.0",
        "`rate_cap`: the most",
        "Reconstruction",
    ):
        assert words in out


class TestTrain:
    def test_writes_a_complete_run_folder(self, capsys, tmp_path):
        out_dir = tmp_path / "run"
        code, out, _ = run(
            capsys, "train", "--target-epsilon", "4", "--epochs", "2", "--quiet", "--json",
            "--method", "fo-dp-sgd", "--set", "beta=0.8", "--lr", "0.3", "--out", str(out_dir), "--threads", "1",
        )  # fmt: skip
        assert code == 0
        result = json.loads(out.splitlines()[-1])
        assert 3.96 <= result["epsilon"] <= 4
        assert result["delta"] == 1e-5
        assert result["params"]["beta"] == 0.8
        assert result["params"]["lr"] == 0.3
        assert 0 <= result["final_accuracy"] <= 1
        names = {path.name for path in out_dir.iterdir()}
        assert names == {
            "config.json", "metrics.csv", "result.json", "privacy.txt", "checkpoint.pt", "ledger.sqlite",
            "ledger.sqlite.mark", "accuracy.png",
        }  # fmt: skip
        assert "differentially private" in (out_dir / "privacy.txt").read_text()
        assert json.loads((out_dir / "config.json").read_text())["plan"]["steps"] == 20
        assert len((out_dir / "metrics.csv").read_text().splitlines()) == 3

    def test_a_shape_and_a_rate_without_tuning(self, capsys, tmp_path):
        words = ["--method", "dp-sgd", "--shape", "fan-in", "--lr", "auto", "--target-epsilon", "4", "--epochs", "1"]
        code, out, err = run(
            capsys, "train", *words, "--quiet", "--json", "--threads", "1", "--out", str(tmp_path / "r")
        )
        assert code == 0, err
        params = json.loads(out.splitlines()[-1])["params"]
        assert (params["shape"], params["lr"]) == ("fan-in", "auto")
        refused = run(capsys, "train", *words, "--shape", "wide", "--out", str(tmp_path / "s"))
        assert refused[0] != 0
        assert "shape" in refused[2]

    def test_without_a_word_about_the_method_it_is_the_recipe(self, capsys, tmp_path):
        def params(*words):
            code, out, err = run(
                capsys, "train", "--target-epsilon", "4", "--epochs", "1", "--quiet", "--json", "--threads", "1",
                "--out", str(tmp_path / str(len(words))), *words,
            )  # fmt: skip
            assert code == 0, err
            result = json.loads(out.splitlines()[-1])
            return result["method"], result["params"]

        method, given = params()
        assert method == recipe.METHOD
        chosen = {name: value for name, value in recipe.PARAMS.items() if value is not None}
        assert {name: given[name] for name in chosen} == chosen
        assert 0 < given["order"] < 1  # what was left to the plan, it has chosen
        assert given["bands"] >= 1
        method, given = params("--lr", "0.5")  # a rate of one's own, in the recipe's shape
        assert (method, given["lr"], given["shape"]) == (recipe.METHOD, 0.5, recipe.PARAMS["shape"])
        method, given = params("--exact-noise")  # which lies on a grid, as earlier noise does not
        assert (method, given["bands"], given["shape"]) == (recipe.METHOD, 1, recipe.PARAMS["shape"])
        method, given = params("--set", "average=tail", "--shape=none")  # the rest is the recipe's
        assert (method, given["average"], "shape" in given) == (recipe.METHOD, "tail", False)
        method, given = params("--preset", "paper", "--dataset", "digits")
        assert (method, given["lr"], "shape" in given) == ("fo-dp-sgd", 0.8, False)

    def test_a_run_of_the_recipe_goes_on_with_the_bands_that_its_plan_chose(self, capsys, tmp_path):
        words = ("train", "--target-epsilon", "4", "--epochs", "2", "--quiet", "--threads", "1")
        assert run(capsys, *words, "--out", str(tmp_path))[0] == 0
        assert run(capsys, "train", "--resume", "--quiet", "--out", str(tmp_path))[0] == 0
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["set"]["order"] is None
        for changes in (dict(order=0.3), dict(bands=1), dict(quantile=0.5)):
            changed = {**config, "set": {**config["set"], **changes}}
            (tmp_path / "config.json").write_text(json.dumps(changed))
            code, _, err = run(capsys, "train", "--resume", "--quiet", "--out", str(tmp_path))
            assert (code, "its plan something else" in err) == (2, True), err

    def test_it_says_how_much_earlier_noise_is_kept_where_that_is_much(self, capsys, tmp_path, monkeypatch):
        words = ("train", "--target-epsilon", "4", "--epochs", "1", "--quiet", "--threads", "1")
        assert run(capsys, *words, "--out", str(tmp_path / "1"))[2] == ""
        monkeypatch.setattr("fodp.cli.papers.MUCH_MEMORY", 1e3)
        assert "correlated over 2 steps" in run(capsys, *words, "--out", str(tmp_path / "2"))[2]
        assert run(capsys, *words, "--method", "dp-sgd", "--out", str(tmp_path / "3"))[2] == ""

    def test_noise_and_target_together_stop_early(self, capsys, tmp_path):
        _, out, _ = run(
            capsys, "train", *QUICK, "--target-epsilon", "0.6", "--epochs", "30", "--json", "--out", str(tmp_path / "r")
        )
        result = json.loads(out.splitlines()[-1])
        assert result["reason"] == "target reached"
        assert result["epsilon"] <= 0.6

    @pytest.mark.rule(13)
    def test_a_run_is_secure_unless_seeded(self, capsys, tmp_path):
        words = [w for w in QUICK if w not in ("--seed", "0")]
        _, out, _ = run(capsys, "train", *words, "--json", "--out", str(tmp_path / "r"))
        assert json.loads(out.splitlines()[-1])["randomness"] == "secure"

    def test_own_data_and_own_model(self, capsys, tmp_path, monkeypatch):
        rng = np.random.default_rng(0)
        arrays = {
            "train_images": rng.integers(0, 256, (40, 4, 4), dtype=np.uint8), "train_labels": rng.integers(0, 3, 40),
            "test_images": rng.integers(0, 256, (10, 4, 4), dtype=np.uint8), "test_labels": rng.integers(0, 3, 10),
        }  # fmt: skip
        np.savez(tmp_path / "own.npz", **arrays)
        (tmp_path / "own_model.py").write_text(
            "from torch import nn\ndef tiny(classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes))\n"
        )
        monkeypatch.chdir(tmp_path)
        code, _, err = run(
            capsys, "train", *QUICK, "--dataset", "own.npz", "--assume-size", "40", "--classes", "3",
            "--model", "own_model:tiny", "--out", "r",
        )  # fmt: skip
        assert (code, err) == (0, "")

    @pytest.mark.parametrize("model", ["mlp", "cnn", "logistic"])
    def test_every_built_in_model(self, capsys, tmp_path, model):
        code, _, err = run(capsys, "train", *QUICK, "--model", model, "--out", str(tmp_path / "r"))
        assert (code, err) == (0, "")

    def meets(self, capsys, tmp_path, target, *words):
        code, out, err = run(
            capsys, "train", "--target-epsilon", str(target), "--accountant", "rdp", "--quiet", "--json",
            "--threads", "1", "--out", str(tmp_path / "r"), *words,
        )  # fmt: skip
        assert code == 0, err
        assert 0.99 * target <= json.loads(out.splitlines()[-1])["epsilon"] <= target

    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_every_method_calibrates_and_trains(self, capsys, tmp_path, method):
        self.meets(capsys, tmp_path, 4, "--method", method, "--epochs", "1")

    @pytest.mark.skipif("FODP_DATA" not in os.environ, reason="needs FODP_DATA: the folder with the .npz files")
    @pytest.mark.parametrize(("method", "dataset"), list(zip(sorted(METHODS), cycle(["cifar10", "cifar100", "svhn"]))))
    def test_every_method_on_a_real_data_set(self, capsys, tmp_path, dataset, method):
        self.meets(capsys, tmp_path, 4, "--method", method, "--dataset", dataset, "--epochs", "0.08")

    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_every_method_meets_a_small_target(self, capsys, tmp_path, method):
        """Here z is above what L/20 of noise on a count leaves."""
        more = ["--set", "normaliser_noise=500"] if method == "dp-is" else []
        self.meets(capsys, tmp_path, 0.05, "--method", method, "--epochs", "1", *more)

    def test_sa_dpsgd_wants_a_public_split_of_own_data(self, capsys, tmp_path):
        images, labels = np.zeros((9, 2, 2), dtype=np.uint8), np.zeros(9, dtype=np.int64)
        np.savez(tmp_path / "o.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
        own = ["--dataset", str(tmp_path / "o.npz"), "--assume-size", "9", "--classes", "2"]
        code, _, err = run(capsys, "train", *QUICK, *own, "--method", "sa-dpsgd", "--out", str(tmp_path / "r"))
        assert code == 2
        assert "public held-out split" in err


WRONG = {
    "no privacy given": (["train"], "--target-epsilon"),
    "unknown command": (["trian"], "trian"),
    "unknown option": (["train", "--epsilon", "3"], "--epsilon"),
    "not a number": (["train", "--target-epsilon", "four"], "four"),
    "unknown data set": (["train", *QUICK, "--dataset", "emnist"], "digits"),
    "unknown method": (["train", *QUICK, "--method", "sgd"], "fo-dp-sgd"),
    "unknown model": (["train", *QUICK, "--model", "resnet"], "mlp"),
    "unknown parameter": (
        ["train", *QUICK, "--set", "betta=1"],
        "no parameter 'betta'; it knows auto_ratio, average, average_decay, bands,",
    ),
    "malformed --set": (["train", *QUICK, "--set", "beta"], "NAME=VALUE"),
    "beta out of range": (["train", *QUICK, "--method", "fo-dp-sgd", "--set", "beta=2"], "(0, 1]"),
    "negative noise": (["train", "--noise-multiplier", "-1"], "noise_multiplier"),
    "zero clip norm": (["train", *QUICK, "--clip-norm", "0"], "clip_norm"),
    "delta of one": (["train", *QUICK, "--delta", "1"], "delta"),
    "zero epochs": (["train", *QUICK, "--epochs", "0"], "--epochs"),
    "rate above one": (["train", *QUICK, "--sampling-rate", "1.5"], "--sampling-rate"),
    "impossible target": (["train", *QUICK, "--target-epsilon", "1e-9"], "not even one step"),
    "unknown preset": (["train", *QUICK, "--preset", "papper"], "paper"),
    "unknown accountant": (["train", *QUICK, "--accountant", "moments"], "pld"),
    "resume without folder": (["train", "--resume"], "--out"),
    "resume nothing": (["train", "--resume", "--out", "nowhere"], "no run"),
    "data folder missing": (["train", *QUICK, "--dataset", "svhn", "--data-dir", "nowhere"], "existing folder"),
    "own data without size": (["train", *QUICK, "--dataset", "own.npz"], "--assume-size"),
    "own data missing": (["train", *QUICK, "--dataset", "own.npz", "--assume-size", "9", "--classes", "2"], "own.npz"),
    "export of nothing": (["export", "nowhere", "m.safetensors"], "nowhere"),
    "epsilon without noise": (["epsilon", "--sampling-rate", "0.1", "--steps", "5"], "--noise-multiplier"),
    "calibrate to zero": (["calibrate", "--target-epsilon", "0", "--sampling-rate", "0.1", "--steps", "5"], "epsilon"),
    "zero threads": (["train", *QUICK, "--threads", "0"], "--threads"),
}


@pytest.mark.rule(14)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    arguments, hint = WRONG[case]
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("fodp: ")
    assert len(err.splitlines()) == 1
    assert hint in err
    assert list(tmp_path.iterdir()) == []  # nothing half-made is left behind


class TestFolders:
    def test_an_existing_run_is_not_overwritten(self, capsys, tmp_path):
        words = ["train", *QUICK, "--out", str(tmp_path / "r")]
        assert run(capsys, *words)[0] == 0
        before = (tmp_path / "r" / "checkpoint.pt").read_bytes()
        code, _, err = run(capsys, *words)
        assert code == 2
        assert "--resume" in err
        assert (tmp_path / "r" / "checkpoint.pt").read_bytes() == before

    def test_an_unwritable_folder(self, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        code, _, err = run(capsys, "train", *QUICK, "--out", str(tmp_path / "file" / "r"))
        assert code == 2
        assert "another --out" in err

    def test_resuming_with_other_settings_is_refused(self, capsys, tmp_path):
        assert run(capsys, "train", *QUICK, "--out", str(tmp_path / "r"))[0] == 0
        code, _, err = run(capsys, "train", "--resume", "--out", str(tmp_path / "r"), "--clip-norm", "3")
        assert code == 2
        assert "--clip-norm" in err

    def test_resuming_takes_the_plan_of_the_run_and_does_not_calibrate_again(self, capsys, tmp_path, monkeypatch):
        words = [*QUICK, "--method", "fo-dp-sgd", "--set", "beta=((0, 0.9), (5, 0.5))"]  # comes back from JSON as lists
        place = words.index("--noise-multiplier")
        words[place : place + 2] = ["--target-epsilon", "3"]
        assert run(capsys, "train", *words, "--out", str(tmp_path / "r"))[0] == 0
        config = json.loads((tmp_path / "r" / "config.json").read_text())
        monkeypatch.setattr("fodp.accounting.calibrate_scale", lambda *_: 7.0)  # what another accountant might find
        code, out, err = run(capsys, "train", "--resume", "--quiet", "--json", "--out", str(tmp_path / "r"))
        assert code == 0, err
        assert json.loads(out.splitlines()[-1])["noise_multiplier"] == config["plan"]["noise_multiplier"] != 7.0

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(plan=None), "holds no plan"),
            (dict(plan={}), "holds no plan"),
            (dict(plan="absent"), "lacks plan"),
            (dict(clip_norm=3.0), "clip_norm 3.0, its plan"),
            (dict(epochs=3.0), "steps"),
            (dict(seed=9), "seed 9, its plan"),
            (dict(noise_multiplier=99.0), "noise_multiplier 99.0, its plan"),
        ],
    )
    def test_a_configuration_that_contradicts_its_plan(self, capsys, tmp_path, changes, message):
        assert run(capsys, "train", *QUICK, "--out", str(tmp_path / "r"))[0] == 0
        file = tmp_path / "r" / "config.json"
        config = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
        for words in (("train", "--resume", "--out"), ("audit", "--run")):
            code, _, err = run(capsys, *words, str(tmp_path / "r"), "--quiet")
            assert code == 2
            assert message in err

    def test_resuming_a_finished_run_changes_nothing(self, capsys, tmp_path):
        assert run(capsys, "train", *QUICK, "--out", str(tmp_path / "r"))[0] == 0
        before = torch.load(tmp_path / "r" / "checkpoint.pt", weights_only=True)["model"]
        assert run(capsys, "train", "--resume", "--quiet", "--out", str(tmp_path / "r"))[0] == 0
        after = torch.load(tmp_path / "r" / "checkpoint.pt", weights_only=True)["model"]
        assert all(torch.equal(before[name], after[name]) for name in before)

    @pytest.mark.parametrize("damage", ["{", "[]", ""])
    def test_a_damaged_configuration(self, capsys, tmp_path, damage):
        assert run(capsys, "train", *QUICK, "--out", str(tmp_path / "r"))[0] == 0
        (tmp_path / "r" / "config.json").write_text(damage)
        code, _, err = run(capsys, "train", "--resume", "--out", str(tmp_path / "r"))
        assert code == 2
        assert "config.json" in err


def _wait_for_lines(path, count, process):
    for _ in range(600):
        if path.exists() and len(path.read_text().splitlines()) > count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("the run never got going")


@pytest.mark.rule(11)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_stopped_in_the_middle_resumes_to_the_same_bits(capsys, tmp_path, how):
    words = [
        "--epochs",
        "60",
        "--noise-multiplier",
        "2",
        "--accountant",
        "rdp",
        "--seed",
        "0",
        "--threads",
        "1",
        "--quiet",
    ]
    assert run(capsys, "train", *words, "--out", str(tmp_path / "whole"))[0] == 0
    command = [sys.executable, "-m", "fodp.cli.main", "train", *words, "--out", str(tmp_path / "cut")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    _wait_for_lines(tmp_path / "cut" / "metrics.csv", 3, process)
    process.send_signal(how)
    out, _ = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "go on with: fodp train --resume --out" in out
    else:
        assert process.returncode == -signal.SIGKILL
    assert run(capsys, "train", "--resume", "--quiet", "--threads", "1", "--out", str(tmp_path / "cut"))[0] == 0
    whole = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)["model"]
    cut = torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert (tmp_path / "whole" / "metrics.csv").read_text() == (tmp_path / "cut" / "metrics.csv").read_text()


@pytest.mark.rule(13)
def test_export_holds_weights_and_card_and_no_key(capsys, tmp_path):
    assert run(capsys, "train", *QUICK, "--out", str(tmp_path / "r"))[0] == 0
    file = tmp_path / "m.safetensors"
    code, out, _ = run(capsys, "export", str(tmp_path / "r"), str(file))
    assert code == 0
    assert "epsilon" in out
    with safe_open(file, "pt") as opened:
        card = opened.metadata()
        names = set(opened.keys())
    saved = torch.load(tmp_path / "r" / "checkpoint.pt", weights_only=True)
    assert names == set(saved["model"])
    assert float(card["epsilon"]) == pytest.approx(fodp.Plan(**saved["plan"]).epsilon())
    assert "seed" not in {*card} | {*json.loads(card["params"])}
    assert "differentially private" in card["statement"]


@pytest.mark.skipif("FODP_DATA" not in os.environ, reason="needs FODP_DATA: the folder with cifar10.npz")
def test_the_papers_run_starts_on_real_data(capsys, tmp_path):
    code, out, _ = run(
        capsys, "train", "--preset", "paper", "--set", "beta=1", "--epochs", "20", "--seed", "0", "--quiet", "--json",
        "--threads", "1", "--out", str(tmp_path / "r"),
    )  # fmt: skip
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert result["accountant"] == "rdp-classic"
    assert 0.2 < result["final_accuracy"] < 0.45


class TestMethodsAndAccounting:
    NUMBERS = ("--sampling-rate=0.1", "--steps=20", "--accountant=rdp", "--json")

    def found(self, capsys, *words):
        assert main([*words]) == 0
        return json.loads(capsys.readouterr().out)

    def test_epsilon_of_a_method_is_that_of_its_plan(self, capsys):
        plain = self.found(capsys, "epsilon", "--noise-multiplier=2", "--beta=1", *self.NUMBERS)["epsilon"]
        for method, params in (("dp-sgd", {}), ("dp-sam", {}), ("fo-dp-sgd", {"beta": 0.5})):
            words = [f"--method={method}", *(f"--set={name}={value}" for name, value in params.items())]
            said = self.found(capsys, "epsilon", "--noise-multiplier=2", *words, *self.NUMBERS)
            public = dict(sampling_rate=0.1, steps=20, lot_size=5, clip_norm=1.0, delta=1e-5, accountant="rdp")
            plan = fodp.Plan(**public, noise_multiplier=2.0, method=method, params=params)
            assert said["epsilon"] == plan.epsilon()
            assert (said["epsilon"] > plain) == (method == "dp-sam")

    def test_sizes_may_stand_for_rate_and_steps(self, capsys):
        sizes = ("--public-size=200", "--batch=20", "--epochs=2", "--accountant=rdp", "--json")
        for words in (("epsilon", "--noise-multiplier=2"), ("calibrate", "--target-epsilon=2", "--method=dp-sgd")):
            assert self.found(capsys, *words, *sizes) == self.found(capsys, *words, *self.NUMBERS)
        assert main(["epsilon", "--noise-multiplier=2", "--sampling-rate=0.2", *sizes]) == 2
        assert "batch / public_size is 0.1: leave one of them out" in capsys.readouterr().err

    def test_without_a_method_it_is_fo_dp_sgd_and_says_so(self, capsys):
        said = self.found(capsys, "epsilon", "--noise-multiplier=2", *self.NUMBERS)
        public = dict(sampling_rate=0.1, steps=20, lot_size=5, clip_norm=1.0, delta=1e-5, accountant="rdp")
        plan = fodp.Plan(**public, noise_multiplier=2.0, method="fo-dp-sgd")
        assert said["epsilon"] == plan.epsilon()
        assert (said["method"], said["beta"]) == (plan.method, plan.params["beta"])
        assert said["noise_meaning"] == plan.algorithm.noise_meaning
        assert main(["epsilon", "--noise-multiplier=2", *self.NUMBERS[:-1]]) == 0
        assert "method fo-dp-sgd with beta 0.9" in capsys.readouterr().out

    def test_a_line_on_a_terminal_after_two_seconds(self, monkeypatch):
        stderr = io.StringIO()
        stderr.isatty = lambda: True
        monkeypatch.setattr("sys.stderr", stderr)
        monkeypatch.setattr(waiting, "_PATIENCE", 0.05)
        with waiting.slow_note("adding up"):
            time.sleep(0.3)
        assert "adding up, 0 s so far" in stderr.getvalue()
        assert stderr.getvalue().endswith("\033[K")

    def test_calibrating_a_method_never_exceeds_the_target(self, capsys):
        said = self.found(capsys, "calibrate", "--target-epsilon=1", "--method=dp-sam", *self.NUMBERS)
        alone = self.found(capsys, "calibrate", "--target-epsilon=1", *self.NUMBERS)
        assert 0.9 < said["epsilon"] <= 1
        assert said["noise_multiplier"] > alone["noise_multiplier"]

    @pytest.mark.parametrize(
        ("words", "hint"), [(["--method=dp-sam", "--beta=0.5"], "--set beta"), (["--set=a=1"], "--method")]
    )
    def test_words_that_would_be_ignored_are_refused(self, capsys, words, hint):
        assert main(["epsilon", "--noise-multiplier=2", *self.NUMBERS, *words]) == 2
        assert hint in capsys.readouterr().err

    @pytest.mark.parametrize("value", ["{[]:1}", "-" * 100_000 + "1", "(" * 100_000])
    def test_values_that_python_cannot_read_are_text(self, capsys, value):
        assert main(["epsilon", "--noise-multiplier=2", "--method=dp-sgd", f"--set=lr={value}", *self.NUMBERS]) == 2
        assert "lr" in capsys.readouterr().err

    def test_one_method_by_name(self, capsys):
        assert main(["methods", "block-dp-sgd"]) == 0
        assert "shape=fan-in" in capsys.readouterr().out
        assert main(["methods", "none-such"]) == 2
        assert "block-dp-sgd" in capsys.readouterr().err
