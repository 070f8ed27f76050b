"""What several tests of the laboratory need."""

import pytest

from fodp.methods import METHODS


@pytest.fixture
def table_of_methods():
    """The table is afterwards what it was: other tests must not see what this one adds."""
    before = dict(METHODS)
    yield
    for name in METHODS.keys() - before.keys():
        del METHODS[name]
