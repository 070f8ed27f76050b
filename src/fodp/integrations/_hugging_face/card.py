"""The privacy card of a folder that may be pushed: a section of its README.md, and the same as JSON."""

import json
import re
from pathlib import Path
from typing import Any

from fodp.accounting import rounded_up

_BEGIN, _END = "<!-- privacy card of fodp -->", "<!-- end of the privacy card -->"
_HEADER = """---
library_name: transformers
tags:
- differential-privacy
- fodp
---

# {name}
"""


def section(card: dict[str, Any]) -> str:
    """What a reader of the model needs to know about its privacy, as Markdown."""
    statement = "\n".join(f"- {line}" for line in str(card["statement"]).splitlines()[1:])
    epsilon, delta = rounded_up(card["epsilon"]), rounded_up(card["delta"], 6)
    mechanism = (
        f"{card['method']}, {card['steps']} steps, clip norm "
        f"{card['clip_norm']:g}, noise multiplier {card['noise_multiplier']:.6g}"
    )
    return f"""{_BEGIN}
## Privacy

This model was trained with differential privacy: **ε = {epsilon}** at **δ = {delta}**.

| | |
| --- | --- |
| unit of protection | {card["unit"]} |
| mechanism | {mechanism} |
| accountant | {card["accountant"]} |
| randomness | {card["randomness"]} |

What it covers, and what it does not:

{statement}
- Covered is what was learned from the training rows. The weights that training began with, the tokenizer and data that
  scores were computed on have no protection from it.
{_END}
"""


def write(folder: Path, name: str, card: dict[str, Any]) -> None:
    """Put the card into the folder's README.md, in place of an earlier one, and beside it."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else _HEADER.format(name=name)
    kept = re.sub(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n?", "", text, flags=re.DOTALL).rstrip("\n")
    readme.write_text(f"{kept}\n\n{section(card)}", encoding="utf-8")
    (folder / "privacy_card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
