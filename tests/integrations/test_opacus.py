"""Coming from Opacus: the same updates from the same draws, its history in our ledger, its layer tests here."""

import importlib
import math
import unittest
import warnings

import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fodp
from fodp import BudgetError, ConfigurationError
from fodp.accounting import Event, Phase
from fodp.noise import Streams

pytest.importorskip("opacus", reason="takes the extra opacus")

import opacus.optimizers.optimizer as opacus_optimizer
from opacus import PrivacyEngine
from opacus.utils.per_sample_gradients_utils import compute_opacus_grad_sample

from fodp.integrations.opacus import from_opacus, history

pytestmark = pytest.mark.filterwarnings("ignore:.*(backward hook|Secure RNG|Full backward).*")
PUBLIC = dict(steps=6, delta=1e-5, sampling_rate=0.1, lot_size=20)


def data(size=200):
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def setup(accountant="rdp", momentum=0.0, loader=None, **words):
    """What somebody who uses Opacus has: engine, model, optimizer, loader."""
    model, engine = network(), PrivacyEngine(accountant=accountant)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum),
        data_loader=loader or DataLoader(data(), batch_size=20),
        **{"noise_multiplier": 1.3, "max_grad_norm": 0.7, **words},
    )
    return engine, *made


def train(model, optimizer, batches):
    for inputs, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class TestSameDraws:
    def test_the_same_lots_and_noise_make_the_same_updates(self, monkeypatch):
        """DP-SGD of ours beside Opacus's, which is fed our lots and our noise."""
        plan = fodp.Plan(
            sampling_rate=0.1, steps=8, lot_size=20, clip_norm=0.7, noise_multiplier=1.3, delta=1e-5, method="dp-sgd",
            seed=5,
        )  # fmt: skip
        ours = network()
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.5, momentum=0.5)
        _, _, loader = fodp.make_private(ours, optimizer, data(), plan)
        lots = []

        def seen():
            for batch in loader:
                lots.append(batch)
                yield batch

        train(ours, optimizer, seen())
        loader.close()

        _, theirs, dp_optimizer, _ = setup(momentum=0.5)
        streams, sizes = Streams.seeded(5), [p.numel() for p in theirs.parameters()]
        for step, (inputs, labels) in enumerate(lots):
            noise = streams.normal_(torch.empty(sum(sizes)), 1.3 * 0.7, step, "noise").split(sizes)
            parts = iter(noise)
            monkeypatch.setattr(
                opacus_optimizer,
                "_generate_noise",
                lambda std, reference, parts=parts, **_: next(parts).view_as(reference),
            )
            train(theirs, dp_optimizer, [(inputs, labels)])
        assert len(lots) == 8
        assert torch.allclose(flat(ours), flat(theirs), atol=2e-6)
        assert (flat(ours) - flat(network())).norm() > 0.1

    def test_without_a_method_it_is_the_recipe_as_in_every_door(self):
        engine, model, optimizer, loader = setup()
        on = from_opacus(engine, optimizer=optimizer, model=model, data_loader=loader, **PUBLIC)
        alike = dict(clip_norm=on.plan.clip_norm, noise_multiplier=on.plan.noise_multiplier)
        assert on.plan == fodp.Plan(**PUBLIC, **alike)
        for batch in on.loader:
            train(on.model, on.optimizer, [batch])
        assert on.loader.step == PUBLIC["steps"]

    def test_going_on_with_dp_sgd_is_opacus_going_on(self, monkeypatch):
        """Opacus takes steps; then both go on from there, with momentum, on the same lots and noise."""
        pair = []
        for _ in range(2):
            torch.manual_seed(1)
            engine, model, optimizer, loader = setup(momentum=0.9)
            train(model, optimizer, list(loader)[:4])
            pair.append((engine, model, optimizer, loader))
        assert torch.equal(flat(pair[0][1]), flat(pair[1][1]))
        engine, model, optimizer, loader = pair[0]
        on = from_opacus(
            engine, optimizer=optimizer, model=model, data_loader=loader, method="dp-sgd", seed=9, **PUBLIC
        )
        assert on.model is model._module
        assert on.plan.clip_norm == 0.7
        assert on.plan.noise_multiplier == 1.3
        lots = []
        for batch in on.loader:
            lots.append(batch)
            train(on.model, on.optimizer, [batch])
        _, theirs, dp_optimizer, _ = pair[1]
        streams, sizes = Streams.seeded(9), [p.numel() for p in theirs.parameters()]
        for step, batch in enumerate(lots):
            parts = iter(streams.normal_(torch.empty(sum(sizes)), 1.3 * 0.7, step, "noise").split(sizes))
            monkeypatch.setattr(
                opacus_optimizer,
                "_generate_noise",
                lambda std, reference, parts=parts, **_: next(parts).view_as(reference),
            )
            train(theirs, dp_optimizer, [batch])
        assert torch.allclose(flat(on.model), flat(theirs), atol=5e-6)
        on.loader.close()


class TestGuarantee:
    def test_noise_of_a_thousand_leaves_chance(self):
        scores = []
        for seed in range(5):
            engine, model, optimizer, loader = setup()
            on = from_opacus(
                engine,
                optimizer=optimizer,
                model=model,
                data_loader=loader,
                seed=seed,
                noise_multiplier=1000.0,
                **PUBLIC,
            )
            train(on.model, on.optimizer, on.loader)
            inputs, labels = data().tensors
            scores.append(float((on.model(inputs).argmax(1) == labels).float().mean()))
            on.loader.close()
        assert 0.2 < sum(scores) / 5 < 0.8

    def test_the_history_is_charged_first_and_once_and_the_plan_after_it(self, tmp_path):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, list(loader)[:3])
        past = (Phase((Event(0.1, 1.3),), 3),)
        assert history(engine) == history(optimizer) == history(engine.accountant) == past
        ledger = fodp.Ledger(tmp_path / "l.sqlite", dataset="people", budget=(50, 1e-5))
        on = from_opacus(optimizer, model=model, data_loader=loader, ledger=ledger, **PUBLIC)
        assert on.history == past
        first, second = ledger.store.select("run")
        assert first.data["phases"] == [[[[0.1, 1.3]], 3]]
        assert ledger.steps(first.run) == 3
        assert second.data["phases"] == [[[[0.1, 1.3 / 0.9]], 6]]
        train(on.model, on.optimizer, on.loader)
        assert ledger.steps(second.run) == 6
        assert on.loader.epsilon() == on.plan.epsilon()
        assert on.total_epsilon() > on.plan.epsilon()
        assert fodp.accounting.epsilon_of(past, 1e-5, "rdp") == pytest.approx(engine.get_epsilon(1e-5), rel=0.03)
        on.loader.close()
        _, again, optimizer, loader = setup()
        optimizer.step_hook = engine.accountant.get_optimizer_hook_fn(sample_rate=0.1)
        from_opacus(optimizer, model=again, data_loader=loader, ledger=ledger, **PUBLIC).loader.close()
        assert [run.run.startswith("opacus-") for run in ledger.store.select("run")] == [True, False, False]

    def test_another_history_under_the_same_accountant_is_charged_whole(self, tmp_path):
        ledger = fodp.Ledger(tmp_path / "l.sqlite", dataset="people", budget=(50, 1e-5))
        engine, model, optimizer, loader = setup()
        for past in ([(5.0, 0.1, 30)], [(0.7, 0.1, 30)]):
            engine.accountant.history = past
            optimizer.step_hook = engine.accountant.get_optimizer_hook_fn(sample_rate=0.1)
            from_opacus(optimizer, model=model, data_loader=loader, ledger=ledger, **PUBLIC).loader.close()
            _, model, optimizer, loader = setup()
        carried = [run.data["phases"] for run in ledger.store.select("run") if run.run.startswith("opacus-")]
        assert carried == [[[[[0.1, 5.0]], 30]], [[[[0.1, 0.7]], 30]]]

    def test_a_history_that_is_above_the_budget_is_refused(self, tmp_path):
        engine, model, optimizer, loader = setup(noise_multiplier=0.3)
        train(model, optimizer, list(loader))
        ledger = fodp.Ledger(tmp_path / "l.sqlite", dataset="people", budget=(1, 1e-5))
        with pytest.raises(BudgetError):
            from_opacus(engine, optimizer=optimizer, model=model, data_loader=loader, ledger=ledger, **PUBLIC)

    @pytest.mark.parametrize("accountant", ["prv", "gdp"])
    def test_other_accountants_have_histories_too(self, accountant):
        engine, model, optimizer, loader = setup(accountant)
        train(model, optimizer, list(loader)[:2])
        assert history(engine) == (Phase((Event(0.1, 1.3),), 2),)

    def test_fo_dp_sgd_goes_on_in_the_owners_loop(self):
        engine, model, optimizer, loader = setup()
        on = from_opacus(
            engine, optimizer=optimizer, model=model, data_loader=loader, seed=1,
            method="fo-dp-sgd", params=dict(beta=0.8, window=3), **PUBLIC,
        )  # fmt: skip
        before = flat(on.model)
        train(on.model, on.optimizer, on.loader)
        assert not torch.equal(flat(on.model), before)
        assert not any(hasattr(parameter, "grad_sample") for parameter in on.model.parameters())
        assert on.plan.epsilon() == pytest.approx(
            fodp.epsilon(noise_multiplier=1.3, sampling_rate=0.1, steps=6, delta=1e-5, beta=0.8)
        )
        on.loader.close()

    def test_the_owners_collate_fn_goes_on(self):
        def halved(rows):
            inputs, labels = torch.utils.data.default_collate(rows)
            return inputs / 2, labels

        engine, model, optimizer, loader = setup(loader=DataLoader(data(), batch_size=20, collate_fn=halved))
        on = from_opacus(
            engine, optimizer=optimizer, model=model, data_loader=loader, seed=1, method="fo-dp-sgd", **PUBLIC
        )
        inputs, _ = next(iter(on.loader))
        assert all(any(torch.equal(row, known / 2) for known in data().tensors[0]) for row in inputs)
        on.loader.close()


class TestRefusals:
    def test_what_opacus_counts_from_the_data_is_met_by_a_warning(self):
        engine, model, optimizer, loader = setup()
        with pytest.warns(UserWarning, match="computed sample_rate and expected_batch_size"):
            on = from_opacus(engine, optimizer=optimizer, model=model, data_loader=loader, steps=3, delta=1e-5)
        assert (on.plan.sampling_rate, on.plan.lot_size) == (0.1, 20)
        on.loader.close()

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (dict(poisson_sampling=False), "does not draw Poisson lots"),
            (dict(clipping="per_layer", max_grad_norm=[0.1] * 4), "DPPerLayerOptimizer clips or divides otherwise"),
        ],
    )
    def test_set_ups_that_cannot_go_on(self, words, said):
        engine, model, optimizer, loader = setup(**words)
        with pytest.raises(ConfigurationError, match=said):
            from_opacus(engine, optimizer=optimizer, model=model, data_loader=loader, **PUBLIC)

    def test_steps_without_noise(self):
        engine, model, optimizer, loader = setup(noise_multiplier=0.0)
        train(model, optimizer, list(loader)[:1])
        with pytest.raises(ConfigurationError, match="are not private"):
            history(engine)

    def test_what_is_not_opacus(self):
        _, model, optimizer, loader = setup()
        with pytest.raises(ConfigurationError, match="takes a PrivacyEngine"):
            from_opacus(3, model=model, data_loader=loader, **PUBLIC)
        with pytest.raises(ConfigurationError, match="give optimizer="):
            from_opacus(PrivacyEngine(), model=model, data_loader=loader, **PUBLIC)
        optimizer.step_hook = None
        with pytest.raises(ConfigurationError, match="no accountant counts"):
            from_opacus(optimizer, model=model, data_loader=loader, **PUBLIC)


def opacus_layer_tests():
    """Opacus's own tests of its layers, as it installs them, with few examples each."""
    before = settings.default
    settings.register_profile("few", parent=before, max_examples=25)  # of which some draw no layer at all
    settings.load_profile("few")
    try:
        for name in (
            "linear", "conv1d", "conv2d", "conv3d", "embedding", "group_norm", "instance_norm1d",
            "instance_norm2d", "instance_norm3d", "layer_norm", "rms_norm", "sequence_bias", "dp_multihead_attention",
            "dp_rnn",
        ):  # fmt: skip
            module = importlib.import_module(f"opacus.tests.grad_samples.{name}_test")
            for kind in vars(module).values():
                if (
                    isinstance(kind, type)
                    and issubclass(kind, unittest.TestCase)
                    and kind.__module__ == module.__name__
                ):
                    for method in unittest.TestLoader().getTestCaseNames(kind):
                        if "unfold" not in method and "asym" not in method:  # helpers of Opacus's own convolutions
                            yield pytest.param(kind, method, id=f"{name}-{method}")
    finally:
        settings.load_profile("fodp")


def compare_with_opacus(self, x, module, batch_first=True, **_):
    """Instead of Opacus's comparison with single examples: our clipped sum beside that of its grad_samples."""
    if not isinstance(x, torch.Tensor) or x.numel() == 0:
        return  # packed sequences have no dimension for examples; an empty lot has no gradients to compare
    expected = compute_opacus_grad_sample(x, module, batch_first=batch_first, loss_reduction="sum")
    rows = x if batch_first else x.transpose(0, 1)
    samples = torch.cat([part.flatten(1) for part in expected.values()], dim=1)
    clip_norm = float(samples.norm(dim=1).median()) or 1.0
    factors = (clip_norm / samples.norm(dim=1).clamp(min=1e-30)).clamp(max=1)

    def losses(model, batch):
        outputs = model(batch if batch_first else batch.transpose(0, 1))
        return (outputs if batch_first else outputs.transpose(0, 1)).abs().flatten(1).sum(1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers without a rule, which are slower
        found = fodp.clipped_sum(module, losses, rows, clip_norm)
    type(self).compared += 1
    assert torch.allclose(found, (factors[:, None] * samples).sum(0), atol=1e-4 * math.sqrt(len(rows)), rtol=1e-3)


@pytest.mark.parametrize(("kind", "method"), list(opacus_layer_tests()))
def test_opacus_own_layer_tests_on_our_engine(kind, method, monkeypatch):
    monkeypatch.setattr(kind, "run_test", compare_with_opacus)
    monkeypatch.setattr(kind, "compared", 0, raising=False)
    kind(method).debug()
    assert kind.compared >= 2


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_words(mode):
    """Opacus takes them flat with offsets, here an example is a row; Opacus 1.6 loses a word's second time in a bag."""
    layer, losses = nn.EmbeddingBag(10, 4, mode=mode), lambda model, rows: model(rows).abs().sum(1)
    distinct = torch.stack([torch.randperm(10)[:3] for _ in range(5)])
    flat_bags = (distinct.flatten(), torch.arange(0, 15, 3))
    (theirs,) = compute_opacus_grad_sample(flat_bags, layer, loss_reduction="sum").values()
    twice = torch.tensor([[1, 1, 2], [3, 3, 3], [4, 5, 4], [0, 1, 2], [9, 9, 8]])
    alone = [torch.autograd.grad(losses(layer, bag[None]).sum(), layer.weight)[0] for bag in twice]
    for bags, samples in ((distinct, theirs), (twice, torch.stack(alone))):
        norms = samples.flatten(1).norm(dim=1)
        clip_norm = float(norms.mean())
        expected = ((clip_norm / norms).clamp(max=1)[:, None] * samples.flatten(1)).sum(0)
        assert torch.allclose(fodp.clipped_sum(layer, losses, bags, clip_norm), expected, atol=1e-4)
