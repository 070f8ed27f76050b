"""The same premise in a loop of one's own: what `make_private` keys, finds and refuses."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import fodp
from fodp import PrivacyError, make_private
from fodp.noise import keyed_from
from test_premise import ALLOWED, CLIP, ROWS, data, neighbours, network, pair, plan  # noqa: F401  fixtures


def refused(words):
    return pytest.raises(PrivacyError, match=words)


def release_of(model, dataset, the_plan=None, collate_fn=None, forward=None):
    """The first step's release in a secure loop under one injected key."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with keyed_from(bytes(32)):
        model, optimizer, loader = make_private(model, optimizer, dataset, the_plan or plan(), collate_fn=collate_fn)
    for batch in loader:
        loss = (forward or (lambda m, b: F.cross_entropy(m(b[0]), b[1])))(model, batch)
        loss.backward()
        optimizer.step()
        break
    found = torch.cat([p.grad.flatten() for p in model.parameters()]) * (the_plan or plan()).lot_size
    loader.close()
    return found


# --- 1: randomness -------------------------------------------------------------------------------------------


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(4, 2)

    def forward(self, x):
        mean, scale = self.a(x).chunk(2, 1)
        return self.b(mean + scale.exp() * torch.randn_like(mean))


@pytest.mark.rule(18)
@pytest.mark.parametrize("model", [network(nn.Dropout(0.5)), Vae()], ids=["dropout", "noise"])
def test_what_a_row_draws_in_a_loop_of_ones_own_does_not_depend_on_the_lot(model, pair):  # noqa: F811
    assert 0.01 < pair.moved(lambda d: release_of(model, d)) <= ALLOWED


@pytest.mark.rule(18)
def test_the_loop_draws_as_the_trainer_does(pair):  # noqa: F811
    from test_premise import first_sum

    model = network(nn.Dropout(0.5))
    assert torch.allclose(release_of(model, data()), first_sum(model)(data()), atol=1e-4)


@pytest.mark.rule(18)
def test_draws_beside_the_model_are_refused():
    model, optimizer, loader = loop()
    for x, y in loader:
        F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y).backward()
        with refused("between the loader and optimizer.step"):
            optimizer.step()
        break


class Checkpointed(nn.Module):
    def __init__(self, draws):
        super().__init__()
        self.a, self.drop = nn.Linear(6, 2), nn.Dropout(0.5 if draws else 0.0)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(lambda x: self.drop(self.a(x)), x, use_reentrant=False)


@pytest.mark.rule(18)
def test_draws_that_the_owners_backward_would_repeat_are_refused():
    """Checkpointing draws again in the backward pass, which is not fodp's here: for all rows, one after another."""
    model, _, loader = loop(Checkpointed(draws=True))
    for x, _ in loader:
        with refused("a checkpointed part of the model draws"):
            model(x)
        break
    model, optimizer, loader = loop(Checkpointed(draws=False))
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert loader.step == 3


@pytest.mark.rule(18)
def test_draws_that_depend_on_the_lot_are_refused():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 2)

        def forward(self, x):
            return self.a(F.dropout(x, 0.5) if len(x) < 5 else x)

    model, _, loader = loop(Sometimes())
    for x, _ in loader:
        with refused("keep the examples of a lot apart.*it draws less in some passes"):
            model(x)
        break


@pytest.mark.rule(18)
def test_the_callers_generator_stays_where_it_was():
    model, optimizer, loader = loop(network(nn.Dropout(0.5)))
    for x, y in loader:
        before = torch.get_rng_state()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert torch.equal(before, torch.get_rng_state())


def loop(model=None, dataset=None, collate_fn=None, **changes):
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(
        model, optimizer, dataset or data(), plan(noise_multiplier=1.0, **changes), collate_fn=collate_fn
    )


# --- 2: autocast around the whole loop -----------------------------------------------------------------------


@pytest.mark.rule(19)
def test_autocast_around_the_whole_loop(pair):  # noqa: F811
    def run(dataset):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return release_of(network(), dataset, forward=lambda m, b: F.cross_entropy(m(100 * b[0]).float(), b[1]))

    assert pair.moved(run) <= 1.01 * CLIP  # bfloat16 rounds the forward pass, not the norms


# --- 3: a model that mixes in lots of three ------------------------------------------------------------------


class CentredInThrees(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 2)

    def forward(self, x):
        return self.a(x - x.mean(0) if len(x) > 2 else x)


@pytest.mark.rule(20)
def test_a_model_that_mixes_only_larger_lots_is_refused():
    model, _, loader = loop(CentredInThrees())
    for x, _ in loader:
        with refused("mixes the examples of a lot"):
            model(x)
        break


# --- 5: padding ----------------------------------------------------------------------------------------------


class Texts(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        length = 3 + index % 7
        return torch.full((length,), 1 + index % 5), index % 2


def padded(records):
    texts = nn.utils.rnn.pad_sequence([text for text, _ in records], batch_first=True)
    return texts, torch.tensor([label for _, label in records])


def padded_to_ten(records):
    texts, labels = padded(records)
    return F.pad(texts, (0, 10 - texts.shape[1])), labels


class Reader(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.masked, self.words, self.head = masked, nn.Embedding(8, 6), nn.Linear(6, 2)

    def forward(self, texts):
        seen = self.words(texts)
        if not self.masked:
            return self.head(seen.mean(1))
        there = (texts != 0).unsqueeze(-1)
        return self.head((seen * there).sum(1) / there.sum(1))


def read(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.rule(20)
def test_a_mean_over_padded_positions_is_refused():
    model, _, loader = loop(Reader(masked=False), Texts(), padded)
    for batch in loader:
        with refused("how far other records of its lot make collate_fn pad it"):
            read(model, batch)
        break


@pytest.mark.rule(20)
@pytest.mark.parametrize(("masked", "collate_fn"), [(True, padded), (False, padded_to_ten)])
def test_padding_without_effect_and_padding_to_a_public_length_pass(masked, collate_fn):
    model, optimizer, loader = loop(Reader(masked), Texts(), collate_fn)
    for batch in loader:
        optimizer.zero_grad()
        read(model, batch).backward()
        optimizer.step()
    assert loader.step == 3


@pytest.mark.rule(20)
def test_padded_tensors_that_cannot_be_followed_are_refused():
    model, _, loader = loop(Reader(masked=True), Texts(), padded)
    for texts, labels in loader:
        with refused("other tensors than the loader's"):
            read(model, (texts.flip(1), labels))
        break


@pytest.mark.rule(20)
def test_a_collate_function_that_normalises_by_the_lot_is_refused():
    def centred(records):
        x = torch.stack([x for x, _ in records])
        return x - x.mean(0), torch.stack([y for _, y in records])

    _, _, loader = loop(collate_fn=centred)
    with refused("another batch of a record alone than in its lot"):
        next(iter(loader))


# --- 10: a second module -------------------------------------------------------------------------------------


@pytest.mark.rule(24)
def test_a_second_module_that_learns_from_the_same_loss_is_refused():
    head = nn.Linear(2, 2)
    model, optimizer, loader = loop()
    for x, y in loader:
        F.cross_entropy(head(model(x)), y).backward()
        with refused("a trainable Linear, which is not part of the model"):
            optimizer.step()
        break


@pytest.mark.rule(24)
def test_modules_that_are_not_reached_do_no_harm():
    """A generator whose outputs are detached, a frozen teacher."""
    generator, teacher = nn.Linear(6, 6), nn.Linear(2, 2).requires_grad_(False)
    model, optimizer, loader = loop()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(teacher(model(x)), y)
        generator(x).detach()
        loss.backward()
        optimizer.step()
    assert loader.step == 3


# --- 12: a language model's own loss -------------------------------------------------------------------------


class Speaker(nn.Module):
    """Returns logits and, with labels, the mean loss over all tokens of the lot, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(8, 6), nn.Linear(6, 8)

    def forward(self, ids, labels=None):
        logits = self.head(self.words(ids))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(logits=logits, loss=loss)


class Sentences(Dataset):
    def __init__(self, equal):
        self.equal = equal

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        ids = torch.arange(10) * (index + 1) % 8
        labels = ids.clone()
        labels[10 if self.equal else 2 + index % 9 :] = -100
        return ids, labels


@pytest.mark.rule(20)
def test_a_mean_over_the_tokens_of_the_whole_lot_is_refused():
    model, _, loader = loop(Speaker(), Sentences(equal=False))
    for ids, labels in loader:
        with refused("fodp.losses.causal_lm"):
            model(ids, labels).loss.backward()
        break


@pytest.mark.rule(20)
@pytest.mark.parametrize("equal", [True, False])
def test_a_mean_of_the_records_own_losses_passes(equal):
    model, optimizer, loader = loop(Speaker(), Sentences(equal))
    for ids, labels in loader:
        optimizer.zero_grad()
        outputs = model(ids, labels)
        loss = outputs.loss if equal else fodp.losses.causal_lm(outputs.logits, labels).mean()
        loss.backward()
        optimizer.step()
    assert loader.step == 3


@pytest.mark.rule(20)
def test_a_wrongly_declared_reduction_of_the_models_own_loss_is_refused():
    model = Speaker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = make_private(model, optimizer, Sentences(equal=True), plan(), loss_reduction="sum")
    for ids, labels in loader:
        with refused("not the sum of its examples' own losses"):
            model(ids, labels).loss.backward()
        break
