"""Faults that were silent once, brought back: the test that stands for each in docs/audit.md fails."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from mutants_for_tests import UNSEEN
from rules_page import TESTS, _marked
from test_premise import neighbours, pair  # noqa: F401  fixtures

PLANTED = [mutant for mutant in UNSEEN if mutant.plant is not None]


@pytest.mark.parametrize("mutant", UNSEEN, ids=str)
def test_the_named_test_exists(mutant):
    file, _, name = mutant.test.partition("::")
    assert name in [found for found, _ in _marked(ast.parse((TESTS / file).read_text()).body, "", ())]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:per-example gradients")
@pytest.mark.parametrize("mutant", PLANTED, ids=str)
def test_the_named_test_fails_with_the_fault(mutant, request, monkeypatch):
    file, _, name = mutant.test.partition("::")
    monkeypatch.syspath_prepend((TESTS / file).parent)
    test = getattr(importlib.import_module(Path(file).stem), name)
    wanted = [argument for argument in inspect.signature(test).parameters if argument not in mutant.given]
    given = {**mutant.given, **{argument: request.getfixturevalue(argument) for argument in wanted}}
    mutant.plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(**given)
