"""Durable spending takes 2% of a run, by a clock of our own. `make bench-trust` measures what this machine takes."""

import pytest

from fodp.accounting import Event, Phase
from fodp.ledger import Ledger


@pytest.mark.parametrize("step_seconds", [1e-4, 5e-3, 1.0])
@pytest.mark.parametrize("write_seconds", [1e-4, 5e-3, 0.1])
def test_the_ledger_settles_below_2_percent_on_slow_disks_too(tmp_path, monkeypatch, step_seconds, write_seconds):
    """Exact, and for disks and models that this machine does not have."""
    now = writing = 0.0
    monkeypatch.setattr("fodp.ledger.account.time.perf_counter", lambda: now)
    account = Ledger(tmp_path / "l.sqlite").open("run", (Phase((Event(0.1, 1.0),), 10**7),), 10**7)
    append = account._store.append

    def slow_append(*words, **more):
        nonlocal now, writing
        now, writing = now + write_seconds, writing + write_seconds
        return append(*words, **more)

    monkeypatch.setattr(account._store, "append", slow_append)
    for step in range(3):
        assert account.covers(step)
        now += step_seconds
    started, writing, step = now, 0.0, 3
    for _ in range(8):
        assert account.covers(step)
        ahead = account.charged - step  # these are granted already: asking again changes nothing
        now, step = now + ahead * step_seconds, step + ahead
    assert 0 < writing <= 0.02 * (now - started)
