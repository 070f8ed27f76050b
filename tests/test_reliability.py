"""The table of faults is what the tests say, and complete."""

from reliability_page import PAGE, faults, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/reliability_page.py"


def test_every_row_is_whole_and_stands_once():
    found = faults()
    assert len(found) >= 60
    assert all(all(cell.strip() and "|" not in cell for cell in row) for row in found)
    assert len({row.what for row in found}) == len(found)
