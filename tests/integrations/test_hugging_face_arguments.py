"""Habits that would void the guarantee, or do nothing: each is met by a sentence, and stands in the page's table."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fodp
from fodp import ConfigurationError, DataError, PrivacyError
from fodp.integrations import transformers as door
from fodp.integrations._hugging_face.arguments import RULES, refuse
from fodp.integrations.transformers import PrivateTrainer
from fodp.support.extras import MissingExtra
from hugging_face_for_tests import arguments, bert, gpt2, plan, rows, tokenizer, trainer, transformers, weights

PAGE = Path(__file__).parents[2] / "docs" / "hugging-face.md"

# For every rule: what is refused, and what is not.
TRIED: dict[str, tuple[Any, Any]] = {
    "max_steps": (5, 4),
    "num_train_epochs": (2, 1),  # four steps of a quarter of the rows
    "gradient_accumulation_steps": (2, 1),
    "train_sampling_strategy": ("group_by_length", "random"),
    "group_by_length": (True, False),
    "data_seed": (0, None),
    "dataloader_drop_last": (True, False),
    "auto_find_batch_size": (True, False),
    "label_smoothing_factor": (0.1, 0.0),
    "neftune_noise_alpha": (5.0, None),
    "max_grad_norm": (0.5, 0.0),
    "fp16": (True, False),
    "fp16_full_eval": (True, False),
    "bf16_full_eval": (True, False),
    "torch_compile": (True, False),
    "use_liger_kernel": (True, False),
    "deepspeed": ({"zero_optimization": {}}, None),
    "fsdp": ("full_shard", ""),
    "parallelism_config": (object(), None),
    "n_gpu": (2, 1),
    "optim": ("lomo", "sgd"),
    "lr_scheduler_type": ("greedy", "cosine"),
    "include_num_input_tokens_seen": ("all", "no"),
    "skip_memory_metrics": (False, True),
    "debug": ("underflow_overflow", ""),
    "enable_jit_checkpoint": (True, False),
    "hub_strategy": ("all_checkpoints", "end"),
}
# These cannot be set on this machine, or not any more: the trainer reads them from the arguments all the same.
ELSEWHERE = ("group_by_length", "fp16", "fsdp", "deepspeed", "parallelism_config", "n_gpu")
ELSEWHERE += ("use_liger_kernel", "lr_scheduler_type")


def changed(folder, name, value):
    """Training arguments, or as much of them as is looked at."""
    if name not in ELSEWHERE:
        return arguments(folder, **{name: value})
    usual = arguments(folder)
    return SimpleNamespace(**{**{rule.name: getattr(usual, rule.name, None) for rule in RULES}, name: value})


@pytest.mark.rule(14)
@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_what_contradicts_the_plan_is_refused_by_name(name, tmp_path):
    bad, good = TRIED[name]
    declared = plan(seed=1)
    with pytest.raises(ConfigurationError, match=rf"TrainingArguments has {name}=") as refused:
        refuse(changed(tmp_path, name, bad), declared)
    assert len(str(refused.value)) < 300
    refuse(changed(tmp_path, name, good), declared)


def test_every_rule_stands_in_the_page_and_no_other():
    table = PAGE.read_text().partition("## What is refused")[2].partition("| habits |")[0]
    listed = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(rule.name for rule in RULES)
    assert len(set(listed)) == len(listed)


def test_the_trainer_asks_when_it_is_made_and_again_when_it_trains(tmp_path):
    with pytest.raises(ConfigurationError, match="max_steps=5"):
        trainer(tmp_path, max_steps=5)
    run = trainer(tmp_path)
    run.args.gradient_accumulation_steps = 4
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps=4"):
        run.train()


def test_a_plan_is_needed(tmp_path):
    with pytest.raises(ConfigurationError, match=r"plan must be a fodp\.Plan, got dict"):
        trainer(tmp_path, plan={"epsilon": 3})
    with pytest.raises(TypeError, match="plan"):
        PrivateTrainer(bert(), arguments(tmp_path))


def test_the_learning_rate_stands_in_one_place(tmp_path):
    with pytest.raises(ConfigurationError, match=r"lr=0.5 in params.*TrainingArguments\(learning_rate"):
        trainer(tmp_path, public=dict(params=dict(lr=0.5)))
    with pytest.raises(ConfigurationError, match=r"learning_rate='0\.01', and dp-adambc brings its own update"):
        trainer(tmp_path, public=dict(method="dp-adambc"))


def test_a_method_may_bring_its_own_update(tmp_path):
    model, before = bert(), weights(bert())
    public = dict(method="dp-adambc", params=dict(lr=0.01), steps=2)
    scored = dict(eval_dataset=rows(4, 1), eval_data_is_public=True, eval_strategy="epoch")
    run = trainer(tmp_path, model, public=public, learning_rate=5e-5, **scored)
    run.train()
    assert "eval_loss" in run.state.log_history[-2]
    assert run.optimizer is run.private.optimizer
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize("name", ["compute_loss", "training_step", "get_train_dataloader", "_get_train_sampler"])
def test_what_would_not_be_called_may_not_be_overridden(name, tmp_path):
    own = type("Own", (PrivateTrainer,), {name: lambda self, *_, **__: None})
    with pytest.raises(ConfigurationError, match=f"Own overrides {name}"):
        own(bert(), arguments(tmp_path), plan=plan())


@pytest.mark.rule(24)
def test_a_loss_of_ones_own_that_keeps_statistics_is_refused(tmp_path):
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, outputs, labels, num_items_in_batch=None):
            self.seen += len(labels)
            return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")

    with pytest.raises(PrivacyError, match="writes into the buffer seen"):
        trainer(tmp_path, compute_loss_func=Counting()).train()


def test_a_ledger_that_would_be_pushed_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="lies in output_dir"):
        trainer(tmp_path, ledger=fodp.Ledger(tmp_path / "spent.db"))


def test_a_search_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="every trial of a search"):
        trainer(tmp_path).hyperparameter_search(n_trials=2)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    other = torch.optim.SGD(bert().parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="parameters that are not this model's"):
        trainer(tmp_path, optimizers=(other, None)).train()


def test_nothing_to_train_on_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="give train_dataset"):
        PrivateTrainer(bert(), arguments(tmp_path), plan=plan()).train()
    with pytest.raises(DataError, match="no records"):
        trainer(tmp_path, train=[]).train()


def test_nothing_is_charged_for_what_is_refused(tmp_path):
    ledger = fodp.Ledger(tmp_path / "spent.db")
    flat = transformers.DataCollatorWithFlattening()
    with pytest.raises(DataError):
        trainer(
            tmp_path / "run", gpt2(), rows(40, kind="words"), data_collator=flat, ledger=ledger, run_id="hf"
        ).train()
    assert not ledger.steps("hf")


def test_unused_columns_may_be_kept_for_a_collator_of_ones_own(tmp_path):
    encode, seen = tokenizer(), set()

    def collate(some):
        seen.update(*some)
        batch = encode([row["text"] for row in some], padding=True, return_tensors="pt", return_token_type_ids=False)
        return {**batch, "labels": torch.tensor([row["labels"] for row in some])}

    trainer(tmp_path, data_collator=collate, remove_unused_columns=False, public=dict(steps=1)).train()
    assert "text" in seen


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r'pip install "fodp\[hf\]"'):
        door.PrivateTrainer(plan=plan())
