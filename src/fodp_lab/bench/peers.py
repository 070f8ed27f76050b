"""A step of other libraries, given what makes them fast: batches gathered in one go, not by a data loader."""

from typing import Any

import torch

from fodp_lab.bench.contenders import Step
from fodp_lab.bench.steps import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, size_of
from fodp_lab.bench.workloads import Workload


def opacus(workload: Workload, mode: str) -> tuple[Step, int]:
    """Opacus in one of its modes: hooks, functorch or ghost; Poisson lots, noise of torch's generator."""
    from opacus.grad_sample.utils import prepare_module
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    inputs, labels = workload.data()
    model = workload.model()
    size = size_of(model)
    ghost = mode == "ghost"
    private = prepare_module(model, mode, **(dict(max_grad_norm=CLIP_NORM, use_ghost_clipping=True) if ghost else {}))
    optimizer = (DPOptimizerFastGradientClipping if ghost else DPOptimizer)(
        torch.optim.SGD(private.parameters(), lr=LEARNING_RATE),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=workload.batch,
    )
    loss: Any = torch.nn.CrossEntropyLoss()
    if ghost:
        loss = DPLossFastGradientClipping(private, optimizer, loss)

    def step() -> None:
        rows = (torch.rand(workload.examples) < workload.batch / workload.examples).nonzero().flatten()
        optimizer.zero_grad()
        loss(private(inputs[rows]), labels[rows]).backward()
        optimizer.step()

    return step, size


def jax_privacy(workload: Workload, microbatch: int) -> tuple[Step, int]:
    """JAX-Privacy on the MLP, compiled; lots of fixed size, as a varying one would compile anew."""
    import jax
    import jax.numpy as jnp
    import jax_privacy as library
    import numpy as np
    import optax

    model = workload.model()
    inputs, labels = (t.numpy() for t in workload.data())
    weights = [jnp.asarray(p.detach().numpy()) for p in model.parameters()]

    def loss(weights: Any, example: Any) -> Any:
        x, label = example
        for weight, bias in zip(weights[0:-2:2], weights[1:-2:2], strict=True):
            x = jnp.tanh(weight @ x + bias)
        return optax.losses.softmax_cross_entropy_with_integer_labels(weights[-2] @ x + weights[-1], label)

    clipped = library.clipped_grad(
        loss, l2_clip_norm=CLIP_NORM, normalize_by=workload.batch, keep_batch_dim=False, microbatch_size=microbatch
    )
    privatizer = library.noise_addition.gaussian_privatizer(
        stddev=clipped.sensitivity() * NOISE_MULTIPLIER, prng_key=jax.random.key(0)
    )
    optimizer = optax.sgd(LEARNING_RATE)

    def update(weights: Any, state: Any, batch: Any) -> Any:
        noise_state, optimizer_state = state
        release, noise_state = privatizer.update(clipped(weights, batch), noise_state)
        changes, optimizer_state = optimizer.update(release, optimizer_state)
        return optax.apply_updates(weights, changes), (noise_state, optimizer_state)

    update = jax.jit(update)
    now = (weights, (privatizer.init(weights), optimizer.init(weights)))
    random = np.random.default_rng(0)

    def step() -> None:
        nonlocal now
        rows = random.integers(workload.examples, size=workload.batch)
        now = jax.block_until_ready(update(*now, (inputs[rows], labels[rows])))

    return step, size_of(model)
