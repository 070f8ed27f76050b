"""Cards of fits whose guarantee is not the plan's alone: on public rows, or behind steps that no ε covers."""

from collections.abc import Mapping, Sequence
from typing import Any


def for_public_rows(card: Mapping[str, Any]) -> dict[str, Any]:
    """The card of a fit on rows that were declared public: the numbers of the fit, and no claim."""
    return {
        **card,
        "epsilon": None,
        "delta": None,
        "data_is_public": True,
        "statement": "No privacy is claimed for this fit: its rows were declared public (data_is_public=True), and "
        "nothing was charged. It had the noise of the plan, so that a search sees what a private fit would be like.",
    }


def for_private_steps(card: Mapping[str, Any], uncovered: Sequence[str]) -> dict[str, Any]:
    """The card of a fit behind private steps, which stand in it and before the statement; else the card as it is."""
    if not uncovered:
        return dict(card)
    return {
        **card,
        "private_preprocessing": list(uncovered),
        "statement": f"What follows does not cover the preprocessing: in front of the model stood "
        f"{'; and '.join(uncovered)}. It was computed from the private rows without noise, and one row could change "
        "the inputs of every other row. The guarantee below would hold only if that preprocessing were public.\n\n"
        f"{card['statement']}",
    }
