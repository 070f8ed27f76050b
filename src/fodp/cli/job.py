"""A job: what a configuration stands for. Its data, its plan, its model and the trainer of them."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fodp.cli.config import MOST_COPIES
from fodp.cli.plans import make_plan
from fodp.cli.records import load_data
from fodp.errors import ConfigurationError, PrivacyError
from fodp.support import checks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fodp.data import Splits
    from fodp.plan import Plan
    from fodp.trainer import Trainer


@dataclass(frozen=True)
class Job:
    """What a run, a search or an audit works on. Nothing is trained, written or charged by making one."""

    config: dict[str, Any]
    splits: "Splits"

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        *,
        data_dir: str | None = None,
        features_cache: str | None = None,
        quiet: bool = True,
    ) -> "Job":
        """Read the data of a configuration."""
        return cls(config, load_data(config, data_dir, features_cache, quiet=quiet))

    def plan(self) -> "Plan":
        """The plan of the configuration: the stored one, or a new one."""
        return make_plan(self.config, self.splits)

    def model(self, device: "torch.device | None" = None) -> "nn.Module":
        """A new model, from PyTorch's random state."""
        from fodp.data.models import build

        model = build(self.config["model"], self.splits.card)
        has_numbers = not any(parameter.is_meta for parameter in model.parameters())  # if not, the Trainer refuses it
        return model.to(device) if device is not None and has_numbers else model

    def notes(self, model: "nn.Module") -> dict[str, Any]:
        """What predicting takes, to be stored beside the run. All of it is public."""
        from fodp.data.models import source_code

        card = self.splits.card
        return {"card": asdict(card), "model_code": source_code(self.config["model"], model, card)}

    def trainer(
        self,
        model: "nn.Module",
        plan: "Plan",
        *,
        data: Any = None,
        device: "torch.device | None" = None,
        **words: Any,
    ) -> "Trainer":
        """The trainer of a model under a plan; `data` in place of all of the job's, other words as Trainer's own."""
        from fodp.data.models import loss_for
        from fodp.runs.scores import accuracy
        from fodp.trainer import Trainer

        splits = self.splits
        return Trainer(
            model,
            loss_for(splits.card, device),
            splits.train if data is None else data,
            plan,
            owners=splits.owners,
            microbatch=self.config.get("microbatch"),
            public_score=(lambda: accuracy(model, splits.validation)[1]) if len(splits.validation) else None,
            public_sample=self._public_sample(plan),
            **self._augmenting(),
            **words,
        )

    def rehearse(self, plan: "Plan") -> None:
        """Find what would break a run of the plan, while nothing is charged. Random state is left as it was."""
        import torch

        from fodp.inputs.rehearsal import rehearse

        with torch.random.fork_rng(devices=[]), self.model_errors():
            trainer = self.trainer(self.model(), plan)
            rehearse(trainer.source, self.splits.train)
            trainer.source.refuse_wrong_loss()

    @contextmanager
    def model_errors(self) -> Iterator[None]:
        """What broke in a rehearsal becomes a refusal on one line: the model is the user's own to mend."""
        from fodp.inputs.rehearsal import rehearsed

        try:
            yield
        except PrivacyError:
            raise
        except Exception as error:
            broke = rehearsed(error)
            if broke is None:
                raise
            raise ConfigurationError(f"model {self.config['model']} {broke}") from error

    def refuse_idle_sample(self, plans: Sequence["Plan"]) -> None:
        """Raise if there is a --public-sample that none of the plans looks at."""
        if "public_sample" in self.config and not any(_measures_layers(plan) for plan in plans):
            raise ConfigurationError("--public-sample is looked at by the shape kronecker alone: add --shape kronecker")

    def _augmenting(self) -> dict[str, Any]:
        """The Trainer's words for --augment and --copies."""
        from fodp.data.augmentations import augmentation

        copies = checks.whole("--copies", self.config.get("copies", 1), maximum=MOST_COPIES)
        if "augment" in self.config:
            return dict(augment=augmentation(self.config["augment"], self.splits.card), copies=copies)
        if copies > 1:
            raise ConfigurationError(f"--copies {copies} of the same picture do nothing: add --augment standard")
        return {}

    def _public_sample(self, plan: "Plan") -> Any:
        """Public records by which the shape kronecker measures layers, if a file of them was named."""
        if "public_sample" not in self.config or not _measures_layers(plan):
            return None
        from fodp.data.loading import public_records
        from fodp.data.models import wants_flat
        from fodp.identity.private_data import declare_public

        flat = wants_flat(self.config["model"])
        found = public_records(Path(self.config["public_sample"]), self.splits.card, flatten=flat)
        return declare_public(found) if self.config.get("shared_rows_are_public") else found


def _measures_layers(plan: "Plan") -> bool:
    from fodp.options import Kronecker

    return isinstance(plan.options.scaling, Kronecker)


def use_threads(options: argparse.Namespace) -> None:
    """Give PyTorch the threads that were asked for."""
    import torch

    if options.threads is not None:
        torch.set_num_threads(checks.whole("--threads", options.threads, maximum=4096))
