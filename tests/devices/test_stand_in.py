"""Every method, memory, filter, clip rule and checkpoint on a device that is not the CPU: the stand-in.

It refuses to mix devices, and counts the calls on which a host would wait. The first lots are looked at, as is about
one step in 256: what a look reads is no ordinary step's.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fodp
from fodp.methods import METHODS
from fodp.noise import Streams
from fodp.queries import Query
from fodp.release import release
from fodp.testing.problem import data, network, plan
from fodp.trainer import Trainer
from stand_in_for_tests import IS_THERE, NAME, OnStandIn, counted, device

pytestmark = pytest.mark.skipif(not IS_THERE, reason="this PyTorch cannot register a device in Python")

LOOKED_AT, STEPS = 3, 6
# What a step may wait for, with the reason; everything else is a new wait, and fails.
ALLOWED = {
    "sa-dpsgd": ({"_local_scalar_dense"}, "whether a proposal stays is decided on the host, by a public score"),
    **dict.fromkeys(
        (
            "dp-adam-ac",
            "a quantile",
            "a quantile with lr='auto'",
            "a quantile with memory and filter",
            "a quantile by layer",
            "a quantile with adambc",
            "dp-is with a quantile",
        ),
        ({"_local_scalar_dense"}, "C is a number of the host's: the released count is read once a step"),
    ),
    "shape transcript": ({"_to_copy to cpu"}, "the factors are public numbers of the host's"),
    "rate rule transcript": ({"_local_scalar_dense"}, "the rate is a number of the optimizer's"),
    "adambc after a memory": ({"tolist"}, "the noise left by feedback is a recursion over thousands of steps"),
    "exact noise": (
        {"_local_scalar_dense"},
        "it is made on the CPU from whole numbers, and sums are looked at for their range",
    ),
    "buffers": ({"tolist"}, "a model that writes into its buffers is refused before its step is used"),
}
CASES = [
    *((name, name, {}, {}) for name in METHODS if name != "sa-dpsgd"),
    ("sa-dpsgd", "sa-dpsgd", {}, {}),
    ("a quantile", "dp-sgd", {"quantile": 0.5, "lr": 0.1}, {}),
    ("a quantile with lr='auto'", "dp-sgd", {"quantile": 0.5, "lr": "auto"}, {}),
    ("shape kronecker", "dp-sgd", {"shape": "kronecker"}, {}),
    ("shape transcript", "dp-sgd", {"shape": "transcript", "shape_warmup": 1}, {}),
    ("rate rule transcript", "dp-sgd", {"shape": "fan-in", "rate_rule": "transcript"}, {}),
    ("a quantile with memory and filter", "fo-dp-sgd", {"quantile": 0.5, "filter": "momentum", "lr": 0.1}, {}),
    ("a quantile by layer", "dp-sgd", {"quantile": 0.5, "clip": "per-layer", "lr": 0.1}, {}),
    ("a quantile with adambc", "dp-adambc", {"quantile": 0.5}, {}),
    ("dp-is with a quantile", "dp-is", {"quantile": 0.5}, {}),
    ("per-layer", "dp-sgd", {"clip": "per-layer"}, {}),
    ("normalised", "dp-sgd", {"clip": "normalised"}, {}),
    ("fan-in", "dp-sgd", {"shape": "fan-in"}, {}),
    ("momentum", "dp-sgd", {"filter": "momentum"}, {}),
    ("doppler", "dp-sgd", {"filter": "doppler"}, {}),
    ("fractional", "dp-sgd", {"filter": "fractional"}, {}),
    ("exponentials", "fo-dp-sgd", {"compact": "exponentials", "tau": 0.0, "window": 64, "lam": 0.1}, {}),
    ("a fixed kernel", "fo-dp-sgd", {"tau": 0.0}, {}),
    ("adambc after a memory", "fo-dp-sgd", {"update": "adambc"}, {}),
    ("bands", "fo-noise", {"bands": 2}, {}),
    ("schedules", "dp-sgd", {"noise_schedule": [[0, 1.0], [3, 0.5]]}, {}),
    ("exact noise", "dp-sgd", {}, {"exact_noise": True}),
]  # fmt: skip


def there(model, batch):
    """The loss on the stand-in: its owner sends the records, without a wait."""
    inputs, labels = (part.to(device(), non_blocking=True) for part in batch)
    return F.cross_entropy(model(inputs), labels, reduction="none")


OPTIONS = "microbatch", "copies", "augment", "owners"  # of a trainer; the rest are fields of the plan


def trainer_of(method, params, model=None, loss=there, dataset=None, **changes):
    options = {name: changes.pop(name) for name in OPTIONS if name in changes}
    model = network(torch.float32) if model is None else model
    model = model.to(device())
    given = data(dtype=torch.float32) if dataset is None else dataset

    def score():
        with torch.no_grad():
            return loss(model, data(30, 9, torch.float32).tensors).mean().item()

    return Trainer(model, loss, given, plan(method, params, **changes), public_score=score, **options)


def ordinary_waits(training, steps=STEPS):
    for _ in range(LOOKED_AT):
        training.take_step()
    with counted() as found:
        for _ in range(steps - LOOKED_AT):
            training.take_step()
    return found


def on_cpu(tensor):
    return tensor.held if isinstance(tensor, OnStandIn) else tensor


def weights(training):
    return torch.cat([on_cpu(p.detach()).flatten() for p in training.model.parameters()])


@pytest.mark.parametrize(("name", "method", "params", "changes"), CASES, ids=[case[0] for case in CASES])
def test_a_step_mixes_no_devices_and_waits_for_none(name, method, params, changes):
    training = trainer_of(method, params, **changes)
    found = ordinary_waits(training)
    allowed, _ = ALLOWED.get(name, (set(), ""))
    assert set(found) <= allowed, f"a new wait: {dict(found)}"
    assert set(found) == allowed, f"no longer waited for: leave {allowed - set(found)} out of the list"
    if training.session.adaptive_clip is not None:
        assert found["_local_scalar_dense"] == STEPS - LOOKED_AT, "the count is read once a step"
    assert weights(training).isfinite().all()
    assert all(p.device.type == NAME for p in training.model.parameters())


@pytest.mark.rule(3)
def test_a_sum_over_millions_is_not_rounded_before_it_has_its_noise():
    """Else one example that adds 1 would move 20,000,002 by 2: float32 has no odd numbers there."""

    def released(value):
        query = Query(torch.tensor(value, dtype=torch.float64, device=device()), 1.0, dtype=torch.float32)
        return on_cpu(release(query, 1.0, Streams.seeded(1), 1, "noise")).item()

    noise = released(0.0)
    values = torch.arange(20_000_000, 20_000_008, dtype=torch.float64)
    expected = (values + noise).float()
    assert (values.float().double() + noise).float().tolist() != expected.tolist()  # this noise would show it
    assert [released(value) for value in values.tolist()] == expected.tolist()


def test_the_stand_in_refuses_mixed_devices_and_counts_reads():
    here, far = torch.ones(3), torch.ones(3, device=device())
    with pytest.raises(RuntimeError, match="mixes the CPU and the stand-in"):
        far + here
    assert on_cpu(far + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number may come from anywhere
    reads = [
        lambda: float(far[0]),
        lambda: bool((far > 0).all()),
        lambda: far.tolist(),
        lambda: far.cpu(),
        lambda: far.nonzero(),
        lambda: far[far > 0],
        lambda: torch.equal(far, far),
        lambda: far.unique(),
        lambda: torch.masked_select(far, far > 0),
        lambda: here.to(device()),
        lambda: torch.empty(3).copy_(far),
    ]
    for number, read in enumerate(reads):
        with counted() as found:
            read()
        assert sum(found.values()) >= 1, f"read {number} was not seen"
    with counted() as found:
        far.mul_(2.0).add_(1.0).clamp_(max=far.sum())
        here.to(device(), non_blocking=True)
        torch.zeros(4, device=device())[2:].fill_(1.0)
    assert not found


class Noiseless:
    """Releases without noise: the rest of a step can be compared with the CPU's."""

    def add(self, query, std, step, name):
        return query.add_to(query.empty(query.dtype).zero_())

    def scale(self):
        return 1.0


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("fo-dp-sgd", {"window": 3}),
        ("fo-dp-sgd", {"window": 4, "quantile": 0.5}),
        ("dp-adam-ac", {}),
        ("dp-adambc", {"quantile": 0.6}),
        ("dp-sgd", {"filter": "fractional", "quantile": 0.3}),
        ("dp-sat", {}),
    ],
)
def test_without_noise_a_run_on_a_device_is_the_cpus(method, params):
    """Scores, weights, clip norms, controllers and updates are the same formulas in tensors as in floats."""
    far = trainer_of(method, params)
    near = Trainer(network(torch.float32), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
                   data(dtype=torch.float32), plan(method, params))  # fmt: skip
    for training in (far, near):
        training.session.noise = Noiseless()
        for _ in range(6):
            training.take_step()
    torch.testing.assert_close(weights(far), weights(near), rtol=2e-4, atol=2e-5)
    if far.session.adaptive_clip is not None:
        assert far.session.clip_norm == pytest.approx(near.session.clip_norm, rel=1e-5)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("fo-dp-sgd", {"window": 3, "quantile": 0.5}),
        ("dp-adam-ac", {}),
        ("dp-adambc", {"quantile": 0.5, "filter": "momentum"}),
        ("disk", {}),
        ("dp-adamw", {}),
        ("fo-noise", {"bands": 2}),
    ],
)
def test_a_checkpoint_goes_from_the_device_to_the_device_bit_for_bit(tmp_path, method, params):
    whole = trainer_of(method, params)
    for _ in range(4):
        whole.take_step()
    whole.save(tmp_path / "run.ckpt")
    again = trainer_of(method, params)
    again.resume(tmp_path / "run.ckpt")
    for training in (whole, again):
        for _ in range(2):
            training.take_step()
    assert torch.equal(weights(whole), weights(again))
    state = again.session.state_dict()
    assert all(t.device.type == NAME for t in tensors_of(state)), "the state is where the model is"
    held = tensors_of(again.optimizer.state_dict()["state"])
    assert {t.device.type for t in held if t.dim()} <= {NAME}
    assert {t.device.type for t in held if not t.dim()} <= {"cpu"}, "PyTorch reads the number of steps in every step"


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


class Sequences(nn.Module):
    """An embedding whose tokens repeat, a convolution, a norm: layers with rules of their own."""

    def __init__(self):
        super().__init__()
        self.words, self.mixed = nn.Embedding(7, 8), nn.Linear(8, 8)
        self.conv, self.norm, self.head = nn.Conv1d(8, 6, 3), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        tokens = x.mul(2).long().remainder(7)
        made = self.conv(self.mixed(self.words(tokens)).transpose(1, 2))
        return self.head(self.norm(made.transpose(1, 2)).mean(1))


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("scale", torch.full((5,), 0.5))
        self.register_buffer("other", torch.arange(3))

    def forward(self, x):
        return self.linear(x * self.scale)


class WithDropout(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("model", [Sequences, WithDropout, WithBuffer])
def test_layers_with_rules_of_their_own_wait_for_nothing(model):
    torch.manual_seed(0)
    training = trainer_of("dp-sgd", {}, model())
    found = ordinary_waits(training)
    assert set(found) == (ALLOWED["buffers"][0] if model is WithBuffer else set()), dict(found)
    assert sum(found.values()) <= STEPS - LOOKED_AT, "one look for all buffers"
    assert training.source.engine.path == "layers"


def test_norms_of_repeated_tokens_are_those_of_the_cpu():
    from fodp.clipping.layers.embeddings import Rows

    torch.manual_seed(1)
    indices, back = torch.randint(4, (9, 12)), torch.randn(9, 12, 5, dtype=torch.float64)
    near, far = Rows(indices, back, 4), Rows(indices.to(device()), back.to(device()), 4)
    with counted() as found:
        there_squares = far.squared_norms()
    assert not found
    torch.testing.assert_close(on_cpu(there_squares), near.squared_norms())
    assert on_cpu(far.slack).min() >= on_cpu(near.slack).min()


def test_a_clipped_sum_on_the_device_keeps_its_bound():
    """One huge example among others: without the others, the sum moves by its bound at most."""
    torch.manual_seed(0)
    model = Sequences().to(device())
    clipper = fodp.Clipper(model, there)
    inputs, labels = data(12, dtype=torch.float32).tensors
    inputs[3] *= 1e3
    whole = clipper.clipped_sum((inputs, labels), 0.5)
    keep = torch.arange(12) != 3
    part = clipper.clipped_sum((inputs[keep], labels[keep]), 0.5, records=torch.arange(12)[keep])
    assert 0 < float((on_cpu(whole) - on_cpu(part)).norm()) <= 0.5 * (1 + 1e-5)
    assert math.isfinite(float(on_cpu(whole).norm()))


class ByHand(nn.Module):
    """A parameter that no layer has: functions are watched instead."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.linear(x * self.scale)


def test_functions_that_are_watched_wait_for_nothing_either():
    training = trainer_of("dp-sgd", {}, ByHand())
    assert not ordinary_waits(training)
    assert training.source.engine.path == "functions"


def test_a_whole_fit_with_scores_averages_and_the_loop_goes_through():
    """Callbacks and the one-example loop may wait; they must not mix devices."""
    test = data(20, 3, torch.float32)
    training = trainer_of("fo-dp-sgd", {"quantile": 0.5}, steps=4)
    training.callbacks += [fodp.callbacks.Evaluate(test), fodp.callbacks.WeightAverage()]
    result = training.fit()
    assert result.reason == "finished"
    assert 0 <= training.metrics["accuracy"] <= 1
    loop = Trainer(network(torch.float32).to(device()), there, data(dtype=torch.float32), plan("dp-sgd"), engine="loop")
    for _ in range(2):
        loop.take_step()
    assert loop.source.engine.path == "loop"


@pytest.mark.rule(11)
def test_a_seeded_run_does_not_go_on_on_another_device(tmp_path):
    """Its noise would be another, on steps that are charged once."""
    far = trainer_of("dp-sgd", {})
    far.take_step()
    far.save(tmp_path / "run.ckpt")
    near = Trainer(network(torch.float32), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
                   data(dtype=torch.float32), plan("dp-sgd"))  # fmt: skip
    with pytest.raises(fodp.PrivacyError, match="began on standin and would go on on cpu"):
        near.resume(tmp_path / "run.ckpt")


def test_a_loop_of_ones_own_on_the_device():
    model = network(torch.float32).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = fodp.make_private(
        model, optimizer, data(dtype=torch.float32), plan("fo-dp-sgd", {"quantile": 0.5}), loss_reduction="mean"
    )
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.to(device())), labels.to(device())).backward()
        optimizer.step()
    assert all(on_cpu(p.detach()).isfinite().all() for p in model.parameters())


def in_passing(training):
    """How many ordinary steps wait, and that the weights stay finite."""
    found = ordinary_waits(training)
    assert weights(training).isfinite().all()
    return dict(found)


def test_micro_batches_copies_and_data_on_the_device_wait_for_nothing():
    here, far = data(dtype=torch.float32), [column.to(device()) for column in data(dtype=torch.float32).tensors]
    assert not in_passing(trainer_of("dp-sgd", {"clip": "per-layer", "lr": 0.1}, microbatch=5))
    assert not in_passing(trainer_of("dp-sgd", {}, copies=2, augment=lambda batch: (batch[0] + 0.1, batch[1])))
    assert not in_passing(trainer_of("fo-dp-sgd", {}, dataset=torch.utils.data.TensorDataset(*far), microbatch=5))
    assert len(here) == len(far[0])


def test_people_on_the_device_wait_for_nothing():
    owners = [f"person {math.isqrt(i)}" for i in range(24)]  # of one record, of three, of more
    people = dict(unit="person", records_per_person=5)
    assert not in_passing(trainer_of("dp-sgd", {}, owners=owners, **people))


def test_a_step_that_reads_is_found_out(monkeypatch):
    """The counter itself: a method that looks at its release, a memory that looks at a distance."""
    from fodp.memory.weights import FractionalMemory
    from fodp.methods.dp_sgd import DPSGD

    step, by_lag = DPSGD.step, FractionalMemory.by_lag

    def reading(self, run, state):
        released = step(self, run, state)
        return released if released.norm() > 0 else released * 2

    def looking(self):
        weights = by_lag(self)
        return weights.tolist() if isinstance(weights, torch.Tensor) else weights

    monkeypatch.setattr(DPSGD, "step", reading)
    assert set(ordinary_waits(trainer_of("dp-sgd", {}))) == {"_local_scalar_dense"}
    monkeypatch.setattr(FractionalMemory, "by_lag", looking)
    assert set(ordinary_waits(trainer_of("fo-dp-sgd", {}))) == {"tolist"}


class Remembers(WithBuffer):
    def forward(self, x):
        self.scale.data.add_(x.detach().mean() * (not torch.equal(x, torch.zeros_like(x))))
        return self.linear(x * 0.5)


@pytest.mark.rule(14)
def test_a_model_on_the_device_that_writes_into_a_buffer_is_refused():
    training = trainer_of("dp-sgd", {}, Remembers())
    before = on_cpu(training.model.scale).clone()
    with pytest.raises(fodp.PrivacyError, match="writes into the buffer scale"):
        training.take_step()
    assert torch.equal(on_cpu(training.model.scale), before)
