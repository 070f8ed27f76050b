"""Commands that other packages add: listed when they load, and one clear line each when they do not."""

import re
import sys
from importlib.metadata import EntryPoint

import pytest

from fodp.cli import commands
from fodp.cli.commands import GROUP, OWN, Command
from fodp.cli.main import main
from odd_input_for_tests import run

HELLO = Command("hello", "Say hello.", lambda parser: None, lambda options: print("hello") or 0)
NOT_A_COMMAND = "hello"


@pytest.fixture
def installed(monkeypatch):
    """Make it look as if these entry points, and no others, were installed."""

    def install(**points):
        found = [EntryPoint(name, value, GROUP) for name, value in points.items()]
        monkeypatch.setattr(commands, "entry_points", lambda group: [p for p in found if p.group == group])

    return install


def help_of(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    return capsys.readouterr().out


def test_an_entry_point_becomes_a_command(installed, capsys):
    installed(hello="test_commands:HELLO")
    assert "Say hello." in help_of(capsys)
    assert run("hello")[:2] == (0, "hello\n")


@pytest.mark.parametrize("name", ["reproduce", "report", "bench"])
@pytest.mark.parametrize("words", [[], ["--quick"], ["--help"], ["fair", "--seeds", "3"]])
def test_without_the_laboratory_its_commands_say_how_to_get_it(installed, capsys, name, words):
    installed()
    code, out, err = run(name, *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert f"fodp {name} " in err
    assert 'pip install "fodp[lab]"' in err
    said = help_of(capsys)
    assert not re.search(rf"^    {name}\b", said, re.MULTILINE)
    assert "Not installed here: reproduce, report, bench" in said


@pytest.mark.parametrize("module", ["filelock", "matplotlib", "pooch", "sklearn"])
def test_the_laboratory_without_a_package_of_its_extra_is_not_there(monkeypatch, capsys, module):
    """One distribution holds both packages, so that entry points alone do not tell."""
    monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith("fodp_lab")]:
        monkeypatch.delitem(sys.modules, name)
    code, _, err = run("bench", "--quick")
    assert code == 2
    assert module.replace("sklearn", "scikit-learn") in err
    assert 'pip install "fodp[lab]"' in err
    assert "Not installed here: " in help_of(capsys)


@pytest.mark.parametrize(
    ("value", "why"), [("no_such_module:X", "ModuleNotFoundError"), ("test_commands:NOT_A_COMMAND", "not the Command")]
)
def test_a_package_that_is_broken_takes_only_its_own_command_with_it(installed, value, why):
    installed(other=value)
    code, _, err = run("other", "--x")
    assert code == 2
    assert value in err
    assert why in err
    assert run("epsilon", "--noise-multiplier=2", "--sampling-rate=0.1", "--steps=3")[0] == 0


def test_nobody_replaces_a_command_of_the_library(installed):
    installed(train="test_commands:HELLO")
    assert [command for command in commands.known() if command.name == "train"] == [OWN[0]]
