"""The list of slow tests names tests that exist."""

import ast

import pytest

from rules_page import TESTS, _marked
from tiers import slow_tests


def test_every_slow_test_exists():
    known = {
        f"tests/{file.relative_to(TESTS).as_posix()}::{name.replace('.', '::')}"
        for file in TESTS.rglob("test_*.py")
        for name, _ in _marked(ast.parse(file.read_text(encoding="utf-8")).body, "", ())
    }
    assert slow_tests() <= known, "run tests/tiers.py again"


def test_slow_tests_are_marked(request: pytest.FixtureRequest):
    marked = {item.nodeid.partition("[")[0] for item in request.session.items if item.get_closest_marker("slow")}
    assert marked == {item.nodeid.partition("[")[0] for item in request.session.items} & slow_tests()
