"""The table of private optimizers: one row each. Those with a step of their own have a file each.

The table drives the command line's choices, the common tests, the docs page and the benchmark rows.
"""

from fodp.errors import ConfigurationError
from fodp.methods.adp_adamw import ADPAdamW
from fodp.methods.base import Method
from fodp.methods.disk import DiSK
from fodp.methods.dp_adam_ac import DPAdamAC
from fodp.methods.dp_is import DPIS
from fodp.methods.dp_sam import DPSAM
from fodp.methods.dp_sat import DPSAT
from fodp.methods.dp_sgd import DPSGD
from fodp.methods.fo_ablations import FOExponential, FOUniform
from fodp.methods.fo_dp_sgd import FODPSGD
from fodp.methods.fo_noise import FONoise
from fodp.methods.post_fm import PostFM
from fodp.methods.presets import BlockDPSGD, Doppler, DPAdam, DPAdamBC, DPAdamW
from fodp.methods.sa_dpsgd import SADPSGD
from fodp.support import checks

_IN_ORDER: tuple[type[Method], ...] = (
    DPSGD, FODPSGD, FOUniform, FOExponential, PostFM, DPAdam, DPAdamBC, DPAdamW, ADPAdamW, DPIS, DPSAM, DPSAT, DPAdamAC,
    SADPSGD, Doppler, DiSK, BlockDPSGD, FONoise,
)  # fmt: skip
METHODS: dict[str, type[Method]] = {method.name: method for method in _IN_ORDER}


def register(method: type[Method]) -> type[Method]:
    """Add a method of your own to the table, for every door; usable as a class decorator.

    Args:
        method: a class that derives from `Method` and has a name of its own.

    Returns:
        The class.

    Raises:
        ConfigurationError: the name is in the table already.

    Example:
        >>> import fodp
        >>> from fodp.methods.dp_sgd import DPSGD
        >>> @fodp.register
        ... class Mine(DPSGD):
        ...     name, summary = "mine", "DP-SGD under another name."
        >>> fodp.Plan(public_size=1000, batch=50, steps=9, noise_multiplier=1.0, method="mine").method
        'mine'
        >>> _ = fodp.methods.METHODS.pop("mine")
    """
    if method.name in METHODS:
        raise ConfigurationError(f"a method named {method.name!r} is in the table already: choose another name")
    METHODS[method.name] = method
    return method


def find(name: str) -> type[Method]:
    """The method of this name.

    Args:
        name: its name, as in `fodp methods`.

    Returns:
        The class.

    Raises:
        ConfigurationError: no method has this name; the message lists the names.

    Example:
        >>> find("dp-sgd").summary
        'The canonical baseline; momentum optional.'
    """
    return METHODS[checks.one_of("method", name, METHODS)]


__all__ = ["METHODS", "Method", "find", "register"]
