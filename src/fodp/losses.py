"""One loss per example, for models whose usual loss is a mean over the whole lot.

A mean over the tokens of a lot couples its examples: what one token weighs depends on how many tokens the others
have, and a long example weighs more than the clip norm allows. Here a record's loss is the mean over its own tokens.

    losses = fodp.losses.causal_lm(model(**batch).logits, batch["labels"])     # for fodp.Trainer's loss_fn
    losses.mean().backward()                                                   # in a loop of your own
"""

from torch import Tensor
from torch.nn import functional as F

from fodp.errors import ConfigurationError

IGNORED = -100  # the label of positions that do not count, as Hugging Face's models have it


def causal_lm(logits: Tensor, labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """The loss of predicting each token from the tokens before it: the mean over an example's own tokens.

    Args:
        logits: what the model returns, [examples, positions, classes].
        labels: the labels as the model takes them, not shifted, [examples, positions].
        ignored: the label of positions that do not count, such as padding.

    Returns:
        One loss per example. An example without a position that counts has the loss zero.

    Example:
        >>> import torch, fodp
        >>> logits, labels = torch.zeros(2, 4, 8), torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100]])
        >>> fodp.losses.causal_lm(logits, labels)
        tensor([2.0794, 2.0794])
    """
    return tokens(logits[:, :-1], labels[:, 1:], ignored)


def tokens(logits: Tensor, labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """The loss of labels of tokens, for masked language models and tagging: the mean over an example's own tokens.

    Args:
        logits: what the model returns, [examples, positions, classes].
        labels: [examples, positions].
        ignored: the label of positions that do not count, such as padding.

    Returns:
        One loss per example. An example without a position that counts has the loss zero.

    Raises:
        ConfigurationError: if the dimensions do not fit together.

    Example:
        >>> import torch, fodp
        >>> fodp.losses.tokens(torch.zeros(2, 3, 8), torch.tensor([[1, 2, 3], [1, -100, -100]]))
        tensor([2.0794, 2.0794])
    """
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ConfigurationError(
            f"expected logits [examples, positions, classes] and labels [examples, positions], got {logits.dim()} and "
            f"{labels.dim()} dimensions that do not fit together: give the model's logits and its own labels"
        )
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none", ignore_index=ignored)
    counts = (labels != ignored).sum(1)
    return each.view(labels.shape).sum(1) / counts.clamp(min=1)


def classes(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of one label per example.

    Args:
        logits: [examples, classes].
        labels: the class of each example, [examples].

    Returns:
        One loss per example.

    Example:
        >>> import torch, fodp
        >>> fodp.losses.classes(torch.zeros(2, 8), torch.tensor([1, 2]))
        tensor([2.0794, 2.0794])
    """
    return F.cross_entropy(logits.float(), labels, reduction="none")
