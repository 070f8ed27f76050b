"""What releases cost: events, ε(δ) of a plan, the noise that meets a target ε, budgets over several runs.

Nothing here imports torch, and SciPy, which takes a while to load, only when an ε is asked for.
"""

from fodp.accounting.composition import (
    ACCOUNTANTS,
    Tally,
    calibrate,
    calibrate_scale,
    epsilon,
    epsilon_curve,
    epsilon_for_group,
    epsilon_of,
    epsilon_replace_one,
    rdp_curve,
)
from fodp.accounting.events import (
    MOST_STEPS,
    Event,
    Phase,
    after,
    joint,
    phases_from_data,
    phases_to_data,
    rounded_up,
    truncate,
)
from fodp.accounting.running import RunningEpsilon

__all__ = [
    "ACCOUNTANTS", "MOST_STEPS", "Event", "Phase", "RunningEpsilon", "Tally", "after", "calibrate", "calibrate_scale",
    "epsilon", "epsilon_curve", "epsilon_for_group", "epsilon_of", "epsilon_replace_one", "joint", "phases_from_data",
    "phases_to_data", "rdp_curve", "rounded_up", "truncate",
]  # fmt: skip
