"""What each file of a run may hold is a closed list: keys, types of values, and lines of text.

Whoever adds something to a file has to add it here, and so to think about what it tells. Numbers are also compared
with what nobody may write down, the size of the data and of each lot.
"""

import copy
import csv
import json
import re
from types import NoneType

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp import audit
from fodp.accounting import Event, Phase
from fodp.callbacks import Checkpoint, CSVLog, Evaluate, WeightAverage
from fodp.cli.main import main
from fodp.ledger import Ledger
from fodp.lots.poisson import PoissonSampler
from fodp.session import Session
from fodp.state import checkpoint
from fodp.trainer import Trainer


class Each:
    """A list, or a mapping whose keys are names of public things, in which every value is of one kind."""

    def __init__(self, kind, *, keys=None):
        self.kind, self.keys = kind, keys


def unlisted(value, kind, where=""):
    """What is in a value and not on its list, or the other way round; types are exact."""
    if isinstance(kind, Each):
        if not isinstance(value, dict | list | tuple) or isinstance(value, dict) != (kind.keys is not None):
            return [f"{where} is a {type(value).__name__}"]
        items = value.items() if isinstance(value, dict) else enumerate(value)
        strange = [f"{where}.{key}" for key in value if not re.fullmatch(kind.keys, str(key))] if kind.keys else []
        return strange + [fault for key, item in items for fault in unlisted(item, kind.kind, f"{where}.{key}")]
    if isinstance(kind, dict):
        if type(value) is not dict:
            return [f"{where} is a {type(value).__name__}"]
        faults = [f"{where}.{key} is not listed" for key in value.keys() - kind.keys()]
        faults += [f"{where}.{key} is gone" for key in kind.keys() - value.keys()]
        return faults + [
            f for key in value.keys() & kind.keys() for f in unlisted(value[key], kind[key], f"{where}.{key}")
        ]
    if isinstance(kind, list):  # of a fixed length
        if not isinstance(value, list | tuple) or len(value) != len(kind):
            return [f"{where} is {value!r}"]
        return [
            f
            for i, (item, each) in enumerate(zip(value, kind, strict=True))
            for f in unlisted(item, each, f"{where}.{i}")
        ]
    if isinstance(kind, re.Pattern):
        return [] if isinstance(value, str) and kind.fullmatch(value) else [f"{where} is {value!r}"]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return [] if type(value) in kinds else [f"{where} is a {type(value).__name__}"]


HEX, MARK = re.compile("[0-9a-f]+"), re.compile("[0-9a-f]{12}:[0-9a-f]{32}")
NUMBER = (int, float)
PARAMS = {
    "alpha": float, "beta": float, "compact": NoneType, "compact_error": float, "eps": float, "gamma": float,
    "kappa": NoneType, "lam": float, "tau": float, "window": int, "zeta": NoneType, "lr": (float, str),
    "lr_schedule": str, "lr_warmup": int, "auto_ratio": float, "rate_rule": str, "update": str, "momentum": float,
    "clip": str,
}  # fmt: skip


def plan_list(seeded):
    return {
        "sampling_rate": float, "steps": int, "lot_size": NUMBER, "clip_norm": float, "noise_multiplier": float,
        "delta": float, "method": str, "params": PARAMS, "accountant": str, "seed": int if seeded else NoneType,
        "exact_noise": bool,
    }  # fmt: skip


MEMORY = {
    "window": int, "writes": int, "releases": Each(torch.Tensor), "trend": torch.Tensor,
    "trend_norm": float, "distances": Each(float),
}  # fmt: skip
GROUP = {
    "lr": float, "momentum": float, "dampening": int, "weight_decay": int, "nesterov": bool, "maximize": bool,
    "foreach": NoneType, "differentiable": bool, "fused": (NoneType, bool), "params": Each(int),
}  # fmt: skip
SCORES = {"accuracy": float, "loss": float, "best_accuracy": float}


def checkpoint_list(seeded, ledger, callbacks):
    return {
        "format": int,
        "made_with": {"fodp": str, "torch": str},
        "digest": HEX,
        "run": HEX,
        "ledger": [int, HEX] if ledger else NoneType,
        "plan": plan_list(seeded),
        "step": int,
        "planned": int,
        "lost_steps": int,
        "model": Each(torch.Tensor, keys=r"[0-9]+\.(weight|bias)"),
        "optimizer": {"state": {}, "param_groups": [GROUP]},
        "scheduler": NoneType,
        "state": {
            "states": {"method": MEMORY},
            "noise_stds": Each(float),
            "kernels": bool,
            "device": str,
            # Where lots are split says something about the records in them: seeded runs need it to repeat.
            "source": {"rows_at_once": (int, NoneType)} if seeded else NoneType,
        },
        "metrics": SCORES,
        "callbacks": callbacks,
    }


RESULT = {
    "dataset": str, "model": str, "method": str, "params": PARAMS, "lr": float, "reason": str, "steps": int,
    "lost_steps": int, "final_accuracy": float, "best_accuracy": float, "final_loss": float, "epsilon": float,
    "delta": float, "noise_multiplier": float, "accountant": str, "randomness": str, "out": str,
}  # fmt: skip


def result_list(seeded, shared):
    named, share = (str, float) if shared else (NoneType, NoneType)
    return {**RESULT, "seconds": float if seeded else NoneType, "dataset_name": named, "budget_left": share}


DATA_CARD = {  # what is known of the data without it; of a table, its public schema
    "name": str, "description": str, "source": str, "train_size": int, "test_size": int, "classes": int,
    "shape": Each(int), "sampling_rate": float, "scale": float, "mean": Each(float), "std": Each(float),
    "constants": str, "schema": NoneType, "mirrored": bool,
}  # fmt: skip


def config_list(seeded, shared):
    said = {
        "dataset": str, "model": str, "method": str, "delta": float, "clip_norm": float, "accountant": str,
        "epochs": float, "eval_every": int, "noise_multiplier": float, "plan": plan_list(seeded), "run": HEX,
        "fodp": str, "card": DATA_CARD, "model_code": str, "described": Each(str),
    }  # fmt: skip
    seed = {"seed": int} if seeded else {}
    return {**said, **seed, **({"dataset_name": str, "budget": str, "ledger": str} if shared else {})}


WHO = {"who": str, "fodp": str}
PEOPLE = {"unit": str, "records_per_person": int, "person_gradient": str}
ABOUT = {
    "method": str, "noise_multiplier": float, "delta": float, "accountant": str, "randomness": str, "bands": int,
    "exact_noise": bool,
}  # fmt: skip
RELEASED = Each([int, re.compile("[0-9A-Za-z+/=]+")])  # of seeded runs: keyed hashes of what steps released
HOLD = (float, NoneType)  # what the whole plan costs, where there is a budget
PHASES = Each([Each([float, float]), int])


def row_lists(seeded, people=False):
    """The data of a ledger's rows, by kind."""
    about = {**ABOUT, **PEOPLE} if people else ABOUT
    released = {"released": RELEASED} if seeded else {}
    unused = {"unused_from": int} if seeded else {}
    return {
        **({"unit": {"unit": str}} if people else {}),
        "budget": {"epsilon": float, "delta": float, "order": float},
        "data": {"fingerprint": MARK, "allowed_change": bool, "before": int},
        "run": {
            **WHO, "about": about, "phases": PHASES, "planned": int, "seed": MARK if seeded else NoneType, "hold": HOLD,
            **unused,
        },
        "resume": {**WHO, "about": about, "hold": HOLD, **unused, **released},
        "reserve": released,
        "settle": released,
        "checkpoint": {"step": int, "digest": HEX, **released},
        "selection": {**WHO, "phases": PHASES, "mean": float, "shape": str},
        "release": WHO,
        "rollback": {**WHO, "known": int, "found": int},
    }  # fmt: skip


def ledger_faults(path, seeded, people=False):
    faults = []
    rows = Ledger(path, create=False).store.select()
    for entry in rows:
        columns = {
            "id": int, "at": float, "kind": str, "dataset": str, "run": str, "steps": (int, NoneType),
            "rdp": (float, NoneType), "data": row_lists(seeded, people)[entry.kind], "chain": HEX,
            # What all rows before it come to: numbers of rows, of runs, and divergences.
            "of_data": [int, int, int, int, float, float],
            "of_run": [int, int, int, (int, NoneType), (float, NoneType), (float, NoneType)],
        }  # fmt: skip
        faults += unlisted(entry._asdict(), columns, entry.kind)
        faults += [f"{entry.kind} has seconds: {entry.at}"] if entry.at % 60 else []
    return faults


CARD = {
    "epsilon": str, "delta": str, "accountant": str, "method": str, "params": str, "sampling_rate": str, "steps": str,
    "clip_norm": str, "noise_multiplier": str, "unit": str, "randomness": str, "statement": str,
    "model": str, "data": str, "loader": str,
}  # fmt: skip
NUMERAL = r"[0-9.e+-]+"
HOW = (
    rf"Sampling: in each step a lot is drawn at random; each (example|person) is in it with probability {NUMERAL} "
    r"\([0-9]+ lots\), independently of all other (examples|people), lots and steps \(Poisson sampling\)\.",
    r"Noise: Gaussian, drawn afresh for each release, independently of all other noise; computed in floating point\.",
    rf"Accountant: (privacy loss distributions|Rényi DP)[^.]*, for delta {NUMERAL}\.",
)
STATEMENT = (
    rf"This run is \({NUMERAL}, {NUMERAL}\)-differentially private\.",
    r"Unit: one training example\. Adjacency: add or remove one example\.",
    rf"Mechanism: [a-z-]+, [0-9]+ steps; each example's gradient is clipped to norm {NUMERAL}, "
    rf"noise multiplier {NUMERAL}\.",
    *HOW,
    r"Randomness: (secure|SEEDED).*",
    r"It holds against someone who sees every private release, and so the model after every step\.",
    rf"A person with 2 examples in the data: epsilon {NUMERAL} at the same delta; with k examples, more\.",
    rf"Replacing one example instead of adding or removing it: epsilon {NUMERAL} at the same delta\.",
    r"Not covered: .*",
)
ABOUT_PEOPLE = (
    r"Unit: one person\. Adjacency: one person with all of their records is added or removed\.",
    rf"Mechanism: [a-z-]+, [0-9]+ steps; each person's gradient is clipped to norm {NUMERAL}, "
    rf"noise multiplier {NUMERAL}\.",
    HOW[0] + r" Of each person in a lot at most 3 of their records, drawn at random, are used, and the mean of these "
    r"records' gradients is clipped\.",
    *HOW[1:],
    rf"Two people together, or one person whose records have 2 owners' names: epsilon {NUMERAL} at the same delta; "
    r"with k people or names, more\.",
    rf"Replacing one person, or changing their records, instead of adding or removing them: epsilon {NUMERAL} at the "
    r"same delta\.",
    *(line for line in STATEMENT if "example" not in line),
)
PRINTED = (
    r"accuracy 0\.[0-9]{4} on the public test split",
    rf"learning rate {NUMERAL}, chosen from public numbers only \(lr=auto\)(, then by what was released)?",
    rf"epsilon {NUMERAL} at delta {NUMERAL}",
    r"[0-9.]+% of the budget of people is left",
    *STATEMENT,
    r"run folder: .*",
    "",
)


def unlisted_lines(text, patterns):
    return [line for line in text.splitlines() if not any(re.fullmatch(pattern, line) for pattern in patterns)]


@pytest.mark.rule(12)
@pytest.mark.rule(26)
@pytest.mark.parametrize("seeded", [False, True], ids=["secure", "seeded"])
@pytest.mark.parametrize("shared", [False, True], ids=["own ledger", "shared ledger"])
def test_files_of_a_command_line_run(tmp_path, capsys, seeded, shared):
    folder, book = tmp_path / "r", tmp_path / "l.sqlite"
    words = ["train", "--epochs=2", "--noise-multiplier=6", "--accountant=rdp", "--threads=1", "--quiet", "--json"]
    words += ["--method=fo-dp-sgd"]
    words += ["--seed=5"] if seeded else []
    words += [f"--ledger={book}", "--dataset-name=people", "--budget=3,1e-5"] if shared else []
    assert main([*words, "--out", str(folder)]) == 0
    seen = capsys.readouterr()
    files = {"config.json", "metrics.csv", "result.json", "privacy.txt", "checkpoint.pt", "accuracy.png"}
    assert {path.name for path in folder.iterdir()} == files | (
        set() if shared else {"ledger.sqlite", "ledger.sqlite.mark"}
    )

    result = json.loads((folder / "result.json").read_text())
    assert unlisted(result, result_list(seeded, shared)) == []
    assert json.loads(seen.out.splitlines()[-1]) == result
    assert unlisted(json.loads((folder / "config.json").read_text()), config_list(seeded, shared)) == []
    callbacks = {"Evaluate.0": {"epochs": int, "best": float}, "CSVLog.0": {}, "Checkpoint.0": {}}
    saved = checkpoint.load(folder / "checkpoint.pt")
    assert unlisted(saved, checkpoint_list(seeded, True, callbacks)) == []
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert all(tuple(row) == ("epoch", "step", "epsilon", "accuracy", "loss", "best_accuracy") for row in rows)
    assert ledger_faults(book if shared else folder / "ledger.sqlite", seeded) == []
    assert unlisted_lines((folder / "privacy.txt").read_text(), STATEMENT) == []
    assert unlisted_lines(seen.err, PRINTED) == []  # beside --json all text goes there
    assert seen.out.count("\n") == 1

    assert main(["export", str(folder), str(tmp_path / "m.safetensors")]) == 0
    with safe_open(tmp_path / "m.safetensors", "pt") as opened:
        assert unlisted(opened.metadata(), CARD) == []
        assert unlisted_lines(opened.metadata()["statement"], STATEMENT) == []
        assert unlisted(json.loads(opened.metadata()["data"]), DATA_CARD) == []
        assert set(opened.keys()) == set(saved["model"])


SIZE = 8192 + 83  # of the data: neither it nor the size of a lot (414 ± 20) is near to a public number


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def records(seed=0):
    inputs = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def trained(tmp_path, seeded, ledger):
    plan = fodp.Plan(
        sampling_rate=0.05, steps=8, lot_size=1000, clip_norm=1.0, noise_multiplier=9.0, delta=1e-5, accountant="rdp",
        seed=5 if seeded else None, params=dict(lr=0.1), method="fo-dp-sgd",
    )  # fmt: skip
    book = Ledger(tmp_path / "l.sqlite", dataset="people", budget=(3.0, 1e-5)) if ledger else None
    callbacks = [Evaluate(TensorDataset(*records(seed=1)[:50])), CSVLog(tmp_path / "m.csv"), WeightAverage()]
    callbacks.append(Checkpoint(tmp_path / "c.pt"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    trainer = Trainer(model, losses, records(), plan, callbacks=callbacks, ledger=book)
    draw, sizes = trainer.session.lots.draw, {SIZE}

    def watched(*args, **kwargs):
        lot = draw(*args, **kwargs)
        sizes.add(len(lot.indices))
        return lot

    trainer.session.lots.draw = watched
    trainer.fit()
    return sizes


def numbers(value):
    """Every single number in nested values; weights and releases are tensors and noisy."""
    if isinstance(value, dict):
        return [number for item in (*value.keys(), *value.values()) for number in numbers(item)]
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers(item)]
    if isinstance(value, torch.Tensor):
        return value.flatten().tolist()
    return [value] if isinstance(value, int | float) else []


def faults_of(tmp_path, seeded, ledger):
    """What two lists and the numbers that must not be there say about a run of the Trainer."""
    private = trained(tmp_path, seeded, ledger)
    saved = checkpoint.load(tmp_path / "c.pt")
    average = {"average": Each(torch.Tensor, keys=r"n_averaged|module\.[0-9]+\.(weight|bias)")}
    callbacks = {
        "Evaluate.0": {"epochs": int, "best": float}, "CSVLog.0": {}, "WeightAverage.0": average, "Checkpoint.0": {},
    }  # fmt: skip
    faults = unlisted(saved, checkpoint_list(seeded, ledger, callbacks))
    told = numbers({key: part for key, part in saved.items() if key not in ("format", "made_with")})
    if ledger:
        faults += ledger_faults(tmp_path / "l.sqlite", seeded)
        entries = Ledger(tmp_path / "l.sqlite").store.select()
        told += numbers([(entry.steps, entry.rdp, entry.data, entry.of_data, entry.of_run) for entry in entries])
    told += [float(cell) for row in csv.reader((tmp_path / "m.csv").open()) for cell in row if cell[:1].isdigit()]
    return faults + [f"the private number {number}" for number in set(told) & private]


@pytest.mark.rule(12)
@pytest.mark.rule(26)
@pytest.mark.parametrize("seeded", [False, True], ids=["secure", "seeded"])
@pytest.mark.parametrize("ledger", [False, True], ids=["alone", "with a ledger"])
def test_files_of_a_trainer(tmp_path, seeded, ledger):
    assert faults_of(tmp_path, seeded, ledger) == []


class TestMutants:
    """The lists catch what they are for."""

    def test_the_size_of_the_data_in_a_ledger_row(self, tmp_path, monkeypatch):
        from fodp.state import course, ledgers

        def talkative(ledger, run, plan, steps, dataset):
            append = ledger.store.append

            def more(kind, *args, data=None, **kwargs):
                data = {**(data or {}), "records": len(dataset)} if kind == "run" else data
                return append(kind, *args, data=data, **kwargs)

            monkeypatch.setattr(ledger.store, "append", more)
            return ledgers.open_account(ledger, run, plan, steps, dataset)

        monkeypatch.setattr(course, "open_account", talkative)
        faults = faults_of(tmp_path, seeded=False, ledger=True)
        assert "run.data.records is not listed" in faults
        assert f"the private number {SIZE}" in faults

    def test_the_size_of_the_data_in_a_number_that_is_listed(self, tmp_path, monkeypatch):
        from fodp.ledger import Account

        note = Account.note_checkpoint
        monkeypatch.setattr(Account, "note_checkpoint", lambda self, step, digest: note(self, SIZE, digest))
        assert faults_of(tmp_path, seeded=False, ledger=True) == [f"the private number {SIZE}"]

    def test_the_size_of_a_lot_in_a_checkpoint(self, tmp_path, monkeypatch):
        draw, state = PoissonSampler.draw, Session.state_dict

        def counting(self, *words):
            lot = draw(self, *words)
            Session.last_lot = len(lot.indices)
            return lot

        monkeypatch.setattr(Session, "last_lot", 0, raising=False)
        monkeypatch.setattr(PoissonSampler, "draw", counting)
        monkeypatch.setattr(Session, "state_dict", lambda self, **how: {**state(self, **how), "lot": self.last_lot})
        faults = faults_of(tmp_path, seeded=False, ledger=False)
        assert ".state.lot is not listed" in faults
        assert any("the private number" in fault for fault in faults)

    def test_a_time_to_the_second(self, tmp_path, monkeypatch):
        monkeypatch.setattr("fodp.ledger.store.whole_minutes", lambda: 1_700_000_123.4)
        assert any("has seconds" in fault for fault in faults_of(tmp_path, seeded=True, ledger=True))

    @pytest.mark.parametrize(
        ("change", "found"),
        [
            (lambda saved: saved["metrics"].update(training_loss=0.3), ".metrics.training_loss is not listed"),
            (lambda saved: saved["plan"].update(seed=5), ".plan.seed is a int"),
            (lambda saved: saved.pop("step"), ".step is gone"),
            (lambda saved: saved["model"].update(hidden=torch.zeros(1)), ".model.hidden"),
            (lambda saved: saved["state"]["noise_stds"].append("x"), ".state.noise_stds.8 is a str"),
        ],
    )
    def test_a_changed_checkpoint(self, tmp_path, change, found):
        trained(tmp_path, seeded=False, ledger=False)
        saved = copy.deepcopy(checkpoint.load(tmp_path / "c.pt"))
        change(saved)
        average = {"average": Each(torch.Tensor, keys=r"n_averaged|module\.[0-9]+\.(weight|bias)")}
        callbacks = {
            "Evaluate.0": {"epochs": int, "best": float}, "CSVLog.0": {}, "WeightAverage.0": average,
            "Checkpoint.0": {},
        }  # fmt: skip
        assert unlisted(saved, checkpoint_list(False, False, callbacks)) == [found]


@pytest.mark.rule(12)
def test_an_average_adds_itself_and_the_iterate_to_a_checkpoint(tmp_path):
    plan = fodp.Plan(
        sampling_rate=0.05, steps=4, lot_size=1000, clip_norm=1.0, noise_multiplier=9.0, delta=1e-5, accountant="rdp",
        params=dict(average="ema"), method="fo-dp-sgd",
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    Trainer(model, losses, records(), plan, callbacks=[Checkpoint(tmp_path / "c.pt")]).fit()
    wanted = checkpoint_list(False, False, {"Checkpoint.0": {}})
    params = {**PARAMS, "average": str, "average_decay": float}
    states = {**wanted["state"]["states"], "average": {"mean": torch.Tensor, "count": int}}
    state = {**wanted["state"], "states": states}
    listed = {**wanted, "plan": {**wanted["plan"], "params": params}, "metrics": {}, "state": state}
    saved = checkpoint.load(tmp_path / "c.pt")
    assert unlisted(saved, {**listed, "iterate": torch.Tensor}) == []
    assert saved["state"]["states"]["average"]["count"] == 4


@pytest.mark.rule(12)
def test_a_rate_rule_adds_an_average_of_iterates_and_its_votes_to_a_checkpoint(tmp_path):
    plan = fodp.Plan(
        sampling_rate=0.05, steps=4, lot_size=1000, clip_norm=1.0, noise_multiplier=9.0, delta=1e-5, accountant="rdp",
        method="dp-sgd", params=dict(rate_rule="transcript"),
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    Trainer(model, losses, records(), plan, callbacks=[Checkpoint(tmp_path / "c.pt")]).fit()
    state = checkpoint.load(tmp_path / "c.pt")["state"]["states"]
    votes = {"mean": Each(torch.Tensor), "seen": int, "votes": float, "variance": float}
    assert unlisted(state["rate"], votes) == []
    assert state["rate"]["seen"] == 4


@pytest.mark.rule(26)
def test_selections_and_resumes_in_a_ledger(tmp_path):
    """The rows that the runs above do not write."""
    dead = ("dp-sgd", 9.0, 1e-5, "rdp", "secure", 1, False)
    words = ["--epochs=1", "--noise-multiplier=6", "--accountant=rdp", "--threads=1", "--quiet"]
    book = str(tmp_path / "l.sqlite")
    shared = ["--ledger", book, "--dataset-name=people"]
    assert main(["train", *words, *shared, "--budget=3,1e-5", "--out", str(tmp_path / "r")]) == 0
    assert main(["train", "--resume", "--quiet", "--out", str(tmp_path / "r")]) == 0
    numbers = ["--mean=2", "--sampling-rate=0.1", "--noise-multiplier=9", "--steps=5"]
    assert main(["ledger", "select", book, "--dataset-name=people", *numbers]) == 0
    Ledger(book, dataset="people").open(
        "dead", (Phase((Event(0.1, 9.0),), 5),), 5, about=dict(zip(ABOUT, dead, strict=True))
    )
    assert main(["ledger", "release", book, "dea"]) == 0
    old = (tmp_path / "l.sqlite").read_bytes()
    assert main(["ledger", "select", book, "--dataset-name=people", *numbers]) == 0
    (tmp_path / "l.sqlite").write_bytes(old)
    assert main(["ledger", "accept-rollback", book]) == 0
    mark = json.loads((tmp_path / "l.sqlite.mark").read_text())
    assert unlisted(mark, {"ledger": HEX, "entry": int, "chain": HEX, "seal": HEX}) == []
    kinds = {entry.kind for entry in Ledger(book).store.select()}
    assert kinds == set(row_lists(False))
    assert ledger_faults(book, seeded=False) == []


@pytest.mark.rule(26)
def test_an_audits_report():
    """It is computed without noise and promises nothing; its frame is a closed list all the same."""
    plan = fodp.Plan(
        sampling_rate=0.2, steps=6, lot_size=12, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5, accountant="rdp",
        seed=5, method="dp-sgd",
    )  # fmt: skip
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    findings = (audit.replay_neighbours(plan, nn.Linear(6, 2), losses, data, seed=0),)
    kind = {
        "attack": str, "consistent": bool, "summary": str, "epsilon_claimed": float,
        "epsilon_lower": (float, NoneType), "delta": float, "confidence": (float, NoneType), "faults": Each(str),
        "fault_count": int, "numbers": Each((int, float, str, bool, list, dict, NoneType), keys="[a-z_]+"),
    }  # fmt: skip
    frame = {
        "method": str, "consistent": bool, "epsilon_claimed": float, "epsilon_lower": (float, NoneType),
        "delta": float, "attacks": Each(kind),
    }  # fmt: skip
    assert unlisted(audit.Report(plan, findings).to_dict(), frame) == []


@pytest.mark.rule(12)
@pytest.mark.rule(26)
def test_files_of_a_run_about_people(tmp_path):
    """As of other runs, and the unit; no owner's name is in any of them."""
    folder, owners = tmp_path / "r", tmp_path / "owners.txt"
    owners.write_text("".join(f"Ottilie Nummer {i % 479}\n" for i in range(1437)))
    words = ["train", "--epochs=2", "--noise-multiplier=6", "--accountant=rdp", "--threads=1", "--quiet"]
    words += ["--method=fo-dp-sgd"]
    words += ["--owners", str(owners), "--records-per-person=3", "--assume-people=500"]
    assert main([*words, "--out", str(folder)]) == 0
    plan = {**plan_list(False), **PEOPLE, "person_gradient": str}
    said = {"owners": str, "records_per_person": int, "assume_people": int}
    result = json.loads((folder / "result.json").read_text())
    assert unlisted(result, {**result_list(False, False), "unit": str}) == []
    config = json.loads((folder / "config.json").read_text())
    assert unlisted(config, {**config_list(False, False), **said, "plan": plan}) == []
    callbacks = {"Evaluate.0": {"epochs": int, "best": float}, "CSVLog.0": {}, "Checkpoint.0": {}}
    listed = {**checkpoint_list(False, True, callbacks), "plan": plan}
    assert unlisted(checkpoint.load(folder / "checkpoint.pt"), listed) == []
    assert ledger_faults(folder / "ledger.sqlite", False, people=True) == []
    assert unlisted_lines((folder / "privacy.txt").read_text(), ABOUT_PEOPLE) == []
    assert main(["export", str(folder), str(tmp_path / "m.safetensors")]) == 0
    with safe_open(tmp_path / "m.safetensors", "pt") as opened:
        assert unlisted(opened.metadata(), {**CARD, "records_per_person": str}) == []
    for path in (*folder.iterdir(), tmp_path / "m.safetensors"):
        assert b"Ottilie" not in path.read_bytes()
