"""Sessions as the Trainer and `make_private` make them."""

from fodp import Trainer


def session(model, loss_fn, dataset, plan, **options):
    """What carries the plan out on this model and data."""
    return Trainer(model, loss_fn, dataset, plan, **options).session
