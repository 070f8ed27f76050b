"""Options as objects and in the flat spelling, public sizes, and options and methods from outside the package."""

from dataclasses import dataclass, fields
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp import options
from fodp.accounting import Event, Phase
from fodp.accounting.sizes import usual_delta
from fodp.methods import METHODS
from fodp.methods.base import DataclassState
from fodp.options import KINDS, OPTIONS
from fodp.options.table import flat, known_names

PUBLIC = dict(sampling_rate=0.3, steps=6, lot_size=6, noise_multiplier=1.0, delta=1e-5, seed=0)
DATA = TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2)


# --- two spellings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.option.__name__)
def test_an_object_and_its_flat_spelling_make_the_same_plan(row):
    option = row.option((0.5, 2.0)) if row.option is options.Factors else row.option()
    by_object = fodp.Plan(**PUBLIC, method="dp-sgd", **{row.kind: option})
    by_words = fodp.Plan(**PUBLIC, method="dp-sgd", params=dict(flat(row.kind, option)))
    assert by_object == by_words == fodp.Plan(**by_object.to_dict())
    assert getattr(by_object.options, row.kind) == option
    assert flat(row.kind, option).items() <= by_object.params.items()


def test_objects_stand_beside_words():
    found = fodp.Plan(
        **PUBLIC, method="dp-sgd", average=options.Ema(0.9), filter=options.Momentum(0.5), update=options.Sgd(),
        params=dict(lr=0.2, average="ema"),
    )  # fmt: skip
    params = dict(lr=0.2, average="ema", average_decay=0.9, filter="momentum", momentum=0.5)
    assert found == fodp.Plan(**PUBLIC, method="dp-sgd", params=params)
    assert eval(repr(found), {"Plan": fodp.Plan}) == found


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(average=options.Ema(0.9), params=dict(average="tail")), "average='ema' and 'tail': leave one out"),
        (dict(average=options.Ema(0.9), params=dict(average_decay=0.8)), "average_decay=0.9 and 0.8"),
        (dict(filter=options.Momentum(0.5), update=options.Sgd(0.9)), "momentum is said twice, 0.5 and 0.9"),
        (dict(average="ema"), r"average takes an option such as fodp\.options\.Ema"),
        (dict(average=options.Sgd()), r"Sgd\(momentum=0\.0\) is an update: say update="),
        (dict(averages=options.Ema()), r"a plan has no field 'averages'; it knows .*average, "),
        (dict(average_decay=0.5), r"put it into params, params=dict\(average_decay=0.5\)"),
    ],
)
def test_what_is_said_twice_or_of_another_kind_is_refused(given, says):
    with pytest.raises(fodp.ConfigurationError, match=says):
        fodp.Plan(**PUBLIC, method="dp-sgd", **given)


@pytest.mark.rule(14)
@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.option.__name__)
def test_a_number_of_an_option_that_was_not_chosen_does_nothing_and_is_refused(row):
    usual, kind = fodp.Plan(**PUBLIC, method="dp-sgd").params, KINDS[row.kind]
    for field in fields(row.option):
        if field.name not in usual and field.name != kind.name and isinstance(field.default, float):
            needed = f"{kind.name}=" if row.word else kind.called
            with pytest.raises(fodp.ConfigurationError, match=f"{field.name} does nothing without {needed}"):
                fodp.Plan(**PUBLIC, method="dp-sgd", params={field.name: field.default / 2 or 0.25})
            fodp.Plan(**PUBLIC, method="dp-sgd", params={field.name: field.default})  # as it is anyway


# --- one default, and public sizes ---------------------------------------------------------------------------------


def test_without_a_word_about_the_method_it_is_the_recipe_with_what_was_said():
    plan = fodp.Plan(**PUBLIC)
    assert plan.method == "fo-noise"
    assert {"shape": "fan-in", "lr": "auto", "average": "ema", "bands": 1}.items() <= plan.params.items()
    other = fodp.Plan(**PUBLIC, average=options.Tail(), params=dict(lr=0.3))
    assert (other.params["average"], other.params["lr"], other.params["shape"]) == ("tail", 0.3, "fan-in")
    assert fodp.Plan(**PUBLIC, exact_noise=True).params["bands"] == 1
    with pytest.raises(fodp.ConfigurationError, match=r"alpha is a parameter of fo-dp-sgd, .* say which method"):
        fodp.Plan(**PUBLIC, params=dict(alpha=0.5))


def test_calibration_without_a_method_chooses_the_bands_of_the_recipe():
    plan = fodp.Plan.calibrated(target_epsilon=8, public_size=60000, batch=512, epochs=20)
    assert (plan.method, plan.lot_size, plan.clip_norm) == ("fo-noise", 512, 1.0)
    assert plan.params["bands"] > 1
    assert plan.sampling_rate == 512 / 60000
    assert plan.steps == round(20 * 60000 / 512)
    assert plan.delta == usual_delta(60000) == 2e-6
    assert plan.epsilon() <= 8


SIZES = dict(public_size=200, batch=20, epochs=3)


@pytest.mark.rule(1)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (SIZES, (0.1, 20, 30, 1e-5)),
        (dict(SIZES, sampling_rate=0.1, lot_size=20, steps=30), (0.1, 20, 30, 1e-5)),
        (dict(SIZES, delta=1e-7), (0.1, 20, 30, 1e-7)),
        (dict(public_size=200, sampling_rate=0.2, steps=7), (0.2, 40, 7, 1e-5)),
        (dict(batch=20, sampling_rate=0.2, epochs=1, delta=1e-6), (0.2, 20, 5, 1e-6)),
        (dict(public_size=10**6, sampling_rate=0.01, lot_size=7, steps=1), (0.01, 7, 1, 1e-7)),
    ],
    ids=str,
)
def test_sizes_stand_for_rates_and_steps(given, expected):
    plan = fodp.Plan(noise_multiplier=9.0, **given)
    assert (plan.sampling_rate, plan.lot_size, plan.steps, plan.delta) == expected


@pytest.mark.rule(1)
@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(SIZES, sampling_rate=0.2), r"sampling_rate is 0.2, and batch / public_size is 0.1: leave one"),
        (dict(SIZES, lot_size=30), "lot_size is 30, and batch is 20"),
        (dict(SIZES, steps=31), "steps is 31, and epochs / sampling_rate is 30"),
        (dict(SIZES, batch=300), "batch 300 is more than public_size 200"),
        (dict(SIZES, public_size=2.5), "public_size must be a whole number"),
        (dict(SIZES, epochs=0), "epochs must be above 0"),
        (dict(batch=20, epochs=3), "sampling_rate is missing: give it, or batch and public_size"),
        (dict(public_size=200, batch=20), "steps is missing: give it, or epochs"),
        (dict(sampling_rate=0.1, batch=20, epochs=3), "delta is missing: give it, or public_size"),
        (dict(sampling_rate=0.1, steps=20, delta=1e-5), "lot_size is missing: give it, or batch"),
    ],
    ids=str,
)
def test_sizes_that_are_missing_or_do_not_agree_are_refused(given, says):
    with pytest.raises(fodp.ConfigurationError, match=says):
        fodp.Plan(noise_multiplier=1.0, **given)


# --- from outside --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Median(options.Filter):
    """The median of the last `median_of` releases, entry by entry."""

    median_of: int = 3

    def start(self, run):
        return MedianState(self.median_of)


@dataclass
class MedianState(DataclassState):
    kept: int
    last: Tensor | None = None

    def __call__(self, release):
        self.last = release[None] if self.last is None else torch.cat([release[None], self.last])[: self.kept]
        return self.last.median(0).values

    def noise_gains(self):
        return (1.0,)


@dataclass(frozen=True)
class Newest(options.Average):
    """The newest iterate counts for `newest_weight`."""

    newest_weight: float = 0.5

    def weight(self, earlier):
        return 1.0 if earlier == 0 else self.newest_weight


@dataclass(frozen=True)
class Signs(options.Update):
    """Steps by the sign, with `sign_scale` times the rate."""

    sign_scale: float = 1.0

    def optimizer(self, parameters, lr):
        return torch.optim.Rprop(parameters, lr=lr * self.sign_scale)


class Halved(fodp.Method):
    """Half of a DP-SGD release: post-processing."""

    name = "halved"
    summary = reference = noise_meaning = "for this test"
    defaults: ClassVar = {"lr": 0.1}

    @dataclass(frozen=True, kw_only=True)
    class Params:
        share: float = 0.5

    def events(self, plan):
        return (Phase((Event(plan.sampling_rate, plan.noise_multiplier),), plan.steps),)

    def step(self, step, state):
        query = step.gradients(step.draw()).clipped_sum(step.clip_norm)
        return step.release(query, step.plan.noise_multiplier * step.clip_norm) * self.params.share


@pytest.fixture
def outside():
    added = (("filter", "median", Median), ("average", "newest", Newest), ("update", "signs", Signs))
    for row in added:
        options.register(*row)
    fodp.register(Halved)
    yield
    del METHODS["halved"]
    for kind, word, _ in added:
        options.unregister(kind, word)


def trainer(plan):
    torch.manual_seed(0)

    def losses(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return fodp.Trainer(nn.Linear(3, 2), losses, DATA, plan)


def weights(training):
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


@pytest.mark.usefixtures("outside")
def test_options_and_a_method_from_outside_train_are_saved_and_go_on(tmp_path):
    words = dict(filter="median", median_of=2, average="newest", update="signs", sign_scale=2.0, share=0.25)
    by_words = fodp.Plan(**PUBLIC, method="halved", params=words)
    objects = dict(filter=Median(2), average=Newest(), update=Signs(2.0))
    assert fodp.Plan(**PUBLIC, method="halved", params=dict(share=0.25), **objects) == by_words
    assert by_words.params["newest_weight"] == 0.5  # recorded, as a default
    straight, first, second = (trainer(by_words) for _ in range(3))
    straight.fit()
    for _ in range(3):
        first.take_step()
    state = first.session.states["filter"]
    assert torch.equal(first.session.state_dict()["states"]["filter"]["last"], state.last)
    first.save(tmp_path / "c.pt")
    second.resume(tmp_path / "c.pt")
    second.fit()
    assert torch.equal(weights(second), weights(straight))
    assert not torch.equal(weights(second), weights(trainer(by_words)))
    assert type(straight.optimizer).__name__ == "Rprop"
    with pytest.raises(fodp.ConfigurationError, match="median_of does nothing without filter='median'"):
        fodp.Plan(**PUBLIC, method="halved", params=dict(median_of=2))
    with pytest.raises(fodp.ConfigurationError, match="no rule for the update Signs: give lr as a number"):
        trainer(fodp.Plan(**PUBLIC, method="dp-sgd", update=Signs()))


@pytest.mark.usefixtures("outside")
def test_what_does_not_fit_into_the_table_is_refused():
    @dataclass(frozen=True)
    class Taken(options.Average):
        average_decay: float = 0.5

    @dataclass(frozen=True)
    class Needs(options.Average):
        number: float

    for row, says in (
        (("average", "newest", Newest), "average='newest' is in the table already"),
        (("average", "none", Newest), "in the table already"),
        (("average", "median", Median), "derives from Average"),
        (("averages", "mean", Newest), "kind must be one of"),
        (("average", "taken", Taken), "average_decay is a number of another option"),
        (("average", "needs", Needs), "give every field of Needs a default"),
    ):
        with pytest.raises(fodp.ConfigurationError, match=says):
            options.register(*row)


def test_the_table_is_as_it_was():
    assert "median_of" not in known_names()
    with pytest.raises(fodp.ConfigurationError, match="filter must be one of none, momentum, doppler, fractional"):
        fodp.Plan(**PUBLIC, method="dp-sgd", params=dict(filter="median"))
