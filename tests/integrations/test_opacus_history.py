"""Opacus's history is charged once for a ledger and the name of its data: the ledger is asked, not a path."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fodp
from fodp.ledger import Ledger

pytest.importorskip("opacus", reason="takes the extra opacus")

from opacus import PrivacyEngine

from fodp.integrations.opacus import from_opacus

pytestmark = pytest.mark.filterwarnings("ignore:.*(backward hook|Secure RNG|Full backward).*")
PAST = [(1.3, 0.1, 30)]
PHASES = [[[[0.1, 1.3]], 30]]


def go_on(engine, ledger):
    """Another model that Opacus's engine has made goes on with fodp."""
    inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(4, 2)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=20),
        noise_multiplier=1.3, max_grad_norm=1.0,
    )  # fmt: skip
    engine.accountant.history = list(PAST)
    on = from_opacus(
        engine, optimizer=optimizer, model=model, data_loader=loader, ledger=ledger, steps=3, delta=1e-5,
        sampling_rate=0.1, lot_size=20,
    )  # fmt: skip
    on.loader.close()


def charged(ledger):
    """The histories of Opacus that the data set of this ledger has been charged for."""
    rows = [row for row in ledger.store.select("run") if row.dataset == ledger.dataset]
    return [row.data["phases"] for row in rows if row.run.startswith("opacus-") and ledger.steps(row.run) == 30]


def book(path, name="people", **options):
    return Ledger(path, dataset=name, budget=(50, 1e-5), **options)


@pytest.mark.rule(17)
def test_a_new_file_under_the_path_is_charged(tmp_path):
    engine, path = PrivacyEngine(accountant="rdp"), tmp_path / "l.sqlite"
    first = book(path)
    go_on(engine, first)
    assert charged(first) == [PHASES]
    first.close()
    for file in (path, tmp_path / "l.sqlite.mark"):
        file.unlink()
    anew = book(path)
    go_on(engine, anew)
    assert charged(anew) == [PHASES]


@pytest.mark.rule(17)
def test_another_data_set_in_the_same_file_is_charged(tmp_path):
    engine = PrivacyEngine(accountant="rdp")
    for name in ("people", "others"):
        ledger = book(tmp_path / "l.sqlite", name, allow_other_name=True)
        go_on(engine, ledger)
        assert charged(ledger) == [PHASES]


@pytest.mark.rule(17)
def test_an_older_copy_that_does_not_have_the_charge_is_charged(tmp_path):
    engine, path = PrivacyEngine(accountant="rdp"), tmp_path / "l.sqlite"
    book(path).close()
    copy = path.read_bytes()
    first = book(path)
    go_on(engine, first)
    first.close()
    path.write_bytes(copy)
    (tmp_path / "l.sqlite.mark").unlink()
    older = book(path)
    go_on(engine, older)
    assert charged(older) == [PHASES]


def test_the_same_ledger_is_charged_once(tmp_path):
    """Also where it is opened again, and where it has moved."""
    engine = PrivacyEngine(accountant="rdp")
    first = book(tmp_path / "l.sqlite")
    go_on(engine, first)
    first.close()
    for file in ("l.sqlite", "l.sqlite.mark"):
        (tmp_path / file).rename(tmp_path / file.replace("l.", "moved."))
    for _ in range(2):
        go_on(engine, book(tmp_path / "moved.sqlite"))
    assert charged(book(tmp_path / "moved.sqlite")) == [PHASES]


@pytest.mark.rule(17)
def test_changed_data_is_refused_before_the_history_is_charged(tmp_path):
    with book(tmp_path / "l.sqlite").store.writing():
        pass
    ledger = book(tmp_path / "l.sqlite")
    inputs = torch.randn(50, 4)
    fodp.make_private(
        *(lambda model: (model, torch.optim.SGD(model.parameters(), lr=0.1)))(nn.Linear(4, 2)),
        TensorDataset(inputs, torch.zeros(50).long()),
        fodp.Plan(
            sampling_rate=0.1, steps=1, lot_size=5, clip_norm=1.0, noise_multiplier=5.0, delta=1e-5, method="fo-dp-sgd"
        ),
        ledger=ledger,
    )[2].close()
    with pytest.raises(fodp.PrivacyError, match="is not what it was"):
        go_on(PrivacyEngine(accountant="rdp"), ledger)
    assert charged(ledger) == []
