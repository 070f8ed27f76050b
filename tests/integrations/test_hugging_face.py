"""Hugging Face's Trainer with a plan: the guarantee, the ledger, and what people expect of Trainer."""

import json
import os
import signal
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional as F

import fodp
from fodp import ConfigurationError, DataError, LedgerError, PrivacyError
from fodp.integrations._hugging_face.losses import RowLoss
from fodp.integrations.transformers import PrivateTrainer
from hugging_face_for_tests import (
    adapted,
    arguments,
    bert,
    gpt2,
    plan,
    rows,
    t5,
    tokenizer,
    trainer,
    transformers,
    weights,
)

CPU = torch.device("cpu")
LANGUAGE = dict(mlm=False)


class Recorder(transformers.TrainerCallback):
    """Notes moments, modes, logs and released gradients; may do something at a step."""

    def __init__(self, at: int | None = None, act: Any = None):
        self.moments: list[str] = []
        self.modes: set[bool] = set()
        self.logs: list[dict[str, Any]] = []
        self.releases: list[torch.Tensor] = []
        self._at, self._act = at, act

    def on_step_begin(self, args, state, control, model, **_):
        self.moments.append("begin")
        self.modes.add(model.training)

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.releases.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))

    def on_step_end(self, args, state, control, **_):
        self.moments.append("end")
        if state.global_step == self._at:
            self._act(control)

    def on_epoch_end(self, args, state, control, **_):
        self.moments.append("epoch")

    def on_log(self, args, state, control, logs, **_):
        self.logs.append(dict(logs))


def killed(control):
    raise KeyboardInterrupt  # at once: nothing is saved or settled, as if the machine had stopped


def head_only(**options: Any) -> Any:
    """A frozen backbone: steps take little time."""
    model = bert(**options)
    for parameter in model.bert.parameters():
        parameter.requires_grad_(False)
    return model


def language(**options: Any) -> Any:
    return transformers.DataCollatorForLanguageModeling(tokenizer(), **options)


class TestLoss:
    KINDS: ClassVar = {
        "classes": (bert, "classes", lambda row: row),
        "numbers": (lambda: bert(num_labels=1), "classes", lambda row: row | {"labels": row["labels"] + 0.5}),
        "several labels": (
            lambda: bert(num_labels=2),
            "classes",
            lambda row: row | {"labels": [1.0, row["labels"] / 2]},
        ),
        "tokens": (lambda: bert("TokenClassification"), "tokens", lambda row: row),
        "masked words": (lambda: bert("MaskedLM"), "words", lambda row: row),
        "next words": (gpt2, "words", lambda row: row),
        "from sequence to sequence": (t5, "words", lambda row: row),
        "next words, adapted": (lambda: adapted(gpt2(), task_type="CAUSAL_LM"), "words", lambda row: row),
    }

    @pytest.mark.rule(20)
    @pytest.mark.filterwarnings("ignore:fan_in_fan_out")
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_row_has_the_loss_that_the_model_gives_it_alone(self, kind):
        make, labels, change = self.KINDS[kind]
        model, some = make().eval(), [change(row) for row in rows(5, kind=labels)]
        collate = transformers.DataCollatorForSeq2Seq(tokenizer()) if labels != "classes" else None
        batch = (collate or transformers.DataCollatorWithPadding(tokenizer()))(without_text(some))
        with torch.no_grad():
            found = RowLoss(model, None, CPU)(model, batch)
            alone = [model(**{n: torch.tensor([v]) for n, v in row.items()}).loss for row in without_text(some)]
        torch.testing.assert_close(found, torch.stack(alone), rtol=1e-4, atol=1e-5)

    def test_an_unknown_model_needs_a_loss_of_ones_own(self, tmp_path):
        class Own(type(bert())):
            pass

        model = Own(bert().config)
        with pytest.raises(ConfigurationError, match="not known for Own: give compute_loss_func"):
            trainer(tmp_path, model).train()

    def test_a_loss_of_ones_own_is_one_per_row(self, tmp_path):
        def summed(outputs, labels, num_items_in_batch=None):
            return F.cross_entropy(outputs.logits, labels)

        with pytest.raises(ConfigurationError, match="one loss per example"):
            trainer(tmp_path, compute_loss_func=summed).train()

    def test_rows_without_labels_are_refused_by_name(self, tmp_path):
        with pytest.raises(ConfigurationError, match="input_ids, attention_mask and no labels"):
            trainer(tmp_path, train=rows(40, kind="plain")).train()


def without_text(some):
    return [{name: value for name, value in row.items() if name != "text"} for row in some]


class TestGuarantee:
    @pytest.mark.rule(15)
    def test_noise_of_a_thousand_leaves_chance_and_little_noise_learns(self, tmp_path):
        def accuracy(sigma):
            model = bert(hidden_dropout_prob=0.0)
            public = dict(noise_multiplier=sigma, steps=20, sampling_rate=0.5, lot_size=30)
            run = trainer(tmp_path, model, rows(60), public=public, per_device_train_batch_size=64)
            run.train()
            fresh = transformers.DataCollatorWithPadding(tokenizer())(without_text(rows(200, seed=1)))
            labels = fresh.pop("labels")
            return float((model.eval()(**fresh).logits.argmax(1) == labels).float().mean())

        assert accuracy(0.01) > 0.9
        assert accuracy(1000.0) < 0.7

    @pytest.mark.rule(6)
    def test_epsilon_events_and_ledger_are_those_of_the_plan(self, tmp_path):
        ledger, wanted = fodp.Ledger(tmp_path / "spent.db", dataset="texts", budget=(20.0, 1e-5)), plan(steps=3)
        run = trainer(tmp_path / "run", head_only(), plan=wanted, ledger=ledger, run_id="hf")
        result = run.train()
        assert result.global_step == wanted.steps == ledger.steps("hf")
        assert result.metrics["train_epsilon"] == wanted.epsilon() == run.privacy_card()["epsilon"]
        from fodp.accounting import phases_from_data
        from fodp.ledger.card import summary

        (record,) = summary(ledger, "texts")
        assert tuple(phases_from_data(record["runs"][0]["events"])) == wanted.events()

    @pytest.mark.parametrize("batch", [3, 64])
    def test_weights_are_those_of_fodps_own_trainer(self, tmp_path, batch):
        wanted, data, collate = plan(seed=7, steps=4), rows(40), transformers.DataCollatorWithPadding(tokenizer())
        theirs = bert()
        trainer(tmp_path, theirs, data, plan=wanted, per_device_train_batch_size=batch, weight_decay=0.1).train()
        ours = bert().train()
        no_decay = [p for n, p in ours.named_parameters() if "bias" in n or "LayerNorm" in n]
        decay = [p for n, p in ours.named_parameters() if not ("bias" in n or "LayerNorm" in n)]
        groups = [dict(params=decay, weight_decay=0.1), dict(params=no_decay, weight_decay=0.0)]

        def loss(model, some):
            logits = model(input_ids=some["input_ids"], attention_mask=some["attention_mask"]).logits
            return F.cross_entropy(logits, some["labels"], reduction="none")

        fodp.Trainer(
            ours,
            loss,
            without_text(data),
            wanted,
            torch.optim.AdamW(groups, lr=1e-2),
            scheduler=lambda optimizer: transformers.get_linear_schedule_with_warmup(optimizer, 0, 4),
            collate_fn=lambda some: dict(collate(some)),
        ).fit()
        torch.testing.assert_close(weights(theirs), weights(ours), rtol=1e-4, atol=1e-6)

    @pytest.mark.rule(9)
    def test_tables_of_datasets_and_workers_change_nothing(self, tmp_path):
        datasets = pytest.importorskip("datasets", reason="rows of a table")
        found = []
        for data, workers in ((rows(40), 0), (datasets.Dataset.from_list(rows(40)), 1)):
            model = head_only()
            trainer(tmp_path, model, data, public=dict(seed=3, steps=3), dataloader_num_workers=workers).train()
            found.append(weights(model))
        assert torch.equal(*found)

    @pytest.mark.rule(2)
    @pytest.mark.parametrize("make", [gpt2, t5])
    def test_empty_lots_are_steps_of_noise(self, tmp_path, make):
        model, before = make(), weights(make())
        kind = language(**LANGUAGE) if make is gpt2 else transformers.DataCollatorForSeq2Seq(tokenizer())
        data = rows(4, kind="plain" if make is gpt2 else "words")
        result = trainer(tmp_path, model, data, data_collator=kind, public=dict(sampling_rate=1e-9, steps=2)).train()
        assert result.global_step == 2
        assert weights(model).isfinite().all()
        assert not torch.equal(weights(model), before)

    @pytest.mark.filterwarnings("ignore:per-example gradients run one example at a time")  # T5's positions, for now
    @pytest.mark.parametrize("kind", ["masked words", "tokens", "from sequence to sequence"])
    def test_collators_that_draw_or_pad_labels_train(self, tmp_path, kind):
        model, data, collate = {
            "masked words": (bert("MaskedLM"), rows(20, kind="plain"), language(mlm_probability=0.5)),
            "tokens": (
                bert("TokenClassification"),
                rows(20, kind="tokens"),
                transformers.DataCollatorForTokenClassification(tokenizer()),
            ),
            "from sequence to sequence": (
                t5(), rows(20, kind="words"), transformers.DataCollatorForSeq2Seq(tokenizer())
            ),
        }[kind]  # fmt: skip
        before = weights(model)
        trainer(tmp_path, model, data, data_collator=collate, public=dict(steps=2)).train()
        assert weights(model).isfinite().all()
        assert not torch.equal(weights(model), before)

    @pytest.mark.rule(20)
    def test_padding_that_moves_a_row_is_refused(self, tmp_path):
        """GPT-2 counts positions from the left: padded there, a long row changes what all others are."""
        left = tokenizer()
        left.padding_side = "left"
        collate = transformers.DataCollatorForLanguageModeling(left, mlm=False)
        with pytest.raises(ConfigurationError, match="set padding_side='right'"):
            trainer(tmp_path, gpt2(), rows(40, kind="plain"), data_collator=collate).train()

    @pytest.mark.rule(20)
    def test_packing_is_refused(self, tmp_path):
        collate = transformers.DataCollatorWithFlattening()
        with pytest.raises(DataError, match="records along dimension 0"):
            trainer(tmp_path, gpt2(), rows(40, kind="words"), data_collator=collate).train()

    @pytest.mark.rule(8)
    def test_rows_that_only_stream_are_refused(self, tmp_path):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(rows(3))

        with pytest.raises(DataError, match="cannot be Poisson sampled"):
            trainer(tmp_path, train=Stream(), max_steps=4).train()


class TestPeople:
    NAMES: ClassVar = [f"person {i % 15}" for i in range(40)]
    PERSON: ClassVar = dict(unit="person", records_per_person=2, seed=7, steps=3, sampling_rate=0.5, lot_size=8)

    def test_the_unit_may_be_a_person_with_all_of_their_rows(self, tmp_path):
        wanted, theirs, data = plan(**self.PERSON), head_only(), rows(40)
        run = trainer(tmp_path, theirs, data, plan=wanted, owners=self.NAMES, lr_scheduler_type="constant", optim="sgd")
        assert run.train().metrics["train_epsilon"] == wanted.epsilon()
        ours, collate = head_only().train(), transformers.DataCollatorWithPadding(tokenizer())
        fodp.Trainer(
            ours,
            RowLoss(ours, None, CPU),
            without_text(data),
            wanted,
            torch.optim.SGD(ours.parameters(), lr=1e-2),
            owners=self.NAMES,
            collate_fn=lambda some: dict(collate(some)),
        ).fit()
        torch.testing.assert_close(weights(theirs), weights(ours), rtol=1e-5, atol=1e-7)
        run.save_model()
        assert "one person" in json.loads((tmp_path / "privacy_card.json").read_text())["unit"]

    def test_people_need_owners_and_owners_people(self, tmp_path):
        with pytest.raises(ConfigurationError, match="give owners"):
            trainer(tmp_path, public=self.PERSON).train()
        with pytest.raises(ConfigurationError, match="the plan's unit is a record"):
            trainer(tmp_path, owners=self.NAMES).train()


class TestWhatIsSaid:
    PUBLIC = frozenset(("epsilon", "learning_rate", "epoch", "step", "train_epsilon", "train_delta"))

    @pytest.mark.rule(12)
    def test_no_number_of_the_private_rows_is_logged_or_saved(self, tmp_path, capsys):
        seen = Recorder()
        run = trainer(tmp_path, head_only(), callbacks=[seen], save_strategy="steps", save_steps=2)
        result = run.train()
        assert result.training_loss != result.training_loss  # NaN
        assert result.metrics.keys() == {"train_epsilon", "train_delta"}
        state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
        for log in (*seen.logs, *run.state.log_history, *state["log_history"]):
            assert log.keys() <= self.PUBLIC
        assert state["total_flos"] == state["num_input_tokens_seen"] == 0
        assert "loss" not in capsys.readouterr().out

    @pytest.mark.rule(26)
    def test_what_a_folder_holds_is_a_closed_list(self, tmp_path):
        run = trainer(tmp_path / "run", head_only(), processing_class=tokenizer(), save_strategy="steps", save_steps=2)
        run.train()
        run.save_model(tmp_path / "model")
        model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training_args.bin"}
        model |= {"README.md", "privacy_card.json"}
        assert {file.name for file in (tmp_path / "model").iterdir()} == model
        saved = tmp_path / "run" / "checkpoint-2"
        assert {file.name for file in saved.iterdir()} == model | {"fodp.pt", "trainer_state.json"}

    @pytest.mark.rule(23)
    def test_the_folder_says_what_the_model_costs_once(self, tmp_path):
        wanted = plan(steps=3)
        run = trainer(tmp_path, head_only(), plan=wanted)
        run.train()
        for _ in range(2):  # a second card takes the place of the first
            run.save_model()
        readme, card = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "privacy_card.json").read_text())
        assert card["epsilon"] == wanted.epsilon()
        assert readme.count("## Privacy") == 1
        assert f"ε = {fodp.accounting.rounded_up(wanted.epsilon())}** at **δ = 1e-05" in readme
        assert "one training example, added or removed" in readme
        assert "Not covered: the choice of hyper-parameters" in readme
        loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
        assert torch.equal(weights(loaded), weights(run.model))

    def test_a_stop_for_what_was_seen_costs_the_whole_plan(self, tmp_path):
        def stop(control):
            control.should_training_stop = True

        wanted = plan(steps=6)
        run = trainer(tmp_path, head_only(), plan=wanted, callbacks=[Recorder(2, stop)])
        result = run.train()
        assert result.global_step == 2
        assert result.metrics["train_epsilon"] == run.privacy_card()["epsilon"] == wanted.epsilon()

    def test_callbacks_see_the_moments_of_trainer(self, tmp_path):
        seen = Recorder(1, lambda control: run.model.eval())
        run = trainer(tmp_path, head_only(), callbacks=[seen], public=dict(sampling_rate=0.5, steps=5))
        run.train()
        step = ["begin", "end"]
        assert seen.moments == [*step, *step, "epoch", *step, *step, "epoch", *step, "epoch"]
        assert seen.modes == {True}
        assert len(seen.releases) == 5
        assert [log["learning_rate"] for log in seen.logs[:2]] == pytest.approx([1e-2, 8e-3])
        assert run.epsilon() == pytest.approx(seen.logs[-2]["epsilon"])


class TestEvaluation:
    def test_scores_need_data_that_is_declared_public(self, tmp_path):
        with pytest.raises(ConfigurationError, match="eval_data_is_public=True"):
            trainer(tmp_path, eval_dataset=rows(4, 1))
        run = trainer(tmp_path)
        with pytest.raises(ConfigurationError, match="eval_data_is_public=True"):
            run.evaluate(rows(4, 1))
        with pytest.raises(ConfigurationError, match="eval_data_is_public must be True or False, got 'no'"):
            trainer(tmp_path, eval_dataset=rows(2, 1), eval_data_is_public="no")
        with pytest.raises(ConfigurationError, match="compute_loss_func must be a function, got 3"):
            trainer(tmp_path, compute_loss_func=3)

    def test_scores_on_the_training_rows_are_refused(self, tmp_path):
        data = rows(40)
        with pytest.raises(ConfigurationError, match="is the training data"):
            trainer(tmp_path, train=data, eval_dataset={"a": rows(2, 1), "b": data}, eval_data_is_public=True)
        run = trainer(tmp_path, train=data, eval_data_is_public=True)
        with pytest.raises(ConfigurationError, match="is the training data"):
            run.evaluate(data)
        with pytest.raises(ConfigurationError, match="rows that were trained on"):
            run.predict(data)

    def test_public_scores_choose_the_model_and_the_end(self, tmp_path):
        scores = iter([0.5, 0.9, 0.2, 0.1, 0.0])
        saved: dict[int, torch.Tensor] = {}
        seen = Recorder()
        seen.on_save = lambda args, state, control, model, **_: saved.update({state.global_step: weights(model)})
        run = trainer(
            tmp_path, head_only(), public=dict(steps=8), eval_dataset=rows(8, 1), eval_data_is_public=True,
            compute_metrics=lambda found: {"made_up": next(scores)}, eval_strategy="steps", eval_steps=1,
            save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="made_up",
            callbacks=[transformers.EarlyStoppingCallback(2), seen], save_total_limit=2,
        )  # fmt: skip
        result = run.train()
        assert (result.global_step, run.state.best_global_step) == (4, 2)
        assert torch.equal(weights(run.model), saved[2])
        assert {"eval_loss", "eval_made_up"} <= run.state.log_history[1].keys()
        assert result.metrics["train_epsilon"] == run.plan.epsilon()
        assert run.predict(rows(3, 2)).predictions.shape == (3, 2)


class TestCheckpoints:
    STEPS = 16

    def run(self, folder, seed=None, at=None, act=None, **options):
        seen = Recorder(at, act)
        given = dict(noise_multiplier=1000.0, steps=self.STEPS, seed=seed)
        ledger = fodp.Ledger(folder / "spent.db") if "ledger" not in options else options.pop("ledger")
        usual: dict[str, Any] = dict(save_strategy="steps", save_steps=3, logging_steps=100)
        made = trainer(folder / "run", head_only(), public=given, callbacks=[seen], ledger=ledger, **usual | options)
        return made, seen

    @pytest.mark.rule(11)
    @pytest.mark.parametrize("seed", [None, 5])
    def test_a_killed_run_goes_on_and_repeats_no_noise(self, tmp_path, seed):
        first, before = self.run(tmp_path, seed, 5, killed, run_id="hf")
        with pytest.raises(KeyboardInterrupt):
            first.train()
        charged = first.private.ledger.steps("hf")
        assert charged >= 5  # reserved before they were taken
        second, after = self.run(tmp_path, seed)
        result = second.train(resume_from_checkpoint=True)
        assert second.private.ledger.steps("hf") == result.global_step == self.STEPS
        assert result.metrics["train_epsilon"] == second.plan.epsilon()
        again = [step for step in before.releases if any(torch.equal(step, other) for other in after.releases)]
        if seed is None:
            assert not again
            assert len(after.releases) == self.STEPS - charged
            assert second.private.lost_steps == charged - 3
        else:
            assert len(again) == 2  # steps 4 and 5, the same releases
            assert len(after.releases) == self.STEPS - 3
        scheduled = second.lr_scheduler.last_epoch
        assert scheduled == 3 + len(after.releases)

    @pytest.mark.rule(11)
    def test_a_secure_run_goes_on_with_its_ledger_only(self, tmp_path):
        first, _ = self.run(tmp_path, None, 5, killed)
        with pytest.raises(KeyboardInterrupt):
            first.train()
        second, _ = self.run(tmp_path, None, ledger=None)
        with pytest.raises(PrivacyError, match="goes on only with its ledger"):
            second.train(resume_from_checkpoint=True)

    def test_ctrl_c_ends_after_the_step_with_a_checkpoint(self, tmp_path):
        first, _ = self.run(tmp_path, None, 4, lambda control: os.kill(os.getpid(), signal.SIGINT), run_id="hf")
        assert first.train().global_step == 4
        assert (tmp_path / "run" / "checkpoint-4" / "fodp.pt").exists()
        assert first.private.ledger.steps("hf") == 4
        assert first.train().global_step == self.STEPS  # and the same trainer may go on
        second, _ = self.run(tmp_path)
        with pytest.raises(LedgerError):  # another process cannot: the run has ended
            second.train(resume_from_checkpoint=str(tmp_path / "nowhere"))

    def test_a_folder_that_a_crash_has_cut_is_passed_over(self, tmp_path):
        first, _ = self.run(tmp_path, 5, 7, killed)
        with pytest.raises(KeyboardInterrupt):
            first.train()
        (tmp_path / "run" / "checkpoint-6" / "trainer_state.json").unlink()
        second, after = self.run(tmp_path, 5)
        second.train(resume_from_checkpoint=True)
        assert len(after.releases) == self.STEPS - 3

    def test_a_folder_of_weights_alone_is_refused(self, tmp_path):
        first, _ = self.run(tmp_path, 5, save_only_model=True)
        first.train()
        second, _ = self.run(tmp_path, 5)
        with pytest.raises(LedgerError, match="no complete checkpoint"):
            second.train(resume_from_checkpoint=True)
        with pytest.raises(LedgerError, match=r"has no fodp\.pt"):
            second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))

    def test_a_trainer_has_one_run(self, tmp_path):
        run, _ = self.run(tmp_path, 5, ledger=None)
        run.train()
        with pytest.raises(ConfigurationError, match="a second one spends anew"):
            run.train()


class TestAdapters:
    @pytest.mark.filterwarnings("ignore:fan_in_fan_out")
    @pytest.mark.parametrize("options", [dict(lora_dropout=0.1), dict(use_dora=True)], ids=["LoRA", "DoRA"])
    def test_only_adapters_move_and_what_is_saved_is_what_was_trained(self, tmp_path, options):
        peft = pytest.importorskip("peft", reason="fodp[hf]")
        model = adapted(gpt2(), task_type="CAUSAL_LM", **options)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        collate = language(**LANGUAGE)
        trainer(tmp_path, model, rows(40, kind="plain"), data_collator=collate, public=dict(steps=3)).train()
        moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
        assert moved == {name for name in before if "lora_" in name}
        run_folder = tmp_path / "adapter"
        model.eval()
        words = torch.tensor([[4, 9, 12]])
        with torch.no_grad():
            wanted, untrained = model(input_ids=words).logits, gpt2().eval()(input_ids=words).logits
        saved = PrivateTrainer(model, arguments(tmp_path), plan=plan())
        saved.save_model(run_folder)
        loaded = peft.PeftModel.from_pretrained(gpt2(), run_folder).eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded(input_ids=words).logits, wanted)
        assert not torch.allclose(wanted, untrained, atol=1e-3)

    @pytest.mark.filterwarnings("ignore:fan_in_fan_out")
    def test_the_card_stands_in_the_adapters_own_readme(self, tmp_path):
        model = adapted(gpt2(), task_type="CAUSAL_LM")
        collate = language(**LANGUAGE)
        run = trainer(tmp_path, model, rows(40, kind="plain"), data_collator=collate, public=dict(steps=1))
        run.train()
        run.save_model()
        readme = (tmp_path / "README.md").read_text()
        assert "library_name: peft" in readme
        assert readme.count("## Privacy") == 1
        assert not (tmp_path / "model.safetensors").exists()

    def test_a_frozen_backbone_stays(self, tmp_path):
        model, before = head_only(), weights(bert().bert)
        trainer(tmp_path, model).train()
        assert torch.equal(weights(model.bert), before)
        assert not torch.equal(weights(model.classifier), weights(bert().classifier))


def test_an_average_of_the_iterates_is_what_is_saved_and_left_in_the_model(tmp_path):
    averaged = dict(seed=0, params=dict(average="ema"))
    run = trainer(tmp_path, head_only(), public=averaged, save_strategy="steps", save_steps=4)
    run.train()
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-4")
    assert torch.equal(weights(loaded.classifier), weights(run.model.classifier))
    assert not torch.equal(run.private.session.parameters(), run.private._weights.iterate)
