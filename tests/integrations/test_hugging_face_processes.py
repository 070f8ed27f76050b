"""Hugging Face's Trainer in two processes of torchrun or `accelerate launch`: one model, one ledger, no waiting."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fodp
from fodp import ConfigurationError
from fodp.integrations._hugging_face.processes import refuse_unknown
from hugging_face_for_tests import bert, plan, rows, trainer, transformers, weights
from ranks_for_tests import SECONDS, in_ranks

TESTS = Path(__file__).parents[1]
STEPS = 6


class Moments(transformers.TrainerCallback):
    """Counts steps that it was told of, and may end the training."""

    def __init__(self, end: int | None = None):
        self.steps, self._end = 0, end

    def on_step_end(self, args, state, control, **_):
        self.steps += 1
        control.should_training_stop = state.global_step == self._end


def trained(folder: Path, resume: bool = False, **options: Any) -> dict[str, Any]:
    """A seeded run with scores, checkpoints and the best model, and all that can be said of it afterwards."""
    seen = Moments()
    usual: dict[str, Any] = dict(
        public=dict(seed=7, steps=STEPS), ledger=fodp.Ledger(folder / "spent.db"), run_id="hf", callbacks=[seen],
        eval_dataset=rows(9, 1), eval_data_is_public=True, per_device_eval_batch_size=4, eval_strategy="steps",
        eval_steps=2, compute_metrics=lambda found: {"best_at": -abs(run.state.global_step - 4)}, save_strategy="steps",
        save_steps=2, load_best_model_at_end=True, metric_for_best_model="best_at",
    )  # fmt: skip
    run = trainer(folder / "run", bert(), **usual | options)
    result = run.train(resume_from_checkpoint=resume or None)
    scores = [log["eval_loss"] for log in run.state.log_history if "eval_loss" in log]
    after = run.evaluate() if "eval_dataset" not in options else {"eval_loss": 0.0}
    run.save_model(str(folder / "model"))
    return dict(
        weights=weights(run.model), result=(result.global_step, result.metrics), steps=seen.steps, scores=scores,
        state=(run.state.global_step, run.state.best_global_step, run.state.epoch), after=after["eval_loss"],
        predicted=run.predict(rows(5, 2)).predictions.shape, wrapped=type(run.model_wrapped).__name__,
        charged=fodp.Ledger(folder / "spent.db").steps("hf"), rank=run.args.process_index,
    )  # fmt: skip


def launched(tmp_path: Path, *command: str) -> list[dict[str, Any]]:
    """What each of two processes has found."""
    words = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command, __file__, str(tmp_path)],
        env=words, timeout=SECONDS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.rule(6)
@pytest.mark.parametrize(
    "command",
    [
        ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        # --cpu starts one process (accelerate 1.15) unless there is mpirun; the arguments say that CPUs are meant.
        ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"),
    ],
    ids=["torchrun", "accelerate"],
)
def test_two_processes_train_as_one(tmp_path, command):
    (tmp_path / "one").mkdir()
    alone, (first, other) = trained(tmp_path / "one"), launched(tmp_path, *command)
    assert (first["rank"], other["rank"]) == (0, 1)
    torch.testing.assert_close(first["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
    assert torch.equal(first["weights"], other["weights"])  # those of step 4, loaded by both
    for found in (first, other):
        assert found["result"] == alone["result"]
        assert found["state"] == alone["state"] == (STEPS, 4, STEPS / 4)
        assert found["after"] == pytest.approx(alone["after"], rel=1e-4)
        assert found["predicted"] == alone["predicted"] == (5, 2)
        assert found["wrapped"] == "BertForSequenceClassification"  # not DistributedDataParallel
    assert first["scores"] == pytest.approx(alone["scores"], rel=1e-4)
    assert (first["steps"], other["steps"], other["scores"]) == (STEPS, 0, [])  # callbacks are of the first process
    assert first["charged"] == alone["charged"] == STEPS  # once, not once for each process
    assert files(tmp_path / "two") == files(tmp_path / "one")


def files(folder: Path) -> set[str]:
    """What a training has written."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def in_two(work: Any) -> list[Any]:
    """`work(rank)` in two processes that know each other as those of torchrun do."""

    def started(rank: int) -> Any:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        return work(rank)

    return in_ranks(2, started)


NO_SCORES: dict[str, Any] = dict(eval_dataset=None, eval_strategy="no", load_best_model_at_end=False)


@pytest.mark.rule(11)
def test_a_run_goes_on_with_other_numbers_of_processes(tmp_path):
    """From one to two: what a callback of the first process has stopped, both go on with."""
    whole = tmp_path / "whole"
    whole.mkdir()
    wanted = trained(whole, **NO_SCORES)
    stopped = trained(tmp_path, callbacks=[Moments(end=3)], **NO_SCORES)
    assert stopped["result"][0] == 3
    first, other = in_two(lambda rank: trained(tmp_path, resume=True, **NO_SCORES))
    for found in (first, other):
        assert isinstance(found, dict), found
        assert found["result"] == wanted["result"]
        torch.testing.assert_close(found["weights"], wanted["weights"], rtol=1e-4, atol=1e-6)
    assert first["charged"] == STEPS
    assert first["steps"] == STEPS - 3


def test_a_callback_of_the_first_process_stops_both(tmp_path):
    found = in_two(lambda rank: trained(tmp_path, callbacks=[Moments(end=3)], **NO_SCORES))
    for one in found:
        assert isinstance(one, dict), one
        assert one["result"][0] == one["state"][0] == 3
        assert one["result"][1]["train_epsilon"] == plan(seed=7, steps=STEPS).epsilon()  # of the whole plan
    assert torch.equal(found[0]["weights"], found[1]["weights"])


def test_a_callback_that_fails_ends_both(tmp_path):
    class Failing(transformers.TrainerCallback):
        def on_train_end(self, args, state, control, **_):
            raise OSError("no such luck")

    first, other = in_two(lambda rank: trained(tmp_path, callbacks=[Failing()], **NO_SCORES))
    assert first == ("OSError", "no such luck")
    assert other[0] == "RankLost"


@pytest.mark.rule(14)
def test_people_are_refused_before_anything_is_charged(tmp_path):
    ledger = tmp_path / "spent.db"

    def work(rank):
        person = dict(unit="person", records_per_person=2)
        names = [i % 15 for i in range(40)]
        trainer(tmp_path / "run", public=person, owners=names, ledger=fodp.Ledger(ledger), run_id="hf").train()

    for kind, message in in_two(work):
        assert kind == "ConfigurationError"
        assert "unit='person' and several processes do not go together" in message
        assert "train in one process" in message
    assert not fodp.Ledger(ledger).steps("hf")


@pytest.mark.rule(14)
def test_processes_that_would_release_by_themselves_are_refused():
    def started(count=1, kind="NO", fsdp=False):
        args = SimpleNamespace(world_size=count, distributed_state=SimpleNamespace(distributed_type=kind))
        return SimpleNamespace(args=args, is_fsdp_enabled=fsdp, is_deepspeed_enabled=False)

    with pytest.raises(ConfigurationError, match="knows of 2 processes and PyTorch's process group of 1"):
        refuse_unknown(started(2, "XLA"))
    with pytest.raises(ConfigurationError, match="accelerate was set up for FSDP"):
        refuse_unknown(started(fsdp=True))
    with pytest.raises(ConfigurationError, match="accelerate was set up for MEGATRON_LM"):
        refuse_unknown(started(kind="MEGATRON_LM"))
    refuse_unknown(started())


if __name__ == "__main__":  # one of the processes
    shared = Path(sys.argv[1]) / "two"
    shared.mkdir(exist_ok=True)
    outcome = trained(shared)
    torch.save(outcome, Path(sys.argv[1]) / f"rank{outcome['rank']}.pt")
