"""Small models of Hugging Face from configurations, a tokenizer made in memory, and rows of text: nothing is loaded."""

from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="fodp[hf]")
transformers = pytest.importorskip("transformers", reason="fodp[hf]")

import fodp  # noqa: E402
from fodp.integrations.transformers import PrivateTrainer  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[MASK]", "[EOS]", "good", "bad", *(f"w{i}" for i in range(26))]
PAD = 0
_ENCODER: dict[str, Any] = dict(
    vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=32, pad_token_id=PAD,
)  # fmt: skip


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", eos_token="[EOS]")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def texts(count: int, seed: int = 0) -> list[tuple[str, int]]:
    """Sentences of two to seven words, of which half hold "good" and half "bad"."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        length = int(torch.randint(2, 8, (), generator=generator))
        words = [f"w{int(w)}" for w in torch.randint(0, 26, (length,), generator=generator)]
        words[0] = ("bad", "good")[i % 2]
        found.append((" ".join(words), i % 2))
    return found


def rows(count: int, seed: int = 0, kind: str = "classes") -> list[dict[str, Any]]:
    """Records of unequal length: one label, a label for each token, or labels that are the tokens themselves."""
    encode = tokenizer()
    made = []
    for text, label in texts(count, seed):
        row: dict[str, Any] = dict(encode(text, return_token_type_ids=False))
        words = list(row["input_ids"])
        row["labels"] = {"classes": label, "tokens": [w % 2 for w in words], "words": words}.get(kind)
        if kind == "plain":
            del row["labels"]
        made.append(row | {"text": text})  # a column that no model takes
    return made


def bert(kind: str = "SequenceClassification", **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(**_ENCODER | options))


def gpt2(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=3, eos_token_id=3
    )
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | options))


def t5() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    config = transformers.T5Config(**sizes, decoder_start_token_id=PAD, pad_token_id=PAD)
    return transformers.T5ForConditionalGeneration(config)


def adapted(model: Any, **options: Any) -> Any:
    """With LoRA adapters."""
    peft = pytest.importorskip("peft", reason="fodp[hf]")
    return peft.get_peft_model(model, peft.LoraConfig(**dict(r=4, lora_alpha=8, init_lora_weights=True) | options))


def plan(**public: Any) -> fodp.Plan:
    usual = dict(
        sampling_rate=0.25, steps=4, lot_size=10, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, method="dp-sgd"
    )
    return fodp.Plan(**usual | public)


def arguments(folder: Any, **options: Any) -> Any:
    usual = dict(
        report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=1e-2, save_strategy="no", logging_steps=1
    )
    return transformers.TrainingArguments(output_dir=str(folder), **usual | options)


def trainer(folder: Any, model: Any = None, train: Any = None, *, public: Any = None, **options: Any) -> PrivateTrainer:
    """With rows, a padding collator and training arguments that may be given by name."""
    own = ("plan", "owners", "ledger", "run_id", "eval_data_is_public", "engine", "data_collator", "eval_dataset",
           "callbacks", "compute_metrics", "compute_loss_func", "optimizers", "processing_class",
           "model_init")  # fmt: skip
    given = {name: options.pop(name) for name in own if name in options}
    given.setdefault("data_collator", transformers.DataCollatorWithPadding(tokenizer()))
    given.setdefault("plan", plan(**public or {}))
    if model is None and "model_init" not in given:
        model = bert()
    return PrivateTrainer(
        model, arguments(folder, **options), train_dataset=rows(40) if train is None else train, **given
    )


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
