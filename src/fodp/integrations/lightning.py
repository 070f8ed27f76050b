"""Lightning: an ordinary LightningModule trains privately with `Trainer(callbacks=[PrivateTraining(plan)])`.

A thin door to `fodp.make_private`: Lightning's loop stays Lightning's; batches become the plan's Poisson lots and the
optimizer's step a private release. It takes the extra `lightning`; docs/lightning.md is its page.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fodp.support.extras import need

need("lightning", "fodp.integrations.lightning", extra="lightning")

import lightning.pytorch as pl  # noqa: E402 - said in one line if it is missing
from lightning.pytorch.callbacks import (  # noqa: E402
    BatchSizeFinder,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ThroughputMonitor,
)
from lightning.pytorch.plugins.precision import Precision  # noqa: E402
from lightning.pytorch.utilities.combined_loader import CombinedLoader  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate  # noqa: E402

from fodp.accounting import RunningEpsilon  # noqa: E402
from fodp.errors import ConfigurationError  # noqa: E402
from fodp.identity.private_data import refuse_private  # noqa: E402
from fodp.integrations._privates import lightning as privates  # noqa: E402
from fodp.ledger import Ledger  # noqa: E402
from fodp.options import conflicts  # noqa: E402
from fodp.own_loop import PrivateLoader, make_private  # noqa: E402
from fodp.plan import Plan  # noqa: E402
from fodp.ranks import refuse_group  # noqa: E402
from fodp.sources.beside import KeptModule  # noqa: E402
from fodp.state.fitting import refuse_plateau  # noqa: E402
from fodp.state.ledgers import refuse_other_ledger  # noqa: E402
from fodp.state.published import privacy_card, stated_epsilon  # noqa: E402
from fodp.support import checks  # noqa: E402
from fodp.support.words import in_our_words  # noqa: E402

_SHOWN = 100  # values of ε that are worked out for the progress bar, at most
_FLOAT32 = 1 + 2.0**-22  # Lightning keeps float32, which must not round ε down
_EPOCHS_IF_NONE_ARE_SAID = 1000  # by Lightning
_SEARCHES = (BatchSizeFinder, LearningRateFinder)
_OWN_STEPS = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")

# What of a Trainer contradicts a plan: its name, whether it does, and what to do. docs/lightning.md has the same rows.
_REFUSED: tuple[tuple[str, Callable[[pl.Trainer], bool], str], ...] = (
    (
        "devices",
        lambda trainer: trainer.world_size > 1 or trainer.num_devices > 1,
        "private training over several devices is not built for Lightning: use one",
    ),
    (
        "precision",
        lambda trainer: type(trainer.precision_plugin) is not Precision or trainer.precision != "32-true",
        "a rescaled or rounded loss changes what one example weighs: leave it at 32-true",
    ),
    (
        "accumulate_grad_batches",
        lambda trainer: (
            trainer.accumulate_grad_batches != 1
            or any(type(c) is GradientAccumulationScheduler and c.going_to_accumulate_grad_batches()
                   for c in trainer.callbacks)
        ),
        "one lot is one step, however many examples were drawn: leave it at 1 and raise sampling_rate in the plan",
    ),
    (
        "callbacks",
        lambda trainer: any(isinstance(c, ThroughputMonitor | DeviceStatsMonitor) for c in trainer.callbacks),
        "samples, memory and seconds of a step tell how large its lot was: leave monitors of them out",
    ),
    (
        "gradient_clip_val",
        lambda trainer: bool(trainer.gradient_clip_val),
        "each example's gradient is clipped to the plan's clip_norm: leave it out",
    ),
    (
        "fast_dev_run",
        lambda trainer: bool(trainer.fast_dev_run),
        "a trial run on private data spends epsilon: try a plan of few steps on made-up data",
    ),
    (
        "limit_train_batches",
        lambda trainer: trainer.limit_train_batches != 1.0 or trainer.overfit_batches != 0.0,
        "the plan says how many lots there are: leave limit_train_batches and overfit_batches out",
    ),
    (
        "reload_dataloaders_every_n_epochs",
        lambda trainer: bool(trainer.reload_dataloaders_every_n_epochs),
        "a run is about one data set: leave it out",
    ),
    (
        "detect_anomaly",
        privates.detects_anomalies,
        "the mean loss of an empty lot is NaN, as it should be: leave it out",
    ),
    (
        "LearningRateFinder, BatchSizeFinder",
        lambda trainer: any(isinstance(c, _SEARCHES) or type(c).__name__ == "_LRCallback" for c in trainer.callbacks),
        "it trains on the private data again and looks at the training loss: choose on public data",
    ),
)  # fmt: skip


class PrivateTraining(pl.Callback):  # type: ignore[misc]
    """Makes a Trainer's fit private under a plan: `Trainer(callbacks=[PrivateTraining(plan)])`.

    The data set and `collate_fn` are those of the training loader; its batch size and order are not used, for the plan
    draws Poisson lots. An epoch is round(1/q) lots, and the fit ends after the plan's steps. A `training_step`
    returns one loss per example, or the `loss_reduction` ("mean" or "sum") of them; what it logs is private and
    dropped, with a line. Guarantee: that of `fodp.make_private`, for the module after the fit and its checkpoints.

    Args:
        plan: all public numbers of the run.
        ledger: a `fodp.Ledger` that writes spending down before it happens; a checkpoint of a secure run needs it.
        loss_reduction: "mean" over the lot's examples, or "sum".
        public_validation: say True if the validation data is public: its scores are shown as they are.
        public_logs: names that may be logged in training, such as a learning rate: nothing computed from a batch.
        public_state: how the names of buffers begin that may change in training, being made of the weights alone, such
            as those of a moving average: nothing computed from a batch. Any other change of state is refused.
    """

    @in_our_words("PrivateTraining")
    def __init__(
        self,
        plan: Plan,
        *,
        ledger: Ledger | None = None,
        loss_reduction: str = "mean",
        public_validation: bool = False,
        public_logs: Iterable[str] = (),
        public_state: Iterable[str] = (),
    ):
        if not isinstance(plan, Plan):
            raise ConfigurationError(f"PrivateTraining takes a fodp.Plan, got {checks.shown(plan)}")
        refuse_other_ledger(ledger)
        checks.one_of("loss_reduction", loss_reduction, ("mean", "sum"))
        checks.switch("public_validation", public_validation)
        self._public = {"epsilon", *_names("public_logs", public_logs)}
        self._public_state = _names("public_state", public_state)
        conflicts.refuse(plan.features, {"Lightning": True})
        self.plan, self.ledger, self.loss_reduction = plan, ledger, loss_reduction
        self.public_validation = public_validation
        self._followed: set[str] = set()  # names that schedulers follow
        self._dropped: set[str] = set()
        self._loader: PrivateLoader | None = None
        self._loaded: dict[str, Any] | None = None
        self._undo: list[Callable[[], None]] = []
        self._trained_on: Any = None
        self._running = RunningEpsilon(plan.events(), plan.delta, plan.accountant)
        self._block = max(1, plan.steps // _SHOWN)

    @property
    def steps(self) -> int:
        """How many of the plan's steps are used."""
        return 0 if self._loader is None else self._loader.step

    def epsilon(self) -> float:
        """The ε to publish if the run ends here: that of the whole plan for one that was stopped early."""
        return (
            stated_epsilon(self.plan, 0, self.plan.steps, None)
            if self._loader is None
            else self._loader.stated_epsilon()
        )

    def statement(self) -> str:
        """The guarantee of the run in plain English."""
        return self.plan.statement(epsilon=self.epsilon())

    def privacy_card(self) -> dict[str, Any]:
        """What may be published about the run's privacy if it ends here."""
        return privacy_card(self.plan, 0, self.plan.steps) if self._loader is None else self._loader.privacy_card()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what contradicts the plan, before any data is touched; the fit gets the plan's length."""
        if stage != "fit":
            return
        refuse_group("PrivateTraining")
        _refuse(trainer, pl_module)
        if trainer.enable_validation and not self.public_validation:
            raise ConfigurationError(
                "scores on the validation data are shown as they are: say PrivateTraining(..., public_validation=True) "
                "if that data is public; if it is a part of the private data, leave it out (limit_val_batches=0)"
            )
        self._set_length(trainer)
        self._undo.append(privates.set_precision(trainer, _PrivateStep(self._backward)))

    def _set_length(self, trainer: pl.Trainer) -> None:
        epochs = -(-self.plan.steps // self._epoch)
        if trainer.max_steps not in (-1, self.plan.steps):
            raise ConfigurationError(
                f"max_steps is {trainer.max_steps} and the plan has {self.plan.steps} steps, whose epsilon is stated: "
                "leave max_steps out, or make another plan"
            )
        if trainer.max_epochs not in (None, -1, _EPOCHS_IF_NONE_ARE_SAID, epochs):
            raise ConfigurationError(
                f"max_epochs is {trainer.max_epochs} and the plan has {self.plan.steps} steps, {epochs} epochs of "
                f"{self._epoch}: leave max_epochs out, or make another plan"
            )
        self._undo.append(privates.set_length(trainer, self.plan.steps))

    @property
    def _epoch(self) -> int:
        return max(1, round(1 / self.plan.sampling_rate))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the data set out of the training loader and make module and optimizer private."""
        if self.steps and self._loaded is None:
            raise ConfigurationError(
                f"this PrivateTraining has taken {self.steps} private steps already, and its epsilon is of one run: "
                "go on from a checkpoint (ckpt_path=), or make another one with the same ledger, which adds both up"
            )
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"configure_optimizers returns {len(trainer.optimizers)} optimizers: a plan drives one; give it all "
                "parameters, in groups if need be"
            )
        given = _training_loader(privates.training_loader(trainer))
        self._trained_on = given.dataset
        if trainer.enable_validation:
            self._refuse_private_rows("the validation data", privates.validation_loaders(trainer))
        collate = None if given.collate_fn is default_collate else given.collate_fn
        taken_up = self._loaded is not None
        _, _, self._loader = make_private(
            _model_of(pl_module),
            trainer.optimizers[0],
            given.dataset,
            self.plan,
            loss_reduction=self.loss_reduction,
            collate_fn=collate,
            ledger=None if taken_up else self.ledger,
        )
        self._undo.append(self._loader.close)
        averages = {m for a in pl_module.modules() if isinstance(a, AveragedModel) for m in a.modules()}
        self._loader.around.watch(lambda: KeptModule(pl_module, frozenset(averages), self._public_state))
        self._refuse_plateau(trainer)
        if self._loaded is not None:
            self._loader.load_state_dict(self._loaded, self.ledger)
            self._loaded = None
        rank_zero_info(
            f"fodp: lots are drawn by the plan, about {self.plan.sampling_rate:.3g} of the data each; batch_size, "
            "shuffle and workers of the training loader are not used"
        )
        lots, epochs = _Epochs(self._loader, self._epoch), -(-self.plan.steps // self._epoch)
        self._undo.append(privates.feed(trainer, lots, epochs, self._guarded))

    def _refuse_private_rows(self, door: str, loaders: Any) -> None:
        """Compare what is scored with the data that is trained on."""
        if self._trained_on is not None:
            flat = loaders.flattened if isinstance(loaders, CombinedLoader) else loaders
            refuse_private(door, flat, self._trained_on)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After the fit, the rows that were trained on are still private."""
        self._refuse_private_rows("the test data", trainer.test_dataloaders)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """As for a test."""
        self._refuse_private_rows("the data to predict", trainer.predict_dataloaders)

    def _refuse_plateau(self, trainer: pl.Trainer) -> None:
        """A scheduler may follow a score on public validation data, and no other."""
        for config in trainer.lr_scheduler_configs:
            if not (self.public_validation and trainer.enable_validation):
                refuse_plateau(config.scheduler, "give public validation data whose score it follows (monitor=)")
            elif config.reduce_on_plateau and config.monitor is not None:
                self._followed.add(config.monitor)

    def _backward(self, losses: Tensor) -> None:
        assert self._loader is not None
        self._loader.backward(losses)

    def _guarded(self, log: Callable[..., None]) -> Callable[..., None]:
        def public_only(fx: str, name: str, *args: Any, **kwargs: Any) -> None:
            if name in self._followed and name not in self._public:
                raise ConfigurationError(
                    f"a scheduler follows {name!r}, which training computes from private batches: let it follow a "
                    "score on public validation data, or the step alone"
                )
            if name in self._public:
                log(fx, name, *args, **kwargs)
            elif name not in self._dropped:
                self._dropped.add(name)
                rank_zero_warn(
                    f"fodp: {name!r} is logged in {fx} and dropped: what training computes from private batches is "
                    "private. Log scores on public data in validation_step; if it is no such number, name it in "
                    "PrivateTraining(..., public_logs=[...])"
                )

        return public_only

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """As for a test. In a fit the rows were compared before, and what they change in the module is no lot's."""
        if trainer.state.fn == "validate":
            self._refuse_private_rows("the validation data", trainer.val_dataloaders)
        if self._loader is not None:
            self._loader.around.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What the rest of the epoch leaves in the module may be of its lots."""
        if self._loader is not None and trainer.state.fn == "fit":
            self._loader.around.go_on()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to write what the module has kept of a lot."""
        if self._loader is not None:
            self._loader.around.refuse_changes()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last lot, too, has left nothing."""
        if self._loader is not None:
            self._loader.around.refuse_changes()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A run whose steps are all used has nothing more to train on."""
        privates.end_if(trainer, self.steps >= self.plan.steps)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Show ε, never below that of the steps so far."""
        shown = min(self.plan.steps, -(-self.steps // self._block) * self._block)
        pl_module.log(
            "epsilon", self._running.after(shown) * _FLOAT32, prog_bar=True, on_step=True, on_epoch=False, batch_size=1
        )
        privates.end_if(trainer, self.steps >= self.plan.steps)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give everything back as it was; what was reserved and not used is given back to the ledger."""
        while self._undo:
            self._undo.pop()()
        if self._loader is not None:
            self._loader.around.pause()  # hooks of the module at the end of the fit, too

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """As after a fit that went well."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the method's memory, the step, the position in the ledger, the privacy card."""
        if self._loader is None:
            return {}
        return {"loop": self._loader.state_dict(), "privacy_card": self.privacy_card()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, when the fit starts."""
        self._loaded = state_dict.get("loop")


class _PrivateStep(Precision):  # type: ignore[misc]
    """Runs forward and backward pass first, then the optimizer's step: Lightning would do the first inside the second.

    A private step releases what the backward pass has left, so that must be over before it. If a training_step returns
    one loss per example, the loop adds them up.
    """

    def __init__(self, backward: Callable[[Tensor], None]):
        super().__init__()
        self._backward = backward

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if tensor.dim() == 1:
            self._backward(tensor)
        else:
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result


class _Epochs:
    """The plan's lots, so many in an epoch. It has a length, so that Lightning fetches no lot ahead."""

    def __init__(self, loader: PrivateLoader, size: int):
        self._loader, self._size = loader, size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._size):
            if self._loader.step >= len(self._loader):
                return
            yield self._loader.next_batch()


def _names(word: str, given: Any) -> tuple[str, ...]:
    """The names of a list; of a text alone each letter would be one."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{word} must be a list of names, got {checks.shown(given)}")
    return tuple(given)


def _refuse(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    for name, contradicts, fix in _REFUSED:
        if contradicts(trainer):
            raise ConfigurationError(f"PrivateTraining refuses {name} as it is set: {fix}")
    if not module.automatic_optimization:
        raise ConfigurationError(
            "PrivateTraining takes automatic optimization: in a manual one nothing says which step is private. Use "
            "fodp.make_private in a loop of your own"
        )
    for name in _OWN_STEPS:
        if is_overridden(name, module):
            raise ConfigurationError(
                f"{type(module).__name__}.{name} is overridden, and a private step would go past it: leave it out, or "
                "use fodp.make_private in a loop of your own"
            )


def _training_loader(given: Any) -> DataLoader[Any]:
    if not isinstance(given, DataLoader):
        raise ConfigurationError(
            f"the training data must come as one torch.utils.data.DataLoader, got {type(given).__name__}"
        )
    if isinstance(given.dataset, IterableDataset):
        raise ConfigurationError("Poisson lots take a data set with a length and an index, not an IterableDataset")
    sampler = given.sampler
    plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if given.batch_size is None or not plain:
        own = type(sampler if given.batch_size is not None else given.batch_sampler or sampler).__name__
        raise ConfigurationError(
            f"the training loader brings a sampler of its own, {own}: the plan draws each example with one public "
            "probability, and epsilon holds for that alone. Leave sampler and batch_sampler out"
        )
    return given


def _model_of(module: pl.LightningModule) -> nn.Module:
    """What is called on a batch: the module itself if it has a forward, else the one part that has all parameters."""
    if is_overridden("forward", module):
        return module
    trained = {id(p) for p in module.parameters() if p.requires_grad}
    for part in module.children():
        if trained and trained == {id(p) for p in part.parameters() if p.requires_grad}:
            return part
    raise ConfigurationError(
        f"{type(module).__name__} has no forward, and no one part with all trainable parameters: define forward, and "
        "call self(inputs) in training_step"
    )
