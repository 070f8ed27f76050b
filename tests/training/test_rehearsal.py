"""Mistakes that would show in or after private steps are found before the first one, and nothing is charged."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import fodp
import fodp.audit
from fodp.callbacks import Callback, Evaluate
from fodp.ledger import Ledger

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long()
OTHERS = INPUTS + 10  # public


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plan(seed=None):
    return fodp.Plan(
        sampling_rate=0.25, steps=4, lot_size=10, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5, seed=seed,
        accountant="rdp", method="fo-dp-sgd",
    )  # fmt: skip


class NoStep(Callback):
    def on_step(self, trainer):
        raise AssertionError("a private step was taken")


def refused(tmp_path, data, error, match, loss=losses, model=None, **options):
    """The run fails before its first step, and its ledger has charged nothing."""
    book = Ledger(tmp_path / "l.sqlite")
    callbacks = [*options.pop("callbacks", ()), NoStep()]
    run = fodp.Trainer(model or nn.Linear(4, 2), loss, data, plan(), ledger=book, callbacks=callbacks, **options)
    with pytest.raises(error, match=match) as raised:
        run.fit()
    assert run.step == run.lost_steps == 0
    assert not book.steps(run.run_id)
    return raised.value


@pytest.mark.fault(
    "data of another type than the model's (float64, whole numbers)",
    happens="refused before the first step, naming both types and what to convert",
    lost="nothing",
    costs="nothing",
)
@pytest.mark.parametrize("inputs", [INPUTS.double(), (INPUTS * 9).long()], ids=["float64", "whole numbers"])
def test_types_that_do_not_fit(tmp_path, inputs):
    error = refused(tmp_path, TensorDataset(inputs, LABELS), fodp.DataError, "parameters are float32")
    assert f"have {str(inputs.dtype).removeprefix('torch.')} numbers" in str(error)
    assert "inputs.to(torch.float32)" in str(error)
    assert "Nothing was released or charged" in str(error)


def test_a_mistake_of_the_code_is_left_as_it_is_with_a_note(tmp_path):
    def wrong(model, batch):
        raise AttributeError("a mistake in the loss")

    error = refused(tmp_path, TensorDataset(INPUTS, LABELS), AttributeError, "a mistake in the loss", loss=wrong)
    assert "rehearsal on a few records (float32 (2, 4), int64 (2,))" in error.__notes__[0]
    assert "the parameters are torch.float32. Nothing was released or charged" in error.__notes__[0]


@pytest.mark.fault(
    "a label out of range in a data set of tensors",
    happens="refused before the first step, naming the record's number and the range",
    lost="nothing",
    costs="nothing",
)
@pytest.mark.parametrize("label", [2, -3])
def test_labels_out_of_range(tmp_path, label):
    labels = LABELS.clone()
    labels[17] = label  # of which a run without a rehearsal would know when it draws that record
    error = refused(tmp_path, TensorDataset(INPUTS, labels), fodp.DataError, "record 17 .* a label outside of 0 to 1")
    assert "mend or drop that record" in str(error)
    assert error.__suppress_context__  # PyTorch's own words hold the label


def with_a_value(value, where):
    """The data with one value in a row of its inputs, as a data set of this kind."""
    inputs = INPUTS.clone()
    inputs[31, 2] = value
    columns = (inputs, LABELS)
    whole = TensorDataset(*columns)
    return {
        "TensorDataset": lambda: whole,
        "tensors": lambda: columns,
        "Subset": lambda: Subset(whole, range(20, 40)),
        "ConcatDataset": lambda: ConcatDataset([TensorDataset(INPUTS[:9], LABELS[:9]), Subset(whole, [-9])]),
    }[where]()


@pytest.mark.rule(5)
@pytest.mark.fault(
    "data that is not finite, in a data set of tensors",
    happens="refused before the first step; `allow_non_finite=True` takes it, and such examples count as zero",
    lost="nothing",
    costs="nothing",
)
@pytest.mark.parametrize("kind", ["TensorDataset", "tensors", "Subset", "ConcatDataset"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_data_that_is_not_finite(tmp_path, kind, value):
    refusal = refused(tmp_path, with_a_value(value, kind), fodp.DataError, "not finite")
    assert "31" not in str(refusal)
    run = fodp.Trainer(nn.Linear(4, 2), losses, with_a_value(value, kind), plan(), allow_non_finite=True)
    assert run.fit().reason == "finished"


@pytest.mark.rule(5)
def test_what_is_refused_says_nothing_about_how_much_is_not_finite():
    said = set()
    for rows in (slice(3, 4), slice(0, 30)):
        inputs = INPUTS.clone()
        inputs[rows] = float("nan")
        model = nn.Linear(4, 2)
        with pytest.raises(fodp.DataError) as refusal:
            fodp.make_private(model, torch.optim.SGD(model.parameters()), TensorDataset(inputs, LABELS), plan())
        said.add(str(refusal.value))
    assert len(said) == 1


def test_rows_that_are_left_out_may_be_anything():
    data = with_a_value(float("nan"), "TensorDataset")
    part = Subset(data, [row for row in range(40) if row != 31])
    assert fodp.Trainer(nn.Linear(4, 2), losses, part, plan()).fit().reason == "finished"


def test_audits_plant_records_that_are_not_finite_in_a_pipeline_that_refuses_them():
    made = []

    def make(model, loss_fn, dataset, the_plan):
        made.append(dataset)
        return fodp.Trainer(model, loss_fn, dataset, the_plan, allow_non_finite=False)

    data = TensorDataset(INPUTS, LABELS)
    finding = fodp.audit.replay_neighbours(plan(), nn.Linear(4, 2), losses, data, make, steps=2, secure=True)
    assert finding.faults == ()
    assert any(not column.isfinite().all() for column in made[0].tensors)


@pytest.mark.fault(
    "a scheduler that wants a score (ReduceLROnPlateau)",
    happens="refused when the Trainer is made, naming others",
    lost="nothing",
    costs="nothing",
)
def test_a_scheduler_that_wants_a_score():
    with pytest.raises(fodp.PrivacyError, match="ReduceLROnPlateau wants a score"):
        fodp.Trainer(
            nn.Linear(4, 2), losses, TensorDataset(INPUTS, LABELS), plan(),
            scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
        )  # fmt: skip


class Dicts(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"x": OTHERS[index], "y": LABELS[index]}


@pytest.mark.fault(
    "`Evaluate` on dicts, regression or several labels a record",
    happens="refused before the first step, naming what to use instead",
    lost="nothing",
    costs="nothing",
)
@pytest.mark.parametrize("kind", ["dicts", "regression", "several labels"])
def test_public_data_that_has_no_accuracy(tmp_path, kind):
    public = {
        "dicts": Dicts(),
        "regression": TensorDataset(OTHERS, OTHERS[:, 0]),
        "several labels": TensorDataset(OTHERS, (OTHERS[:, :2] > 0).float()),
    }[kind]
    private = TensorDataset(INPUTS, LABELS)
    refused(tmp_path, private, fodp.PrivacyError, "Evaluate computes the accuracy", callbacks=[Evaluate(public)])


@pytest.mark.fault(
    "a metric of one's own that fails, or gives no scores by name",
    happens="found before the first step",
    lost="nothing",
    costs="nothing",
)
def test_a_metric_of_ones_own_is_tried_first(tmp_path):
    private, public = TensorDataset(INPUTS, LABELS), TensorDataset(OTHERS, OTHERS[:, 0])

    def loss(model, data):
        return {"squared": float((model(data.tensors[0])[:, 0] - data.tensors[1]).square().mean())}

    run = fodp.Trainer(nn.Linear(4, 2), losses, private, plan(), callbacks=[Evaluate(public, metric=loss)])
    run.fit()
    assert set(run.metrics) == {"squared"}
    for metric, error in ((lambda model, data: 0.5, fodp.PrivacyError), (lambda model, data: 1 / 0, ZeroDivisionError)):
        refused(tmp_path, private, error, "scores by name|zero", callbacks=[Evaluate(public, metric=metric)])


def test_an_augmentation_is_part_of_it(tmp_path):
    data = TensorDataset((INPUTS * 9).long(), LABELS)
    run = fodp.Trainer(nn.Linear(4, 2), losses, data, plan(), augment=lambda batch: (batch[0] / 9, batch[1]))
    assert run.fit().reason == "finished"

    def broken(batch):
        raise KeyError("a mistake in augment")

    refused(tmp_path, data, KeyError, "a mistake in augment", augment=broken)


@pytest.mark.rule(12)
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_nobody_listens_to_gradients_without_noise(hook):
    """As `wandb.watch(model)` does; also if it begins to listen when training has begun."""
    heard = []

    class Listen(Callback):
        def on_start(self, trainer):
            getattr(trainer.model.weight, hook)(heard.append)

    data = TensorDataset(INPUTS, LABELS)
    for callbacks in ([], [Listen()]):
        model = nn.Linear(4, 2)
        if not callbacks:
            getattr(model.weight, hook)(heard.append)
        trainer = fodp.Trainer(model, losses, data, plan(), callbacks=callbacks)
        with pytest.raises(fodp.ConfigurationError, match="a hook on the parameter weight would be given gradients"):
            trainer.fit()
        assert (trainer.step, heard) == (0, [])


@pytest.mark.rule(12)
def test_nobody_listens_to_a_parameter_that_was_added_or_replaced_later():
    heard, model = [], nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = fodp.make_private(model, optimizer, TensorDataset(INPUTS, LABELS), plan())
    model.append(nn.Linear(2, 2))
    model[1].weight.register_hook(heard.append)
    with pytest.raises(fodp.ConfigurationError, match=r"a hook on the parameter 1\.weight would be given gradients"):
        loader.backward(losses(model, loader.next_batch()))
    assert heard == []
    loader.close()


def test_it_leaves_no_trace():
    class Drawing(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return INPUTS[index] + torch.rand(4), LABELS[index]

    class Counting(nn.Linear):
        passes = 0

        def __init__(self):
            super().__init__(4, 2)
            self.register_buffer("seen", torch.zeros(()))

    torch.manual_seed(5)
    model = nn.Sequential(Counting(), nn.Dropout(0.5))
    run = fodp.Trainer(model, losses, Drawing(), plan(seed=1))
    before, generator = [p.clone() for p in model.state_dict().values()], torch.get_rng_state()
    from fodp.inputs.rehearsal import rehearse

    rehearse(run.source, Drawing())
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(generator, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
