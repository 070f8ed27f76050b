"""No input leads to a traceback, a NaN model as a result, or an ε below the truth: inputs nobody thought of.

Hypothesis makes the inputs. The truth that ε is held against is the privacy profile of one release, in closed form:
a run can cost no less than any one of its releases.
"""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import special

import fodp
from fodp import accounting
from fodp.accounting import ACCOUNTANTS, Event, Phase
from fodp.methods import METHODS
from fodp.options.table import known_names
from odd_input_for_tests import mostly_plain, odd, plain, run, text

# ---- accounting ----------------------------------------------------------------------------------------------


def one_release(rate: float, noise: float, delta: float) -> float:
    """ε at δ of one Poisson-subsampled Gaussian release, removing a record: Φ, bisection and nothing else."""

    def profile(epsilon: float) -> float:
        # outcomes where the mixture (1-q)N(0,1) + qN(1/z,1) is more than e^ε times N(0,1): all above a threshold
        odds = math.expm1(epsilon) / rate + 1  # e^(x/z - 1/2z²) must exceed this
        threshold = noise * (math.log(odds) + 1 / (2 * noise**2))
        tail = special.ndtr(-threshold)
        return float((1 - rate) * tail + rate * special.ndtr(1 / noise - threshold) - math.exp(epsilon) * tail)

    if profile(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while profile(high) > delta:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if profile(middle) > delta else (low, middle)
    return low


def test_the_truth_is_that_of_the_plain_gaussian_at_rate_one():
    """Balle and Wang (2018), theorem 8, at the ε that the profile gives."""
    epsilon = one_release(1.0, 1.3, 1e-5)
    mean = 1 / 1.3
    delta = special.ndtr(mean / 2 - epsilon / mean) - math.exp(epsilon) * special.ndtr(-mean / 2 - epsilon / mean)
    assert delta == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.rule(10)
@settings(max_examples=25)
@given(
    rate=st.one_of(st.floats(1e-4, 1), st.sampled_from([1.0, 1e-12, 5e-324, 1 - 2**-53])),
    noise=st.one_of(st.floats(0.3, 50), st.sampled_from([0.05, 1e3, 1e8, 1e300])),
    steps=st.sampled_from([1, 2, 30, 10**6]),
    delta=st.one_of(st.floats(1e-9, 0.1), st.sampled_from([1e-15, 1e-300, 0.999])),
    accountant=st.sampled_from(ACCOUNTANTS),
)
def test_epsilon_is_never_below_what_one_release_costs(rate, noise, steps, delta, accountant):
    epsilon = accounting.epsilon_of((Phase((Event(rate, noise),), steps),), delta, accountant)
    assert epsilon >= 0
    if delta > 1e-12 and noise < 1e6:  # there the truth itself is a difference of numbers float64 can tell apart
        assert epsilon >= one_release(rate, noise, delta) * (1 - 1e-6) - 1e-9


@pytest.mark.rule(10)
@settings(max_examples=20)
@given(
    rates=st.lists(st.floats(1e-3, 1), min_size=2, max_size=2),
    noises=st.lists(st.floats(0.4, 20), min_size=2, max_size=2),
    steps=st.lists(st.integers(1, 100), min_size=2, max_size=2),
    accountant=st.sampled_from(("rdp", "rdp-classic", "pld")),
)
def test_more_steps_more_data_or_less_noise_never_cost_less(rates, noises, steps, accountant):
    """An ε that fell when a run does more would be below the truth of one of the two."""

    def cost(rate, noise, count):
        return accounting.epsilon_of((Phase((Event(rate, noise),), count),), 1e-5, accountant)

    cheap = cost(min(rates), max(noises), min(steps))
    dear = cost(max(rates), min(noises), max(steps))
    # bounds are not tight to the last digit: PLD on another grid may differ by a hundredth
    assert cheap <= dear * 1.01 + 1e-3


@settings(max_examples=80)
@given(words=st.dictionaries(
    st.sampled_from(["noise-multiplier", "sampling-rate", "steps", "delta", "beta", "target-epsilon", "accountant"]),
    st.one_of(odd, plain, st.integers(-2, 5000).map(str), st.sampled_from(ACCOUNTANTS), text),
), command=st.sampled_from(["epsilon", "calibrate"]))  # fmt: skip
def test_no_accounting_command_fails_with_a_traceback(words, command):
    words = {"sampling-rate": "0.1", "steps": "20", "accountant": "rdp", **words}
    words.setdefault("noise-multiplier" if command == "epsilon" else "target-epsilon", "2")
    code, out, _ = run(command, "--json", *(f"--{name}={value}" for name, value in words.items()))
    if code == 0:
        found = json.loads(out, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
        assert found["epsilon"] >= 0
        if command == "calibrate":
            assert found["epsilon"] <= float(words["target-epsilon"])


# ---- plans ---------------------------------------------------------------------------------------------------

anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
    st.sampled_from([10**400, -(10**400), complex(1, 1), object(), float, np.float32(0.5), np.int64(3)]),
)  # fmt: skip
PLAN = dict(sampling_rate=0.1, steps=10, lot_size=10, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, accountant="rdp")


def plan_or_refusal(**fields) -> tuple[fodp.Plan | None, str]:
    try:
        return fodp.Plan(**fields), ""
    except fodp.PrivacyError as error:
        return None, str(error)


@pytest.mark.rule(14)
@settings(max_examples=300)
@given(field=st.sampled_from([*PLAN, "method", "params", "seed", "exact_noise"]), value=anything)
def test_a_plan_takes_a_value_or_says_which_field_is_wrong(field, value):
    plan, refusal = plan_or_refusal(**{**PLAN, field: value})
    if plan is None:
        assert field in refusal or (field == "params" and "no parameter" in refusal)
        return
    assert plan.epsilon() >= one_release(plan.sampling_rate, plan.noise_multiplier / 0.9, plan.delta) - 1e-9


@pytest.mark.rule(14)
@settings(max_examples=300)
@given(data=st.data(), method=st.sampled_from(sorted(METHODS)))
def test_parameters_of_every_method_are_taken_or_refused_by_name(data, method):
    names = sorted({*METHODS[method].Params().__dict__, *known_names()})
    name, value = data.draw(st.sampled_from(names)), data.draw(st.one_of(anything, st.floats(0, 1)))
    plan, refusal = plan_or_refusal(**PLAN, method=method, params={name: value})
    if plan is None:
        assert name in refusal or (name.startswith("filter_") and "the filter" in refusal)
        return
    try:
        epsilon = plan.epsilon()
    except fodp.PrivacyError:  # events that no accountant takes: refused before any data is touched
        return
    for event in {event for phase in plan.events() for event in phase.events}:
        assert epsilon >= one_release(event.sampling_rate, max(event.noise_multiplier, 0.05), 1e-5) - 1e-9


# ---- training ------------------------------------------------------------------------------------------------

QUICK = [
    "--quiet",
    "--json",
    "--threads=1",
    "--accountant=rdp",
    "--epochs=0.2",
    "--noise-multiplier=2",
    "--model=logistic",
]
OPTIONS = [
    "noise-multiplier",
    "delta",
    "clip-norm",
    "lot-size",
    "lr",
    "target-epsilon",
    "seed",
    "eval-every",
    "microbatch",
]


def judge(folder: Path, code: int, out: str) -> None:
    """What came out is a finite model whose ε is at least that of its plan's first release, or no result at all."""
    if code:
        assert not (folder / "result.json").exists()
        return
    result = json.loads(out.splitlines()[-1], parse_constant=lambda constant: pytest.fail(f"{constant} in the result"))
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())
    plan = fodp.Plan(**saved["plan"])
    assert result["steps"] == saved["step"] >= 1
    assert result["epsilon"] >= plan.epsilon(steps=1) - 1e-9
    multiplier = min(event.noise_multiplier for event in plan.events_at(0))
    if plan.delta > 1e-12 and 0.05 < multiplier < 1e6:
        assert result["epsilon"] >= one_release(plan.sampling_rate, multiplier, plan.delta) - 1e-9


@settings(max_examples=25)
@given(words=st.dictionaries(st.sampled_from(OPTIONS), mostly_plain, min_size=1, max_size=3),
       setting=st.one_of(st.none(), st.tuples(st.sampled_from(["beta", "window", "update", "filter", "alpha", "zz"]),
                                              st.one_of(mostly_plain, text)).map("=".join)))  # fmt: skip
def test_training_ends_in_a_result_or_in_one_line(words, setting):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "r"
        options = [f"--{option}={value}" for option, value in words.items()]
        extra = [] if setting is None else [f"--set={setting}"]
        code, out, _ = run("train", *QUICK, *options, *extra, f"--out={folder}")
        judge(folder, code, out)


VALUES = st.sampled_from([0.0, 1.0, -1.0, 1e-40, 1e10, 1e20, 3e38, -3e38, math.nan, math.inf, 1e300])


@pytest.mark.filterwarnings("ignore:per-example gradients run one example at a time")
@settings(max_examples=25)
@given(
    count=st.sampled_from([0, 1, 2, 20]), shape=st.sampled_from([(3,), (2, 2), (2, 2, 3), (1, 2, 2), (2, 2, 2, 2), ()]),
    kind=st.sampled_from(["float32", "float64", "float16", "uint8", "int64", "bool"]),
    pixels=st.lists(VALUES, min_size=1, max_size=4), labels=st.lists(st.integers(-1, 3), min_size=1, max_size=3),
    missing=st.sampled_from([None, None, None, "train_labels", "test_images"]),
    lr=st.sampled_from(["0.1", "1e10", "1e30"]),
)  # fmt: skip
def test_any_data_ends_in_a_finite_model_or_in_one_line(count, shape, kind, pixels, labels, missing, lr):
    assume(not (kind in ("uint8", "int64", "bool") and any(not abs(p) < 1e3 for p in pixels)))
    with np.errstate(all="ignore"):
        images = np.resize(np.array(pixels), (count, *shape)).astype(kind)
    arrays = dict(train_images=images, train_labels=np.resize(labels, count))
    arrays |= dict(test_images=images[:2], test_labels=arrays["train_labels"][:2])
    with tempfile.TemporaryDirectory() as name:
        np.savez(f"{name}/own.npz", **{key: value for key, value in arrays.items() if key != missing})
        words = [f"--dataset={name}/own.npz", "--assume-size=20", "--classes=3", f"--lr={lr}", "--epochs=0.5"]
        code, out, _ = run("train", *QUICK, *words, f"--out={name}/r")
        judge(Path(name) / "r", code, out)


@settings(max_examples=30)
@given(place=st.floats(0, 1), junk=st.binary(min_size=0, max_size=8), cut=st.booleans(),
       file=st.sampled_from(["config.json", "checkpoint.pt", "ledger.sqlite", "metrics.csv"]))  # fmt: skip
def test_damaged_files_of_a_run_end_in_one_line_or_change_nothing(finished, place, junk, cut, file):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "r"
        folder.mkdir()
        for source, content in finished.items():
            (folder / source).write_bytes(content)
        content = finished[file]
        start = int(place * len(content))
        (folder / file).write_bytes(content[:start] + junk + (b"" if cut else content[start + len(junk) :]))
        truth = fodp.Plan(**{**PLAN, "noise_multiplier": 2.0, "params": {}}).epsilon(steps=2)
        code, out, _ = run("train", "--resume", "--quiet", "--json", f"--out={folder}")
        if code == 0 and file != "config.json":
            assert json.loads(out.splitlines()[-1])["epsilon"] >= truth * (1 - 1e-9)
        code, out, _ = run("export", str(folder), f"{name}/m.safetensors")


@pytest.fixture(scope="module")
def finished():
    with tempfile.TemporaryDirectory() as name:
        assert run("train", *QUICK, "--seed=0", f"--out={name}/r")[0] == 0
        return {path.name: path.read_bytes() for path in Path(name, "r").iterdir()}


WORDS = [
    "train",
    "epsilon",
    "export",
    "methods",
    "audit",
    "ledger",
    "reproduce",
    "report",
    "tune",
    "--json",
    "--set",
    "--resume",
    "--out",
    "--version",
    "-h",
    "--",
    "-",
]


@settings(max_examples=60)
@given(words=st.lists(st.one_of(st.sampled_from(WORDS), text), max_size=4))
def test_any_words_at_all(words, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.getbasetemp())
        try:
            run(*words)
        except SystemExit as done:  # --help and --version
            code = done.code
        else:
            code = 0
    assert code == 0
