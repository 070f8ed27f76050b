"""Public cards of the full data sets. Nothing here ever looks at the data.

They are beside `CARDS`, not in it: the laboratory's recorded results are known by the cards in `CARDS` as they are.
"""

from fodp.data.adult import SCHEMA
from fodp.data.cards import CARDS, Card
from fodp.data.schema import read_schema

BUCKETS = 2048  # numbers that a text becomes
ADULT_WIDTH = sum(column.width for column in read_schema(SCHEMA).split("income")[0])

_HASHED = f"words and pairs of words, hashed into {BUCKETS} numbers of unit norm together; no vocabulary is learnt"
_BYTES = "the range of a byte alone, mapped to [-1, 1]; no data was looked at"


def _pixels(name: str, description: str, source: str) -> Card:
    return Card(
        name=name,
        description=description,
        source=source,
        train_size=60_000,
        test_size=10_000,
        classes=10,
        shape=(1, 28, 28),
        sampling_rate=1 / 60,
        scale=255.0,
        mean=(0.5,),
        std=(0.5,),
        constants=_BYTES,
    )


def _numbers(name: str, description: str, source: str, sizes: tuple[int, int], width: int, constants: str) -> Card:
    return Card(
        name=name,
        description=description,
        source=source,
        train_size=sizes[0],
        test_size=sizes[1],
        classes=2,
        shape=(width,),
        sampling_rate=1000 / sizes[0],
        scale=1.0,
        mean=(0.0,),
        std=(1.0,),
        constants=constants,
    )


MORE_CARDS = {
    card.name: card
    for card in (
        _pixels(
            "mnist",
            "28x28 grey handwritten digits",
            "LeCun, Cortes and Burges 1998 (yann.lecun.com/exdb/mnist), from PyTorch's mirror; CC BY-SA 3.0",
        ),
        _pixels(
            "fashion-mnist",
            "28x28 grey pictures of clothes, 10 classes",
            "Xiao, Rasul and Vollgraf 2017 (github.com/zalandoresearch/fashion-mnist), MIT licence",
        ),
        Card(
            name="cifar10-full",
            description="32x32 colour photographs of 10 classes; all 50,000 train and 10,000 test",
            source=CARDS["cifar10"].source,
            train_size=50_000,
            test_size=10_000,
            classes=10,
            shape=(3, 32, 32),
            sampling_rate=0.02,
            scale=255.0,
            mean=CARDS["cifar10"].mean,
            std=CARDS["cifar10"].std,
            constants=CARDS["cifar10"].constants,
            mirrored=True,
        ),
        _numbers(
            "imdb",
            "film reviews, negative (0) or positive (1)",
            "Maas et al. 2011 (ai.stanford.edu/~amaas/data/sentiment); no licence stated, cite the paper",
            (25_000, 25_000),
            BUCKETS,
            _HASHED,
        ),
        _numbers(
            "sst2",
            "phrases and sentences of film reviews, negative (0) or positive (1); GLUE's train and dev",
            "Socher et al. 2013 in GLUE's split (gluebenchmark.com); no licence stated, cite the paper",
            (67_349, 872),
            BUCKETS,
            _HASHED,
        ),
        _numbers(
            "adult",
            "census records: income above (1) or at most (0) 50,000 dollars",
            "Becker and Kohavi 1996, UCI (archive.ics.uci.edu/dataset/2/adult), CC BY 4.0",
            (32_561, 16_281),
            ADULT_WIDTH,
            "bounds and values of the public schema in fodp.data.adult; no data was looked at",
        ),
    )
}


def known_cards() -> dict[str, Card]:
    """All data sets that `load` knows by name.

    Example:
        >>> known_cards()["mnist"].lot_size
        1000
    """
    return {**CARDS, **MORE_CARDS}
