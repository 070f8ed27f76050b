"""Committed records come out again, so that what the fingerprint of the code does not see counts: pixels, scores, SGD.

The beginning of a run is trained again, with the noise of the whole run, and its scores are compared with the curve on
record. On the machine that made the records they are equal to the last digit; a change of the initial weights by one
part in a million leaves them so too (but for plain SGD at its large rate after more than 100 steps). Of 2,000 images,
four may be classified otherwise elsewhere.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest

from fodp.methods import METHODS
from fodp_lab.paper.execute import execute
from fodp_lab.paper.spec import RunSpec, recorded

RESULTS = Path(__file__).parents[2] / "results"
TOLERANCE = 0.002

with_data = pytest.mark.skipif(
    "FODP_DATA" not in os.environ, reason="FODP_DATA does not name a folder with the data sets of the paper"
)


@pytest.fixture(autouse=True)
def twin_is_known(monkeypatch):
    """The exact twin is a method of the laboratory; other tests must not see it."""
    from fodp_lab.paper import twin

    monkeypatch.setitem(METHODS, twin.Twin.name, twin.Twin)
    yield
    METHODS.pop(twin.Twin.name, None)


def committed(suite, method, dataset, scored_on):
    """The first such record, if its data are here."""
    file = Path(os.environ["FODP_DATA"]) / f"{dataset}.npz"
    found = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "no such file"
    if f"| `{file.name}` | `{found}` |" not in (RESULTS / "README.md").read_text(encoding="utf-8"):
        pytest.skip(f"{file.name} in FODP_DATA is not the file of the records, see results/README.md ({found})")
    for line in (RESULTS / f"{suite}.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if (record["algorithm"], record["run"]["dataset"], record["run"]["scored_on"]) == (method, dataset, scored_on):
            return record
    raise AssertionError(f"no record of {method} on {dataset}")


def distance(record, steps, variant=""):
    """How far the scores of the first steps are from those on record, at most; and how many there are."""
    again = execute(RunSpec(**record["run"]).with_(steps=steps, variant=variant))["curve"]
    assert again["steps"] == record["curve"]["steps"][: len(again["steps"])]
    pairs = zip(again["accuracy"], record["curve"]["accuracy"], strict=False)
    return max(abs(a - b) for a, b in pairs), len(again["steps"])


@pytest.mark.parametrize("suite", ["paper", "fair", "utility"])
def test_parameters_are_recorded_as_ever(suite):
    """Of every kind of run on record, but for bands, which calibration chooses."""
    seen = set()
    for line in (RESULTS / f"{suite}.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        spec, kind = RunSpec(**record["run"]), (record["algorithm"], str(record["run"]["params"]))
        if spec.method in ("none", "fo-noise") or kind in seen:
            continue
        seen.add(kind)
        found = recorded(spec.with_(target_epsilon=None, noise_multiplier=1.0).plan())
        found = json.loads(json.dumps(found))
        assert found.keys() ^ record["params"].keys() <= {"variant", "ascent", "compact", "compact_error"}  # of methods
        assert {n: found[n] for n in found.keys() & record["params"].keys()} == {
            n: v for n, v in record["params"].items() if n in found
        }
    assert len(seen) > 20


@with_data
@pytest.mark.parametrize(
    ("suite", "method", "dataset", "scored_on", "steps", "scores"),
    [
        ("paper", "dp-sgd", "cifar10", "test", 200, 8),
        ("fair", "dp-sgd", "cifar100", "validation", 200, 2),
        ("fair", "fo-dp-sgd", "svhn", "test", 200, 2),
        ("fair", "none", "cifar100", "test", 100, 1),
    ],
)
def test_a_record_comes_out_again(suite, method, dataset, scored_on, steps, scores):
    off, compared = distance(committed(suite, method, dataset, scored_on), steps)
    assert compared == scores
    assert off <= TOLERANCE


@with_data
@pytest.mark.parametrize("variant", ["tested on train[5000:7000]", "pixels in [-1, 1]", "train[5000:10000]"])
def test_other_images_or_another_normalisation_would_be_noticed(variant):
    assert distance(committed("fair", "none", "cifar100", "test"), 100, variant)[0] > TOLERANCE
