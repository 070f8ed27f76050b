"""The standard image augmentations: each picture by itself, drawn by record, at full speed."""

import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp import ConfigurationError
from fodp.cli.main import main
from fodp.clipping.batches import take
from fodp.data import CARDS, ImageAugmentation, augmentation
from fodp.data.augmentations import AUGMENTATIONS, random_crop, random_flip
from fodp.gradients import HERE

SHAPE, ROWS = (2, 8, 8), 30


def images(rows=ROWS):
    return torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(0))


def plan(**changes):
    numbers = dict(
        sampling_rate=0.6, steps=6, lot_size=20.0, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, method="dp-sgd",
        accountant="rdp", seed=4,
    )  # fmt: skip
    return fodp.Plan(**{**numbers, **changes})


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def run(pictures, flat=False, copies=3, **options):
    pictures = pictures.flatten(1) if flat else pictures
    dataset = TensorDataset(pictures, torch.zeros(len(pictures), dtype=torch.int64))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(128, 2))
    return fodp.Trainer(
        model, losses, dataset, plan(), augment=ImageAugmentation(SHAPE, 2, True), copies=copies, **options
    )


def by_row(trainer, step):
    """The pictures of a step's lot by (record, copy)."""
    lot = trainer.session.lots.draw(step)
    batch = trainer.source.chunks(lot, HERE, None, False).batch
    batch = take(batch, torch.arange(len(batch.records)))
    return {int(number): picture.reshape(SHAPE) for number, picture in zip(batch.records, batch.rows[0], strict=True)}


def test_a_crop_is_a_window_of_the_reflected_image_and_all_windows_come_up():
    torch.manual_seed(0)
    one = images(1)
    wide = F.pad(one, [1] * 4, mode="reflect")[0]
    windows = [wide[:, i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
    found = [
        [torch.equal(cut, window) for window in windows].index(True) for cut in random_crop(one.repeat(400, 1, 1, 1), 1)
    ]
    assert set(found) == set(range(9))
    assert min(map(found.count, range(9))) > 15  # 44 expected


def test_a_flip_mirrors_left_and_right_of_about_one_half():
    torch.manual_seed(0)
    one = images(1)
    found = random_flip(one.repeat(400, 1, 1, 1))
    mirrored = [torch.equal(picture, one[0].flip(-1)) for picture in found]
    assert 150 < sum(mirrored) < 250
    assert all(m or torch.equal(picture, one[0]) for m, picture in zip(mirrored, found, strict=True))


def test_flattened_images_are_augmented_as_whole_ones_and_labels_stay():
    labels = torch.arange(ROWS)
    augment, pictures = ImageAugmentation(SHAPE, 1, True), images()
    torch.manual_seed(1)
    whole = augment((pictures, labels))
    torch.manual_seed(1)
    flat = augment([pictures.flatten(1), labels])
    assert isinstance(whole, tuple)
    assert isinstance(flat, list)
    assert torch.equal(whole[0].flatten(1), flat[0])
    assert whole[1] is labels
    assert torch.equal(pictures, images())  # the data itself is as it was


@pytest.mark.rule(18)
@pytest.mark.parametrize("flat", [False, True])
def test_a_record_has_the_same_pictures_whoever_else_is_in_the_lot(flat):
    """By (key, step, record, copy): without another record, in micro-batches, and in another process of this key."""
    pictures = images()
    for step in (0, 3):
        whole = by_row(run(pictures, flat), step)
        for other in (run(pictures, flat, microbatch=4), run(pictures[:-1], flat)):
            found = by_row(other, step)
            assert len(found) >= len(whole) - 3
            assert all(torch.equal(picture, whole[number]) for number, picture in found.items())
    again = by_row(run(pictures, flat), 1)
    both = [number for number in again if number in whole]
    assert not all(torch.equal(again[number], whole[number]) for number in both)  # another step, other pictures
    copies = [[whole[number + copy] for copy in range(3)] for number in whole if number % 3 == 0]
    assert any(not torch.equal(first, second) for first, second, _ in copies)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_fast_path_is_taken(name, monkeypatch):
    """A whole lot at once: no warning, no record alone but those of the looks."""
    sizes = []
    card = CARDS["cifar10"]
    pictures = torch.randn(40, 3 * 32 * 32)
    dataset = TensorDataset(pictures, torch.zeros(40, dtype=torch.int64))
    augment = augmentation(name, card)

    def counted(batch):
        sizes.append(len(batch[0]))
        return augment(batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training = fodp.Trainer(nn.Linear(3 * 32 * 32, 2), losses, dataset, plan(steps=12), augment=counted, copies=2)
        training.fit()
    assert training.source.augmentation._site.alone is False
    assert sum(size > 20 for size in sizes) >= 12
    assert len(sizes) < 60


def test_a_crop_that_draws_row_after_row_does_not_take_it():
    """The usual way of writing it: one record more shifts what all later ones draw, so it gets one at a time."""

    def together(batch):
        wide = F.pad(batch[0], [1] * 4, mode="reflect")
        downs = [int(torch.randint(3, (1,))) for _ in wide]
        return torch.stack([row[:, d : d + 8, 1:9] for row, d in zip(wide, downs, strict=True)]), batch[1]

    dataset = TensorDataset(images(), torch.zeros(ROWS, dtype=torch.int64))
    training = fodp.Trainer(nn.Sequential(nn.Flatten(), nn.Linear(128, 2)), losses, dataset, plan(), augment=together)
    training.fit()
    assert training.source.augmentation._site.alone is True


def test_the_card_decides_what_is_standard():
    assert augmentation("standard", CARDS["cifar10"]) == ImageAugmentation((3, 32, 32), 4, True)
    assert augmentation("standard", CARDS["svhn"]) == ImageAugmentation((3, 32, 32), 4, False)
    assert augmentation("standard", CARDS["digits"]) == ImageAugmentation((1, 8, 8), 1, False)
    assert augmentation("crop+flip", CARDS["svhn"]) == ImageAugmentation((3, 32, 32), 4, True)
    assert augmentation("flip", CARDS["cifar100"]) == ImageAugmentation((3, 32, 32), 0, True)
    with pytest.raises(ConfigurationError, match="padding must be at most 7"):
        ImageAugmentation((1, 8, 8), 8)
    with pytest.raises(ConfigurationError, match="channels, height, width"):
        ImageAugmentation((5,))


def test_the_command_line(tmp_path, capsys):
    words = ["train", "--epochs", "1", "--quiet", "--noise-multiplier", "1", "--accountant", "rdp", "--seed", "0"]
    out = tmp_path / "run"
    assert main([*words, "--augment", "standard", "--copies", "2", "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["augment"], config["copies"]) == ("standard", 2)
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0
    capsys.readouterr()
    for more, says in (
        (["--copies", "2"], "add --augment standard"),
        (["--augment", "blur"], "augment must be one of"),
        (["--augment", "crop", "--copies", "0"], "--copies must be a whole number of at least 1"),
    ):
        assert main([*words, *more, "--out", str(tmp_path / "no")]) == 2
        assert says in capsys.readouterr().err
