"""What the README and the guides tell people to type really works."""

import pkgutil
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import fodp
import walks
from fodp.cli.main import main
from fodp.cli.methods import markdown, method_rows
from fodp.methods import METHODS
from fodp.options import OPTIONS
from names_for_tests import all_names

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/tutorial.md", "docs/budgets.md")


@pytest.fixture(autouse=True)
def table_as_it_was():
    """Examples may register methods and options; later tests must not see them."""
    before, rows = dict(METHODS), list(OPTIONS)
    yield
    METHODS.clear()
    METHODS.update(before)
    OPTIONS[:] = rows


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


OWN = ("own-method", "layers", "errors", "people", "own-loop", "trainer", "features")


@pytest.mark.parametrize("page", [*PAGES, *(f"docs/{name}.md" for name in OWN)])
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = blocks(page, "python")
    assert found
    names = {}
    for block in found:
        exec(compile(block, page, "exec"), names)


def test_the_page_about_hugging_face_runs(tmp_path, monkeypatch):
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason="fodp[hf]")
    test_python_blocks_run("docs/hugging-face.md", tmp_path, monkeypatch)
    assert "ε = " in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.parametrize(("page", "package"), [("scikit-learn", "sklearn"), ("lightning",) * 2, ("opacus",) * 2])
@pytest.mark.filterwarnings("ignore")  # of those packages
def test_the_pages_of_other_doors_run(page, package, tmp_path, monkeypatch):
    pytest.importorskip(package, reason=f"fodp[{package}]")
    test_python_blocks_run(f"docs/{page}.md", tmp_path, monkeypatch)


@pytest.mark.parametrize("page", [*PAGES, "docs/tuning.md"])
def test_shell_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = blocks(page, "sh")
    assert found
    for line in "".join(found).splitlines():
        words = shlex.split(line)
        assert words[0] == "fodp"
        assert main(words[1:]) == 0, line


def test_the_page_about_your_own_data_works_from_top_to_bottom(tmp_path, monkeypatch):
    """Its commands use files that its Python has written, and the other way round."""
    monkeypatch.chdir(tmp_path)
    page, names = "docs/your-data.md", {}
    found = re.findall(r"^```(python|sh)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert {language for language, _ in found} == {"python", "sh"}
    for language, block in found:
        if language == "python":
            exec(compile(block, page, "exec"), names)
        else:
            for line in block.splitlines():
                assert main([*shlex.split(line)[1:], *(["--quiet"] if "train" in line else [])]) == 0, line
    predicted = names["exported"].predict({"age": [30, 80], "town": ["Ulm", "Rome"]})
    assert set(predicted) <= {"no", "yes"}


def test_every_public_name_exists_and_is_documented():
    assert set(fodp.__all__) < set(all_names())
    for name in all_names():
        assert getattr(fodp, name).__doc__, name


def test_the_top_level_shows_twenty_names():
    assert dir(fodp) == sorted(fodp.__all__)
    assert len(fodp.__all__) <= 20


def anchors(page):
    """What the headings of a page are called in links: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    pages = [page for where in ("*.md", "docs/*.md", "results/**/*.md", ".github/**/*.md") for page in ROOT.glob(where)]
    assert {"README.md", "CONTRIBUTING.md", "SECURITY.md", "glossary.md"} <= {page.name for page in pages}
    for page in pages:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "docs/glossary.md", "docs/stability.md"])
def test_what_contributors_are_told_of_is_there(page):
    """Paths and make's targets by name; `your_method.py` is for the reader to write."""
    text = (ROOT / page).read_text()
    for path in re.findall(r"`((?:src|tests|docs|results|\.github)/[^`\s]*)`", text):
        assert "your_method" in path or (ROOT / path).exists(), path
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^    )make ([\w-]+)", text, re.MULTILINE)) <= targets


def test_the_glossary_has_the_words_and_is_in_alphabetical_order():
    ours, theirs = (ROOT / "docs/glossary.md").read_text().split("## Words you may have come with")
    words = re.findall(r"^\| \*\*(\w+)\*\* \|", ours, re.MULTILINE)
    assert words == sorted(words)
    assert {"lot", "release", "query", "bound", "event", "phase", "plan", "card", "window", "twin", "step", "ledger",
            "budget", "draw", "record", "unit"} <= set(words)  # fmt: skip
    for word in ("batch", "DataLoader", "gradient accumulation", "ghost clipping", "virtual step", "physical batch",
                 "noise multiplier", "sample rate", "secure mode"):  # fmt: skip
        assert re.search(rf"^\| [^|]*\b{word}\b[^|]*\|", theirs, re.MULTILINE), word


def test_the_citation_names_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    top = dict(re.findall(r'^([\w-]+): *"?([^"\n]*)"?$', text, re.MULTILINE))
    assert top["cff-version"] == "1.2.0"
    assert top["version"] == fodp.__version__
    assert {"message", "title", "authors"} <= set(top)  # what the format asks for


def test_the_version_stands_in_one_place():
    """pyproject.toml takes it from the package, as a plain string: builds read that without importing anything."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fodp.__version__"}
    assert re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', Path(fodp.__file__).read_text(), re.MULTILINE) == [
        fodp.__version__
    ]


def test_the_methods_page_is_generated_from_the_table(monkeypatch):
    monkeypatch.delitem(METHODS, "fo-twin", raising=False)  # the experiments' own, if their tests ran before
    assert (ROOT / "docs/methods.md").read_text() == markdown(method_rows())


def test_the_ways_through_the_house_lead_past_names_that_exist():
    section = (ROOT / "docs/architecture.md").read_text().split("## Four ways")[1].split("\n## ")[0]
    ways = re.findall(r"^\*\*One .*?(?=^\*\*One |\Z)", section, re.MULTILINE | re.DOTALL)
    assert len(ways) == len(walks.WALKS)
    for way, (walk, most) in zip(ways, walks.WALKS.values(), strict=True):
        assert 5 <= len(re.findall(r"^\d+\. ", way, re.MULTILINE)) <= 10
        assert f"at most {most.stations}" in way
        assert not [station for station in walk().stations if not re.search(rf"`{station}\b", way)]
    for name in re.findall(r"`([a-z_.]+\.[A-Za-z_.]+)`", section):
        if not name.startswith(("sys.", "tests/")) and name != "fodp":
            assert pkgutil.resolve_name(f"fodp.{name}") is not None
