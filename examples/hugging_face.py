"""Sequence classification with Hugging Face's Trainer, privately: pip install "fodp[hf]".

Everything is made up here, model, words and reviews, so that nothing is downloaded. With data of yours, take
`AutoModelForSequenceClassification.from_pretrained(...)`, its tokenizer and your rows instead.
"""

import random
import tempfile

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)

import fodp
from fodp.integrations.transformers import PrivateTrainer

GOOD, BAD = ["great", "lovely", "superb"], ["awful", "boring", "broken"]
FILLING = ["the", "film", "was", "a", "story", "about", "people", "who", "talk", "in", "rain"]


def reviews(count: int, seed: int) -> list[tuple[str, int]]:
    draw = random.Random(seed)
    made = []
    for i in range(count):
        words = draw.choices(FILLING, k=draw.randint(3, 9))
        words.insert(0, draw.choice((BAD, GOOD)[i % 2]))
        made.append((" ".join(words), i % 2))
    return made


words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *GOOD, *BAD, *sorted(set(FILLING))])}
backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


def rows(texts: list[tuple[str, int]]) -> list[dict]:
    return [{**tokenizer(text, return_token_type_ids=False), "labels": label} for text, label in texts]


set_seed(0)  # of the first weights; rows and noise are drawn from a secret stream
sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
model = BertForSequenceClassification(BertConfig(vocab_size=len(words), max_position_embeddings=32, **sizes))

# Public numbers, fixed before the data is touched: about 3000 rows, of which about 300 take part in a step.
plan = fodp.Plan.calibrated(
    target_epsilon=4, delta=1e-4, sampling_rate=0.1, steps=40, lot_size=300, clip_norm=1.0, method="dp-sgd"
)
folder = tempfile.mkdtemp()
trainer = PrivateTrainer(
    model=model,
    args=TrainingArguments(
        folder, learning_rate=5e-3, per_device_train_batch_size=128, logging_steps=20, eval_strategy="steps",
        eval_steps=20, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    ),
    data_collator=DataCollatorWithPadding(tokenizer),
    train_dataset=rows(reviews(3000, seed=1)),
    eval_dataset=rows(reviews(200, seed=2)),
    eval_data_is_public=True,  # scores have no noise: they may be computed on rows that are nobody's secret
    compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
    plan=plan,
    ledger=fodp.Ledger(f"{tempfile.mkdtemp()}/spent.db", dataset="reviews"),
)  # fmt: skip
result = trainer.train()
trainer.save_model()  # weights, tokenizer, and a README.md with the privacy card
scores = trainer.evaluate()
print(f"accuracy {scores['eval_accuracy']:.2f} at epsilon {result.metrics['train_epsilon']:.2f}, delta {plan.delta}")
