"""Optimizers that take releases: AdamBC against a plain transcription of its definition."""

import math
from dataclasses import fields

import pytest
import torch

from fodp.options.table import row_of, words_of
from fodp.options.update import NoiseCorrectedAdam

BETAS = (0.9, 0.99)


def gradients(steps: int = 12, size: int = 4) -> torch.Tensor:
    return torch.randn(steps, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def run(optimizer_of, inputs, variances=None, start=1.0) -> torch.Tensor:
    """The parameters after each step; `variances` are what a run tells AdamBC before each step."""
    parameter = torch.full((inputs.shape[1],), start, dtype=inputs.dtype, requires_grad=True)
    optimizer = optimizer_of([parameter])
    path = []
    for t, gradient in enumerate(inputs):
        parameter.grad = gradient.clone()
        if variances is not None:
            optimizer.param_groups[0]["noise_variance"] = variances[t]
        optimizer.step()
        path.append(parameter.detach().clone())
    return torch.stack(path)


def by_hand(inputs, variances, *, lr=0.1, floor=0.03, decay=0.0, least=1e-16) -> torch.Tensor:
    """BASELINES.md 2: m̂ and v̂ bias-corrected, Φ̂ the same average of the noise's variance, then subtracted."""
    first, second = BETAS
    theta, m, v, phi = torch.ones(inputs.shape[1]).double(), 0.0, 0.0, 0.0
    path = []
    for t, (g, noise) in enumerate(zip(inputs, variances, strict=True), 1):
        m = first * m + (1 - first) * g
        v = second * v + (1 - second) * g**2
        phi = second * phi + (1 - second) * noise
        m_hat, v_hat, phi_hat = m / (1 - first**t), v / (1 - second**t), phi / (1 - second**t)
        corrected = torch.clamp(v_hat - phi_hat, min=max(floor * phi_hat, least))
        theta = theta - lr * decay * theta - lr * m_hat / corrected.sqrt()
        path.append(theta)
    return torch.stack(path)


def adambc(lr=0.1, **options):
    return lambda parameters: NoiseCorrectedAdam(parameters, lr=lr, betas=BETAS, **options)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("variances", [[0.3] * 12, [0.0] * 12, [1.0 * 0.8**t for t in range(12)], [0.0, 9.0] * 6])
def test_adambc_is_its_definition(variances, decay):
    """Also with noise that changes from step to step, as with a schedule or an adapted clip norm."""
    found = run(adambc(weight_decay=decay), gradients(), variances)
    assert torch.allclose(found, by_hand(gradients(), variances, decay=decay), rtol=1e-10)


@pytest.mark.parametrize("size", [1, 1003])
def test_the_update_in_float32_is_its_definition_too(size):
    inputs, variances = gradients(30, size), [1.0 * 0.9**t for t in range(30)]
    found = run(adambc(weight_decay=0.1), inputs.float(), variances)
    torch.testing.assert_close(found.double(), by_hand(inputs, variances, decay=0.1), rtol=1e-4, atol=1e-4)


def test_a_learning_rate_may_be_a_tensor():
    inputs, variances = gradients().float(), [0.3] * 12
    found = run(adambc(lr=torch.tensor(0.1), weight_decay=0.1), inputs, variances)
    torch.testing.assert_close(found, run(adambc(weight_decay=0.1), inputs, variances))


def test_an_update_is_seen_by_autograd():
    """A graph that was made with the old parameters must not be walked with the new ones."""
    parameter = torch.ones(3, requires_grad=True)
    loss, parameter.grad = (parameter**2).sum(), torch.ones(3)
    adambc()([parameter]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_constant_noise_is_subtracted_as_it_is():
    """The average of a constant, bias-corrected, is the constant from the first step on."""
    found = run(adambc(floor=0.1), gradients(1), [0.04])[0]
    g = gradients(1)[0]
    expected = 1 - 0.1 * g / torch.clamp(g**2 - 0.04, min=0.004).sqrt()
    assert torch.allclose(found, expected, rtol=1e-10)


def test_without_noise_it_is_adam():
    adam = run(lambda p: torch.optim.Adam(p, lr=0.1, betas=BETAS, eps=1e-12), gradients())
    assert torch.allclose(run(adambc(), gradients(), [0.0] * 12), adam, rtol=1e-8)


def test_zero_gradients_without_noise_do_not_move_it():
    assert torch.equal(run(adambc(), torch.zeros(3, 2).double(), [0.0] * 3), torch.ones(3, 2).double())


def test_on_pure_noise_steps_are_bounded_by_the_floor():
    variance, floor = 0.25, 0.03
    noise = math.sqrt(variance) * gradients(400, 50)
    path = run(adambc(lr=1.0, floor=floor), noise, [variance] * 400)
    longest = (path[1:] - path[:-1]).abs().max()
    # |m̂| is at most the largest |g|, the denominator at least √(floor·Φ).
    assert longest <= noise.abs().max() / math.sqrt(floor * variance)


def test_where_adam_is_drowned_by_noise_adambc_keeps_its_adaptivity():
    """Two coordinates whose true gradients differ 4-fold: with the noise in v, Adam's steps differ as much."""
    truth = torch.tensor([0.4, 0.1], dtype=torch.float64)
    noise = torch.randn(3000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = truth + noise
    options = dict(lr=0.01, betas=(0.9, 0.999))
    plain = run(lambda p: torch.optim.Adam(p, **options), inputs)
    corrected = run(lambda p: NoiseCorrectedAdam(p, floor=0.001, **options), inputs, [1.0] * 3000)

    def ratio(path):
        travelled = (path[1500] - path[-1]).abs()
        return (travelled[0] / travelled[1]).item()

    assert ratio(plain) > 2.5
    assert ratio(corrected) < 2.0


def test_state_goes_on_elsewhere_bit_for_bit():
    inputs, variances = gradients(), [0.3 * 0.9**t for t in range(12)]
    expected = run(adambc(), inputs, variances)[-1]
    parameter = torch.ones(4, dtype=torch.float64, requires_grad=True)
    optimizer = adambc()([parameter])
    for t in range(12):
        if t == 5:
            saved = optimizer.state_dict()
            optimizer = NoiseCorrectedAdam([parameter], lr=9.0)
            optimizer.load_state_dict(saved)
        parameter.grad = inputs[t].clone()
        optimizer.param_groups[0]["noise_variance"] = variances[t]
        optimizer.step()
    assert torch.equal(parameter.detach(), expected)


@pytest.mark.parametrize("kind", words_of("update"))
def test_every_update_takes_its_own_settings(kind):
    parameter = torch.ones(2, requires_grad=True)
    settings = dict(momentum=0.5, beta1=0.8, beta2=0.9, adam_eps=1e-3, weight_decay=0.1, bc_floor=0.2)
    update = row_of("update", kind).option
    chosen = update(**{f.name: settings[f.name] for f in fields(update)})
    group = chosen.optimizer([parameter], lr=0.2).param_groups[0]
    assert group["lr"] == 0.2
    expected = {
        "sgd": dict(momentum=0.5, weight_decay=0),
        "adam": dict(betas=(0.8, 0.9), eps=1e-3, weight_decay=0),
        "adamw": dict(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
        "adambc": dict(betas=(0.8, 0.9), floor=0.2),
        "adamwbc": dict(betas=(0.8, 0.9), floor=0.2, weight_decay=0.1),
    }[kind]
    assert {name: group[name] for name in expected} == expected
