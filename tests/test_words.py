"""Words of other libraries, arguments in another order, several mistakes at once: one message says what to write."""

import inspect
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp import accounting
from fodp.accounting.sizes import SIZES
from fodp.cli.main import main
from fodp.support import words

PUBLIC = dict(sampling_rate=0.1, steps=10, lot_size=20, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)
DATA = TensorDataset(torch.zeros(40, 4), torch.zeros(40, dtype=torch.int64))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def network():
    return nn.Linear(4, 2)


def test_the_fields_that_words_are_explained_with_are_those_of_a_plan():
    assert {f.name for f in fields(fodp.Plan)} | {*SIZES} == words.FIELDS


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("word", "here"),
    [
        ("max_grad_norm", "here it is clip_norm"),
        ("l2_norm_clip", "here it is clip_norm"),
        ("clipping_norm", "here it is clip_norm"),
        ("target_delta", "here it is delta"),
        ("sample_rate", "here it is sampling_rate"),
        ("sampling_prob", "here it is sampling_rate"),
        ("num_updates", "here it is steps"),
        ("num_epochs", "here it is epochs"),
        ("batch_size", "here it is batch, with public_size"),
        ("dataset_size", "here it is public_size"),
        ("target_epsilon", r"Plan\.calibrated"),
        ("secure_mode", "come from the operating system"),
    ],
)
def test_a_plan_answers_words_of_other_libraries(word, here):
    with pytest.raises(fodp.ConfigurationError, match=f"a plan has no field '{word}': here it is|{here}") as raised:
        fodp.Plan(**PUBLIC, **{word: 1})
    assert "it knows" not in str(raised.value)


DOORS = {
    "Trainer": lambda **words: fodp.Trainer(network(), losses, DATA, fodp.Plan(**PUBLIC), **words),
    "make_private": lambda **words: fodp.make_private(
        (model := network()), torch.optim.SGD(model.parameters()), DATA, fodp.Plan(**PUBLIC), **words
    ),
}


@pytest.mark.rule(14)
@pytest.mark.parametrize("door", DOORS)
def test_doors_send_words_of_a_plan_to_the_plan(door):
    with pytest.raises(fodp.ConfigurationError) as raised:
        DOORS[door](max_grad_norm=1.0, epochs=3, noise_multiplier=2.0, train_loader=DATA, device="cpu")
    said = str(raised.value)
    assert said.startswith("5 things to mend: (1) ")
    for part in (
        "Plan(clip_norm=…)",
        "Plan(epochs=…)",
        "Plan(noise_multiplier=…)",
        "here it is dataset",
    ):
        assert part in said
    assert f"{door} has no argument 'device'; it knows" in said


@pytest.mark.rule(14)
def test_calculators_answer_words_of_other_libraries():
    with pytest.raises(fodp.ConfigurationError, match=r"\(1\) .*here it is sampling_rate; \(2\) .*here it is delta"):
        fodp.epsilon(noise_multiplier=1.0, sample_rate=0.1, steps=10, target_delta=1e-5)
    with pytest.raises(fodp.ConfigurationError, match="calibrate has no argument 'num_steps': here it is steps"):
        fodp.calibrate(target_epsilon=1.0, sampling_rate=0.1, num_steps=10, delta=1e-5)
    assert list(inspect.signature(fodp.epsilon).parameters)[:2] == ["noise_multiplier", "sampling_rate"]


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("words", "here"),
    [
        (["--max-grad-norm", "1"], "--max-grad-norm is --clip-norm here"),
        (["--batch-size=64"], "--batch-size is --batch here"),
        (
            ["--target-delta", "1e-5", "--sigma", "2"],
            "--target-delta is --delta here; --sigma is --noise-multiplier here",
        ),
    ],
)
def test_the_command_line_answers_words_of_other_libraries(capsys, words, here):
    assert main(["train", "--noise-multiplier", "2", *words]) == 2
    assert here in capsys.readouterr().err


ORDERS = {
    "loss first": (lambda m, o, p: fodp.Trainer(losses, m, DATA, p), "model must be a torch.nn.Module, got function"),
    "data second": (lambda m, o, p: fodp.Trainer(m, DATA, losses, p), "loss_fn must be .* got TensorDataset; dataset"),
    "plan third": (lambda m, o, p: fodp.Trainer(m, losses, p, DATA), "dataset must be .* got Plan; plan must be"),
    "no plan": (lambda m, o, p: fodp.Trainer(m, losses, DATA, None), "plan must be a fodp.Plan, got None"),
    "data before optimizer": (lambda m, o, p: fodp.make_private(m, DATA, o, p), "optimizer must be .* TensorDataset"),
    "optimizer first": (lambda m, o, p: fodp.make_private(o, m, DATA, p), "model must be .* got SGD"),
}  # fmt: skip


@pytest.mark.rule(14)
@pytest.mark.parametrize("order", ORDERS)
def test_arguments_in_another_order(order):
    call, words = ORDERS[order]
    model = network()
    with pytest.raises(fodp.ConfigurationError, match=f"in this order: {words}"):
        call(model, torch.optim.SGD(model.parameters()), fodp.Plan(**PUBLIC))


@pytest.mark.rule(14)
def test_all_that_is_wrong_with_a_plan_stands_in_one_message():
    with pytest.raises(fodp.ConfigurationError) as raised:
        fodp.Plan(
            **PUBLIC
            | dict(clip_norm=-1, steps=0, delta=3, accountant="x", unit="y", method="fo-dp-sgd", params=dict(beta=7))
        )
    said = str(raised.value)
    assert said.startswith("6 things to mend: (1) ")
    for name in ("clip_norm", "steps", "delta", "accountant", "unit", "beta"):
        assert f" {name} must" in said
    with pytest.raises(fodp.ConfigurationError, match=r"\(1\) a plan has no field 'sigma'.*\(2\) delta must lie"):
        fodp.Plan(**PUBLIC | dict(sigma=1.0, delta=2.0))


@pytest.mark.rule(14)
def test_a_frozen_model_is_told_to_be_unfrozen_and_nothing_else():
    with pytest.raises(fodp.ConfigurationError, match="requires_grad=True on what") as raised:
        fodp.Trainer(network().requires_grad_(False), losses, DATA, fodp.Plan(**PUBLIC))
    assert "fodp.fix" not in str(raised.value)
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    with pytest.raises(fodp.ConfigurationError, match=r"fodp\.fix\(model\) replaces such layers"):
        fodp.Trainer(model, losses, DATA, fodp.Plan(**PUBLIC))


# name -> (call with model, optimizer and plan; what is said): each came as an error of Python's own
OTHER_KINDS = {
    "a ledger's path": (lambda m, o, p: fodp.Trainer(m, losses, DATA, p, ledger="l.db"), "must be .* got 'l.db'"),
    "a loop's": (lambda m, o, p: fodp.make_private(m, o, DATA, p, ledger="l.db"), "ledger must be .* got 'l.db'"),
    "a function without a ledger": (
        lambda m, o, p: fodp.Trainer(m, losses, DATA, p, ledger=lambda: None).fit(), "opened no ledger",
    ),
    "one callback": (lambda m, o, p: fodp.Trainer(m, losses, DATA, p, callbacks=fodp.callbacks.Progress()), "Progress"),
    "no callback": (lambda m, o, p: fodp.Trainer(m, losses, DATA, p, callbacks=[3]), "a list of callbacks .* got int"),
    "a class": (lambda m, o, p: fodp.Trainer(m, losses, DATA, p, torch.optim.SGD), "made of .* parameters, got SGD"),
}  # fmt: skip


@pytest.mark.rule(14)
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_arguments_of_another_kind(kind):
    call, words = OTHER_KINDS[kind]
    model = network()
    with pytest.raises(fodp.ConfigurationError, match=words):
        call(model, torch.optim.SGD(model.parameters()), fodp.Plan(**PUBLIC))


def test_a_large_rate_of_the_owners_own_optimizer_is_warned_of():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e9)
    with pytest.warns(UserWarning, match=r"lr 1e\+09 moves weights by noise alone"):
        fodp.Trainer(model, losses, DATA, fodp.Plan(**PUBLIC), optimizer)
    with pytest.warns(UserWarning, match=r"lr 1e\+09 moves weights by noise alone"):
        fodp.make_private(model, optimizer, DATA, fodp.Plan(**PUBLIC))[2].close()


@pytest.mark.rule(14)
def test_all_that_is_wrong_with_a_calculators_numbers_stands_in_one_message():
    with pytest.raises(fodp.ConfigurationError, match=r"^4 things to mend: \(1\) noise_multiplier must .* delta must"):
        accounting.epsilon(noise_multiplier=-1, sampling_rate=7, steps=-2, delta=5)
    with pytest.raises(fodp.ConfigurationError, match=r"^2 things to mend: \(1\) target_epsilon must .* steps must"):
        accounting.calibrate(target_epsilon=0, sampling_rate=0.1, steps=1.5, delta=1e-5)
