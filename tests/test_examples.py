"""Every file in examples/ runs as it stands, is short, and is in the index."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MODULES = {"scikit-learn": "sklearn"}  # where a package is imported by another name


def missing(text: str) -> list[str]:
    """The extras that an example asks for in its first lines, `pip install "fodp[name]"`, and that are not there."""
    asked = [name for names in re.findall(r"fodp\[([\w,]+)\]", text) for name in names.split(",")]
    packages = {
        extra: [re.split(r"[\[<>=]", package)[0] for package in EXTRAS[extra] if not package.startswith("fodp[")]
        for extra in asked
    }
    return [extra for extra, names in packages.items() if any(find_spec(MODULES.get(n, n)) is None for n in names)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.name)
def test_an_example_runs_and_says_its_epsilon(example, tmp_path):
    lacking = missing(example.read_text(encoding="utf-8"))
    if lacking:
        pytest.skip(f"takes fodp[{','.join(lacking)}]")
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    settings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"epsilon \d", done.stdout), done.stdout[-500:]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.name)
def test_an_example_is_short_and_in_the_index(example):
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert f"(../examples/{example.name})" in (ROOT / "docs" / "examples.md").read_text()
    assert all(extra in EXTRAS for names in re.findall(r"fodp\[([\w,]+)\]", text) for extra in names.split(","))
