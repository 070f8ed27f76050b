"""The recommended recipe: what `fodp train` uses where nothing is said about the method.

It needs no search: the learning rate follows from public numbers and then from releases. It was chosen on validation
data (`benchmarks/rate_rules.py`); docs/utility.md shows how it fares on test data.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

METHOD: Final = "dp-sgd"
PARAMS: Final[Mapping[str, Any]] = MappingProxyType({"shape": "fan-in", "lr": "auto", "rate_rule": "transcript"})
