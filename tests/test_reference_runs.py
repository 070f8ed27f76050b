"""Seeded runs release what they have always released, by every method and in every way to train."""

import json

import pytest

from reference_runs import FILE, cases, machine, noted

KNOWN = json.loads(FILE.read_text(encoding="utf-8"))
CASES = {str(case): case for case in cases()}


def test_the_file_knows_every_run():
    assert list(KNOWN["runs"]) == list(CASES), "run tests/reference_runs.py, if the others have not changed"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_seeded_run_releases_what_it_always_did(name):
    expected, found = KNOWN["runs"][name], noted(CASES[name])
    assert len(found) == len(expected)
    for step, (known, now) in enumerate(zip(expected, found, strict=True)):
        assert now[1:] == pytest.approx(known[1:], rel=1e-3, abs=1e-4), f"step {step}"
        if KNOWN["machine"] == machine():
            assert now[0] == known[0], f"step {step}: not the same bits"
