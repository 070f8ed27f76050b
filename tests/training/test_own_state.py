"""What a lot leaves outside of the model in a loop of one's own: for the next lot, in a criterion, in a schedule."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fodp
from test_own_loss import loop, losses, plan, train


def refused(words):
    return pytest.raises(fodp.PrivacyError, match=words)


class Centre:
    """A plain object whose method is the loss, with a slow average of what it has seen."""

    def __init__(self):
        self.centre = torch.zeros(3)

    def rebound(self, model, x, y):
        outputs = model(x)
        loss = (outputs - self.centre).square().mean()
        self.centre = 0.9999 * self.centre + 0.0001 * outputs.detach().mean(0)
        return loss

    def written(self, model, x, y):
        outputs = model(x)
        loss = (outputs - self.centre.clone()).square().mean()
        self.centre.mul_(0.9999).add_(0.0001 * outputs.detach().mean(0))
        return loss

    def written_as_data(self, model, x, y):
        outputs = model(x)
        loss = (outputs - self.centre.clone()).square().mean()
        self.centre.data.mul_(0.9999).add_(0.0001 * outputs.detach().mean(0))
        return loss

    def of_inputs(self, model, x, y):
        loss = losses(model, x - self.centre.mean(), y).mean()
        self.centre = self.centre + x.mean()
        return loss


@pytest.mark.rule(28)
@pytest.mark.parametrize("how", ["rebound", "written", "written_as_data", "of_inputs"])
def test_an_average_over_lots_that_the_loss_uses_is_refused_however_slow(how):
    with refused("computed from an earlier lot"):
        train(getattr(Centre(), how))


@pytest.mark.rule(28)
def test_so_is_one_that_is_brought_up_to_date_after_the_step():
    model, optimizer, loader = loop()
    centre = torch.zeros(3)
    with refused("computed from an earlier lot"):
        for x, _ in loader:
            outputs = model(x)
            (outputs - centre).square().mean().backward()
            optimizer.step()
            centre = 0.999 * centre + 0.001 * outputs.detach().mean(0)
    assert loader.step == 1  # whose loss had no memory yet


class Criterion(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind == "buffer":
            self.register_buffer("centre", torch.zeros(3))
        else:
            self.centre = torch.zeros(3)

    def forward(self, outputs):
        loss = (outputs - self.centre.clone()).square().mean()
        self.centre.mul_(0.999).add_(0.001 * outputs.detach().mean(0))
        return loss


@pytest.mark.rule(24)
@pytest.mark.rule(28)
@pytest.mark.parametrize("kind", ["buffer", "tensor"])
def test_a_criterion_that_keeps_something_of_the_lot_is_refused_and_put_back(kind):
    criterion = Criterion(kind)
    with refused(f"Criterion, beside the model, keeps the {kind} centre"):
        train(lambda m, x, y: criterion(m(x)))
    assert torch.equal(criterion.centre, torch.zeros(3))


@pytest.mark.rule(28)
def test_criteria_without_memory_metrics_and_averages_of_the_weights_do_no_harm():
    class Metric(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, values):
            self.total += values.detach().sum()
            return self.total

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, outputs, y):
            return F.cross_entropy(outputs, y, weight=self.weight, reduction="none").mean()

    metric, criterion = Metric(), Weighted()
    model, optimizer, loader = loop()
    average = torch.optim.swa_utils.AveragedModel(model)
    for x, y in loader:
        outputs = model(x)
        loss = criterion(outputs, y)
        metric(loss)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
    assert loader.step == 3


@pytest.mark.rule(28)
def test_a_memory_that_begins_late_is_seen_after_the_next_rare_look(monkeypatch):
    monkeypatch.setattr("fodp.support.looks.is_rare", lambda step: step == 5)
    monkeypatch.setattr("fodp.sources.coupling.is_rare", lambda step: step == 5)
    kept, steps = [torch.zeros(())], itertools.count()

    def late(model, x, y):
        outputs = model(x)
        loss = (outputs - kept[0]).square().mean()
        if next(steps) > 3:
            kept[0] = outputs.detach().mean()
        return loss

    with refused("computed from an earlier lot.*|Earlier lots"):
        train(late, the_plan=plan(steps=9))
    assert next(steps) == 7


@pytest.mark.rule(14)
@pytest.mark.parametrize("chained", [False, True, "twice"])
def test_a_scheduler_that_follows_a_score_is_refused(chained):
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    if chained:
        scheduler = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.StepLR(optimizer, 1)])
        scheduler._schedulers.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    if chained == "twice":
        outer = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.StepLR(optimizer, 1)])
        outer._schedulers.append(scheduler)
        scheduler = outer
    with refused("ReduceLROnPlateau wants a score"):
        fodp.make_private(model, optimizer, torch.zeros(9, 5), plan(), scheduler=scheduler)


@pytest.mark.rule(14)
def test_a_second_pass_over_a_finished_loader_is_empty_with_one_warning(recwarn):
    model, optimizer, loader = loop()
    for _ in range(3):  # epochs, as in any other loop
        for x, y in loader:
            loader.backward(losses(model, x, y))
            optimizer.step()
    said = [str(w.message) for w in recwarn if "3 steps are done" in str(w.message)]
    assert len(said) == 1
    assert [w.filename for w in recwarn if "3 steps are done" in str(w.message)] == [__file__]
    assert loader.step == 3
    loader.close()
    with refused("this loader is closed"):
        iter(loader)
