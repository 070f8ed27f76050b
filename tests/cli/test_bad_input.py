"""Bad input from the command line: each gets one specific line and exit code 2, and nothing half-made is left.

The tables name what goes wrong and the words that help; `test_bad_input_properties.py` looks for what they forgot.
"""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import fodp
from fodp.cli.main import main
from fodp.methods import recipe
from fodp.state.checkpoint import FORMAT

QUICK = ["--epochs", "0.2", "--quiet", "--noise-multiplier", "2", "--accountant", "rdp", "--threads", "1"]
SEEDED = [*QUICK, "--seed", "0"]


def refused(capsys, *words: str, warned: str = "") -> str:
    """The one line on stderr of a command that is refused, after one that warns if there is a reason to."""
    code = main(list(words))
    captured = capsys.readouterr()
    if warned:
        warning, captured = captured.err.partition("\n")[0], captured._replace(err=captured.err.partition("\n")[2])
        assert warning.startswith(f"fodp: {warned}")
    assert code == 2, captured.err
    assert captured.out == ""
    assert captured.err.startswith("fodp: ")
    assert len(captured.err.splitlines()) == 1
    assert len(captured.err) < 1000
    return captured.err


# ---- configuration -------------------------------------------------------------------------------------------

# option -> (values, words the message must have)
NUMBERS = {
    "noise-multiplier": (["nan", "inf", "-inf", "0", "-1", "1e400", "1e308", "1e-308"], ["noise_multiplier"]),
    "clip-norm": (["nan", "inf", "0", "-1", "1e308", "1e-308"], ["clip_norm"]),
    "delta": (["nan", "inf", "0", "-0.1", "1", "2"], ["delta"]),
    "sampling-rate": (["nan", "inf", "0", "-0.1", "1.01"], ["--sampling-rate"]),
    "lot-size": (["nan", "inf", "0", "-5"], ["lot_size"]),
    "epochs": (["nan", "inf", "0", "-1", "1e308"], ["--epochs"]),
    "lr": (["nan", "inf", "0", "-1", "1e31", "1e308"], ["lr"]),
    "target-epsilon": (["nan", "inf", "0", "-1", "1e-300"], ["epsilon"]),
    "seed": (["-1"], ["seed"]),
    "eval-every": (["0", "-1"], ["every"]),
    "microbatch": (["0", "-1"], ["microbatch"]),
    "copies": (["0", "-1", "2", "2000"], ["--copies"]),
    "threads": (["0", "-1", str(2**70)], ["--threads"]),
    "assume-size": (["40"], ["public card"]),
    "classes": (["3"], ["public card"]),
}


@pytest.mark.rule(14)
@pytest.mark.parametrize(("option", "value"), [(o, v) for o, (values, _) in NUMBERS.items() for v in values])
@pytest.mark.fault(
    "numbers out of range on the command line",
    happens="one line, exit code 2, before any data is read",
    lost="nothing",
    costs="nothing",
)
def test_numbers_out_of_range(capsys, tmp_path, monkeypatch, option, value):
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, "train", *SEEDED, f"--{option}={value}")
    assert all(word in message for word in NUMBERS[option][1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", NUMBERS)
@pytest.mark.parametrize("value", ["", "four", "0x10", "1,5", "None", "[1]"])
def test_what_is_not_a_number(capsys, option, value):
    message = refused(capsys, "train", *SEEDED, f"--{option}={value}")
    assert re.search(rf"--{option}(/--[a-z-]+)?: invalid", message)  # an option may have two names


SETTINGS = {
    "beta=nan": "beta must be a finite number",
    "beta=1e999": "beta must be a finite number",
    "beta=None": "beta must be a finite number",
    "beta=True": "beta must be a finite number",
    "beta=": "beta must be a finite number",
    "beta={}": "beta must be a finite number",
    "beta=[0.9]": "pairs (first step, value)",
    "beta=((0,nan),)": "beta must be a finite number",
    "beta=((3,0.9),)": "beta",
    "beta=" + "9" * 5000: "beta must be a finite number",
    "beta=" + "(" * 200: "beta must be a finite number",
    "window=1e9": "window must be a whole number",
    "window=True": "window must be a whole number",
    "alpha=-5": "alpha must lie in (0, 1]",
    "update=1": "update must be one of",
    "filter=[1,2]": "filter must be one of",
    "average=[1,2]": "average must be one of",
    "average_decay=nan": "average_decay must be a finite number",
    "average_share=0.5": "does nothing without average='tail'",
    "filter_a=1": "filter_a must be a sequence",
    "filter_a=('x',)": "each of filter_a must be a finite number",
    "filter_a=(float,)": "filter_a must be a sequence",
    "quantile=1": "quantile must lie strictly between 0 and 1",
    "lr=1e300": "lr must be at most 1e30",
    "eps=0": "eps must be above 0",
    "gamma=2": "gamma",
    "=3": "NAME=VALUE",
    "beta": "NAME=VALUE",
    "Beta=0.9": "no parameter 'Beta'; it knows",
    "seed=3": "no parameter 'seed'; it knows",
    "__class__=3": "no parameter '__class__'",
}


@pytest.mark.rule(14)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[:20])
def test_settings_of_the_method(capsys, tmp_path, monkeypatch, setting):
    monkeypatch.chdir(tmp_path)
    assert SETTINGS[setting] in refused(capsys, "train", *SEEDED, "--method", "fo-dp-sgd", "--set", setting)
    assert list(tmp_path.iterdir()) == []


CONTRADICTIONS = {
    "momentum with adam": (["--set", "update=adam", "--set", "momentum=0.9"], "momentum does nothing"),
    "decay with sgd": (["--set", "weight_decay=0.1"], "weight_decay does nothing"),
    "clip range upside down": (
        ["--set", "quantile=0.5", "--set", "clip_min=2", "--set", "clip_max=1"],
        "clip_min must not exceed clip_max",
    ),
    "a count that takes everything": (["--set", "quantile=0.5", "--set", "count_noise=0.1"], "count"),
    "a target out of reach": (["--target-epsilon", "0.001"], "not even one step fits"),
    "nearly no noise": (["--noise-multiplier", "1e-9"], "no finite epsilon"),
    "a window for ever": (["--method", "fo-dp-sgd", "--set", "window=1000000000"], "window must be at most"),
    "too many steps": (["--sampling-rate", "1e-300"], "steps"),
    "public card and own size": (["--assume-size", "9"], "public card"),
}


@pytest.mark.rule(14)
@pytest.mark.parametrize("case", CONTRADICTIONS)
@pytest.mark.fault(
    "options that contradict each other",
    happens="one line, exit code 2",
    lost="nothing",
    costs="nothing",
)
def test_contradictions(capsys, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    words, hint = CONTRADICTIONS[case]
    assert hint in refused(capsys, "train", *SEEDED, *words)
    assert list(tmp_path.iterdir()) == []


ACCOUNTING = {
    "infinite": (["--noise-multiplier=1e-300", "--steps=10"], "no finite epsilon"),
    "steps beyond counting": ([f"--noise-multiplier=1 --steps={10**400}"], "steps"),
    "more steps than anyone takes": (["--noise-multiplier=1", f"--steps={10**16}"], "steps must be at most"),
    "negative steps": (["--noise-multiplier=1", "--steps=-1"], "steps"),
    "beta too small": (["--noise-multiplier=1", "--steps=10", "--beta=5e-324"], "noise_multiplier"),
    "unknown accountant": (["--noise-multiplier=1", "--steps=10", "--accountant=gdp"], "pld, rdp, rdp-classic"),
}


@pytest.mark.rule(14)
@pytest.mark.parametrize("case", ACCOUNTING)
def test_accounting(capsys, case):
    words, hint = ACCOUNTING[case]
    assert hint in refused(capsys, "epsilon", "--sampling-rate=0.1", *" ".join(words).split())


@pytest.mark.rule(10)
@pytest.mark.parametrize("target", ["1e300", "1e-300", "1e-9"])
def test_a_calibration_that_cannot_be_met_is_refused_or_met(capsys, target):
    public = ["--sampling-rate=0.1", "--steps=10", "--accountant=rdp", "--json"]
    code = main(["calibrate", f"--target-epsilon={target}", *public])
    captured = capsys.readouterr()
    if code == 0:
        assert json.loads(captured.out)["epsilon"] <= float(target)
    else:
        assert code == 2
        assert "target_epsilon" in captured.err


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.fault(
    "too little memory",
    happens="one line that names `--microbatch`, exit code 2",
    lost="steps since the last checkpoint",
    costs="the lost steps stay charged",
)
def test_a_lack_of_memory_is_said_in_one_line(capsys, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr("fodp.data.models.build", full)
    assert "not enough memory" in refused(capsys, "train", *SEEDED)


@pytest.mark.parametrize("seed", ["-1", str(2**70)])
def test_a_seed_that_an_audit_cannot_use(capsys, seed):
    assert "--seed" in refused(capsys, "audit", "--seed", seed)


def test_a_seed_of_any_length_works(capsys, tmp_path):
    assert main(["train", *QUICK, "--seed", str(2**200 + 1), "--out", str(tmp_path / "r")]) == 0


# ---- data ----------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(40, 4, 4)).astype(np.float32)
LABELS = RNG.integers(0, 3, 40)
PUBLIC = RNG.normal(size=(10, 4, 4)).astype(np.float32)  # rows that nobody trains on


def with_pixel(value: float, dtype: str = "float32") -> np.ndarray:
    images = IMAGES.astype(dtype)
    images[3, 1, 1] = value
    return images


WRONG_DATA = {
    "a NaN pixel": (dict(train_images=with_pixel(np.nan)), "example 3 is not"),
    "an infinite pixel": (dict(train_images=with_pixel(np.inf)), "example 3 is not"),
    "a NaN pixel in the test set": (dict(test_images=with_pixel(np.nan)[:10]), "test_images"),
    "beyond float32": (
        dict(train_images=with_pixel(1e300, "float64"), test_images=PUBLIC.astype("float64")),
        "finite in float32",
    ),
    "no examples": (dict(train_images=IMAGES[:0], train_labels=LABELS[:0]), "at least one example"),
    "no pixels": (dict(train_images=IMAGES[:, :, :0]), "at least one example"),
    "five dimensions": (dict(train_images=IMAGES.reshape(40, 2, 2, 2, 2)), "shape"),
    "no dimension": (dict(train_images=np.float32(3)), "shape"),
    "another shape in the test set": (dict(test_images=PUBLIC[:, :2]), "one shape and dtype"),
    "fewer labels": (dict(train_labels=LABELS[:39]), "40 examples but train_labels 39"),
    "labels as fractions": (dict(train_labels=LABELS / 2), "one whole number per example"),
    "labels as truth values": (dict(train_labels=LABELS > 0), "one whole number per example"),
    "labels in columns": (dict(train_labels=LABELS[:, None]), "one whole number per example"),
    "a negative label": (
        dict(train_labels=LABELS - 1),
        f"that of example {int((LABELS == 0).argmax())} does not",
    ),
    "a label too large": (
        dict(train_labels=LABELS + 1),
        f"that of example {int((LABELS == 2).argmax())} does not",
    ),
    "a label beyond 64 bits": (dict(train_labels=LABELS.astype(np.uint64) + 2**63), "that of example 0 does not"),
    "complex pixels": (dict(train_images=IMAGES.astype("complex64")), "uint8 or floating point"),
    "whole-number pixels": (dict(train_images=IMAGES.astype("int32")), "uint8 or floating point"),
    "text": (dict(train_images=np.full((40, 3), "a")), "uint8 or floating point"),
    "objects": (dict(train_labels=LABELS.astype(object)), "cannot read"),
    "no test set": (dict(test_images=None), "lacks test_images"),
}


def own_data(folder, **changes) -> list[str]:
    arrays = dict(train_images=IMAGES, train_labels=LABELS, test_images=PUBLIC, test_labels=LABELS[:10])
    np.savez(folder / "own.npz", **{k: v for k, v in {**arrays, **changes}.items() if v is not None})
    return ["--dataset", str(folder / "own.npz"), "--assume-size", "40", "--classes", "3"]


@pytest.mark.rule(5)
@pytest.mark.rule(14)
@pytest.mark.parametrize("case", WRONG_DATA)
@pytest.mark.fault(
    "data that is damaged, not finite, or has labels out of range (command line)",
    happens="refused before the first step, naming the example",
    lost="nothing",
    costs="nothing",
)
def test_wrong_data(capsys, tmp_path, case):
    changes, hint = WRONG_DATA[case]
    assert hint in refused(capsys, "train", *SEEDED, *own_data(tmp_path, **changes), "--out", str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--assume-size", "0"], "assume_size"),
        (["--assume-size", "-4"], "assume_size"),
        (["--classes", "1"], "classes"),
        (["--classes", "2"], "must lie in 0..1"),
        (["--classes", str(10**30)], "classes must be at most"),
        (["--model", "cnn"], "at least 8x8 pixels"),
        (["--method", "sa-dpsgd"], "public held-out split"),
    ],
)
@pytest.mark.fault(
    "public numbers that do not fit the data",
    happens="refused before the first step",
    lost="nothing",
    costs="nothing",
)
def test_wrong_public_numbers_of_own_data(capsys, tmp_path, words, hint):
    assert hint in refused(capsys, "train", *SEEDED, *own_data(tmp_path), *words, "--out", str(tmp_path / "r"))


ODD_DATA = {
    "one example": dict(train_images=IMAGES[:1], train_labels=LABELS[:1]),
    "huge values": dict(train_images=with_pixel(3e38)),
    "huge values everywhere": dict(train_images=IMAGES * 1e20),
    "one class only": dict(train_labels=LABELS * 0),
    "constant images": dict(train_images=IMAGES * 0),
    "half precision": dict(train_images=IMAGES.astype("float16"), test_images=PUBLIC.astype("float16")),
    "big-endian": dict(train_images=IMAGES.astype(">f4"), test_images=PUBLIC.astype(">f4")),
    "long floats": dict(train_images=IMAGES.astype("longdouble"), test_images=PUBLIC.astype("longdouble")),
    "subnormal values": dict(train_images=IMAGES * np.float32(1e-40)),
}


@pytest.mark.rule(5)
@pytest.mark.filterwarnings("ignore:per-example gradients run one example at a time")
@pytest.mark.parametrize("case", ODD_DATA)
def test_odd_data_trains_to_a_finite_model_with_the_same_epsilon(capsys, tmp_path, case):
    """Data that is odd but legal costs what any data costs: ε does not depend on what is in it."""
    words = [*SEEDED, "--epochs", "1", *own_data(tmp_path, **ODD_DATA[case])]
    assert main(["train", *words, "--json", "--out", str(tmp_path / "r")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    plan = fodp.Plan(
        sampling_rate=0.1, steps=10, lot_size=4, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5, accountant="rdp",
        method=recipe.METHOD,
    )  # fmt: skip
    assert result["epsilon"] == plan.epsilon()
    weights = torch.load(tmp_path / "r" / "checkpoint.pt", weights_only=True)["model"]
    assert all(tensor.isfinite().all() for tensor in weights.values())


# ---- a run that diverges -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--lot-size", "1e-300", "--lr", "0.1"],
        ["--lr", "1e30", "--clip-norm", "1e10"],
        ["--lr", "1e30", "--set", "update=adamw", "--set", "weight_decay=1"],
    ],
)
@pytest.mark.fault(
    "training that diverges",
    happens="no result and no export; the line names the ε that stays spent",
    lost="the training",
    costs="the ε of the whole plan",
)
def test_a_diverged_model_is_not_a_result(capsys, tmp_path, words):
    warned = "lr 1e+30 moves weights by noise alone" if "1e30" in words else ""
    message = refused(capsys, "train", *SEEDED, *words, "--epochs", "1", "--out", str(tmp_path / "r"), warned=warned)
    assert "diverged" in message
    assert "stays spent" in message
    assert not (tmp_path / "r" / "result.json").exists()
    assert "diverged" in refused(capsys, "train", "--resume", "--quiet", "--out", str(tmp_path / "r"))


# ---- models --------------------------------------------------------------------------------------------------

MODELS = """
import torch
from torch import nn

class Apply(nn.Module):
    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
    def forward(self, x):
        return self.function(self, x.flatten(1))

def linear(classes): return nn.Linear(16, classes)
def good(classes): return nn.Sequential(nn.Flatten(), linear(classes))
def batch_norm(classes): return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), linear(classes))
def frozen_batch_norm(classes):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16).eval().requires_grad_(False), linear(classes))
def nothing_to_train(classes): return good(classes).requires_grad_(False)
def unused(classes): return Apply(lambda m, x: m.a(x), a=linear(classes), b=nn.Linear(5, 5))
def only_unused(classes): return Apply(lambda m, x: torch.zeros(len(x), 3), b=nn.Linear(5, 5))
def in_place(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 9), nn.ReLU(inplace=True), nn.Linear(9, classes))
def in_place_too_early(classes):
    return Apply(lambda m, x: m.b(torch.sigmoid(m.a(x)).mul_(2)), a=nn.Linear(16, 9), b=nn.Linear(9, classes))
def in_place_on_the_input(classes): return Apply(lambda m, x: m.a(x.mul_(0.5)), a=linear(classes))
def dropout(classes): return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), linear(classes))
def dropout_of_all(classes): return nn.Sequential(nn.Flatten(), nn.Dropout(1.0), linear(classes))
def too_few_outputs(classes): return nn.Sequential(nn.Flatten(), linear(classes - 1))
def wrong_inputs(classes): return nn.Sequential(nn.Flatten(), nn.Linear(15, classes))
def raises(classes): return Apply(lambda m, x: 1 / 0, a=linear(classes))
def a_tuple(classes): return Apply(lambda m, x: (m.a(x),), a=linear(classes))
def no_tensor(classes): return Apply(lambda m, x: None, a=linear(classes))
def one_number(classes): return Apply(lambda m, x: m.a(x).sum(), a=linear(classes))
def nan_outputs(classes): return Apply(lambda m, x: m.a(x) * float("nan"), a=linear(classes))
def nan_weights(classes):
    model = good(classes)
    model[1].weight.data.fill_(float("nan"))
    return model
def detached(classes): return Apply(lambda m, x: m.a(x).detach(), a=linear(classes))
def double(classes): return good(classes).double()
def complex_weights(classes):
    return Apply(lambda m, x: m.a(x.to(torch.complex64)).abs(), a=nn.Linear(16, classes, dtype=torch.complex64))
def on_meta(classes):
    with torch.device("meta"):
        return good(classes)
def lazy(classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
def scripted(classes): return torch.jit.script(good(classes))
def empty_layer(classes): return nn.Sequential(nn.Flatten(), nn.Linear(16, 0), nn.Linear(0, classes))
def keeps_statistics(classes):
    def forward(m, x):
        m.mean.copy_(x.mean())
        return m.a(x)
    model = Apply(forward, a=linear(classes))
    model.register_buffer("mean", torch.zeros(()))
    return model
def counts_calls(classes):
    def forward(m, x):
        m.calls += 1
        return m.a(x)
    model = Apply(forward, a=linear(classes))
    model.register_buffer("calls", torch.zeros((), dtype=torch.long))
    return model
def one_batch_size(classes): return Apply(lambda m, x: m.a(x.view(4, 16)), a=linear(classes))
def not_a_model(classes): return 3
def needs_more(classes, depth): return good(classes)
number = 5
"""

REFUSED_MODELS = {
    "batch_norm": "BatchNorm1d in training mode mixes the examples",
    "nothing_to_train": "no parameter is trainable",
    "only_unused": "does not depend on any trainable parameter",
    "in_place_too_early": "modified by an inplace operation",
    "too_few_outputs": "a label outside of 0 to 1, the 2 classes that the model gives scores for",
    "wrong_inputs": "than the 15 that a linear layer of the model takes",
    "raises": "ZeroDivisionError: division by zero",
    "a_tuple": "must be Tensor, not tuple",
    "no_tensor": "must be Tensor, not NoneType",
    "one_number": "fails (IndexError",
    "nan_outputs": "not finite",
    "nan_weights": "1.weight of model bad_input_models:nan_weights is not finite",
    "detached": "does not depend on any trainable parameter",
    "double": "where the model's parameters are float64",
    "complex_weights": "a complex parameter; use two real parameters",
    "on_meta": "a parameter without numbers",
    "lazy": "a lazy parameter without a shape",
    "scripted": "compiled to TorchScript",
    "empty_layer": "a parameter without numbers",
    "keeps_statistics": "writes into the buffer mean",
    "counts_calls": "writes into the buffer calls",
    "one_batch_size": "fails (RuntimeError: shape",
    "not_a_model": "must return a torch.nn.Module, got int",
    "needs_more": "missing 1 required positional argument",
    "number": "must be a function that returns a model",
    "absent": "has no attribute 'absent'",
}
TRAINABLE_MODELS = (
    "good", "frozen_batch_norm", "unused", "in_place", "in_place_on_the_input", "dropout", "dropout_of_all",
)  # fmt: skip


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    (tmp_path / "bad_input_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    yield own_data(tmp_path)
    sys.modules.pop("bad_input_models", None)


@pytest.mark.rule(14)
@pytest.mark.rule(16)
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:Initializing zero-element", "ignore:.*torch.jit.script")
@pytest.mark.parametrize("name", REFUSED_MODELS)
@pytest.mark.fault(
    "a model that fails, leaks or keeps statistics (command line)",
    happens="refused by a rehearsal on a few records",
    lost="nothing",
    costs="nothing",
)
def test_models_that_cannot_be_trained_are_refused_before_the_data_is_used(capsys, own_models, name):
    message = refused(capsys, "train", *SEEDED, *own_models, "--model", f"bad_input_models:{name}", "--out", "r")
    assert REFUSED_MODELS[name] in message


@pytest.mark.filterwarnings("ignore:per-example gradients run one example at a time")
@pytest.mark.parametrize("name", TRAINABLE_MODELS)
def test_odd_models_train_to_a_finite_result(capsys, own_models, name):
    words = [*SEEDED, *own_models, "--model", f"bad_input_models:{name}", "--json", "--out", "r"]
    assert main(["train", *words]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 <= result["final_accuracy"] <= 1
    assert result["epsilon"] > 0


def test_the_rehearsal_leaves_no_trace(capsys, own_models):
    """With and without rehearsal a seeded run ends in the same weights."""
    words = [*SEEDED, *own_models, "--model", "bad_input_models:dropout"]
    assert main(["train", *words, "--out", "a"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fodp.trainer.rehearse", lambda *_: None)
        assert main(["train", *words, "--out", "b"]) == 0
    a, b = (torch.load(f"{run}/checkpoint.pt", weights_only=True)["model"] for run in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


# ---- files ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    assert main(["train", *SEEDED, "--method", "fo-dp-sgd", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def run_copy(finished_run, tmp_path):
    import shutil

    return shutil.copytree(finished_run, tmp_path / "r")


DAMAGED_CONFIGS = {
    "empty": b"",
    "half": b'{"dataset": "dig',
    "not text": b"\xff\xfe\x00",
    "too deep": b"[" * 100_000,
    "a number": b"3",
    "a list": b"[]",
    "nothing in it": b"{}",
}


@pytest.mark.parametrize("case", DAMAGED_CONFIGS)
@pytest.mark.fault(
    "a damaged configuration of a run",
    happens="refused: restore a copy",
    lost="nothing, with a copy",
    costs="nothing",
)
def test_a_damaged_configuration(capsys, run_copy, case):
    (run_copy / "config.json").write_bytes(DAMAGED_CONFIGS[case])
    assert "restore a copy" in refused(capsys, "train", "--resume", "--quiet", "--out", str(run_copy))


@pytest.mark.parametrize("value", ["absent", None, "zzz", -1, [1], {}])
@pytest.mark.parametrize("key", ["dataset", "model", "method", "epochs", "delta", "clip_norm", "accountant"])
def test_a_changed_configuration(capsys, run_copy, key, value):
    config = json.loads((run_copy / "config.json").read_text())
    config = {**{k: v for k, v in config.items() if k != key}, **({} if value == "absent" else {key: value})}
    (run_copy / "config.json").write_text(json.dumps(config))
    message = refused(capsys, "train", "--resume", "--quiet", "--out", str(run_copy))
    assert key.replace("dataset", "data set") in message or f"lacks {key}" in message


CONTRADICTED_PLANS = {
    "an unknown key": ({"sigma": 3}, "'sigma', which no run knows"),
    "another rate": ({"lr": 0.3}, "{'lr': 0.3}, its plan something else"),
    "another parameter": ({"set": {"beta": 0.5}}, "{'beta': 0.5}, its plan something else"),
    "an unknown parameter": ({"set": {"zz": 1}}, "no parameter 'zz'"),
    "settings that are none": ({"set": ["beta=0.5"]}, "says set ['beta=0.5']"),
    "another seed": ({"seed": 5}, "says seed 5, its plan 0"),
    "other noise": ({"noise_multiplier": 5.0}, "says noise_multiplier 5.0, its plan 2.0"),
    "more epochs": ({"epochs": 3}, "says steps 30, its plan 2"),
    "exact noise": ({"exact_noise": True}, "says exact_noise True, its plan False"),
    "an absurd target": ({"target_epsilon": "q"}, "target_epsilon must be a finite number"),
}


@pytest.mark.rule(14)
@pytest.mark.parametrize("case", CONTRADICTED_PLANS)
@pytest.mark.fault(
    "a configuration that contradicts the plan in it",
    happens="refused",
    lost="nothing",
    costs="nothing",
)
def test_a_configuration_that_contradicts_its_plan(capsys, run_copy, case):
    changes, hint = CONTRADICTED_PLANS[case]
    config = {**json.loads((run_copy / "config.json").read_text()), **changes}
    (run_copy / "config.json").write_text(json.dumps(config))
    assert hint in refused(capsys, "train", "--resume", "--quiet", "--out", str(run_copy))


def test_settings_of_every_kind_are_those_of_the_plan_when_read_again(capsys, tmp_path):
    """Tuples come back from the file as lists."""
    words = ["--set", "filter=doppler", "--set", "filter_a=(-0.8,)", "--set", "filter_b=(0.2,)", "--lr", "0.3"]
    assert main(["train", *SEEDED, *words, "--out", str(tmp_path / "r")]) == 0
    assert main(["train", "--resume", "--quiet", "--out", str(tmp_path / "r")]) == 0


@pytest.mark.parametrize("value", ["absent", None, -1, [1]])
@pytest.mark.parametrize("key", ["run", "ledger", "budget", "dataset_name"])
@pytest.mark.fault(
    "a configuration that no longer names its ledger",
    happens="refused",
    lost="nothing",
    costs="nothing",
)
def test_a_configuration_that_does_not_say_where_its_spending_is_kept(capsys, run_copy, key, value):
    """Also of a run without a checkpoint, which would begin anew."""
    config = {**json.loads((run_copy / "config.json").read_text()), key: value}
    if value == "absent":
        del config[key]
    (run_copy / "config.json").write_text(json.dumps(config))
    (run_copy / "checkpoint.pt").unlink()
    resume = ["train", "--resume", "--quiet", "--out", str(run_copy)]
    if value == "absent" and key != "run":  # these are for shared ledgers
        assert "steps were used" in refused(capsys, *resume)
        return
    assert "restore a copy" in refused(capsys, *resume)
    if value != "absent":
        assert "restore a copy" in refused(capsys, "ledger", "show", str(run_copy))


def damage(content: bytes, how: str) -> bytes:
    return {"empty": b"", "cut": content[:-200], "head": content[:100], "text": b"not a checkpoint"}[how]


@pytest.mark.rule(11)
@pytest.mark.parametrize("how", ["empty", "cut", "head", "text", "absent"])
@pytest.mark.parametrize("command", ["resume", "export"])
@pytest.mark.fault(
    "a truncated, empty or foreign checkpoint",
    happens="refused: restore a copy",
    lost="nothing, with a copy",
    costs="nothing",
)
def test_a_damaged_checkpoint(capsys, run_copy, how, command):
    file = run_copy / "checkpoint.pt"
    file.unlink() if how == "absent" else file.write_bytes(damage(file.read_bytes(), how))
    words = ["export", str(run_copy), str(run_copy / "m.safetensors")]
    if command == "resume":
        words = ["train", "--resume", "--quiet", "--out", str(run_copy)]
    assert "checkpoint" in refused(capsys, *words)


@pytest.mark.rule(11)
@pytest.mark.fault(
    "a checkpoint made to run code",
    happens="refused; nothing is run",
    lost="nothing",
    costs="nothing",
)
def test_a_checkpoint_that_runs_code_is_not_run(capsys, run_copy):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(run_copy / "trapped"),)

    torch.save({"format": FORMAT, "model": Trap()}, run_copy / "checkpoint.pt")
    assert "checkpoint" in refused(capsys, "export", str(run_copy), str(run_copy / "m.safetensors"))
    assert not (run_copy / "trapped").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"x" * 100, None])
def test_files_that_are_no_archives(capsys, tmp_path, content):
    file = tmp_path / "bad.npz"
    if content is None:
        np.savez(file, **{"train_images": IMAGES})
        content = file.read_bytes()[:-30]
    file.write_bytes(content)
    words = ["--dataset", str(file), "--assume-size", "40", "--classes", "3", "--out", str(tmp_path / "r")]
    assert str(file) in refused(capsys, "train", *SEEDED, *words)


UNUSABLE_PATHS = {
    "a zero byte": "a\0b",
    "too long": "x" * 5000,
    "under a file": "file/r",
    "a file": "file",
    "not writable": "/proc/fodp",
}


@pytest.mark.parametrize("case", UNUSABLE_PATHS)
@pytest.mark.fault(
    "folders that cannot be made or written",
    happens="one line, exit code 2, before the first step",
    lost="nothing",
    costs="nothing",
)
def test_paths_that_cannot_be_used(capsys, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    path = UNUSABLE_PATHS[case]
    assert "--out" in refused(capsys, "train", *SEEDED, "--out", path)
    assert "config.json" in refused(capsys, "train", "--resume", "--quiet", "--out", path)
    assert "checkpoint" in refused(capsys, "export", path, "m.safetensors")
    assert "ledger" in refused(capsys, "ledger", "show", path)
    assert "ledger" in refused(
        capsys, "train", *SEEDED, "--ledger", path, "--dataset-name", "d", "--no-budget", "--out", "r"
    )
    own = ["--assume-size", "40", "--classes", "3", "--dataset", f"{path}.npz"]
    assert re.search("no such file|cannot read", refused(capsys, "train", *SEEDED, *own))


@pytest.mark.parametrize("case", ["a zero byte", "too long", "under a file", "not writable"])
@pytest.mark.fault(
    "an export that cannot be written",
    happens="one line, exit code 2; the run is untouched",
    lost="nothing",
    costs="nothing",
)
def test_exports_that_cannot_be_written(capsys, tmp_path, monkeypatch, run_copy, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(capsys, "export", str(run_copy), UNUSABLE_PATHS[case])


def test_a_real_process_prints_one_line_and_no_traceback():
    command = [
        sys.executable,
        "-m",
        "fodp.cli.main",
        "epsilon",
        "--noise-multiplier=nan",
        "--sampling-rate=1",
        "--steps=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fodp: noise_multiplier must be a finite number, got nan\n"
