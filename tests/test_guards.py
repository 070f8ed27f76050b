"""What tests guarded before the house was rebuilt (commit c72e700), they guard now."""

import json

from guards import BEFORE, guards, lost


def test_nothing_that_was_guarded_is_without_a_test():
    assert lost(json.loads(BEFORE.read_text(encoding="utf-8")), guards()) == []


def test_what_is_gone_is_named_unless_it_has_a_reason():
    before = {"rules": {"1": ["a"]}, "faults": {"a full disk": ["b"]}, "statements": {}, "mutants": {"no noise": ["c"]}}
    now = {"rules": {"1": []}, "faults": {"a full disk": ["another name"]}, "statements": {}, "mutants": {}}
    assert lost(before, now) == ["rules: 1", "mutants: no noise"]
    reasons = {"mutants: no noise": "the noise has no switch any more"}
    assert lost({**before, "dropped": reasons}, now) == ["rules: 1"]
