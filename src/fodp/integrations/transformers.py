"""Private training with Hugging Face's Trainer: `PrivateTrainer` is one, with a plan.

    trainer = PrivateTrainer(model=model, args=args, train_dataset=rows, plan=plan, ledger=fodp.Ledger("spent.db"))
    trainer.train()
    trainer.save_model("model")          # with the privacy card in its README.md

Lots, clipping, noise, accounts and checkpoints are those of `fodp.Trainer`. What is translated here are words: training
arguments, data collators, callbacks, logs, evaluation and folders. docs/hugging-face.md has a table of all of them.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fodp.callbacks import Callback
from fodp.errors import ConfigurationError, LedgerError
from fodp.identity.private_data import refuse_private
from fodp.integrations._hugging_face import arguments, card, processes
from fodp.integrations._hugging_face.losses import RowLoss
from fodp.integrations._privates import transformers as privates
from fodp.ledger import Ledger
from fodp.plan import Plan
from fodp.state.ledgers import refuse_other_ledger
from fodp.support import checks
from fodp.support.checks import listed
from fodp.support.extras import need
from fodp.support.words import unknown
from fodp.trainer import Result
from fodp.trainer import Trainer as Private

try:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, TrainOutput
except ImportError as error:  # said when the trainer is made: this module can be looked at without
    _CANNOT = f"transformers cannot be imported ({error}): pip install --upgrade 'fodp[hf]'"

    class Trainer:  # type: ignore[no-redef]
        """Stands in for the one that is missing."""

    def TrainingArguments(*_: Any, **__: Any) -> Any:
        """Of a package that is there and broken."""
        raise ConfigurationError(_CANNOT)


_STATE = "fodp.pt"  # of a checkpoint folder: what the run needs to go on
_OF_HUGGING_FACE = "trainer_state.json"
_OF_THE_FIRST = ("epoch", "best_metric", "best_global_step", "best_model_checkpoint")  # what its callbacks have found
# What people override to change how Trainer learns; nothing of it would be called here.
_NOT_CALLED = {
    "compute_loss": "give compute_loss_func(outputs, labels, num_items_in_batch=None) that returns one loss per row",
    "training_step": "a step is the plan's: use callbacks",
    "get_train_dataloader": "rows are drawn by the plan: change the data set or the data collator",
    "_get_train_sampler": "rows are drawn by the plan: change the data set",
    "get_batch_samples": "rows are drawn by the plan: change the data set or the data collator",
}


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer whose model carries the guarantee of a plan. Other arguments are those of Trainer.

    Guarantee: the model, its checkpoints and all logs are (ε, δ)-differentially private with the plan's ε, where one
    record is one row of `train_dataset` and its loss is the mean over its own labels that are not -100. The training
    loss, and whatever else is a number of the private rows, is nowhere: `TrainOutput.training_loss` is NaN.

    What contradicts the plan is refused in one sentence, before anything is spent. `per_device_train_batch_size` is how
    many rows go through the model at a time; it changes no result.

    Args:
        plan: the public numbers of the run.
        owners: for a plan with unit="person", whose each row is (whole numbers or texts); one record is then all that a
            person has, and the run is in one process.
        ledger: where spending is written down before it happens; a run without a seed is resumed only with it.
        run_id: the name of the run in the ledger.
        eval_data_is_public: says that `eval_dataset`, and any other that `evaluate` is given, is no private data.
        engine: "auto", or "loop" for one row at a time.
        compute_loss_func: as ever (outputs, labels, num_items_in_batch), and returns one loss per row.
    """

    optimizer: Any
    control: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        plan: Plan,
        owners: Any = None,
        ledger: Ledger | Callable[[], Ledger] | None = None,
        run_id: str | None = None,
        eval_data_is_public: bool = False,
        engine: str = "auto",
        **named: Any,
    ):
        need("transformers", "PrivateTrainer", extra="hf")
        need("accelerate", "PrivateTrainer", extra="hf")
        if not isinstance(plan, Plan):
            raise ConfigurationError(f"plan must be a fodp.Plan, got {type(plan).__name__}")
        refuse_other_ledger(ledger, may_open=True)
        checks.switch("eval_data_is_public", eval_data_is_public)
        checks.function("compute_loss_func", named.get("compute_loss_func"))
        _refuse_foreign_words(named)
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        if not isinstance(args, TrainingArguments) or isinstance(model, TrainingArguments):
            raise ConfigurationError(
                "PrivateTrainer takes (model, args) in this order: args must be TrainingArguments, got "
                f"{type(args).__name__}"
            )
        self.plan, self._bridge = plan, _Bridge(self)
        self.private: Private | None = None
        self._ledger, self._run_id, self._engine, self._owners = ledger, run_id, engine, owners
        self._eval_data_is_public = eval_data_is_public
        self._compared: list[Any] = []  # data that is none of the rows that are trained on
        _refuse_overridden(type(self))
        arguments.refuse(args, plan)
        _refuse_pushed_ledger(ledger, args.output_dir)
        if eval_dataset is not None:
            self._refuse_private_scores(eval_dataset, train_dataset)
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, **named)
        processes.refuse_unknown(self)

    def _refuse_private_scores(self, dataset: Any, train_dataset: Any) -> None:
        """A score on private rows is private itself, and it would be logged."""
        self._refuse_private_rows("eval_dataset", dataset, train_dataset)
        if not self._eval_data_is_public:
            raise ConfigurationError(
                "scores on eval_dataset are shown, logged and saved without noise, so it must not be private: say so "
                "with eval_data_is_public=True, or leave eval_dataset out"
            )

    def _refuse_private_rows(self, door: str, dataset: Any, train_dataset: Any) -> None:
        """Compare data with the rows that are trained on, once."""
        if not any(dataset is known for known in self._compared):
            refuse_private(door, dataset, train_dataset)
            self._compared.append(dataset)

    def _refuse_left_padding(self) -> None:
        """Padded on the left, a row begins where the longest of its lot lets it begin, and its positions are others."""
        words = getattr(self.data_collator, "tokenizer", None) or self.processing_class
        fixed = getattr(self.data_collator, "padding", None) == "max_length"
        if getattr(words, "padding_side", None) == "left" and not fixed:
            raise ConfigurationError(
                "the tokenizer pads on the left, where the longest row of a lot moves all others to other positions: "
                "set padding_side='right' for training, or pad to a fixed length (padding='max_length')"
            )

    # --- what may be said of the run ------------------------------------------------------------------------------

    def epsilon(self) -> float:
        """ε of the steps so far, a running display; 0 before the first one."""
        return 0.0 if self.private is None or self.private.step == 0 else self.private.epsilon()

    def statement(self) -> str:
        """The guarantee in plain English."""
        return self.plan.statement() if self.private is None else self.private.statement()

    def privacy_card(self) -> dict[str, Any]:
        """What may be published about this run's privacy if it ends here."""
        if self.private is None:
            raise ConfigurationError("nothing was trained yet: call train() first")
        return self.private.privacy_card()

    # --- training -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **named: Any) -> Any:
        """Take the plan's steps; `resume_from_checkpoint=True` goes on from the newest complete checkpoint."""
        if trial is not None:
            raise ConfigurationError(
                "every trial of a search trains on the private rows and spends ε: search on public data, or with "
                "`fodp tune`"
            )
        arguments.refuse(self.args, self.plan)
        processes.refuse_unknown(self)
        if self.train_dataset is None:
            raise ConfigurationError("there is nothing to train on: give train_dataset")
        self._refuse_left_padding()
        if self.private is not None and (resume_from_checkpoint or self.model_init or self._is_over()):
            raise ConfigurationError(
                "this trainer's run has begun, and a second one spends anew: make another PrivateTrainer, with a plan "
                "of its own or to resume"
            )
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_checkpoint()
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **named)

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refused: see `train`."""
        return self.train(trial="a search")

    def _is_over(self) -> bool:
        return self.private is not None and self.private.step >= self.private.last_step

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """In place of Hugging Face's loop: `fodp.Trainer.fit`, which calls back at every step."""
        self.accelerator.free_memory()
        if self.private is None:
            self.private = self._private_trainer()
            if resume_from_checkpoint is not None:
                self.private.resume(Path(resume_from_checkpoint) / _STATE)
            steps, an_epoch = self.plan.steps, self.private.steps_per_epoch
            self._init_training_state(steps, an_epoch, math.ceil(steps / an_epoch), resume_from_checkpoint, None)
        privates.begin(self, self.private.step)  # steps that a crash has lost are among them
        self.model.train()
        ranks = self.private.session.processes
        with processes.by_itself(self):
            with self._bridge.listening(self.optimizer, ignore_keys_for_eval) if ranks.is_first else _Hooks():
                result = self.private.fit()
            with ranks.together():
                return self._finished(result)

    def _private_trainer(self) -> Private:
        """The same model, rows, optimizer and scheduler, under the plan."""
        dtype = torch.bfloat16 if self.args.bf16 else None
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        made = Private(
            self.model,
            RowLoss(self.model, self.compute_loss_func, self.args.device, dtype),
            self.train_dataset,
            self.plan,
            None if self.plan.algorithm.owns_optimizer and self.optimizer is None else self.create_optimizer(),
            scheduler=lambda optimizer: self.create_scheduler(self.plan.steps, optimizer),
            callbacks=[self._bridge],
            collate_fn=lambda rows: _batch(collate, rows),
            owners=self._owners,
            microbatch=self.args.per_device_train_batch_size,
            engine=self._engine,
            ledger=self._ledger,
            run_id=self._run_id,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )
        self.optimizer = made.optimizer
        return made

    def _finished(self, result: Result) -> Any:
        """As Hugging Face's loop ends, without its numbers of loss, time and tokens."""
        assert self.private is not None
        ranks = self.private.session.processes
        privates.at_step(self, result.steps, self.private.steps_per_epoch)
        metrics = {"train_epsilon": result.epsilon, "train_delta": result.delta}
        if ranks.is_first:
            self.log(dict(metrics))
        if ranks.count > 1:
            self._tell_what_was_found()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
            ranks.refuse_drift(self.private.session.parameters)
        if ranks.is_first:
            privates.tell(self, "on_train_end")
            self._finish_current_push()
        ranks.text(lambda: "ended")  # what fails in the first process alone is told here
        self.is_in_train = False
        return TrainOutput(result.steps, math.nan, metrics)

    def _tell_what_was_found(self) -> None:
        """The first process has the callbacks and the scores; the others learn where its training has ended."""
        assert self.private is not None
        found = self.private.session.processes.text(
            lambda: json.dumps({name: getattr(self.state, name) for name in _OF_THE_FIRST})
        )
        for name, value in json.loads(found).items():
            setattr(self.state, name, value)

    # --- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self, *positional: Any, **named: Any) -> dict[str, float]:
        """As ever; of several processes each takes all rows, so that scores are those of one."""
        with processes.by_itself(self):
            return dict(super().evaluate(*positional, **named))

    def predict(self, *positional: Any, **named: Any) -> Any:
        """As ever; of several processes each takes all rows."""
        with processes.by_itself(self):
            return super().predict(*positional, **named)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Of data that was declared public."""
        named = self.eval_dataset if eval_dataset is None or isinstance(eval_dataset, str) else eval_dataset
        self._refuse_private_scores(named, self.train_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Of any rows but those that were trained on."""
        self._refuse_private_rows(
            "test_dataset (none of the rows that were trained on)", test_dataset, self.train_dataset
        )
        return super().get_test_dataloader(test_dataset)

    # --- folders --------------------------------------------------------------------------------------------------

    def _newest_checkpoint(self) -> str:
        """The newest folder that was written to its end: a crash may have cut the last one."""
        folders = Path(self.args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        whole = [f for f in folders if (f / _STATE).is_file() and (f / _OF_HUGGING_FACE).is_file()]
        if not whole:
            raise LedgerError(
                f"there is no complete checkpoint in {self.args.output_dir}: set save_steps, or start without resuming"
            )
        return str(max(whole, key=lambda folder: int(folder.name.rpartition("-")[2])))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: the run's own file holds weights, optimizer, scheduler and memory, and is read with its plan."""
        if not (Path(resume_from_checkpoint) / _STATE).is_file():
            raise LedgerError(
                f"{resume_from_checkpoint} has no {_STATE}, without which a private run cannot go on: resume from a "
                "checkpoint of a PrivateTrainer that was saved without save_only_model"
            )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.private is not None
        self.private.save(Path(output_dir) / _STATE)

    def _save_rng_state(self, output_dir: str) -> None:
        """PyTorch's and Python's generators have no part in a private run."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        self._write_card(Path(self.args.output_dir if output_dir is None else output_dir))

    def create_model_card(self, *positional: Any, **named: Any) -> None:
        """Hugging Face's draft, with the privacy card."""
        super().create_model_card(*positional, **named)
        self._write_card(Path(self.args.output_dir))

    def _write_card(self, folder: Path) -> None:
        if self.private is not None and self.args.should_save:
            card.write(folder, Path(self.args.output_dir).resolve().name, self.private.privacy_card())


class _Bridge(Callback):
    """From the moments of `fodp.Trainer` to those of Hugging Face's callbacks, logs, evaluation and checkpoints."""

    def __init__(self, trainer: PrivateTrainer):
        self._trainer = trainer
        self._ignore_keys: list[str] | None = None
        self._logged = self._saved = -1
        self._learning_rate = 0.0

    def listening(self, optimizer: torch.optim.Optimizer, ignore_keys: list[str] | None) -> "_Hooks":
        """While inside, optimizer steps are told to callbacks: what they see there is released.

        `ignore_keys`: of the model's outputs, in evaluation.
        """
        self._ignore_keys = ignore_keys

        def before(*_: Any) -> None:
            self._tell("on_pre_optimizer_step")
            self._learning_rate = float(optimizer.param_groups[0]["lr"])

        def after(*_: Any) -> None:
            self._tell("on_optimizer_step")

        return _Hooks(optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))

    def on_start(self, private: Private) -> None:
        """Training, an epoch and a step begin."""
        trainer = self._trainer
        privates.at_step(trainer, private.step, private.steps_per_epoch)
        self._tell("on_train_begin")
        if trainer.args.eval_on_start:
            privates.evaluate(trainer, self._ignore_keys)
        self._tell("on_epoch_begin")
        self._begin_step()

    def on_step(self, private: Private) -> None:
        """A step, perhaps an epoch, has ended; what was asked for is logged, evaluated and saved."""
        trainer = self._trainer
        privates.at_step(trainer, private.step, private.steps_per_epoch)
        self._tell("on_step_end")
        self._log_evaluate_save(private)
        control, at_the_end = trainer.control, private.step >= private.last_step
        stops = control.should_training_stop or at_the_end
        if stops or control.should_epoch_stop or private.step % private.steps_per_epoch == 0:
            self._tell("on_epoch_end")
            self._log_evaluate_save(private)
            stops = stops or trainer.control.should_training_stop
            if not stops:
                self._tell("on_epoch_begin")
        if stops and not at_the_end:
            private.stop_early()
        elif not stops:
            self._begin_step()

    def on_stop(self, private: Private) -> None:
        """A run that ends early, also by Ctrl-C or an error, leaves something to go on from."""
        wanted = self._trainer.args.save_strategy != SaveStrategy.NO
        if wanted and private.between_steps and self._saved < private.step and 0 < private.step < private.plan.steps:
            self._save(private)

    def _begin_step(self) -> None:
        self._trainer.model.train()  # a callback or a score may have put it into evaluation mode
        self._tell("on_step_begin")

    def _tell(self, moment: str) -> None:
        privates.tell(self._trainer, moment)

    def _log_evaluate_save(self, private: Private) -> None:
        trainer = self._trainer
        if trainer.control.should_log and private.step > self._logged:
            self._logged = private.step
            trainer.log({"epsilon": private.epsilon(), "learning_rate": self._learning_rate})
        if trainer.control.should_evaluate:
            with private.averaged():
                metrics = privates.evaluate(trainer, self._ignore_keys)
            privates.note_best(trainer, metrics, saves_best=trainer.args.save_strategy == SaveStrategy.BEST)
        if trainer.control.should_save:
            self._save(private)
            self._tell("on_save")

    def _save(self, private: Private) -> None:
        with private.averaged():
            privates.save_checkpoint(self._trainer)
        self._saved = private.step


class _Hooks:
    """Hooks that are taken away at the end."""

    def __init__(self, *handles: Any):
        self._handles = handles

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()


def _refuse_overridden(kind: type) -> None:
    """Raise if a class of somebody's changes how Trainer learns where nothing calls it."""
    for name, instead in _NOT_CALLED.items():
        if getattr(kind, name, None) is not getattr(PrivateTrainer, name, None):
            raise ConfigurationError(f"{kind.__name__} overrides {name}, which is not called here: {instead}")


def _refuse_foreign_words(named: Mapping[str, Any]) -> None:
    """What neither Trainer nor this one knows, all in one message."""
    known = set(inspect.signature(Trainer.__init__).parameters) | set(
        inspect.signature(PrivateTrainer.__init__).parameters
    )
    foreign = [word for word in named if word not in known]
    if foreign:
        raise ConfigurationError(listed([unknown("PrivateTrainer", word, known - {"named"}) for word in foreign]))


def _refuse_pushed_ledger(ledger: Any, folder: str) -> None:
    """What lies in the output folder is what people push."""
    path = str(getattr(ledger, "path", ""))
    if path and "://" not in path and Path(folder).resolve() in Path(path).resolve().parents:
        raise ConfigurationError(
            f"the ledger {path} lies in output_dir, which may be pushed, and it names users, hosts and all runs: keep "
            "it elsewhere"
        )


def _batch(collate: Callable[[list[Any]], Any], rows: list[Any]) -> dict[str, Any]:
    """A plain dictionary of the collator's tensors; rows are copied, for some collators write into them."""
    return dict(collate([dict(row) if isinstance(row, Mapping) else row for row in rows]))
