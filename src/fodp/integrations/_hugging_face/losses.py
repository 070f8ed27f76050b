"""One loss per row, by the kind of a Hugging Face model: the mean over the row's own positions that have a label."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fodp import losses
from fodp.clipping.buffers import modules_of
from fodp.errors import ConfigurationError

PerRow = Callable[[Any, Tensor], Tensor]


def base_of(model: nn.Module) -> Any:
    """The model inside of PEFT's."""
    inner = getattr(model, "get_base_model", None)
    return inner() if inner is not None else model


def per_row_loss(model: nn.Module) -> PerRow:
    """The loss of logits and labels that fits the model's class; refused where that does not tell."""
    from transformers.models.auto import modeling_auto

    base = base_of(model)

    def is_of(*kinds: str) -> bool:
        return any(
            type(base).__name__ in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values() for kind in kinds
        )

    if is_of("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"):
        return _Classes(base.config)
    if is_of("SEQ_TO_SEQ_CAUSAL_LM", "TOKEN_CLASSIFICATION"):
        return losses.tokens
    causal, masked = is_of("CAUSAL_LM"), is_of("MASKED_LM")
    if causal != masked:
        return losses.causal_lm if causal else losses.tokens
    raise ConfigurationError(
        f"the loss of one row is not known for {type(base).__name__}: give compute_loss_func(outputs, labels, "
        "num_items_in_batch=None) that returns one loss per row"
    )


@dataclass(frozen=True)
class _Classes:
    """One label per row, one number per row, or several labels per row, as the model's configuration says."""

    config: Any

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        problem = self.config.problem_type
        if problem == "regression" or (problem is None and self.config.num_labels == 1):
            return F.mse_loss(
                logits.flatten(1).float(), labels.reshape(len(logits), -1).float(), reduction="none"
            ).mean(1)
        if problem == "multi_label_classification" or (problem is None and labels.is_floating_point()):
            return F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none").mean(1)
        return losses.classes(logits, labels.reshape(len(logits)))


class RowLoss:
    """`loss_fn(model, batch)` of a collated batch. The model is not given the labels: its own loss is the lot's."""

    def __init__(self, model: nn.Module, own: Callable[..., Tensor] | None, device: torch.device, dtype: Any = None):
        self._own = own
        self.args = () if own is None else tuple(modules_of(own, model))  # where `Run` looks for modules to watch
        self._per_row = None if own is not None else per_row_loss(model)
        self._device, self._autocast = device, dtype
        base = base_of(model)
        encoder_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
        self._shifted = getattr(base, "prepare_decoder_input_ids_from_labels", None) if encoder_decoder else None
        self._prompted = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """One loss for each row."""
        inputs = {name: value.to(self._device) for name, value in batch.items()}
        labels = inputs.pop("labels", None)
        if labels is None and self._own is None:
            raise ConfigurationError(
                f"the rows have {', '.join(inputs)} and no labels: add a column labels, or a data collator that makes "
                "them"
            )
        if self._shifted is not None and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = self._shifted(labels=labels)
        with torch.autocast(self._device.type, dtype=self._autocast, enabled=self._autocast is not None):
            outputs = model(**inputs)
        if self._per_row is None:
            assert self._own is not None
            return self._own(outputs, labels, num_items_in_batch=None)
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        assert labels is not None
        if self._prompted and logits.dim() == 3:
            logits = logits[:, -labels.shape[1] :]  # words of its own stand before the row's
        return self._per_row(logits, labels)
