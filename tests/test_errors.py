"""Every refusal is a PrivacyError, and its kind tells who can mend it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fodp
from fodp.runs.folder import RunFolder
from fodp.state.fitting import steps_within
from fodp.support import checks
from methods_for_tests import StopAfter, data, network, plan, trainer

PUBLIC = dict(sampling_rate=0.5, steps=4, lot_size=12, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)


def test_a_value_is_shown_on_one_line():
    assert checks.shown(np.zeros((3, 2))) == "array([[0., 0.], [0., 0.], [0., 0.]])"
    assert checks.shown("a  b") == "'a  b'"


def damaged_ledger(folder):
    (folder / "l.sqlite").write_bytes(b"this is no ledger" * 100)
    fodp.Ledger(folder / "l.sqlite")


def other_budget(folder):
    spending = plan("dp-sgd", seed=None)
    for budget in [(50.0, 1e-5), (60.0, 1e-5)]:
        ledger = fodp.Ledger(folder / "l.sqlite", dataset="d", budget=budget)
        ledger.open(f"run {budget}", spending.events(), 1)


def run_too_large(folder):
    ledger = fodp.Ledger(folder / "l.sqlite", dataset="d", budget=(0.5, 1e-5))
    ledger.open("run", plan("dp-sgd", seed=None).events(), 8)


def resumed(folder, match, *, the_plan=None, model=None, damage=None, without_ledger=False, **options):
    """A run of two steps that is resumed otherwise than it began."""
    book = fodp.Ledger(folder / "l.sqlite")
    first = trainer(plan("dp-sgd", seed=None), network(), callbacks=[StopAfter(2)], ledger=book)
    first.fit()
    file = folder / "checkpoint.pt"
    first.save(file)
    if damage is not None:
        file.write_bytes(damage(file.read_bytes()))
    options |= {} if without_ledger else {"ledger": book}
    again = trainer(plan("dp-sgd", seed=None) if the_plan is None else the_plan, model or network(), **options)
    with pytest.raises(fodp.PrivacyError, match=match) as refusal:
        again.resume(file)
    raise refusal.value


def adam(model):
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def taken_folder(folder):
    RunFolder(folder).create()
    RunFolder(folder).take()


def used_folder(folder):
    (folder / "config.json").write_text("{}")
    RunFolder(folder).create()


def damaged_configuration(folder):
    (folder / "config.json").write_text("{")
    RunFolder(folder).read_config()


CASES = [
    (fodp.LedgerError, lambda folder: resumed(folder, "is damaged", damage=lambda content: content[:-9])),
    (fodp.LedgerError, lambda folder: resumed(folder, "is damaged", damage=lambda content: b"")),
    (fodp.LedgerError, lambda folder: trainer(plan("dp-sgd")).resume(folder / "none.pt")),
    (fodp.LedgerError, lambda folder: resumed(folder, "only with its ledger", without_ledger=True)),
    (
        fodp.ConfigurationError,
        lambda folder: resumed(folder, "another plan", the_plan=plan("dp-sgd", seed=None, clip_norm=2.0)),
    ),
    (fodp.ConfigurationError, lambda folder: resumed(folder, "another model", model=nn.Linear(5, 3))),
    (fodp.ConfigurationError, lambda folder: resumed(folder, "which Adam needs", **adam(network()))),
    (
        fodp.ConfigurationError,
        lambda folder: resumed(folder, "scheduler", scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2)),
    ),
    (fodp.LedgerError, taken_folder),
    (fodp.ConfigurationError, used_folder),
    (fodp.LedgerError, damaged_configuration),
    (fodp.ConfigurationError, lambda folder: RunFolder(folder).read_config()),
    (fodp.ConfigurationError, lambda folder: fodp.Plan(**{**PUBLIC, "clip_norm": -1.0})),
    (fodp.ConfigurationError, lambda folder: fodp.Plan(**PUBLIC, method="dp-sdg")),
    (
        fodp.ConfigurationError,
        lambda folder: trainer(plan("dp-sgd"), nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))),
    ),
    (fodp.ConfigurationError, lambda folder: fodp.register_rule(nn.Linear, lambda layer, inputs, back: {})),
    (fodp.ConfigurationError, lambda folder: fodp.data.load("digitz")),
    (fodp.DataError, lambda folder: fodp.data.load(folder / "none.npz", assume_size=10, classes=2)),
    (fodp.DataError, lambda folder: trainer(plan("dp-sgd"), dataset=TensorDataset(torch.zeros(0, 5)))),
    (fodp.DataError, lambda folder: trainer(plan("dp-sgd"), dataset=iter(()))),
    (fodp.LedgerError, damaged_ledger),
    (fodp.LedgerError, lambda folder: fodp.Ledger(folder / "none" / "l.sqlite", create=False)),
    (fodp.BudgetError, other_budget),
    (fodp.BudgetError, run_too_large),
    (fodp.BudgetError, lambda folder: steps_within(plan("dp-sgd"), 1e-3)),
]


@pytest.mark.rule(14)
@pytest.mark.parametrize(("kind", "mistake"), CASES)
def test_every_refusal_has_its_kind(tmp_path, kind, mistake):
    with pytest.raises(fodp.PrivacyError) as refusal:
        mistake(tmp_path)
    assert isinstance(refusal.value, kind), refusal.value


def test_the_four_kinds_are_apart():
    kinds = [fodp.ConfigurationError, fodp.DataError, fodp.LedgerError, fodp.BudgetError]
    for kind in kinds:
        assert issubclass(kind, fodp.PrivacyError)
        assert not any(issubclass(kind, other) for other in kinds if other is not kind)


class TestNumbersOfNumPy:
    def test_a_plan_takes_them_and_stores_pythons(self):
        mine = fodp.Plan(
            sampling_rate=np.float64(0.5), steps=np.int64(4), lot_size=np.int32(12), clip_norm=np.float32(1.0),
            noise_multiplier=np.float64(1.0), delta=np.float64(1e-5), seed=np.uint8(3), method="fo-dp-sgd",
            params=dict(window=np.int64(4), lr=np.float32(0.5), beta=((np.int64(0), np.float64(0.9)),)),
        )  # fmt: skip
        same = fodp.Plan(**PUBLIC, seed=3, method="fo-dp-sgd", params=dict(window=4, lr=0.5, beta=((0, 0.9),)))
        assert mine == same
        assert repr(mine) == repr(same)  # a number of NumPy's says so

    @pytest.mark.parametrize("value", [np.float64("nan"), np.bool_(True), np.array(3), np.float64(2.0), "3"], ids=repr)
    def test_what_is_no_whole_number_is_refused(self, value):
        with pytest.raises(fodp.ConfigurationError, match="steps must be a whole number"):
            fodp.Plan(**{**PUBLIC, "steps": value})

    def test_a_run_goes_by_them(self):
        counted = plan("dp-sgd", steps=np.int64(3), lot_size=np.float32(12.0))
        assert trainer(counted, network(), data()).fit().steps == 3
