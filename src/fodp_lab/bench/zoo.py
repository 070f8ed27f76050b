"""Models that people have: which way each takes through the clipping engine, how right it is and what it costs.

From configurations, with random weights, in two sizes: tiny ones, for `look`, which compares a clipped sum with the
one-example loop, and ones that have something to compute, for times and memory (`zoo_table`).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fodp.clipping import Clipper
from fodp.clipping.batches import doubled
from fodp.support import extras


@dataclass(frozen=True)
class Size:
    """Of lots and models."""

    lot: int
    length: int  # of texts
    words: int  # that there are
    width: int  # of layers
    image: int  # pixels across

    @property
    def channels(self) -> int:
        """Of convolutions."""
        return max(16, self.width // 8)


TINY = Size(lot=12, length=16, words=101, width=32, image=16)
REAL = Size(lot=16, length=32, words=2000, width=256, image=32)
_size = TINY  # of what is built now
Example = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]


def classes(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of a classifier; Hugging Face's return objects with logits."""
    out = model(batch[0])
    return F.cross_entropy(getattr(out, "logits", out), batch[1], reduction="none")


def next_words(model: nn.Module, batch: Any) -> Tensor:
    """The mean over an example's tokens."""
    logits = model(batch[0]).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), batch[0][:, 1:], reduction="none")
    return losses.mean(1)


def same_words(model: nn.Module, batch: Any) -> Tensor:
    """Tokens from themselves, as a masked model has it."""
    return F.cross_entropy(model(batch[0]).logits.transpose(1, 2), batch[0], reduction="none").mean(1)


def _words() -> tuple[Tensor, Tensor]:
    return torch.randint(2, _size.words, (_size.lot, _size.length)), torch.randint(0, 2, (_size.lot,))


def _images(across: int | None = None) -> tuple[Tensor, Tensor]:
    across = across or _size.image
    return torch.randn(_size.lot, 3, across, across), torch.randint(0, 2, (_size.lot,))


def _over_time(width: int) -> tuple[Tensor, Tensor]:
    return _floats(_size.length, width)


def _floats(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(_size.lot, *shape), torch.randint(0, 2, (_size.lot,))


# --- Hugging Face ---------------------------------------------------------------------------------------------


def _encoder_sizes() -> dict[str, Any]:
    width = _size.width
    return dict(
        vocab_size=_size.words, hidden_size=width, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=4 * width,
    )  # fmt: skip


def _decoder_sizes() -> dict[str, Any]:
    return _encoder_sizes() | dict(num_key_value_heads=2, max_position_embeddings=128, head_dim=_size.width // 4)


def _hugging(config: str, model: str, loss: Any, batch: Callable[[], Any] = _words, **options: Any) -> Example:
    extras.need("transformers", "a model of Hugging Face", extra="hf")
    import transformers

    made = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made.train(), batch(), loss


def _gpt2(**options: Any) -> nn.Module:
    sizes: dict[str, Any] = dict(
        vocab_size=_size.words,
        n_positions=128,
        n_embd=_size.width,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _hugging("GPT2Config", "GPT2LMHeadModel", None, **sizes | options)[0]


def _peft(config: str, **options: Any) -> Example:
    extras.need("peft", "a fine-tuned model", extra="hf")
    import peft

    model = peft.get_peft_model(_gpt2(), getattr(peft, config)(task_type="CAUSAL_LM", **options))
    loss = prompted if config == "PromptTuningConfig" else next_words
    return model.train(), _words(), loss


def prompted(model: nn.Module, batch: Any) -> Tensor:
    """As `next_words`, of a model that puts words of its own before."""
    logits = model(batch[0]).logits[:, -batch[0].shape[1] : -1]
    return F.cross_entropy(logits.transpose(1, 2), batch[0][:, 1:], reduction="none").mean(1)


def _t5() -> Example:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(input_ids=batch[0], decoder_input_ids=batch[0]).logits
        return F.cross_entropy(logits.transpose(1, 2), batch[0], reduction="none").mean(1)

    sizes: dict[str, Any] = dict(
        vocab_size=_size.words, d_model=_size.width, d_kv=_size.width // 4, d_ff=4 * _size.width, num_layers=2,
        num_heads=4,
    )  # fmt: skip
    return _hugging("T5Config", "T5ForConditionalGeneration", loss, **sizes, decoder_start_token_id=0)


# --- PyTorch's own --------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """Parts by name and a function over them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: Any):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        """The function of the parts."""
        return self._run(self, x)


def _encoder(batch_first: bool) -> nn.Module:
    width = _size.width
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=batch_first)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    if batch_first:
        return Apply(lambda m, x: m.head(m.body(x).mean(1)), body=body, head=nn.Linear(width, 2))
    return Apply(lambda m, x: m.head(m.body(x.transpose(0, 1)).mean(0)), body=body, head=nn.Linear(width, 2))


def _residual_net() -> nn.Module:
    def block(channels: int) -> nn.Module:
        layers = [nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()]
        return Apply(
            lambda m, x: x + m.inner(x), inner=nn.Sequential(*layers, nn.Conv2d(channels, channels, 3, padding=1))
        )

    few = _size.channels
    return nn.Sequential(
        nn.Conv2d(3, few, 3, padding=1), block(few), nn.Conv2d(few, 2 * few, 3, stride=2), block(2 * few),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * few, 2),
    )  # fmt: skip


def _recurrent(kind: Any, **options: Any) -> nn.Module:
    layer = kind(_size.width // 2, _size.width, batch_first=True, **options)
    return Apply(lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=layer, head=nn.Linear(_size.width, 2))


def _packed() -> Example:
    def run(m: Any, x: Tensor) -> Tensor:
        lengths = (x[:, :, 0] != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return m.head(m.layer(packed)[1][0][-1])

    model = Apply(run, layer=nn.LSTM(_size.width // 2, _size.width, batch_first=True), head=nn.Linear(_size.width, 2))
    x, y = _over_time(_size.width // 2)
    for i, row in enumerate(x):
        row[4 + i % (len(row) - 4) :] = 0
    return model, (x, y), classes


def _vae() -> Example:
    def loss(m: Any, batch: Any) -> Tensor:
        mean, spread = m.encode(batch[0]).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (spread / 2).exp()
        return (m.decode(z) - batch[0]).square().sum(1) + (mean.square() + spread.exp() - spread).sum(1)

    width = _size.width
    parts = dict(encode=nn.Linear(width, width // 2), decode=nn.Linear(width // 4, width))
    return Apply(lambda m, x: x, **parts), _floats(width), loss


def _diffusion() -> Example:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        noise, share = torch.randn_like(batch[0]), torch.rand(len(batch[0]), 1, 1, 1)
        return (m(batch[0] * share + noise * (1 - share)) - noise).square().mean((1, 2, 3))

    few = _size.channels
    net = nn.Sequential(
        nn.Conv2d(3, few, 3, padding=1), nn.GroupNorm(4, few), nn.SiLU(), nn.Conv2d(few, 3, 3, padding=1)
    )
    return net, _images(), loss


def _normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(
            norm(nn.Linear(_size.width, 2 * _size.width)), nn.Tanh(), norm(nn.Linear(2 * _size.width, 2))
        )


def _offsets() -> Example:
    def loss(m: Any, batch: Any) -> Tensor:
        words = batch[0]
        offsets = torch.arange(0, words.numel(), words.shape[1])
        return F.cross_entropy(m.head(m.bag(words.flatten(), offsets)), batch[1], reduction="none")

    return Apply(lambda m, x: x, bag=nn.EmbeddingBag(_size.words, 16), head=nn.Linear(16, 2)), _words(), loss


def _checkpointed(reentrant: bool) -> nn.Module:
    width = 2 * _size.width
    inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    parts = dict(first=nn.Linear(_size.width, width), inner=inner)
    return Apply(lambda m, x: checkpoint(m.inner, m.first(x), use_reentrant=reentrant), **parts)


def _class_token() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        tokens = torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.positions
        return m.head((tokens + m.scale * m.inner(tokens))[:, 0] / m.temperature)

    width = _size.width
    return Apply(
        run, token=nn.Parameter(torch.randn(1, 1, width)),
        positions=nn.Parameter(torch.randn(1, _size.length + 1, width)),
        scale=nn.Parameter(torch.randn(width)), temperature=nn.Parameter(torch.tensor(2.0)),
        inner=nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True), head=nn.Linear(width, 2),
    )  # fmt: skip


def _frozen_batch_norm() -> nn.Module:
    pixels = (_size.image - 2) ** 2
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * pixels, 2))
    model[1].eval()
    return model


def _attention() -> nn.Module:
    width = _size.width
    parts = dict(inner=nn.MultiheadAttention(width, 4, batch_first=True), head=nn.Linear(width, 2))
    return Apply(lambda m, x: m.head(m.inner(x, x, x, need_weights=False)[0].mean(1)), **parts)


def _pooled(*layers: nn.Module, channels: int, dims: int = 2) -> nn.Module:
    pool = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[dims](1)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(channels, 2))


def _text(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


ZOO: dict[str, Callable[[], Example]] = {
    "BERT classifier": lambda: _hugging("BertConfig", "BertForSequenceClassification", classes, **_encoder_sizes()),
    "BERT masked words, tied": lambda: _hugging("BertConfig", "BertForMaskedLM", same_words, **_encoder_sizes()),
    "DistilBERT": lambda: _hugging(
        "DistilBertConfig", "DistilBertForSequenceClassification", classes,
        vocab_size=_size.words, dim=_size.width, n_layers=2, n_heads=4, hidden_dim=4 * _size.width,
    ),
    "RoBERTa": lambda: _hugging("RobertaConfig", "RobertaForSequenceClassification", classes, **_encoder_sizes()),
    "GPT-2, tied": lambda: (_gpt2().train(), _words(), next_words),
    "T5": _t5,
    "Llama": lambda: _hugging("LlamaConfig", "LlamaForCausalLM", next_words, **_decoder_sizes()),
    "Qwen2": lambda: _hugging("Qwen2Config", "Qwen2ForCausalLM", next_words, **_decoder_sizes()),
    "Gemma": lambda: _hugging("GemmaConfig", "GemmaForCausalLM", next_words, **_decoder_sizes()),
    "Mistral": lambda: _hugging("MistralConfig", "MistralForCausalLM", next_words, **_decoder_sizes()),
    "OPT": lambda: _hugging(
        "OPTConfig", "OPTForCausalLM", next_words, vocab_size=_size.words, hidden_size=_size.width, num_hidden_layers=2,
        ffn_dim=4 * _size.width, num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=_size.width,
    ),
    "ViT": lambda: _hugging(
        "ViTConfig", "ViTForImageClassification", classes, _images, hidden_size=_size.width,
        num_hidden_layers=2, num_attention_heads=4, intermediate_size=4 * _size.width, image_size=_size.image,
        patch_size=4,
    ),
    "ConvNeXt": lambda: _hugging(
        "ConvNextConfig", "ConvNextForImageClassification", classes, lambda: _images(32),
        depths=[1, 1, 1, 1], hidden_sizes=[_size.channels * times for times in (1, 1, 2, 2)],
        layer_scale_init_value=0.5,
    ),
    "GPT-2, LoRA with dropout": lambda: _peft("LoraConfig", r=4, lora_dropout=0.1),
    "GPT-2, DoRA": lambda: _peft("LoraConfig", r=4, use_dora=True),
    "GPT-2, IA3": lambda: _peft("IA3Config"),
    "GPT-2, prompt tuning": lambda: _peft("PromptTuningConfig", num_virtual_tokens=4),
    "ResNet, GroupNorm": lambda: (_residual_net(), _images(), classes),
    "TransformerEncoder": lambda: (_encoder(True), _over_time(_size.width), classes),
    "TransformerEncoder, time first": lambda: (_encoder(False), _over_time(_size.width), classes),
    "LSTM, 2 layers, dropout": lambda: (
        _recurrent(nn.LSTM, num_layers=2, dropout=0.2), _over_time(_size.width // 2), classes
    ),
    "GRU": lambda: (_recurrent(nn.GRU), _over_time(_size.width // 2), classes),
    "LSTM, packed": _packed,
    "VAE": _vae,
    "diffusion": _diffusion,
    "weight norm, old": lambda: (_normed(nn.utils.weight_norm), _floats(_size.width), classes),
    "weight norm": lambda: (_normed(nn.utils.parametrizations.weight_norm), _floats(_size.width), classes),
    "spectral norm, old": lambda: (_normed(nn.utils.spectral_norm).eval(), _floats(_size.width), classes),
    "spectral norm": lambda: (_normed(nn.utils.parametrizations.spectral_norm).eval(), _floats(_size.width), classes),
    "EmbeddingBag": lambda: (_text(nn.EmbeddingBag(_size.words, 64), nn.Linear(64, 2)), _words(), classes),
    "EmbeddingBag, offsets": _offsets,
    "checkpoint": lambda: (_checkpointed(False), _floats(_size.width), classes),
    "checkpoint, reentrant": lambda: (_checkpointed(True), _floats(_size.width), classes),
    "Conv3d": lambda: (_pooled(nn.Conv3d(3, 8, 3), channels=8, dims=3), _floats(3, 6, 8, 8), classes),
    "ConvTranspose": lambda: (_pooled(nn.ConvTranspose2d(3, 8, 3, stride=2), channels=8), _images(8), classes),
    "InstanceNorm": lambda: (
        _pooled(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), channels=8), _images(), classes
    ),
    "PReLU": lambda: (_pooled(nn.Conv2d(3, 8, 3), nn.PReLU(8), channels=8), _images(), classes),
    "RMSNorm": lambda: (
        nn.Sequential(nn.Linear(_size.width, 64), nn.RMSNorm(64), nn.Linear(64, 2)), _floats(_size.width), classes
    ),
    "MultiheadAttention": lambda: (_attention(), _over_time(_size.width), classes),
    "class token, layer scale": lambda: (_class_token(), _over_time(_size.width), classes),
    "BatchNorm, frozen": lambda: (_frozen_batch_norm(), _images(), classes),
}  # fmt: skip


def build(name: str, size: Size = TINY) -> Example:
    """A model, a batch and a loss."""
    global _size
    torch.manual_seed(0)
    before, _size = _size, size
    try:
        return ZOO[name]()
    finally:
        _size = before


@dataclass(frozen=True)
class Look:
    """What a tiny model showed: its path through the engine, and how far its clipped sum is from the loop's."""

    path: str
    error: float
    reason: str = ""


def look(name: str) -> Look:
    """Run one model."""
    model, batch, loss_fn = build(name)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            _, path = _clipped(model, batch, loss_fn, "auto")
            # In float64, where norms are not raised for rounding: what differs there is wrong.
            precise = doubled(batch)
            model.double()
            found, compared = _clipped(model, precise, loss_fn, "auto")
            truth, _ = _clipped(model, precise, loss_fn, "loop")
        except Exception as why:
            return Look("refused", float("nan"), f"{type(why).__name__}: {why}"[:200])
    reasons = [str(w.message) for w in said if "one example at a time" in str(w.message)]
    # The loop compared with itself would say nothing about the path that was taken.
    error = float((found - truth).norm() / truth.norm()) if compared == path else float("nan")
    return Look(path, error, "".join(reasons)[:200])


def _clipped(model: nn.Module, batch: Any, loss_fn: Any, engine: str) -> tuple[Tensor, str]:
    clipper = Clipper(model, loss_fn, engine=engine, seed=0)
    return clipper.clipped_sum(batch, 0.1), clipper.path
