"""Coming from Opacus: a set-up goes on with fodp's engine and methods, its spending carried along.

It takes the extra `opacus`; docs/opacus.md is its page, with a table of their calls and ours.
"""

import uuid
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from fodp.support.extras import need

need("opacus", "fodp.integrations.opacus", extra="opacus")

import torch  # noqa: E402 - said in one line if Opacus is missing
from opacus import PrivacyEngine  # noqa: E402
from opacus.accountants import IAccountant  # noqa: E402
from opacus.optimizers import DPOptimizer  # noqa: E402
from opacus.utils.uniform_sampler import UniformWithReplacementSampler  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, default_collate  # noqa: E402

from fodp import accounting  # noqa: E402
from fodp.accounting import Event, Phase, truncate  # noqa: E402
from fodp.errors import ConfigurationError  # noqa: E402
from fodp.integrations._privates import opacus as privates  # noqa: E402
from fodp.ledger import Ledger  # noqa: E402
from fodp.own_loop import PrivateLoader, make_private  # noqa: E402
from fodp.plan import Plan  # noqa: E402
from fodp.ranks import refuse_group  # noqa: E402
from fodp.state.ledgers import fingerprint_of, refuse_other_ledger  # noqa: E402
from fodp.support import checks  # noqa: E402
from fodp.support.checks import shown  # noqa: E402


class _Charge(NamedTuple):
    """Steps of an accountant's history, in their order, that are in a ledger already."""

    ledger: str  # its identity, not its path: another file may lie there now
    dataset: str | None
    run: str
    phases: tuple[Phase, ...]


# What is carried twice would be paid twice. The ledger is asked each time whether it still has these charges.
_carried: "weakref.WeakKeyDictionary[IAccountant, list[_Charge]]" = weakref.WeakKeyDictionary()


class Continued(NamedTuple):
    """A set-up that goes on: the first three are what `fodp.make_private` returns."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: PrivateLoader
    plan: Plan
    history: tuple[Phase, ...]

    def total_epsilon(self, delta: float | None = None) -> float:
        """ε of everything: Opacus's steps and the whole plan after them."""
        phases = (*self.history, *self.plan.events())
        return accounting.epsilon_of(phases, self.plan.delta if delta is None else delta, self.plan.accountant)


def from_opacus(
    source: PrivacyEngine | DPOptimizer,
    *,
    model: nn.Module,
    data_loader: DataLoader[Any],
    steps: int,
    delta: float,
    optimizer: DPOptimizer | None = None,
    sampling_rate: float | None = None,
    lot_size: float | None = None,
    method: str | None = None,
    params: Mapping[str, Any] | None = None,
    ledger: Ledger | None = None,
    **public: Any,
) -> Continued:
    """Go on from where Opacus is, with a method of one gradient per step; without a `method`, with the recipe.

    `source` is the `PrivacyEngine` (then give its `optimizer`) or the `DPOptimizer` itself; `model` and `data_loader`
    are those that `PrivacyEngine.make_private` returned. Clip norm, noise multiplier and loss reduction are taken from
    the optimizer, whose momentum goes on; the model comes back without Opacus's hooks. The accountant's history of
    (σ, q, steps) is charged to the `ledger` first, once for a ledger and the name of its data: to another ledger, or
    under another name, it is charged again.

    Opacus computes `sample_rate` and `expected_batch_size` from the size of the data. Declare public ones with
    `sampling_rate` and `lot_size`; where they are missing Opacus's are used, with a warning. `public` are other fields
    of a plan, such as `noise_multiplier`, `accountant` or `seed`.
    """
    refuse_other_ledger(ledger)
    dp_optimizer, accountant = _parts_of(source, optimizer)
    past = history(accountant)
    _refuse_shuffled(data_loader)
    if sampling_rate is None or lot_size is None:
        checks.warn(
            "Opacus has computed sample_rate and expected_batch_size from the size of the private data, and whether "
            "one record is there is what privacy hides: declare sampling_rate= and lot_size= as public numbers"
        )
    of_opacus = {
        "sampling_rate": _rate(data_loader) if sampling_rate is None else sampling_rate,
        "lot_size": float(dp_optimizer.expected_batch_size) if lot_size is None else lot_size,
        "noise_multiplier": dp_optimizer.noise_multiplier,
        "clip_norm": dp_optimizer.max_grad_norm,
    }
    chosen: dict[str, Any] = {"steps": steps, "delta": delta} | ({} if method is None else {"method": method})
    chosen |= {} if params is None else {"params": params}
    plan = Plan(**{**of_opacus, **chosen, **public})
    refuse_group("from_opacus")
    if ledger is not None:
        # First: what it refuses leaves Opacus's set-up as it is.
        _carry(accountant, past, ledger, fingerprint_of(data_loader.dataset))
    private = make_private(
        privates.without_hooks(model, dp_optimizer),
        dp_optimizer.original_optimizer,
        data_loader.dataset,
        plan,
        loss_reduction=dp_optimizer.loss_reduction,
        collate_fn=_collate_of(data_loader),
        ledger=ledger,
    )
    return Continued(*private, plan, past)


def history(source: PrivacyEngine | DPOptimizer | IAccountant) -> tuple[Phase, ...]:
    """What Opacus's accountant has seen, (σ, q, steps) by (σ, q, steps), as events of ours: for any accountant of ours.

    Also of its GDP accountant, whose own ε is an approximation from below.
    """
    accountant = source
    if not isinstance(source, IAccountant):
        accountant = source.accountant if isinstance(source, PrivacyEngine) else _accountant_of(source)
    phases = []
    for entry in accountant.history:
        noise, rate, steps = entry
        if not noise > 0:
            raise ConfigurationError(
                f"Opacus has taken {steps} steps with noise_multiplier {shown(noise)}: they are not private, and no "
                "ledger can hold them. Begin with a fresh model"
            )
        phases.append(Phase((Event(min(1.0, float(rate)), float(noise)),), int(steps)))
    return tuple(phases)


def _parts_of(source: Any, optimizer: DPOptimizer | None) -> tuple[DPOptimizer, IAccountant]:
    if isinstance(source, PrivacyEngine):
        if optimizer is None:
            raise ConfigurationError("with a PrivacyEngine give optimizer=, the one that its make_private returned")
        found, accountant = optimizer, source.accountant
    elif isinstance(source, DPOptimizer):
        found, accountant = source, _accountant_of(source)
    else:
        raise ConfigurationError(
            f"from_opacus takes a PrivacyEngine or the DPOptimizer that its make_private returned, got {shown(source)}"
        )
    if type(found) is not DPOptimizer:
        raise ConfigurationError(
            f"{type(found).__name__} clips or divides otherwise than one sum with one clip norm (per layer, "
            "adaptively, over processes or with ghost clipping): set up Opacus with clipping='flat' and "
            "grad_sample_mode='hooks', or begin with fodp.make_private"
        )
    return found, accountant


def _accountant_of(optimizer: DPOptimizer) -> IAccountant:
    """The one whose hook counts the optimizer's steps."""
    found = privates.accountant_of(optimizer)
    if found is None:
        raise ConfigurationError(
            "no accountant counts this optimizer's steps: give from_opacus the PrivacyEngine instead"
        )
    return found


def _refuse_shuffled(loader: DataLoader[Any]) -> None:
    if not isinstance(getattr(loader, "batch_sampler", None), UniformWithReplacementSampler):
        raise ConfigurationError(
            "this loader does not draw Poisson lots, as Opacus's accountant assumes (poisson_sampling=False, or the "
            "loader from before make_private): the epsilon that it has counted does not hold. Give the loader that "
            "make_private returned"
        )


def _rate(loader: DataLoader[Any]) -> float:
    return float(loader.batch_sampler.sample_rate)  # type: ignore[union-attr]


def _collate_of(loader: DataLoader[Any]) -> Any:
    """The owner's collate_fn, from inside of what Opacus wraps around it for empty lots; None for PyTorch's own."""
    given = getattr(loader.collate_fn, "wrapped_collator_fn", loader.collate_fn)
    return None if given is default_collate else given


def _carry(accountant: IAccountant, past: tuple[Phase, ...], ledger: Ledger, fingerprint: str | None) -> None:
    """Charge the history to the ledger's data set, but for what this very ledger has of it there."""
    charges = _carried.setdefault(accountant, [])
    mine = [charge for charge in charges if (charge.ledger, charge.dataset) == (ledger.identity, ledger.dataset)]
    done = tuple(phase for charge in mine for phase in charge.phases)
    taken = sum(phase.steps for phase in done)
    # Another history may have been loaded since, or the ledger have forgotten: then all of it is charged.
    rest = past
    if _same(_first(past, taken), done) and all(ledger.has_charged(charge.run, charge.phases) for charge in mine):
        rest = _minus(past, taken)
    else:
        charges[:] = [charge for charge in charges if charge not in mine]
    if not rest:
        return
    total = sum(phase.steps for phase in rest)
    run = f"opacus-{uuid.uuid4().hex}"
    account = ledger.open(run, rest, total, about={"method": "opacus"}, fingerprint=fingerprint)
    while account.charged < total and account.covers(account.charged):
        pass
    account.settle(total)
    charges.append(_Charge(ledger.identity, ledger.dataset, run, rest))


def _first(phases: tuple[Phase, ...], steps: int) -> tuple[Phase, ...]:
    """The first steps of a history; all of it where it is shorter."""
    return truncate(phases, min(steps, sum(phase.steps for phase in phases)))


def _same(one: tuple[Phase, ...], other: tuple[Phase, ...]) -> bool:
    """The same events in the same order, however they were cut into phases."""
    return _joined(one) == _joined(other)


def _joined(phases: tuple[Phase, ...]) -> list[tuple[Event, int]]:
    joined: list[tuple[Event, int]] = []
    for phase in phases:
        (event,) = phase.events
        before = joined.pop()[1] if joined and joined[-1][0] == event else 0
        joined.append((event, before + phase.steps))
    return joined


def _minus(phases: tuple[Phase, ...], steps: int) -> tuple[Phase, ...]:
    """The phases without their first steps."""
    rest = []
    for phase in phases:
        taken = min(steps, phase.steps)
        steps -= taken
        if phase.steps > taken:
            rest.append(Phase(phase.events, phase.steps - taken))
    return tuple(rest)
