"""`fodp tune`: paid for before the first run, sealed, resumable, and nothing but the winner leaves."""

import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

import fodp
from fodp.accounting.budget import Repetitions
from fodp.cli.main import main
from fodp.data import load
from fodp.data.models import build
from fodp.ledger import Ledger
from fodp.ledger.card import faults, summary
from fodp.ledger.fingerprint import fingerprint
from fodp.methods import recipe
from fodp.tuning.sealed import Sealed
from odd_input_for_tests import mostly_plain, odd, plain, run, text
from workers_for_tests import everything_ended

WORDS = ("--dataset=digits", "--method=dp-sgd", "--target-epsilon=4", "--epochs=1", "--vary=lr=0.1,0.2,0.4", "--runs=4")
LEFT = {"config.json", "privacy.txt", "result.json", "model.safetensors", "ledger.sqlite", "ledger.sqlite.mark"}


def weights_of(score):
    """A model of digits whose every number is the score it is said to have."""
    state = build("mlp", load("digits").card).state_dict()
    return save({name: torch.full_like(tensor, score) for name, tensor in state.items()})


class Here:
    """A pool without workers: scores by learning rate, or in a row; an end after some runs."""

    jobs = 1

    def __init__(self, scores=None, stop_after=None, diverge=()):
        self.scores = scores or {0.1: 0.5, 0.2: 0.9, 0.4: 0.7}
        self.stop_after, self.diverge = stop_after, diverge
        self.asked = []

    def submit(self, function, config, plan, part):
        assert function.__name__ == "sealed_run"
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append((plan["params"]["lr"], part, plan["lot_size"], plan["noise_multiplier"]))
        future = Future()
        rate = plan["params"]["lr"]
        score = None if rate in self.diverge else self.scores[rate]
        found = {"score": score, "lot": len(self.asked), "weights": b"" if score is None else weights_of(score)}
        future.set_result(found)
        return future

    def close(self, *, at_once):
        pass


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Run the command with a pool of ours and the draws that we say; its code, result, text."""

    def run_it(*words, pool=None, draws=(0, 1, 2, 1), new=True):
        monkeypatch.setattr("fodp.workers.open_pool", lambda jobs, ray: pool or Here())
        monkeypatch.setattr("fodp.tuning.search.Search.draw", lambda self: list(draws))
        return main(["tune", *(WORDS if new else ()), "--quiet", f"--out={tmp_path / 's'}", *words])

    return run_it


def charges(path, dataset="data"):
    return summary(Ledger(path, create=False), dataset)[0]


def test_the_best_leaves_and_nothing_else(tune, tmp_path, capsys):
    pool = Here()
    assert tune("--json", pool=pool) == 0
    assert [rate for rate, *_ in pool.asked] == [0.1, 0.2, 0.4, 0.2]
    result = json.loads(capsys.readouterr().out)
    assert result["winner"] == {"lr": 0.2}
    assert result["score"] == 0.9
    assert {file.name for file in (tmp_path / "s").iterdir()} == LEFT
    exported = fodp.load_exported(tmp_path / "s" / "model.safetensors")
    assert all((tensor == torch.tensor(0.9)).all() for tensor in exported.model.state_dict().values())
    assert float(exported.privacy["epsilon"]) == result["epsilon"] <= 4
    assert exported.privacy["statement"] == (tmp_path / "s" / "privacy.txt").read_text().strip()
    assert json.loads((tmp_path / "s" / "result.json").read_text()) == result
    assert result.keys() == {"winner", "score", "model", "noise_multiplier", "score_is", "dataset", "method", "epsilon",
                             "delta", "search_epsilon", "mean_runs", "distribution", "candidates", "out"}  # fmt: skip


@pytest.mark.rule(12)
def test_how_many_runs_there_were_is_nowhere(tune, tmp_path, capsys):
    """Two searches with the same winner, of one run and of thirty, leave the same files and the same words."""
    seen = []
    for draws in ([1], [1] + [0, 2] * 15):
        assert tune(draws=draws) == 0
        folder = tmp_path / "s"
        files = {f.name: f.read_text() for f in folder.iterdir() if f.suffix in (".json", ".txt")}
        config = json.loads(files.pop("config.json"))
        del config["run"]  # a random name
        exported = fodp.load_exported(folder / "model.safetensors")
        seen.append((capsys.readouterr(), files, config, exported.privacy, exported.data, str(exported.model)))
        rows = [entry._asdict() for entry in Ledger(folder / "ledger.sqlite", create=False).store.select()]
        seen[-1] += ([(row["kind"], row["steps"], sorted(row["data"])) for row in rows],)
        for file in folder.iterdir():
            file.unlink()
    assert seen[0] == seen[1]


@pytest.mark.rule(11)
def test_the_whole_price_is_in_the_ledger_before_the_first_run_and_once(tune, tmp_path):
    assert tune(pool=Here(stop_after=0)) == 130
    card = charges(tmp_path / "s" / "ledger.sqlite")
    assert len(card["selections"]) == 1
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    events = fodp.Plan(**config["plans"][0]).events()
    assert card["epsilons"][1e-5] == Repetitions(4.0).epsilon(events, 1e-5)
    assert tune("--resume", new=False) == 0
    assert len(charges(tmp_path / "s" / "ledger.sqlite")["selections"]) == 1
    assert faults(Ledger(tmp_path / "s" / "ledger.sqlite", create=False)) == []


@pytest.mark.rule(11)
def test_a_kill_between_the_draw_and_the_charge_is_charged_once(tune, tmp_path, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge_selection", killed)
        assert tune() == 130
    pool = Here()
    assert tune("--resume", new=False, pool=pool, draws=[0]) == 0
    assert len(pool.asked) == 4
    assert len(charges(tmp_path / "s" / "ledger.sqlite")["selections"]) == 1


def test_a_search_that_is_resumed_makes_the_runs_that_were_drawn(tune, tmp_path, capsys):
    first, second = Here(stop_after=3), Here()
    assert tune(pool=first) == 130
    sealed = tmp_path / "s" / "sealed"
    assert stat.S_IMODE(sealed.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in sealed.iterdir()} == {0o600}
    assert {file.name for file in sealed.iterdir()} == {"state.json", "best-1"}
    done = json.loads((sealed / "state.json").read_text())["done"]
    assert tune("--resume", "--json", new=False, pool=second, draws=[0] * 50) == 0
    assert len(done) + len(second.asked) == 4
    assert json.loads(capsys.readouterr().out)["winner"] == {"lr": 0.2}
    assert {file.name for file in (tmp_path / "s").iterdir()} == LEFT


@pytest.mark.rule(11)
@pytest.mark.parametrize("again", [0.3, 0.6])
def test_a_kill_while_the_best_is_written_mixes_no_two_runs(tune, tmp_path, capsys, monkeypatch, again):
    """Between its weights and the state: the run is made anew, and its first try is in nothing that leaves."""

    def killed(self, state, write=Sealed._write):
        if state.best and state.best["score"] == 0.9:
            raise KeyboardInterrupt
        write(self, state)

    with monkeypatch.context() as patch:
        patch.setattr(Sealed, "_write", killed)
        one_at_a_time = Here()
        one_at_a_time.jobs = 0.5  # two for each job are handed out, and done in any order
        assert tune(draws=(0, 1), pool=one_at_a_time) == 130
    assert tune("--resume", "--json", new=False, pool=Here({0.1: 0.5, 0.2: again}), draws=()) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["score"] == max(0.5, again)
    weights = load_file(result["model"])
    assert all((tensor == result["score"]).all() for tensor in weights.values())


def test_the_recipe_is_searched_where_no_method_is_named(tune, tmp_path, capsys):
    """Its rate is what is tried; what a user says twice is refused."""
    words = [word for word in WORDS if not word.startswith("--method")]
    assert main(["tune", *words, "--lr=0.3", "--quiet", f"--out={tmp_path / 'twice'}"]) == 2
    assert "lr is given twice" in capsys.readouterr().err
    assert tune(*words, "--json", new=False) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["method"], result["winner"]) == (recipe.METHOD, {"lr": 0.2})
    plans = json.loads((tmp_path / "s" / "config.json").read_text())["plans"]
    assert [(plan["params"]["shape"], plan["params"]["lr"]) for plan in plans] == [
        ("fan-in", rate) for rate in (0.1, 0.2, 0.4)
    ]


def test_without_its_sealed_state_a_search_is_not_begun_anew(tune, tmp_path, capsys):
    assert tune(pool=Here(stop_after=1)) == 130
    (tmp_path / "s" / "sealed" / "state.json").unlink()
    assert tune("--resume", new=False) == 2
    assert "another number would not be the one that was paid for" in capsys.readouterr().err


def test_without_the_weights_of_the_best_run_nothing_leaves(tune, tmp_path, capsys):
    assert tune(pool=Here(stop_after=2), draws=(1, 0, 0)) == 130
    (tmp_path / "s" / "sealed" / "best-0").unlink()
    assert tune("--resume", new=False) == 2
    assert "restore a copy" in capsys.readouterr().err
    assert not (tmp_path / "s" / "result.json").exists()


def test_runs_that_diverge_are_worse_than_any_other(tune, tmp_path, capsys):
    assert tune("--json", pool=Here(diverge=(0.2, 0.4))) == 0
    assert json.loads(capsys.readouterr().out)["winner"] == {"lr": 0.1}


@pytest.mark.parametrize("draws", [(), (0, 1)])
def test_nothing_may_come_out(tune, tmp_path, capsys, draws):
    """No run at all, as a Poisson number allows, and runs that all diverged are told by the same words."""
    assert tune("--distribution=poisson", pool=Here(diverge=(0.1, 0.2)), draws=draws) == 0
    assert "nothing came out" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "s").iterdir()} == LEFT - {"model.safetensors"}
    assert len(charges(tmp_path / "s" / "ledger.sqlite")["selections"]) == 1


class TestSubsample:
    WORDS = ("--subsample=0.25", "--search-epsilon=1")

    def test_two_charges_beforehand_and_one_final_run(self, tune, tmp_path, capsys):
        assert tune(*self.WORDS, pool=Here(stop_after=0)) == 130
        card = charges(tmp_path / "s" / "ledger.sqlite")
        assert len(card["selections"]) == len(card["runs"]) == 1
        assert card["runs"][0]["steps"] == card["runs"][0]["planned"] > 0
        pool = Here()
        assert tune("--resume", "--json", new=False, pool=pool) == 0
        assert [part is None for _, part, *_ in pool.asked] == [False] * 4 + [True]
        assert pool.asked[-1][0] == 0.2
        assert pool.asked[0][2] == round(pool.asked[-1][2] / 4)  # the lot's size goes with the part
        result = json.loads(capsys.readouterr().out)
        assert result["search_epsilon"] <= 1 < result["epsilon"] <= 4
        again = charges(tmp_path / "s" / "ledger.sqlite")
        assert again["epsilons"] == card["epsilons"]
        assert again["epsilons"][1e-5] == pytest.approx(result["epsilon"])
        assert faults(Ledger(tmp_path / "s" / "ledger.sqlite", create=False)) == []

    @pytest.mark.rule(11)
    def test_the_final_run_is_made_once(self, tune, tmp_path, monkeypatch):
        """A second one, after the first was written, would be a release that nobody paid for."""
        with monkeypatch.context() as patch:
            patch.setattr("fodp.runs.folder.RunFolder.write", broken_at("result.json"))
            assert tune(*self.WORDS, pool=Here()) == 130
        pool = Here(scores={0.1: 0.3, 0.2: 0.3, 0.4: 0.3})
        assert tune("--resume", new=False, pool=pool) == 0
        assert pool.asked == []
        model = fodp.load_exported(tmp_path / "s" / "model.safetensors").model
        assert all((tensor == torch.tensor(0.9)).all() for tensor in model.state_dict().values())

    def test_the_part_is_drawn_once_for_all_runs(self, tune):
        pool = Here()
        assert tune(*self.WORDS, pool=pool) == 0
        assert len({part for _, part, *_ in pool.asked[:-1]}) == 1


def broken_at(name):
    from fodp.runs.folder import write_atomically

    def write(self, file, text):
        if file.name == name:
            raise KeyboardInterrupt
        write_atomically(file, text)

    return write


def test_a_part_of_the_data_is_a_poisson_sample_by_its_key():
    from torch.utils.data import TensorDataset

    from fodp.cli.sealed_run import subsample

    data = TensorDataset(torch.arange(10_000.0), torch.arange(10_000))
    one, same, other = (subsample(data, 0.3, key) for key in ("ab" * 16, "ab" * 16, "cd" * 16))
    assert abs(len(one) - 3000) < 300
    assert torch.equal(one.tensors[1], same.tensors[1])
    assert not torch.equal(one.tensors[1][:1000], other.tensors[1][:1000])
    assert torch.equal(one.tensors[0].long(), one.tensors[1])


class TestSharedLedger:
    def words(self, tmp_path, budget):
        return (f"--ledger={tmp_path / 'l.sqlite'}", "--dataset-name=people", f"--budget={budget}")

    @pytest.mark.parametrize("more", [(), TestSubsample.WORDS])
    def test_what_does_not_fit_is_refused_and_leaves_nothing(self, tune, tmp_path, capsys, more):
        pool = Here()
        assert tune(*self.words(tmp_path, "1.2,1e-5"), *more, pool=pool) == 2
        assert "budget" in capsys.readouterr().err
        assert pool.asked == []
        assert not (tmp_path / "s" / "config.json").exists()
        assert not (tmp_path / "s" / "sealed").exists()
        ledger = Ledger(tmp_path / "l.sqlite", dataset="people", create=False)
        assert ledger.left("people") in (1.0, float("inf"))

    @pytest.mark.parametrize("more", [(), TestSubsample.WORDS])
    def test_what_fits_is_charged(self, tune, tmp_path, more):
        assert tune(*self.words(tmp_path, "6,1e-5"), *more) == 0
        ledger = Ledger(tmp_path / "l.sqlite", create=False)
        assert 0 < ledger.left("people") < 1
        assert ledger.holds("people") == []
        assert faults(ledger) == []

    def test_other_data_under_the_name_is_refused(self, tune, tmp_path, capsys, monkeypatch):
        assert tune(*self.words(tmp_path, "20,1e-5"), pool=Here(stop_after=0)) == 130
        monkeypatch.setattr("fodp.state.ledgers.fingerprint", lambda chunks: fingerprint([b"x", *chunks]))
        pool = Here()
        assert tune("--resume", new=False, pool=pool) == 2
        assert "--allow-changed-data" in capsys.readouterr().err
        assert pool.asked == []
        assert tune("--resume", "--allow-changed-data", new=False) == 0


REFUSED = {
    "no target": (["--vary=lr=0.1"], "--target-epsilon"),
    "nothing varied": (["--target-epsilon=4"], "--vary"),
    "noise": ([*WORDS, "--noise-multiplier=2"], "calibrates"),
    "accountant": ([*WORDS, "--accountant=pld"], "Rényi"),
    "no values": ([*WORDS, "--vary=beta"], "NAME=VALUE"),
    "an empty value": ([*WORDS, "--vary=beta=0.1,"], "NAME=VALUE"),
    "twice": ([*WORDS, "--vary=lr=1"], "twice"),
    "varied and set": ([*WORDS, "--set=momentum=0.1", "--vary=momentum=0.2"], "twice"),
    "varied and given": ([*WORDS, "--lr=0.1"], "twice"),
    "an unknown parameter": ([*WORDS, "--vary=depth=1"], "depth"),
    "a distribution": ([*WORDS, "--distribution=uniform"], "geometric"),
    "too few runs": ([*WORDS, "--runs=0.5"], "--runs must be at least 1, got 0.5"),
    "runs without end": ([*WORDS, "--runs=1e9"], "fewer runs"),
    "no jobs": ([*WORDS, "--jobs=0"], "--jobs"),
    "all of the data": ([*WORDS, "--subsample=1"], "--subsample"),
    "a share of what": ([*WORDS, "--search-epsilon=1"], "--subsample"),
    "a share above the target": ([*WORDS, "--subsample=0.5", "--search-epsilon=5"], "--search-epsilon"),
    "a name without a ledger": ([*WORDS, "--dataset-name=d"], "--ledger"),
    "a ledger without a name": ([*WORDS, "--ledger=l"], "--dataset-name"),
    "a target too small": ([*WORDS, "--target-epsilon=1e-9"], "cannot be met"),
    "no search to resume": (["--resume"], "config.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words_and_nothing_is_left(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, hint = REFUSED[case]
    code, _, err = run("tune", *words, "--quiet", "--out=s")
    assert code == 2
    assert hint in err
    assert list(tmp_path.iterdir()) == []


OPTIONS = {"runs": mostly_plain, "target-epsilon": mostly_plain, "delta": odd, "epochs": st.one_of(plain, odd),
           "subsample": mostly_plain, "search-epsilon": mostly_plain, "jobs": odd, "distribution": text,
           "vary": st.one_of(st.sampled_from(["momentum=0.1,0.5", "lr=1", "update=sgd,adam", "clip_rate=0,1"]), text),
           "set": st.one_of(st.sampled_from(["momentum=0.5", "quantile=0.5"]), text)}  # fmt: skip


@settings(max_examples=40)
@given(data=st.data())
def test_a_search_ends_well_or_is_refused_in_one_line(data):
    """Nothing is trained: what is tested is what comes before the first run, and what is made of the runs."""
    names = data.draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=3, unique=True))
    words = [f"--{name}={data.draw(OPTIONS[name], label=name)}" for name in names]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        pool = Here(scores=defaultdict(lambda: 0.5))
        patch.setattr("fodp.workers.open_pool", lambda jobs, ray: pool)
        patch.setattr("fodp.tuning.search.Search.draw", lambda self: [0, len(self.candidates) - 1])
        code, out, _ = run("tune", *WORDS, *words, "--json", "--quiet", f"--out={folder}/s")
        assert bool(pool.asked) == (code == 0)
        if code == 0:
            assert (
                json.loads(out)["epsilon"] <= json.loads(Path(folder, "s", "config.json").read_text())["target_epsilon"]
            )
            assert run("ledger", "check", f"{folder}/s")[0] == 0
        else:
            assert not Path(folder, "s", "sealed").exists()


def test_a_public_sample_is_for_the_candidates_that_look_at_it(tune, tmp_path, capsys, monkeypatch):
    from fodp.cli.sealed_run import sealed_run

    rng = np.random.default_rng(1)
    monkeypatch.chdir(tmp_path)
    images = rng.integers(0, 17, (20, 1, 8, 8), dtype=np.uint8)
    np.savez("public.npz", train_images=images, train_labels=np.arange(20) % 10)
    assert tune("--public-sample=public.npz") == 2
    assert "add --shape kronecker" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
    assert tune("--public-sample=public.npz", "--vary=shape=kronecker,none", draws=(1, 0)) == 0
    result = json.loads((tmp_path / "s" / "result.json").read_text())
    assert result["winner"] in ({"lr": 0.1, "shape": "none"}, {"lr": 0.1, "shape": "kronecker"})
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert config["public_sample"] == str(tmp_path / "public.npz")  # workers may look from elsewhere
    for plan in config["plans"][:2]:
        assert sealed_run(json.dumps(config), {**plan, "steps": 1}, None)["score"] is not None


def test_a_search_is_resumed_as_it_began_and_not_over_a_run(tune, tmp_path, capsys):
    assert tune(pool=Here(stop_after=1)) == 130
    assert tune("--resume", "--runs=5", new=False) == 2
    assert "--runs 4.0, not 5.0" in capsys.readouterr().err
    assert tune() == 2
    assert "holds a run already" in capsys.readouterr().err
    assert tune("--resume", new=False) == 0
    assert tune("--resume", new=False) == 2
    assert "has ended" in capsys.readouterr().err


def test_own_data_without_public_data_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("age,ill\n" + "30,no\n50,yes\n" * 20)
    (tmp_path / "s.toml").write_text('[columns.age]\nbounds = [0, 100]\n[columns.ill]\nvalues = ["no", "yes"]\n')
    words = (f"--data={tmp_path / 't.csv'}", f"--schema={tmp_path / 's.toml'}", "--target=ill", "--assume-size=40")
    code, _, err = run(
        "tune", *words, "--model=logistic", "--target-epsilon=4", "--vary=lr=1", f"--out={tmp_path / 's'}"
    )
    assert code == 2
    assert "--test-data" in err


@pytest.fixture
def environment():
    with everything_ended() as found:
        yield found


def test_a_real_search_is_killed_and_resumed(tmp_path, environment):
    """It is begun on Ray, where that is installed, and ended by processes."""
    where = ["--jobs=2"]
    on_ray = [*where, "--ray=local"] if importlib.util.find_spec("ray") else where
    code = "import sys; import fodp.tuning.search as s; s.Search.draw = lambda self: [0, 1, 2, 0, 1, 2]\n"
    code += "from fodp.cli.main import main; sys.exit(main(sys.argv[1:]))\n"
    (tmp_path / "go.py").write_text(f"if __name__ == '__main__':\n    {code.replace(chr(10), chr(10) + '    ')}\n")
    out = tmp_path / "s"
    words = [sys.executable, str(tmp_path / "go.py"), "tune", f"--out={out}", "--quiet"]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen([*words, *on_ray, *WORDS, "--epochs=4"], env=environment, start_new_session=True)
    end = time.monotonic() + 240
    while not list(out.glob("sealed/best-*")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    state = json.loads((out / "sealed" / "state.json").read_text())
    assert state["draws"] == [0, 1, 2, 0, 1, 2]
    again = subprocess.run(
        [*words, *where, "--resume", "--json"], env=environment, capture_output=True, text=True, check=True
    )
    result = json.loads(again.stdout)
    assert result["winner"]["lr"] in (0.1, 0.2, 0.4)
    assert result["score"] > 0.2
    assert {file.name for file in out.iterdir()} == LEFT
    assert len(charges(out / "ledger.sqlite")["selections"]) == 1
    assert again.stderr.count("epsilon") == 2  # the result and its statement; of runs no word
