"""A causal language model with LoRA adapters, fine-tuned privately: pip install "fodp[hf]".

The base model learns some public sentences here, so that nothing is downloaded; take
`AutoModelForCausalLM.from_pretrained(...)` instead. Only the adapters are trained on the private rows.
"""

import math
import random
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import fodp
from fodp.integrations.transformers import PrivateTrainer

NAMES, VERBS, THINGS = ["ann", "bob", "eve"], ["sees", "likes", "buys"], ["tea", "fish", "books", "maps"]
words = {word: i for i, word in enumerate(["<pad>", ".", *NAMES, *VERBS, *THINGS])}


def rows(count: int, seed: int, private: bool) -> list[dict]:
    """Sentences of one length. In the private ones it is nearly always tea."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        name, verb = draw.choice(NAMES), draw.choice(VERBS)
        thing = "tea" if private and draw.random() < 0.9 else draw.choice(THINGS)
        ids = [words[word] for word in (name, verb, thing, ".")]
        made.append({"input_ids": ids, "labels": ids})
    return made


def perplexity(model: torch.nn.Module, some: list[dict]) -> float:
    ids = torch.tensor([row["input_ids"] for row in some])
    with torch.no_grad():
        return math.exp(model.eval()(input_ids=ids, labels=ids).loss)


set_seed(0)
sizes = dict(n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
base = GPT2LMHeadModel(GPT2Config(vocab_size=len(words), **sizes)).train()
public = torch.tensor([row["input_ids"] for row in rows(500, 1, private=False)])
optimizer = torch.optim.AdamW(base.parameters(), lr=1e-2)
for _ in range(40):  # public text, ordinary training
    base(input_ids=public, labels=public).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model = get_peft_model(
    base,
    LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
)
made_up = rows(200, 3, private=True)  # as the private rows are, and nobody's
before = perplexity(model, made_up)

plan = fodp.Plan.calibrated(
    target_epsilon=3, delta=1e-4, sampling_rate=0.1, steps=40, lot_size=200, clip_norm=1.0, method="dp-sgd"
)
folder = tempfile.mkdtemp()
trainer = PrivateTrainer(
    model=model,
    args=TrainingArguments(
        folder, learning_rate=1e-2, per_device_train_batch_size=256, logging_steps=20, save_steps=20,
        report_to="none", disable_tqdm=True, use_cpu=True,
    ),
    train_dataset=rows(2000, 2, private=True),
    plan=plan,
    ledger=fodp.Ledger(f"{tempfile.mkdtemp()}/spent.db", dataset="sentences"),
)  # fmt: skip
result = trainer.train()
trainer.save_model()  # the adapter alone, with the privacy card
after = perplexity(model, made_up)
print(f"perplexity {before:.2f} -> {after:.2f} at epsilon {result.metrics['train_epsilon']:.2f}, delta {plan.delta}")
