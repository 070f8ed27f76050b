"""Who listens to the gradients of a model's parameters: while a step is made they have no noise."""

from torch import nn

from fodp.errors import ConfigurationError


class Listeners:
    """The parameters of a model, to be asked in every step whether somebody listens to their gradients.

    They are those of that moment: a layer may have been added, or a parameter replaced, since the last step.
    """

    def __init__(self, model: nn.Module):
        self._model = model

    def refuse(self) -> None:
        """Raise if a hook would be given a gradient without noise."""
        for name, parameter in self._model.named_parameters():
            # PyTorch has no public name for a parameter's hooks.
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                _refuse_others(name, parameter)


def _refuse_others(name: str, parameter: nn.Parameter) -> None:
    """A loop of the user's own, made private in this process, watches for models that are not in it: that is ours."""
    hooks = [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
    for hook in hooks:
        if not str(getattr(hook, "__module__", "")).startswith("fodp."):
            raise ConfigurationError(
                f"a hook on the parameter {name} would be given gradients without noise: remove it "
                "(wandb.watch: log='parameters', or WANDB_WATCH=false)"
            )
