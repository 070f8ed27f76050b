"""The page of rules is what the tests' markers say, and no rule is without a guard but those named as coming."""

import ast

import pytest

from rules_page import PAGE, RULES, TESTS, _marked, guards, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_every_rule_has_a_test():
    assert all(guards().values())


def test_every_marker_names_a_rule():
    assert set(guards()) == set(RULES) == set(range(1, 34))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("@pytest.mark.rule(3)\ndef test_a(): ...", [("test_a", (3,))]),
        ("@pytest.mark.rule(3)\n@pytest.mark.rule(2)\ndef test_a(): ...", [("test_a", (2, 3))]),
        ("@pytest.mark.rule(3)\nclass TestB:\n    def test_a(self): ...", [("TestB.test_a", (3,))]),
        ("@pytest.mark.rule(3)\ndef helper(): ...", []),
        ("def test_a(): ...", [("test_a", ())]),
    ],
)
def test_markers_are_read_as_pytest_reads_them(source, expected):
    assert list(_marked(ast.parse(source).body, "", ())) == expected


def test_no_marker_is_set_in_a_way_the_page_does_not_see():
    """Each mention of the marker in a test file is a decorator that was counted."""
    for file in TESTS.rglob("test_*.py"):
        if file.name == "test_rules.py":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        mentions = sum(isinstance(n, ast.Attribute) and ast.unparse(n) == "pytest.mark.rule" for n in ast.walk(tree))
        decorators = sum(
            ast.unparse(decorator).startswith("pytest.mark.rule(")
            for n in ast.walk(tree)
            if isinstance(n, ast.FunctionDef | ast.ClassDef)
            for decorator in n.decorator_list
        )
        assert mentions == decorators, file.name
