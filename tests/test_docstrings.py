"""Every public name says what it does: with sections where it has parameters, and with examples that run."""

import contextlib
import doctest
import inspect
import io
import re
from types import ModuleType

import pytest

import fodp
from fodp.methods import METHODS
from fodp.options import OPTIONS
from names_for_tests import all_names

# Functions whose docstrings lack a section. Whoever writes one takes its name out: the list only shrinks.
ALLOWED = {
    "fodp.audit.subject.plain_trainer", "fodp.own_loop.make_private", "fodp.runs.exported.load_exported",
    "fodp.testing.problem.delete_one", "fodp.testing.suite.faults", "fodp.testing.suite.registered",
}  # fmt: skip
METHODS_TOO = {"fodp.plan.Plan": ("epsilon", "calibrated", "statement")}  # of classes: those that users call first


def public():
    """Every public class and function of fodp and its public modules, by the place where it is written."""
    values = [getattr(fodp, name) for name in all_names()]
    found = {f"{value.__module__}.{value.__qualname__}": value for value in values if not isinstance(value, ModuleType)}
    for module in [value for value in values if isinstance(value, ModuleType)]:
        for name in getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    for owner, names in METHODS_TOO.items():
        found |= {f"{owner}.{name}": getattr(found[owner], name) for name in names}
    return {place: value for place, value in found.items() if place.startswith("fodp.")}


PUBLIC = public()


def lacking(value):
    """The sections that the docstring of a function should have and has not."""
    signature, text = inspect.signature(value), inspect.getdoc(value) or ""
    parameters = [name for name in signature.parameters if name not in ("self", "cls")]
    wanted = {"Args:": bool(parameters), "Returns:": signature.return_annotation not in (None, "None")}
    wanted |= {"Example:": bool(parameters)}
    named = [f"the parameter {name}" for name in parameters if not re.search(rf"\b{name}\b[^\n]*:", text)]
    return [section for section, due in wanted.items() if due and section not in text] or named


def test_every_public_name_has_a_docstring_of_its_own():
    everything = [*PUBLIC.values(), *METHODS.values(), *(row.option for row in OPTIONS)]
    assert [value for value in everything if not (vars(value).get("__doc__") or getattr(value, "__doc__", None))] == []
    assert [value for value in everything if inspect.isclass(value) and not vars(value).get("__doc__")] == []


def test_functions_say_what_they_take_and_give_back_and_show_it():
    functions = {place: value for place, value in PUBLIC.items() if not inspect.isclass(value)}
    found = {place: missing for place, value in functions.items() if (missing := lacking(value))}
    assert {place: missing for place, missing in found.items() if place not in ALLOWED} == {}
    assert found.keys() >= ALLOWED, "they have all sections now: take them out of ALLOWED"


def examples():
    """The examples of every public name, with those of its methods."""
    find, places = doctest.DocTestFinder().find, PUBLIC.items()
    found = [test for place, value in places for test in find(value, place, globs=dict(vars(inspect.getmodule(value))))]
    return list({test.name: test for test in found if test.examples}.values())


@pytest.mark.filterwarnings("ignore")  # examples have a few made-up rows, which is warned of
@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_examples_run(example, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    said, flags = io.StringIO(), doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    with contextlib.redirect_stdout(io.StringIO()):
        result = doctest.DocTestRunner(optionflags=flags).run(example, out=said.write)
    assert result.failed == 0, said.getvalue()
