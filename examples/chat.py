"""Supervised fine-tuning with a chat template, privately: pip install "fodp[hf]".

One record is one conversation, and one conversation is one row: packing several into a row is off, for a row is what
the guarantee protects. Only the assistant's words have a loss. The model is made up here; take
`AutoModelForCausalLM.from_pretrained(...)` and its tokenizer, which has a chat template, instead.
"""

import random
import tempfile

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)

import fodp
from fodp.integrations.transformers import PrivateTrainer

ASKED = {"where is the tea ?": "in the kitchen .", "who has the maps ?": "ann has them .", "is it late ?": "no ."}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
special = ["<pad>", "<unk>", "<user>", "<assistant>", "<end>", "please", "well"]
known = [*special, *sorted({word for pair in ASKED.items() for text in pair for word in text.split()})]
backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
tokenizer.chat_template, tokenizer.padding_side = TEMPLATE, "right"


def row(question: str, answer: str) -> dict:
    """A conversation as tokens; what the user said has the label -100, which does not count."""
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    said = [*asked, {"role": "assistant", "content": answer}]
    ids = tokenizer.apply_chat_template(said, return_dict=False)
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * len(prompt) + ids[len(prompt) :]}


draw = random.Random(1)
pairs = [draw.choice(list(ASKED.items())) for _ in range(2000)]
rows = [row(" ".join(draw.choices(["please", "well"], k=draw.randint(0, 2))) + " " + q, a) for q, a in pairs]

set_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
special_ids = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(known), max_position_embeddings=32, **special_ids, **sizes))
plan = fodp.Plan.calibrated(
    target_epsilon=4, delta=1e-4, sampling_rate=0.1, steps=40, lot_size=200, clip_norm=1.0, method="dp-sgd"
)
folder = tempfile.mkdtemp()
arguments = TrainingArguments(
    folder, learning_rate=1e-2, per_device_train_batch_size=256, save_strategy="no", logging_steps=20,
    report_to="none", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
collator = DataCollatorForSeq2Seq(tokenizer)  # pads labels with -100
ledger = fodp.Ledger(f"{tempfile.mkdtemp()}/spent.db", dataset="conversations")
trainer = PrivateTrainer(model, arguments, collator, rows, plan=plan, ledger=ledger)
result = trainer.train()

for question in ASKED:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    said = model.eval().generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
    print(question, "->", tokenizer.decode(said, skip_special_tokens=True))
print(f"epsilon {result.metrics['train_epsilon']:.2f}, delta {plan.delta}")
