"""Packing by owner: all texts of a person are one row, so the guarantee is a person's: pip install "fodp[hf]".

Packing fills rows with one text after another. Across people that is refused, for a row is what ε protects. Within a
person it is what you want: a person with twenty messages has one row, cut at a public length, and joins a step as one.
"""

import random
import tempfile
from collections import defaultdict

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)

import fodp
from fodp.integrations.transformers import PrivateTrainer

LENGTH = 32  # of a row, public: what a person has beyond it is left out
SAYINGS = ["good morning to all", "see you at noon", "thank you so much", "the train is late"]
known = ["<pad>", "<end>", *sorted({word for text in SAYINGS for word in text.split()})]
backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")


def messages(people: int, seed: int) -> list[tuple[str, str]]:
    """(owner, text), in any order; some people write much."""
    draw = random.Random(seed)
    made = [(f"person {i}", draw.choice(SAYINGS)) for i in range(people) for _ in range(draw.randint(1, 12))]
    draw.shuffle(made)
    return made


def packed(some: list[tuple[str, str]]) -> list[dict]:
    """One row for each owner: their texts side by side, with an end after each."""
    of_owner: dict[str, list[int]] = defaultdict(list)
    for owner, text in some:
        of_owner[owner] += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    return [{"input_ids": ids[:LENGTH]} for ids in of_owner.values()]


set_seed(0)
rows = packed(messages(2000, seed=1))
sizes = dict(n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=len(known), **sizes))
plan = fodp.Plan.calibrated(
    target_epsilon=4, delta=1e-4, sampling_rate=0.1, steps=30, lot_size=200, clip_norm=1.0, method="dp-sgd"
)
folder = tempfile.mkdtemp()
arguments = TrainingArguments(
    folder, learning_rate=1e-2, per_device_train_batch_size=256, save_strategy="no", logging_steps=10,
    report_to="none", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
ledger = fodp.Ledger(f"{tempfile.mkdtemp()}/spent.db", dataset="messages, one row a person")
trainer = PrivateTrainer(model, arguments, collator, rows, plan=plan, ledger=ledger)
result = trainer.train()

start = torch.tensor([[tokenizer.convert_tokens_to_ids("see")]])
said = model.eval().generate(start, max_new_tokens=4, do_sample=False)[0]
print(tokenizer.decode(said, skip_special_tokens=True))
print(f"epsilon {result.metrics['train_epsilon']:.2f}, delta {plan.delta}, for each person")
