"""A model in parts on several processes (FSDP2, DTensors): every door refuses it in one sentence with the way out."""

import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

import fodp
from fodp.ledger import Ledger
from methods_for_tests import data, losses, network, plan, trainer
from ranks_for_tests import in_ranks
from test_faults import TRAIN, command

SENTENCE = (
    "this model cannot be trained privately: error: model: divided among processes (fully_shard, or DTensor "
    "parameters); train it unsharded, in one process or several: a sharded source comes back in the next release"
)


def sharded():
    return fully_shard(network())


def sharded_in_part():
    model = network()
    fully_shard(model[0])
    return model


def after_a_forward_pass():
    """FSDP2 leaves the outermost parameters whole then: none of them is a DTensor."""
    model = sharded()
    model(data().tensors[0])
    assert not any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    return model


def by_hand():
    def divide(name, module, mesh):
        for key, parameter in module._parameters.items():
            module._parameters[key] = torch.nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))

    return distribute_module(network(), init_device_mesh("cpu", (torch.distributed.get_world_size(),)), divide)


def digits_model(classes, shape):
    """For the command line."""
    return fully_shard(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[0] * shape[1] * shape[2], classes))
    )


def in_a_trainer(model, folder):
    trainer(plan("fo-dp-sgd"), model, ledger=Ledger(folder / "l.sqlite"))


def in_a_loop_of_ones_own(model, folder):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fodp.make_private(model, optimizer, data(), plan("fo-dp-sgd"), ledger=Ledger(folder / "l.sqlite"))


def in_a_sum(model, folder):
    fodp.clipped_sum(model, losses, data().tensors, 1.0)


@pytest.mark.parametrize("door", [in_a_trainer, in_a_loop_of_ones_own, in_a_sum])
@pytest.mark.parametrize("count", [1, 2])
def test_it_is_refused_before_anything_is_charged(door, count, tmp_path):
    def work(rank):
        (folder := tmp_path / str(rank)).mkdir()
        said = []
        for divided in (sharded, sharded_in_part, after_a_forward_pass, by_hand):
            with pytest.raises(fodp.ConfigurationError) as caught:
                door(divided(), folder)
            said.append(str(caught.value))
        rows = Ledger(folder / "l.sqlite").store.select() if (folder / "l.sqlite").exists() else []
        return set(said), [row.kind for row in rows]

    assert in_ranks(count, work) == [({SENTENCE}, [])] * count


def test_the_check_tells_it_too():
    said = in_ranks(1, lambda rank: [str(found) for found in fodp.check(sharded())])
    assert said == [[SENTENCE.partition(": ")[2]]]


def test_the_command_line_refuses_it(tmp_path, monkeypatch):
    pytest.importorskip("sklearn", reason="the embedded digits come with it")
    monkeypatch.setitem(sys.modules, "divided_models", sys.modules[__name__])
    words = [*TRAIN, "--model", "divided_models:digits_model", "--epochs", "0.5", "--out", str(tmp_path / "run")]
    first, second = command(2, words)
    assert first == (2, "", f"fodp: {SENTENCE}\n")
    assert second[0] == 2
    assert not (tmp_path / "run").exists()


def test_the_same_model_unsharded_trains_on():
    """The way out that the sentence names."""
    assert in_ranks(2, lambda rank: trainer(plan("fo-dp-sgd", steps=2)).fit().steps) == [2, 2]
