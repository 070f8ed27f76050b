"""The page in a real browser: charts are drawn, they react, and nothing is asked of the network.

Needs Chromium (Debian: `apt-get install chromium`); without one these tests are skipped and say so.
"""

from pathlib import Path

import pytest

from browser_for_tests import CHROMIUM, Browser
from fodp_lab.judging.results import Results
from fodp_lab.paper import fair
from fodp_lab.report import charts
from fodp_lab.report.files import texts
from records_for_tests import write_fair, write_paper, write_runtime

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found (Debian: apt-get install chromium)")


COMMITTED = Path(__file__).parents[2] / "results" / "report.html"


@pytest.fixture(scope="module", params=["made up", "committed"])
def page(request, tmp_path_factory):
    if request.param == "committed":
        return COMMITTED
    folder = tmp_path_factory.mktemp("results")
    write_paper(folder, lambda spec: 0.3, seeds=2, only=("final-accuracy", "window", "memory-design", "clipping"))
    few = ("DP-SGD", "FO-DP-SGD", "not private")
    write_fair(folder, lambda spec: 0.3 + 0.1 * (spec.method == "none"), few, fair.Protocol(fair.SETTINGS[:1]))
    write_runtime(folder, {"DP-SAM": 1.9})
    results = Results(folder)
    path = folder / "report.html"
    path.write_text(texts(results, charts.draw(results))["report.html"], encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_lives(page, tmp_path, width, dark):
    with Browser(tmp_path / "profile", width=width, dark=dark) as browser:
        browser.open(page)
        figures = browser.evaluate("document.querySelectorAll('figure[data-chart]').length")
        drawn = browser.evaluate(
            "[...document.querySelectorAll('figure[data-chart] .panel svg')].filter(s => s.querySelectorAll("
            "'.mark path.stroke, .mark .dot, .mark .bar').length && s.getBoundingClientRect().height > 60).length"
        )
        panels = browser.evaluate("document.querySelectorAll('figure[data-chart] .panel').length")
        assert figures >= 7
        assert drawn == panels >= figures
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert _is_dark(browser) == dark

        _hover(browser)
        _toggle(browser)
        _raw_rows(browser)
        browser.evaluate("document.getElementById('theme').click()")
        assert _is_dark(browser) != dark
        assert browser.errors() == []
        assert browser.requests() == []


def _is_dark(browser):
    shade = "getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).slice(0, 3).map(Number)"
    return browser.evaluate(f"Math.max(...{shade}) < 100")


def _hover(browser):
    browser.evaluate(
        "document.querySelector('[data-chart=window] .panels').scrollIntoView({block: 'center', behavior: 'instant'})"
    )
    x, y = browser.evaluate(
        "(r => [r.left + r.width / 2, r.top + r.height / 2])"
        "(document.querySelector('[data-chart=window] .hit').getBoundingClientRect())"
    )
    browser.move(x, y)
    told = browser.evaluate("document.getElementById('tip').innerText")
    assert "epoch" in told
    assert all(label in told for label in ("K=1", "K=2", "K=8", "K=32"))


def _toggle(browser):
    curves = "document.querySelectorAll('[data-chart=window] g.mark').length"
    click = "document.querySelector('[data-chart=window] .legend button').click()"
    before = browser.evaluate(curves)
    browser.evaluate(click)
    assert browser.evaluate(curves) == before - 1
    assert browser.evaluate("!document.querySelector('[data-chart=window] g[data-label=\"K=1\"]')")
    browser.evaluate(click)
    assert browser.evaluate(curves) == before


def _raw_rows(browser):
    browser.evaluate("document.getElementById('rows').open = true; new Promise(done => setTimeout(() => done(1), 100))")
    column = "[...document.querySelectorAll('#rows thead th')].findIndex(th => th.textContent === 'final')"
    values = f"[...document.querySelectorAll('#rows tbody tr')].map(tr => Number(tr.children[{column}].textContent))"
    browser.evaluate(f"document.querySelectorAll('#rows thead th')[{column}].click()")
    found = browser.evaluate(values)
    assert len(found) > 100
    assert found == sorted(found)
    browser.evaluate(f"document.querySelectorAll('#rows thead th')[{column}].click()")
    assert browser.evaluate(values) == sorted(found, reverse=True)
    browser.evaluate("(i => { i.value = 'fair none'; i.dispatchEvent(new Event('input')) })"
                     "(document.querySelector('#rows input'))")  # fmt: skip
    assert 0 < len(browser.evaluate(values)) < len(found)


def test_the_test_sees_faults(page, tmp_path):
    """A page that reaches for the network or throws is noticed."""
    bad = tmp_path / "bad.html"
    text = page.read_text(encoding="utf-8").replace("default-src 'none'; ", "default-src 'none'; img-src http:; ")
    fault = "<script>new Image().src = 'http://localhost:9/x.png'; throw new Error('fault')</script></body>"
    bad.write_text(text.replace("</body>", fault), encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        browser.open(bad)
        assert browser.requests() == ["http://localhost:9/x.png"]
        assert any("fault" in str(error) for error in browser.errors())
