"""Public features for private training: what is computed of each record by itself, with public numbers alone.

`features` computes and keeps what a frozen module makes of a data set. `Scattering`, `HashedText` and `RandomFourier`
need no weights. `PerExample` and `Grouped` normalise each record by itself. See docs/features.md.
"""

from fodp.features.backbone import features, fingerprint
from fodp.features.efficientnet_lite import efficientnet_lite0
from fodp.features.fourier import RandomFourier
from fodp.features.images import Prepared
from fodp.features.normal import Grouped, PerExample
from fodp.features.scattering import Scattering
from fodp.features.text import HashedText

__all__ = [
    "Grouped",
    "HashedText",
    "PerExample",
    "Prepared",
    "RandomFourier",
    "Scattering",
    "efficientnet_lite0",
    "features",
    "fingerprint",
]
