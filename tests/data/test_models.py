"""Models fit what the loader gives; evaluation leaves no trace; one's own models fail in one line."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fodp.data import CARDS, load
from fodp.data.models import MODELS, build, cross_entropy, wants_flat
from fodp.errors import PrivacyError
from fodp.runs.scores import accuracy


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class TestBuild:
    @pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
    @pytest.mark.parametrize("name", MODELS)
    def test_takes_what_the_loader_gives(self, name: str, card) -> None:
        shape = (card.features,) if wants_flat(name) else card.shape
        for size in (3, 0):  # an empty Poisson lot is ordinary
            assert build(name, card)(torch.zeros(size, *shape)).shape == (size, card.classes)

    def test_the_papers_classifier(self) -> None:
        model = build("mlp", CARDS["cifar10"])
        assert parameters(model) == 3072 * 64 + 64 + 64 * 32 + 32 + 32 * 10 + 10
        assert [type(layer).__name__ for layer in model] == ["Flatten", *["Linear", "Tanh"] * 2, "Linear"]
        images = torch.randn(2, 3, 32, 32)
        assert torch.equal(model(images), model(images.flatten(1)))

    def test_sizes(self) -> None:
        assert 100_000 < parameters(build("cnn", CARDS["cifar10"])) < 500_000
        assert 100_000 < parameters(build("cnn", CARDS["cifar100"])) < 500_000
        assert parameters(build("cnn", CARDS["digits"])) < 10_000
        assert parameters(build("logistic", CARDS["digits"])) == 650

    @pytest.mark.rule(16)
    @pytest.mark.parametrize("name", MODELS)
    def test_no_model_mixes_the_examples_of_a_lot(self, name: str) -> None:
        card = CARDS["cifar10"]
        model = build(name, card).train()
        lot = torch.randn(4, *card.shape)
        alone = torch.cat([model(example[None]) for example in lot])
        torch.testing.assert_close(model(lot), alone)
        assert not any("BatchNorm" in type(module).__name__ for module in model.modules())

    @pytest.mark.parametrize("name", MODELS)
    def test_the_callers_seed_decides_the_weights(self, name: str) -> None:
        models = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            models.append(torch.cat([p.flatten() for p in build(name, CARDS["digits"]).parameters()]))
        assert torch.equal(models[0], models[1])
        assert not torch.equal(models[0], models[2])

    def test_cnn_needs_images(self) -> None:
        for shape in ((64,), (1, 7, 9)):
            with pytest.raises(PrivacyError, match="cnn needs images of at least 8x8 pixels"):
                build("cnn", replace(CARDS["digits"], shape=shape))

    def test_unknown_name(self) -> None:
        for name in ("resnet", ":f", "module:", ""):
            with pytest.raises(PrivacyError, match="one of mlp, cnn, logistic or your own module:function"):
                build(name, CARDS["digits"])


OWN = """
from torch import nn
def both(classes, shape): return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))
def some(*, classes, size=64): return nn.Sequential(nn.Flatten(), nn.Linear(size, classes))
def anything(**given): return both(**given)
def nothing(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
def lazy():
    import own_helper
    return own_helper.model()
class Own(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)
    def forward(self, x): return self.layer(x.flatten(1))
def fails(classes): raise RuntimeError("first line\\nsecond line")
def needs_more(classes, depth): return nothing()
def not_a_model(): return 3
number = 3
"""


class TestOwnModel:
    @pytest.fixture(autouse=True)
    def _in_a_folder_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own_models.py").write_text(OWN)
        (tmp_path / "own_helper.py").write_text("from torch import nn\ndef model(): return nn.Linear(64, 10)\n")
        (tmp_path / "own_broken.py").write_text("def f(:\n")
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize("function", ["both", "some", "anything", "nothing", "Own"])
    def test_gets_what_it_accepts(self, function: str) -> None:
        model = build(f"own_models:{function}", CARDS["digits"])
        assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
        assert not wants_flat(f"own_models:{function}")

    def test_may_import_its_neighbours_when_called(self) -> None:
        assert isinstance(build("own_models:lazy", CARDS["digits"]), nn.Linear)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("own_nowhere:f", "cannot import model own_nowhere:f (ModuleNotFoundError"),
            ("own_broken:f", "SyntaxError"),
            ("own_models:absent", "AttributeError"),
            ("own_models:number", "must be a function that returns a model, got int"),
            ("own_models:not_a_model", "must return a torch.nn.Module, got int"),
            ("own_models:fails", "failed with RuntimeError: first line second line"),
            ("own_models:needs_more", "called with classes and shape if it accepts them"),
        ],
    )
    def test_failures_are_one_line(self, name: str, words: str) -> None:
        with pytest.raises(PrivacyError) as caught:
            build(name, CARDS["digits"])
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_leaves_the_search_path_alone(self) -> None:
        import sys

        before = list(sys.path)
        build("own_models:both", CARDS["digits"])
        assert sys.path == before


class TestCrossEntropy:
    def test_one_loss_per_example(self) -> None:
        model, images, labels = nn.Linear(4, 3), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        losses = cross_entropy(model, (images, labels))
        assert losses.shape == (5,)
        expected = -model(images).log_softmax(1)[range(5), labels]
        torch.testing.assert_close(losses, expected)
        assert cross_entropy(model, (images[:0], labels[:0])).shape == (0,)


class Items(Dataset):
    """Any data set of (image, label), labels as plain numbers."""

    def __init__(self, tensors: TensorDataset) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.tensors[index]
        return image, int(label)


class TestAccuracy:
    def test_counts_and_averages_over_uneven_batches(self) -> None:
        test = load("digits").test
        model = build("mlp", CARDS["digits"])
        images, labels = test.tensors
        share = (model(images).argmax(1) == labels).double().mean().item()
        loss = cross_entropy(model, (images, labels)).mean().item()
        for dataset in (test, Items(test)):
            for batch_size in (1000, 360, 7):
                assert accuracy(model, dataset, batch_size) == pytest.approx((share, loss), rel=1e-5)

    def test_evaluates_in_evaluation_mode_and_leaves_no_trace(self) -> None:
        seen = []

        class Spy(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append((self.training, torch.is_inference_mode_enabled()))
                return x

        model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4), Spy(), nn.Linear(4, 3)).train()
        model[1].eval()  # a frozen part
        dataset = TensorDataset(torch.randn(9, 4), torch.zeros(9, dtype=torch.long))
        state = torch.get_rng_state()
        first = accuracy(model, dataset, 4)
        assert accuracy(model, dataset, 4) == first
        assert torch.equal(torch.get_rng_state(), state)
        assert set(seen) == {(False, True)}
        assert [module.training for module in model.modules()] == [True, True, False, True, True]
        model(dataset.tensors[0]).sum().backward()  # the model still trains

    def test_modes_come_back_after_a_failure(self) -> None:
        model = nn.Linear(4, 3).train()
        with pytest.raises(RuntimeError):
            accuracy(model, TensorDataset(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long)))
        assert model.training

    def test_refuses_the_empty_set(self) -> None:
        with pytest.raises(PrivacyError, match="at least one example"):
            accuracy(nn.Linear(1, 1), load("digits").validation)

    def test_a_model_that_learns_is_recognised(self) -> None:
        torch.manual_seed(0)
        splits = load("digits", flatten=False)
        model = build("cnn", splits.card)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        images, labels = splits.train.tensors
        for _ in range(4):
            for start in range(0, len(labels), 64):
                optimizer.zero_grad()
                cross_entropy(model, (images[start : start + 64], labels[start : start + 64])).mean().backward()
                optimizer.step()
        share, loss = accuracy(model, splits.test)
        assert share > 0.93
        assert loss < 0.4
