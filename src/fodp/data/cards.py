"""Public cards: every number about a data set that a plan may use. Nothing here ever looks at the data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Card:
    """The public numbers of a data set.

    `train_size` is the size to assume; sampling rate and lot size follow from it and never from the number
    of examples actually present, because whether one example is there is exactly what privacy hides.
    A pixel p becomes `(p / scale - mean) / std`, with one constant per channel or one for all.
    """

    name: str
    description: str
    source: str  # where it comes from, and on what terms
    train_size: int
    test_size: int
    classes: int
    shape: tuple[int, ...]  # of one example, channels first, before flattening
    sampling_rate: float  # default q
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    constants: str  # where scale, mean and std come from
    schema: Mapping[str, Any] | None = None  # of a table: its public columns, and which of them is the target
    # Of images: whether a mirror image is of the same class. Not shown: records are known by the cards as they were.
    mirrored: bool = field(default=False, repr=False)

    @property
    def is_regression(self) -> bool:
        """Whether a number is predicted, scaled by its public bounds to [-1, 1], and not a class."""
        return self.target_bounds is not None

    @property
    def target_bounds(self) -> tuple[float, float] | None:
        """The public bounds of a number that is predicted."""
        bounds = None if self.schema is None else self.schema["columns"][self.schema["target"]].get("bounds")
        return None if bounds is None else (float(bounds[0]), float(bounds[1]))

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """What the classes of a table are called; None where they are numbers."""
        values = None if self.schema is None else self.schema["columns"][self.schema["target"]].get("values")
        return None if values is None else tuple(values)

    @property
    def is_uint8(self) -> bool:
        """Whether records are pixels of whole numbers, as stored; of all others the values are used as they stand."""
        return self.scale != 1.0

    @property
    def lot_size(self) -> int:
        """Default divisor L: the expected lot q·N, as a whole number."""
        return max(1, round(self.sampling_rate * self.train_size))

    @property
    def features(self) -> int:
        """Length of one flattened example."""
        product = 1
        for side in self.shape:
            product *= side
        return product


_PUBLISHED = (
    "per-channel mean and standard deviation as the literature prints them for the official training split; "
    "typed in here as common knowledge about a public data set, never computed at run time"
)
_RANGE = "the pixel range alone, mapped to [-1, 1]; no data was looked at"

CARDS = {
    card.name: card
    for card in (
        Card(
            name="digits",
            description="1,797 handwritten digits of 8x8 pixels, embedded in scikit-learn; works offline",
            source="UCI optdigits test set (Alpaydin and Kaynak 1998, CC BY 4.0), as shipped by scikit-learn",
            train_size=1437,
            test_size=360,
            classes=10,
            shape=(1, 8, 8),
            sampling_rate=0.1,
            scale=16.0,
            mean=(0.5,),
            std=(0.5,),
            constants=_RANGE,
        ),
        Card(
            name="cifar10",
            description="32x32 colour photographs of 10 classes; the paper's 5,000 train and 2,000 test",
            source="Krizhevsky 2009, cs.toronto.edu/~kriz/cifar.html; no licence stated, cite the report",
            train_size=5000,
            test_size=2000,
            classes=10,
            shape=(3, 32, 32),
            sampling_rate=0.04,
            scale=255.0,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            constants=_PUBLISHED,
            mirrored=True,
        ),
        Card(
            name="cifar100",
            description="32x32 colour photographs, 100 fine labels; the paper's 5,000 train and 2,000 test",
            source="Krizhevsky 2009, cs.toronto.edu/~kriz/cifar.html; no licence stated, cite the report",
            train_size=5000,
            test_size=2000,
            classes=100,
            shape=(3, 32, 32),
            sampling_rate=0.04,
            scale=255.0,
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            constants=_PUBLISHED,
            mirrored=True,
        ),
        Card(
            name="svhn",
            description="32x32 colour crops of house-number digits; the paper's 5,000 train and 2,000 test",
            source="Netzer et al. 2011, ufldl.stanford.edu/housenumbers; for non-commercial use only",
            train_size=5000,
            test_size=2000,
            classes=10,
            shape=(3, 32, 32),
            sampling_rate=0.04,
            scale=255.0,
            mean=(0.4377, 0.4438, 0.4728),
            std=(0.1980, 0.2010, 0.1970),
            constants=_PUBLISHED,
        ),
    )
}


_CONSTANTS = {  # of one's own data: whether it is uint8, whether it is a table
    (True, False): _RANGE,
    (False, False): "floating-point values are used as they stand",
    (False, True): "the public bounds and values of the schema; no data was looked at",
}


def default_rate(size: int) -> float:
    """About 256 examples (or people) a lot, but never more than a tenth of a small set."""
    return min(0.1, 256 / size)


def own_card(
    name: str,
    *,
    assume_size: int,
    test_size: int,
    classes: int,
    shape: tuple[int, ...],
    is_uint8: bool,
    schema: Mapping[str, Any] | None = None,
) -> Card:
    """The card of a user's own data: public numbers as stated, and defaults that depend on those alone."""
    return Card(
        name=name,
        description=f"your own data, {name}",
        source="yours",
        train_size=assume_size,
        test_size=test_size,
        classes=classes,
        shape=shape,
        sampling_rate=default_rate(assume_size),
        scale=255.0 if is_uint8 else 1.0,
        mean=(0.5,) if is_uint8 else (0.0,),
        std=(0.5,) if is_uint8 else (1.0,),
        constants=_CONSTANTS[is_uint8, schema is not None],
        schema=schema,
    )
