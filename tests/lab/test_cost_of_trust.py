"""What trust may cost on the paper's MLP: the secure stream 20% of a step, durable spending 2%.

Ratios within one run, interleaved, medians; a busy machine gets three attempts, for it can only make things look
slower by turns. Each measure is first shown something that is too slow, and must see it.
"""

import statistics
import time

import pytest
from torch.utils.data import TensorDataset

from fodp.accounting import Event, Phase
from fodp.ledger import Account, Ledger
from fodp_lab.bench.trust import MLP, TorchNoise, milliseconds, share_of_writing, trainer_with

ATTEMPTS = 3
ROUNDS, BURST = 12, 4
STREAM = 1.2
# 2%, and as much again because two seconds hold only a few writes, of a disk that others use too: this only sees gross
# mistakes, and the 2% are held by the test with a clock of our own. A write for every step is more than half of a run.
WRITING = 0.02 + 0.02


@pytest.fixture(scope="module")
def data():
    return TensorDataset(*MLP.data())


def least(measure, enough):
    """The best of a few attempts; the first that is good enough ends it."""
    found = []
    while len(found) < ATTEMPTS and (not found or min(found) > enough):
        found.append(measure())
    return min(found)


def test_the_secure_stream_adds_at_most_a_fifth_to_a_step(data):
    steps = (ROUNDS * ATTEMPTS + 1) * BURST
    noises = {"plain": TorchNoise(), "secure": None, "five times": TorchNoise(draws=5)}
    contenders = {k: trainer_with(data, "dp-sgd", steps, noise=noise)._one_step for k, noise in noises.items()}
    milliseconds(contenders, 1, BURST)  # the first steps check the engine and warm caches up

    def ratio(name):
        pair = {k: contenders[k] for k in ("plain", name)}
        times = milliseconds(pair, ROUNDS, BURST, clock=time.thread_time)
        return statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True))

    assert ratio("five times") > STREAM
    found = least(lambda: ratio("secure"), STREAM)
    assert found <= STREAM, f"a step with the secure stream takes {found:.2f} of one with torch's normal_"


def test_writing_spending_down_takes_hardly_any_of_a_run(tmp_path, monkeypatch, data):
    def share(seconds=2.0):
        ledger = Ledger(tmp_path / f"{time.monotonic_ns()}.sqlite", dataset="made up", budget=(1e6, 1e-5))
        return share_of_writing(trainer_with(data, "dp-sgd", 10**4, ledger=ledger), seconds)

    with monkeypatch.context() as patch:
        patch.setattr(Account, "_block", lambda *_: 1)
        assert share(0.3) > WRITING
    found = least(share, WRITING)
    assert found <= WRITING, f"{found:.1%} of the time goes into writing steps down"


@pytest.mark.parametrize("step_seconds", [1e-4, 5e-3, 1.0])
@pytest.mark.parametrize("write_seconds", [1e-4, 5e-3, 0.1])
def test_the_ledger_settles_below_2_percent_on_slow_disks_too(tmp_path, monkeypatch, step_seconds, write_seconds):
    """The same by a clock of our own: exact, and for disks and models that this machine does not have."""
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
