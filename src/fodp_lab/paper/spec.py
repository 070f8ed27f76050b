"""One training run, completely described: what is computed, and the key under which it is remembered."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from fodp.errors import PrivacyError
from fodp.options.table import known_names
from fodp.plan import Plan

_ALWAYS: Mapping[str, Any] = dict(
    update="sgd", momentum=0.0, beta1=0.9, beta2=0.999, adam_eps=1e-8, weight_decay=0.0, bc_floor=0.03, filter="none",
    filter_a=(-0.9,), filter_b=(0.1,), filter_beta=0.9, quantile=None, count_noise=None, clip_rate=0.2, clip_min=1e-3,
    clip_max=1e3,
)  # fmt: skip
NON_PRIVATE = "none"  # plain SGD on the same lots: the ceiling, no privacy at all


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run. The defaults are the paper's protocol; equal specs are the same run and computed once.

    `noise_multiplier` is used as it stands unless `target_epsilon` is given, which calibrates it for
    `plan_steps` steps. A run may stop before the plan ends: that is how a search tries many settings with the
    noise of the full run. `scored_on` is "test" or, for choosing settings, "validation" (`train[6000:]`).
    """

    dataset: str
    method: str
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    plan_steps: int = 6250
    steps: int = 6250
    sampling_rate: float = 0.04
    lot_size: float = 200.0
    clip_norm: float = 1.0
    noise_multiplier: float | None = 1.1
    target_epsilon: float | None = None
    delta: float = 1e-5
    accountant: str = "rdp-classic"
    model: str = "mlp"
    scored_on: str = "test"
    score_every: int = 25  # steps: one epoch
    variant: str = ""  # one of `variants.VARIANTS` or `AUGMENTED`: one thing done otherwise

    def __post_init__(self) -> None:
        if self.target_epsilon is not None:
            object.__setattr__(self, "noise_multiplier", None)
        if self.scored_on not in ("test", "validation"):
            raise PrivacyError(f"scored_on must be test or validation, got {self.scored_on!r}")
        object.__setattr__(self, "params", dict(sorted(self.params.items())))

    def to_dict(self) -> dict[str, Any]:
        """All fields, as they go into the record; `variant` came later and is left out where there is none."""
        fields = asdict(self)
        if not self.variant:
            del fields["variant"]
        return fields

    @property
    def key(self) -> str:
        """Names the run among all others."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_(self, **changes: Any) -> "RunSpec":
        """The same run but for these fields; `params` are merged."""
        if "params" in changes:
            changes["params"] = {**self.params, **changes["params"]}
        return replace(self, **changes)

    def plan(self) -> Plan:
        """The plan of the run, its noise calibrated where a target is given."""
        words: dict[str, Any] = dict(
            sampling_rate=self.sampling_rate,
            steps=self.plan_steps,
            lot_size=self.lot_size,
            clip_norm=self.clip_norm,
            delta=self.delta,
            method=self.method,
            params=dict(self.params),
            accountant=self.accountant,
            seed=self.seed,
        )
        if self.target_epsilon is None:
            return Plan(noise_multiplier=self.noise_multiplier or 0.0, **words)  # 0 is refused by the plan
        shared = {**words, "params": _without_rate(self.params), "seed": 0}
        found = _calibrated(json.dumps(shared, sort_keys=True), self.target_epsilon)
        # The whole plan and not its noise alone: calibration also chooses what was left to it, such as bands.
        rate = {name: value for name, value in self.params.items() if name == "lr"}
        return replace(found, params={**found.params, **rate}, seed=self.seed)


def recorded(plan: Plan) -> dict[str, Any]:
    """A plan's parameters as records list them: those of the first records always, what came later where it is used."""
    usual = {**known_names(), **plan.algorithm.defaults}
    used = {n: v for n, v in plan.params.items() if n not in usual or n in _ALWAYS or n == "lr" or v != usual[n]}
    if plan.method == "block-dp-sgd":  # which had its width before there were shapes
        used["width"] = plan.params["width"]
    return {**_ALWAYS, **used}


def _without_rate(params: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate changes no event, so runs that differ in it alone share one calibration."""
    return {name: value for name, value in params.items() if name != "lr"}


@cache
def _calibrated(words: str, target_epsilon: float) -> Plan:
    return Plan.calibrated(target_epsilon=target_epsilon, **json.loads(words))
