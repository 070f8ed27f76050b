"""Models that FSDP2 has divided: real processes over gloo hold slices, and train as one process with all of it does."""

import io
import math
import pickle

import pytest
import torch
from torch.utils.data import TensorDataset

import fodp
from fodp.ledger import Ledger
from fodp.methods import METHODS
from fodp.testing import PARTS
from fodp.training.callbacks import Callback, Checkpoint, Evaluate, WeightAverage
from methods_for_tests import StopAfter, data, flat, losses, network, plan, trainer
from ranks_for_tests import in_ranks

NUMBERS = 5 * 8 + 8 + 8 * 3 + 3
FEW = [
    ("fo-dp-sgd", dict(window=4)),
    ("fo-dp-sgd", dict(quantile=0.5, count_noise=20.0, shape="fan-in", width=4.0)),
    ("dp-sat", {}),
    ("fo-noise", dict(bands=3)),
    ("sa-dpsgd", dict(momentum=0.9)),
]
VARIANTS = [
    *((name, {}) for name in METHODS),
    *FEW,
    ("dp-sgd", dict(PARTS)),
    ("dp-sgd", dict(filter="fractional", clip="per-layer")),
    ("dp-sgd", dict(shape="fan-in", width=4.0, update="adamwbc", lr=0.01)),
    ("dp-sgd", dict(shape="fan-in", width=4.0, lr="auto")),
    ("fo-dp-sgd", dict(tau=0.0, window=60, lam=0.2, compact="exponentials")),
    ("disk", dict(clip="normalised", noise_schedule=((0, 2.0), (2, 1.0)))),
]


def sharded(dtype=torch.float64, by_layer=True):
    from torch.distributed.fsdp import fully_shard

    model = network(dtype)
    if by_layer:
        fully_shard(model[0])
    return fully_shard(model)


def whole(training):
    with training.run.whole():
        return flat(training.model)


def vectors(state):
    """All flat tensors of a state."""
    if isinstance(state, dict | list | tuple):
        return [v for part in (state.values() if isinstance(state, dict) else state) for v in vectors(part)]
    return [state] if isinstance(state, torch.Tensor) and state.dim() else []


def outcome(method, params, model=None, **options):
    training = trainer(plan(method, params, steps=4), model, **options)
    result = training.fit()
    return whole(training), result.epsilon, result.steps, training.run.noise_variance(), training


@pytest.mark.parametrize(("count", "variants"), [(2, VARIANTS), (3, FEW)])
def test_every_method_is_the_same_in_slices(count, variants):
    alone = [outcome(*variant) for variant in variants]

    def work(rank):
        found = []
        for method, params in variants:
            *numbers, training = outcome(method, params, sharded())
            run, size = training.run, training.run.size
            kept = vectors(run.state_dict(views=True)) + (list(run._correlated._past) if run._correlated else [])
            assert all(vector.shape == (size,) for vector in kept), method  # only slices are remembered
            if method.startswith("fo-") and run.state.__class__.__name__ == "FractionalMemory":
                assert run.state._table.shape[1] == size
            held = [v for state in training.optimizer.state.values() for v in state.values() if hasattr(v, "to_local")]
            assert all(v.to_local().numel() < NUMBERS // count + 8 for v in held)
            assert not any(type(p).__name__ != "DTensor" for p in training.model.parameters())
            found.append((*numbers, size))
        return found

    everywhere = in_ranks(count, work)
    for found in everywhere:
        assert isinstance(found, list), found
        for (method, params), one, many, first in zip(variants, alone, found, everywhere[0], strict=True):
            torch.testing.assert_close(many[0], one[0], rtol=1e-9, atol=1e-11, msg=f"{method} {params}")
            assert many[1] == first[1] == one[1]  # ε
            assert many[2] == one[2]
            assert many[3] == pytest.approx(one[3], rel=1e-9), method  # of weights by distances, whose last bits differ
            assert torch.equal(many[0], first[0])
    assert sum(found[0][4] for found in everywhere) == NUMBERS


def queries(dataset, model=None):
    """What noise is added to in the first step, here; the records of this rank's lot."""
    run = trainer(plan("dp-sgd", clip_norm=0.5), model, dataset=dataset).run
    seen, lots, add_noise, draw = [], [], run.add_noise, run.draw

    def watched(query, *rest):
        seen.append(query.value.clone())
        return add_noise(query, *rest)

    def drawn(*rest):
        lots.append(draw(*rest))
        return lots[-1]

    run.add_noise, run.draw = watched, drawn
    released = run.take_step()
    return seen[0], released, lots[0].indices.tolist(), run


def test_the_clipped_sum_its_noise_and_the_owners_of_records():
    inputs, labels = data().tensors
    value, released, lot, _ = queries(data())
    record = lot[0]
    changed = inputs.clone()
    changed[record] = math.nan  # contributes nothing, as if it were not there

    def work(rank):
        here, there, mine, run = queries(data(), sharded())
        without = queries(TensorDataset(changed, labels), sharded())[0]
        gather = run.shards.slices.gather
        drawn = run._noise.normal_(torch.empty_like(here), 0.5, 0, "noise")
        return gather(here), gather(there), mine, gather(without), gather(drawn), there - here - drawn

    everywhere = in_ranks(3, work)
    noise = fodp.noise.Streams.seeded(0).normal_(torch.empty(NUMBERS, dtype=torch.float64), 0.5, 0, "noise")
    for whole_sum, release, _, without, drawn, rest in everywhere:
        torch.testing.assert_close(whole_sum, value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(release, released, rtol=1e-12, atol=1e-14)
        assert torch.equal(drawn, noise)  # each rank has drawn its part of the noise of one process, bit for bit
        assert rest.abs().max() < 1e-12
        assert 0 < (whole_sum - without).norm().item() <= 0.5 * (1 + 1e-9)
    owned = [index for found in everywhere for index in found[2]]
    assert sorted(owned) == sorted(lot)
    assert len(set(owned)) == len(owned)


def test_secure_noise_is_that_of_one_release_and_fresh_in_every_slice():
    """No record contributes: what is released is noise of σC, independent on every rank, under one shared key."""
    inputs, labels = data().tensors
    silent = TensorDataset(inputs * math.nan, labels)

    def releases(rank):
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Linear(5, 4000).double()
        run = trainer(plan("dp-sgd", seed=None, noise_multiplier=2.0, clip_norm=0.5), fully_shard(model), silent).run
        parts = [run.take_step() for _ in range(2)]
        return [run.shards.slices.gather(part) for part in parts], run.streams._key

    everywhere = in_ranks(2, releases)
    assert everywhere[0][1] == everywhere[1][1]
    first, second = everywhere[0][0]
    assert torch.equal(first, everywhere[1][0][0])
    assert first.std().item() == pytest.approx(1.0, abs=0.03)  # of 24,000: 6 standard errors
    for a, b in ((first, second), (first[:10000], first[10000:20000])):  # steps; rows of rank 0 and of rank 1
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.06


def test_mistakes_with_slices_would_be_found(monkeypatch):
    """Noise of one range for all ranks, distances of slices instead of vectors, a slice summed over no other rank."""
    from fodp.noise.ranges import RangedStreams, Ranges
    from fodp.ranks.shards import Shards

    inputs, labels = data().tensors
    silent = TensorDataset(inputs * math.nan, labels)
    settings = dict(window=4, tau=5.0, kappa=1e-3, zeta=1e-3)
    alone = outcome("fo-dp-sgd", settings)[0]
    value = queries(data())[0]

    def work(rank):
        from torch.distributed.fsdp import fully_shard

        right = outcome("fo-dp-sgd", settings, sharded())[0]
        with monkeypatch.context() as patch:
            patch.setattr(Shards, "add", lambda self, numbers: numbers)
            unsummed = outcome("fo-dp-sgd", settings, sharded())[0]
        with monkeypatch.context() as patch:
            patch.setattr(Shards, "total", lambda self, part: self.slices.cut(part))
            run = queries(data(), sharded())
            unscattered = run[3].shards.slices.gather(run[0])
        with monkeypatch.context() as patch:
            made = RangedStreams.__init__

            def same(self, streams, ranges, made=made):
                return made(self, streams, Ranges(ranges.size, ((0, ranges.count),)))

            patch.setattr(RangedStreams, "__init__", same)
            model = fully_shard(torch.nn.Linear(5, 4000, bias=False).double())
            run = trainer(plan("dp-sgd"), model, silent).run
            twice = run.shards.slices.gather(run.take_step())
        return right, unsummed, unscattered, twice

    for right, unsummed, unscattered, twice in in_ranks(2, work):
        torch.testing.assert_close(right, alone, rtol=1e-9, atol=1e-11)
        assert (unsummed - alone).norm() > 1e-6
        assert (unscattered - value).norm() > 1e-3
        assert torch.equal(twice[:10000], twice[10000:])  # which a difference of two slices would show without noise


class Note(Callback):
    """What a callback sees of the model after each step."""

    def __init__(self):
        self.seen = []

    def on_step(self, trainer):
        self.seen.append(flat(trainer.model))


def test_callbacks_of_the_first_rank_see_the_whole_model():
    public = data(30, seed=9)

    def work(rank=0, model=None):
        note, average = Note(), WeightAverage(decay=0.5)
        evaluate = Evaluate(public, average=average)
        training = trainer(plan("fo-dp-sgd", steps=4), model, callbacks=[note, average, evaluate])
        training.fit()
        if training.run.ranks.rank:
            assert training.callbacks == [] == note.seen
            return None
        return torch.stack(note.seen), dict(training.metrics), flat(average.model)

    one = work()
    two, rest = in_ranks(2, lambda rank: work(rank, sharded()))
    assert rest is None
    torch.testing.assert_close(two[0], one[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(two[2], one[2], rtol=1e-9, atol=1e-11)
    assert two[1] == pytest.approx(one[1], rel=1e-9)


def test_the_model_is_fsdp_s_again_after_a_fit():
    """Its own forward and backward pass, and its state, are as if it had never been whole."""

    def work(rank):
        model = sharded()
        training = trainer(plan("dp-sgd", steps=3), model, callbacks=[StopAfter(1)])
        training.fit()
        model(data().tensors[0])  # leaves some parameters whole
        training.callbacks.clear()
        assert training.fit().reason == "finished"
        weights = whole(training)
        plain = network()
        torch.nn.utils.vector_to_parameters(weights, plain.parameters())
        batch = data().tensors
        assert type(model).__name__ == "FSDPSequential"
        model.zero_grad()
        torch.testing.assert_close(model(batch[0]), plain(batch[0]))
        losses(model, batch).mean().backward()
        losses(plain, batch).mean().backward()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
        return "as before"

    assert in_ranks(2, work) == ["as before"] * 2


SETTINGS = dict(quantile=0.5, count_noise=20.0, update="adamw", lr=0.01)


@pytest.mark.parametrize("method", ["fo-dp-sgd", "fo-noise"])
def test_resuming_with_two_then_three_sharded_then_one_that_is_not(tmp_path, method):
    the_plan = plan(method, SETTINGS | (dict(bands=3) if method == "fo-noise" else {}))
    straight = trainer(the_plan)
    straight.fit()
    file = tmp_path / "c.pt"

    def go_on(model, until=99, ledger=True):
        callbacks = [StopAfter(until), Checkpoint(file)]
        ledger = (lambda: Ledger(tmp_path / "l.sqlite")) if ledger else None
        training = trainer(the_plan, model, callbacks=callbacks, ledger=ledger, run_id="run")
        if until > 2:
            training.resume(file)
        return training.fit().reason, training.step, whole(training)

    assert [found[:2] for found in in_ranks(2, lambda rank: go_on(sharded(), 2))] == [("interrupted", 2)] * 2
    assert len(list(tmp_path.glob("c.pt.slices-*"))) == 1  # older ones are gone
    assert [found[:2] for found in in_ranks(3, lambda rank: go_on(sharded(by_layer=False), 4))] == [
        ("interrupted", 4)
    ] * 3
    reason, steps, _ = go_on(None, 5)  # whole, in one process
    assert (reason, steps) == ("interrupted", 5)
    assert [found[:2] for found in in_ranks(2, lambda rank: go_on(network(), 6))] == [("interrupted", 6)] * 2
    for reason, steps, weights in in_ranks(2, lambda rank: go_on(sharded())):  # of a file without slices
        assert (reason, steps) == ("finished", 8)
        torch.testing.assert_close(weights, flat(straight.model), rtol=1e-9, atol=1e-11)
    assert Ledger(tmp_path / "l.sqlite").steps("run") == 8


def test_a_secure_run_goes_on_with_a_fresh_key_and_loses_what_was_used_since(tmp_path):
    the_plan, file = plan("fo-dp-sgd", seed=None, steps=8), tmp_path / "c.pt"

    def go_on(model, until=99):
        callbacks = [StopAfter(until), *([Checkpoint(file)] if until == 3 else [])]
        options = dict(ledger=lambda: Ledger(tmp_path / "l.sqlite"), run_id="run")
        training = trainer(the_plan, model, callbacks=callbacks, **options)
        if until != 3:
            training.resume(file)
        result = training.fit()
        return result.steps, result.lost_steps, training.run.streams._key

    first = in_ranks(2, lambda rank: go_on(sharded(), 3))
    second = in_ranks(2, lambda rank: go_on(sharded(), 5))  # not saved
    third = in_ranks(3, lambda rank: go_on(sharded()))
    assert [[steps[:2] for steps in found] for found in (first, second, third)] == [
        [(3, 0)] * 2,
        [(5, 0)] * 2,
        [(8, 2)] * 3,
    ]
    assert len({key for found in (first, second, third) for *_, key in found}) == 3
    assert Ledger(tmp_path / "l.sqlite").steps("run") == 8


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of two ranks, and its folder of slices."""

    def work(rank):
        training = trainer(plan("fo-dp-sgd", steps=3), sharded())
        training.fit()
        training.save(tmp_path / "c.pt")
        return whole(training)

    weights, _ = in_ranks(2, work)
    (folder,) = tmp_path.glob("c.pt.slices-*")
    return tmp_path / "c.pt", folder, weights


@pytest.mark.fault(
    "a sharded run's checkpoint: a file of its folder of slices is missing or damaged, or a rank cannot read it",
    happens="refused on all ranks, by digests that the checkpoint has of each",
    lost="nothing, with a copy",
    costs="nothing",
)
def test_a_checkpoint_without_all_of_its_slices_is_refused(saved):
    file, folder, weights = saved
    training = trainer(plan("fo-dp-sgd", steps=3))
    training.resume(file)
    torch.testing.assert_close(flat(training.model), weights, rtol=0, atol=0)
    for part in sorted(folder.iterdir()):
        content = part.read_bytes()
        part.unlink()
        with pytest.raises(fodp.PrivacyError, match="missing, damaged or was changed"):
            trainer(plan("fo-dp-sgd", steps=3)).resume(file)
        part.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        with pytest.raises(fodp.PrivacyError, match="missing, damaged or was changed"):
            trainer(plan("fo-dp-sgd", steps=3)).resume(file)
        part.write_bytes(content)

    def work(rank):
        if rank == 0:
            (folder / "__1_0.distcp").unlink()
        torch.distributed.barrier()
        trainer(plan("fo-dp-sgd", steps=3), sharded()).resume(file)

    for kind, text in in_ranks(2, work):
        assert kind == "LedgerError"
        assert "missing, damaged" in text


def test_a_changed_file_is_refused_and_runs_nothing(saved, tmp_path):
    """Somebody who writes new digests too can change the numbers, as in any checkpoint, but no code is run."""
    from fodp.training import checkpoint, slice_files
    from fodp.training import sharded as slices

    class Evil:
        def __init__(self, what):
            self.what = what

        def __reduce__(self):
            return self.what, (str(tmp_path / "owned"), "w")

    file, folder, _ = saved
    about = (folder / ".metadata").read_bytes()
    assert str(tmp_path).encode() not in about  # nor does it say where it was written
    elsewhere = slice_files.about(folder)
    next(iter(elsewhere.storage_data.values())).relative_path = "../c.pt"
    for what in (Evil(open), Evil(io.FileIO), elsewhere):
        (folder / ".metadata").write_bytes(pickle.dumps(what))
        content = checkpoint.load(file)
        content["slices"]["files"][".metadata"] = slice_files.digest(folder / ".metadata").hex()
        with pytest.raises(fodp.PrivacyError, match=r"_?io\.(open|FileIO), which has no place|names a file outside"):
            slices.whole(content, file)
    assert not (tmp_path / "owned").exists()


@pytest.mark.fault(
    "a sharded run's checkpoint breaks off when its slices are written and its file is not (a full disk, a crash)",
    happens="the checkpoint before it stays, with its slices; what was begun is removed",
    lost="steps since that checkpoint, if the run ends",
    costs="the lost steps of a secure run stay charged",
)
def test_a_crash_before_the_file_has_its_name_leaves_the_one_before(tmp_path, monkeypatch):
    from fodp.training import checkpoint

    def work(rank):
        training = trainer(plan("fo-dp-sgd", steps=3), sharded())
        training.save(tmp_path / "c.pt")
        before = sorted(path.name for path in tmp_path.iterdir())
        torch.distributed.barrier()
        if rank == 0:

            def full(*_):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(checkpoint, "atomically", full)
            with pytest.raises(fodp.PrivacyError, match="the disk is full"):
                training.save(tmp_path / "c.pt")
            assert sorted(path.name for path in tmp_path.iterdir()) == before
        else:
            training.save(tmp_path / "c.pt")
        return "kept"

    assert in_ranks(2, work) == ["kept"] * 2
    trainer(plan("fo-dp-sgd", steps=3)).resume(tmp_path / "c.pt")


def test_an_optimizer_that_keeps_plain_tensors_of_its_slices_cannot_be_saved(tmp_path):
    """The file would have the first rank's, and every rank would go on with them."""

    class Plain(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["mine"] = parameter.grad.to_local().clone()

    def work(rank):
        model = sharded()
        training = trainer(plan("dp-sgd", steps=1), model, optimizer=Plain(model.parameters(), lr=0.1))
        training.fit()
        training.save(tmp_path / "checkpoint.pt")

    said = in_ranks(2, work)
    assert all(kind == "ConfigurationError" and "is a plain tensor of shape" in text for kind, text in said), said
    assert not list(tmp_path.iterdir())


def test_folders_of_other_checkpoints_stay(tmp_path):
    from fodp.training import slice_files

    other, old, kept = (tmp_path / name for name in ("run1.pt.slices-a", "run[1].pt.slices-b", "run[1].pt.slices-c"))
    for folder in (other, old, kept):
        folder.mkdir()
    slice_files.remove_others(tmp_path / "run[1].pt", kept)
    assert sorted(tmp_path.iterdir()) == [other, kept]


def test_a_folder_that_cannot_be_made_ends_all_ranks_at_once(tmp_path):
    def work(rank):
        training = trainer(plan("fo-dp-sgd", steps=3), sharded())
        training.save(tmp_path / "nowhere" / "c.pt")

    first, second = in_ranks(2, work)
    assert first[0] == "NotWritten"
    assert second == ("RankLost", second[1])


def test_a_folder_that_another_rank_does_not_see_is_refused_when_it_is_written(tmp_path):
    def work(rank):
        for number in range(2):
            (tmp_path / str(number)).mkdir(exist_ok=True)
        training = trainer(plan("fo-dp-sgd", steps=3), sharded())
        training.save(tmp_path / str(rank) / "c.pt")

    said = in_ranks(2, work)
    assert said[0][0] == "NotWritten"
    assert "choose a folder that all ranks see" in said[0][1]
    assert not list(tmp_path.glob("*/c.pt"))


@pytest.mark.fault(
    "a sharded run: a rank is killed",
    happens="the others end at once; nobody has all of the model, so the last epoch's checkpoint is the newest",
    lost="steps since that checkpoint",
    costs="the lost steps of a secure run stay charged",
)
def test_a_rank_that_is_killed_ends_the_others_and_the_run_can_be_resumed(tmp_path):
    import os
    import signal

    file = tmp_path / "c.pt"
    the_plan = plan("fo-dp-sgd", steps=6)

    class Records(torch.utils.data.Dataset):
        def __init__(self, rank):
            self.rank, self.read = rank, 0

        def __len__(self):
            return len(data())

        def __getitem__(self, index):
            self.read += 1
            if self.rank == 1 and self.read > 50:
                os.kill(os.getpid(), signal.SIGKILL)
            return tuple(column[index] for column in data().tensors)

    def work(rank):
        options = dict(ledger=lambda: Ledger(tmp_path / "l.sqlite"), run_id="run")
        return trainer(the_plan, sharded(), Records(rank), callbacks=[Checkpoint(file)], **options).fit()

    said = in_ranks(2, work)
    assert said[1] is None
    assert said[0][0] == "RankLost"
    assert 0 < Ledger(tmp_path / "l.sqlite").steps("run") < 6  # charged
    whole_again = trainer(the_plan, dataset=Records(0), ledger=Ledger(tmp_path / "l.sqlite"))
    whole_again.resume(file)
    assert whole_again.fit().reason == "finished"


def test_a_failing_callback_ends_all_ranks():
    class Fails(Callback):
        def on_step(self, trainer):
            raise ValueError("no")

    said = in_ranks(2, lambda rank: trainer(plan("dp-sgd"), sharded(), callbacks=[Fails()]).fit())
    assert [kind for kind, _ in said] == ["ValueError", "RankLost"]


class Looks(Callback):
    """Calls the model at the end, and saves."""

    def __init__(self, file):
        self.file, self.failed = file, []

    def on_step(self, trainer):
        raise ValueError("no")

    def on_stop(self, trainer):
        for act in (lambda: trainer.model(data().tensors[0]), lambda: trainer.save(self.file)):
            with pytest.raises(fodp.PrivacyError, match="broken off") as error:
                act()
            self.failed.append(type(error.value).__name__)
        raise KeyError("another")


def test_callbacks_of_a_run_that_broke_off_cannot_reach_the_other_ranks(tmp_path):
    """A collective that the others take for another one ends a process without a word, or waits for ever."""

    def work(rank):
        looks = Looks(tmp_path / "checkpoint.pt")
        with pytest.raises((ValueError, RuntimeError)) as error:
            trainer(plan("dp-sgd"), sharded(), callbacks=[looks]).fit()
        return type(error.value).__name__, looks.failed

    failed = ["ConfigurationError", "NotWritten"]
    assert in_ranks(2, work) == [("ValueError", failed), ("RankLost", [])]
    assert not list(tmp_path.iterdir())


def test_the_model_is_whole_for_a_function_of_one_callback_s_own_and_refuses_those_that_do_not_look():
    def work(rank):
        seen, calls = Callback(), []
        seen.on_step = lambda trainer: calls.append(trainer.model(data().tensors[0]).shape)
        trainer(plan("dp-sgd", steps=1), sharded(), callbacks=[seen]).fit()
        seen.looks_at_model = False
        trainer(plan("dp-sgd", steps=1), sharded(), callbacks=[seen]).fit()

    said = in_ranks(2, work)
    assert [kind for kind, _ in said] == ["ConfigurationError", "RankLost"]
    assert "looks_at_model" in said[0][1]


def test_a_learning_rate_changed_on_one_rank_is_refused():
    class Faster(Callback):
        def on_step(self, trainer):
            trainer.optimizer.param_groups[0]["lr"] *= 2

    said = in_ranks(2, lambda rank: trainer(plan("dp-sgd"), sharded(), callbacks=[Faster()]).fit())
    assert [kind for kind, _ in said] == ["Disagreement"] * 2
    assert "learning rate on one rank alone" in said[0][1]


def test_weights_changed_by_a_callback_are_refused():
    class Shrinks(Callback):
        def on_step(self, trainer):
            with torch.no_grad():
                next(iter(trainer.model.parameters())).mul_(0.5)

    said = in_ranks(2, lambda rank: trainer(plan("dp-sgd"), sharded(), callbacks=[Shrinks()]).fit())
    assert said[0][0] == "ConfigurationError"
    assert "written into the weights of a sharded model" in said[0][1]
    assert said[1][0] == "RankLost"


def test_what_cannot_be_done_in_slices_is_refused_in_words():
    from fodp.methods.dp_sgd import DPSGD
    from fodp.testing import registered

    class Mine(DPSGD):
        name = "mine"

    class Known(DPSGD):
        name = "known"
        takes_slices = True

    def work(rank):
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import Shard

        def refused(match, make, the_plan=None):
            with pytest.raises(fodp.ConfigurationError, match=match):
                trainer(the_plan or plan("dp-sgd"), make())

        refused("exact noise is drawn whole", sharded, plan("dp-sgd", exact_noise=True))
        for shape in ("kronecker", "transcript"):
            refused("learns from whole releases", sharded, plan("dp-sgd", dict(shape=shape)))
        refused("use the callback WeightAverage", sharded, plan("dp-sgd", dict(average="ema")))
        refused("is not divided", part)
        refused(
            "on a mesh of",
            lambda: fully_shard(network(), mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))),
        )
        refused("as they are numbered", lambda: fully_shard(square(), mesh=DeviceMesh("cpu", [1, 0])))
        refused("rows alone", lambda: fully_shard(square(), shard_placement_fn=lambda p: Shard(p.dim() - 1)))
        refused("leave mp_policy out", lambda: fully_shard(network(), mp_policy=MixedPrecisionPolicy(torch.bfloat16)))
        refused("leave offload_policy out", offloaded)
        with registered(Mine):
            refused("set takes_slices = True", sharded, plan("mine"))
        with registered(Known):
            trainer(plan("known", steps=1), sharded()).fit()
        model = sharded()
        with pytest.raises(fodp.ConfigurationError, match=r"loop of your own calls a sharded model"):
            fodp.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), plan("dp-sgd"))
        with pytest.raises(fodp.ConfigurationError, match=r"not this model's"):
            trainer(plan("dp-sgd"), sharded(), optimizer=torch.optim.SGD(network().parameters(), lr=0.1))
        return "refused"

    def offloaded():
        """As if it had been, which takes an accelerator."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        model = sharded()
        model._get_fsdp_state()._fsdp_param_groups[0].offload_policy = CPUOffloadPolicy()
        return model

    def part():
        from torch.distributed.fsdp import fully_shard

        model = network()
        fully_shard(model[0])
        return model

    def square():
        return torch.nn.Linear(4, 4, bias=False).double()

    assert in_ranks(2, work) == ["refused"] * 2


def test_a_rank_whose_model_is_whole_is_refused():
    said = in_ranks(2, lambda rank: trainer(plan("dp-sgd"), sharded() if rank else network()))
    assert [kind for kind, _ in said] == ["Disagreement"] * 2
    assert "whether the model is sharded" in said[0][1]


def test_more_ranks_than_rows_are_refused():
    def work(rank):
        from torch.distributed.fsdp import fully_shard

        rows = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)).double()  # 2, 2, 0 and 1, 1, 1
        trainer(plan("dp-sgd", steps=1), fully_shard(rows)).fit()
        trainer(plan("dp-sgd"), fully_shard(torch.nn.Linear(5, 4).double()))

    said = in_ranks(3, work)
    assert all(kind == "ConfigurationError" and "hold nothing of this model" in text for kind, text in said), said


def test_one_rank_may_be_sharded_too():
    """A group of one process: all of it is its slice."""
    alone = outcome("fo-dp-sgd", dict(quantile=0.5, count_noise=20.0))
    found = in_ranks(1, lambda rank: outcome("fo-dp-sgd", dict(quantile=0.5, count_noise=20.0), sharded())[:4])[0]
    assert torch.equal(found[0], alone[0])
    assert found[1:] == alone[1:4]


class Recurrent(torch.nn.Module):
    """Layers that keep a list of their parameters, and a parameter that no layer has: functions are watched."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.steps, self.out = torch.nn.LSTM(1, 6, batch_first=True), torch.nn.Linear(6, 3)
            self.places = torch.nn.Parameter(torch.randn(5, 1))
        self.double()

    def forward(self, x):
        return self.out(self.steps(x[:, :, None] + self.places)[0][:, -1])


def test_functions_are_watched_in_a_sharded_model_too():
    def work(divided):
        from torch.distributed.fsdp import fully_shard

        model = Recurrent()
        if divided:
            fully_shard(model.steps)
            fully_shard(model)
        training = trainer(plan("fo-dp-sgd", steps=3), model)
        training.fit()
        return whole(training), training.run.engine.path

    one, path = work(False)
    for found in in_ranks(2, lambda rank: work(True)):
        assert found[1] == path == "functions"
        torch.testing.assert_close(found[0], one, rtol=1e-9, atol=1e-11)


class Tied(torch.nn.Module):
    """A frozen layer, dropout, a weight that is used twice, a buffer, and a part in bfloat16."""

    def __init__(self, half):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            dtype = torch.float32 if half else torch.float64
            self.first, self.frozen = torch.nn.Linear(5, 6).to(dtype), torch.nn.Linear(6, 6).to(dtype)
            self.second, self.last = torch.nn.Linear(6, 6).to(dtype), torch.nn.Linear(6, 3).to(dtype)
        self.second.weight = self.first_square = torch.nn.Parameter(self.frozen.weight.detach().clone())
        self.frozen.requires_grad_(False)
        self.drop = torch.nn.Dropout(0.3)
        self.register_buffer("shift", torch.ones(6, dtype=dtype))

    def forward(self, x):
        hidden = self.drop(torch.tanh(self.frozen(self.first(x.to(self.shift))))) + self.shift
        return self.last(torch.tanh(self.second(torch.tanh(self.second(hidden)))))


@pytest.mark.parametrize("half", [False, True])
def test_frozen_and_tied_weights_dropout_microbatches_and_an_optimizer_of_ones_own(half):
    def work(model, optimizer):
        training = trainer(
            plan("fo-dp-sgd", steps=4, clip_norm=2.0),
            model,
            optimizer=optimizer,
            microbatch=2,
            scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, 0.5),
        )
        training.fit()
        return whole(training)

    def made(model):
        return work(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05))

    def in_slices(rank):
        from torch.distributed.fsdp import fully_shard

        return made(fully_shard(Tied(half)))

    one = made(Tied(half))
    for found in in_ranks(2, in_slices):
        tolerance = dict(rtol=1e-3, atol=1e-4) if half else dict(rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found, one, **tolerance)


def test_half_precision_parameters():
    def work(model):
        training = trainer(plan("dp-sgd", steps=2), model, data(dtype=torch.bfloat16))
        training.fit()
        return whole(training)

    one = work(network(torch.bfloat16))
    for found in in_ranks(2, lambda rank: work(sharded(torch.bfloat16))):
        torch.testing.assert_close(found, one, rtol=0.05, atol=0.05)
