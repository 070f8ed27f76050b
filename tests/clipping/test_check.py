"""fodp.check: what stands in the way of private training, and the fix."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fodp
from fodp import PrivacyError
from fodp.clipping import Engine
from models_for_tests import Apply, Scale, weight_norm

Make = Callable[[], nn.Module]


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


# model -> (where, words of the problem, words of the advice)
ERRORS: dict[str, tuple[Make, str, str, str]] = {
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
        "1", "BatchNorm1d in training mode mixes the examples", "GroupNorm or LayerNorm",
    ),
    "batch norm of images": (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)),
        "1", "BatchNorm2d in training mode mixes the examples", "evaluation mode",
    ),
    "batch norm with frozen parameters": (
        lambda: nn.Sequential(nn.Linear(3, 3), frozen(nn.BatchNorm1d(3))),
        "1", "BatchNorm1d in training mode", "evaluation mode",
    ),
    "batch norm without parameters": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)),
        "1", "BatchNorm1d in training mode", "GroupNorm",
    ),
    "batch norm without statistics": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False).eval()),
        "1", "BatchNorm1d", "GroupNorm",
    ),
    "synchronised batch norm": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)),
        "1", "SyncBatchNorm in training mode", "GroupNorm",
    ),
    "instance norm with statistics": (
        lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True)),
        "1", "stores un-noised statistics", "track_running_stats=False",
    ),
    "embedding max_norm": (lambda: nn.Embedding(4, 3, max_norm=1.0), "model", "max_norm", "drop max_norm"),
    "embedding by frequency": (
        lambda: nn.Sequential(nn.Embedding(4, 3, scale_grad_by_freq=True)),
        "0", "scale_grad_by_freq mixes the examples", "drop scale_grad_by_freq",
    ),
    "bag of embeddings max_norm": (
        lambda: nn.EmbeddingBag(4, 3, max_norm=1.0), "model", "max_norm", "drop max_norm",
    ),
    "nothing to train": (
        lambda: frozen(nn.Linear(3, 3)), "model", "no parameter is trainable", "requires_grad=True",
    ),
    "no parameter": (nn.Tanh, "model", "no parameter is trainable", "requires_grad=True"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "0.weight", "lazy parameter", "dummy input"),
}  # fmt: skip

NOTES: dict[str, tuple[Make, str, str, str]] = {
    "half precision": (lambda: nn.Linear(3, 3, bias=False).half(), "weight", "float16 parameter", "float32"),
    "brain floats": (
        lambda: nn.Linear(3, 3, bias=False).bfloat16(), "weight", "bfloat16 parameter", "float32",
    ),
}  # fmt: skip

FINE: dict[str, Make] = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(), nn.Linear(3, 2)),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 1, 1)),
    "text": lambda: nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.LayerNorm(4), nn.Linear(4, 5)),
    "gru": lambda: nn.GRU(3, 3),
    "attention with dropout": lambda: nn.MultiheadAttention(4, 2, dropout=0.1),
    "own layer": lambda: nn.Sequential(Scale(3)),
    "frozen batch norm with affine": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval()),
    "parametrized": weight_norm,
    "double precision": lambda: nn.Linear(3, 3).double(),
    "frozen batch norm": lambda: nn.Sequential(nn.Linear(3, 3), frozen(nn.BatchNorm1d(3)).eval()),
    "frozen gru": lambda: nn.Sequential(frozen(nn.GRU(3, 3)), nn.Linear(3, 3)),
    "instance norm without statistics": lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.InstanceNorm1d(3)),
    "instance norm in evaluation mode": lambda: nn.Sequential(
        nn.Conv1d(3, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True).eval()
    ),
}


@pytest.mark.rule(16)
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_errors_name_the_place_the_problem_and_the_fix(name: str) -> None:
    make, where, problem, advice = ERRORS[name]
    model = make()
    errors = [finding for finding in fodp.check(model) if finding.level == "error"]
    assert errors[0].where == where
    assert problem in errors[0].problem
    assert advice in errors[0].advice
    with pytest.raises(PrivacyError) as refusal:
        Engine(model, lambda m, x: m(x).sum(1))
    assert str(errors[0]) in str(refusal.value)


@pytest.mark.rule(16)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_clipping_refuses_batch_norm_in_training_mode_before_touching_data(engine: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def loss_fn(m: nn.Module, batch: object) -> torch.Tensor:
        raise AssertionError("the data was touched")

    with pytest.raises(PrivacyError, match=r"BatchNorm1d in training mode.*GroupNorm or LayerNorm.*layer\.eval"):
        fodp.clipped_sum(model, loss_fn, torch.randn(4, 3), 1.0, engine=engine)


def test_every_error_is_named() -> None:
    model = nn.Sequential(nn.Embedding(3, 3, max_norm=1.0), nn.BatchNorm1d(3), nn.Linear(3, 3))
    with pytest.raises(PrivacyError, match=r"0: max_norm.*1: BatchNorm1d"):
        Engine(model, lambda m, x: m(x).sum(1))


@pytest.mark.parametrize("name", NOTES)
def test_notes_say_what_is_odd(name: str) -> None:
    make, where, problem, advice = NOTES[name]
    findings = fodp.check(make())
    assert [finding.level for finding in findings] == ["note"]
    assert findings[0].where == where
    assert problem in findings[0].problem
    assert advice in findings[0].advice


@pytest.mark.parametrize("name", FINE)
def test_a_model_that_is_fine_has_no_findings(name: str) -> None:
    assert fodp.check(FINE[name]()) == []


@pytest.mark.parametrize("table", [NOTES, FINE], ids=["notes", "fine"])
def test_reading_changes_nothing(table: dict[str, tuple[Make, str, str, str]] | dict[str, Make]) -> None:
    for row in table.values():
        model = (row[0] if isinstance(row, tuple) else row)()
        before = [(m.training, len(m._forward_hooks)) for m in model.modules()]
        state = {key: value.clone() for key, value in model.state_dict().items()}
        first = fodp.check(model)
        assert first == fodp.check(model)
        assert before == [(m.training, len(m._forward_hooks)) for m in model.modules()]
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())


def test_a_finding_reads_as_one_line() -> None:
    (finding,) = fodp.check(nn.Sequential(nn.Linear(2, 2, bias=False).half()))
    assert (
        str(finding) == "note: 0.weight: a torch.float16 parameter; norms, noise and releases are float32 all the same"
    )


def test_many_errors_of_one_kind_are_one_short_message() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(53)])
    with pytest.raises(PrivacyError, match=r"error: 0\.1: BatchNorm2d in training.*and 52 more.*fodp\.fix") as refusal:
        Engine(model, lambda m, x: m(x).flatten(1).sum(1))
    assert len(str(refusal.value)) < 500


def test_a_deep_model_has_a_short_list_of_findings() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(53)])
    (finding,) = fodp.check(model)
    assert finding.where == "0.1"
    assert finding.advice.endswith("(and 52 more, the last at 52.1)")
    assert len(str(finding)) < 300


def test_a_compiled_model_is_told_what_to_compile_instead() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    (finding,) = fodp.check(torch.compile(model, backend="eager"))
    assert "compiled" in finding.problem
    assert "_orig_mod" in finding.advice
    model[0].requires_grad_(False).compile(backend="eager")
    assert fodp.check(model) == []


# --- what will really happen ----------------------------------------------------------------------

PATHS: dict[str, tuple[Make, str]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)), "layer rules"),
    "functions": (lambda: nn.Sequential(nn.Linear(6, 6), Scale(6), nn.Linear(6, 2)), "rules for functions"),
    "loop": (lambda: Apply(lambda m, x: m.a(x - 0.5 * x.mean(0)), a=nn.Linear(6, 4)), "one example at a time"),
}


@pytest.mark.parametrize("name", PATHS)
def test_with_a_batch_it_tells_which_way_gradients_take(name: str) -> None:
    make, words = PATHS[name]
    findings = fodp.check(make(), lambda m, x: m(x).square().sum(1), torch.randn(5, 6))
    assert [finding.level for finding in findings] == ["note"]
    assert words in findings[0].problem


def test_a_batch_that_says_nothing_is_called_that() -> None:
    model = nn.Sequential(nn.Linear(6, 2, bias=False))
    (finding,) = fodp.check(model, lambda m, x: m(x).square().sum(1), torch.zeros(5, 6))
    assert "does not show" in finding.problem


def test_with_a_batch_errors_come_first() -> None:
    findings = fodp.check(nn.BatchNorm1d(6), lambda m, x: m(x).sum(1), torch.randn(5, 6))
    assert [finding.level for finding in findings] == ["error"]


# --- fix ------------------------------------------------------------------------------------------


def unfit() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(8 * 4, 6),
        nn.BatchNorm1d(6),
    )  # fmt: skip


@pytest.mark.rule(16)
@pytest.mark.parametrize("norms", ["group", "frozen"])
def test_fix_replaces_what_cannot_be_private_and_says_so(norms: str) -> None:
    model = unfit()
    nn.init.normal_(model[1].weight)
    weight = model[1].weight
    changed = fodp.fix(model, norms=norms)
    assert [line.split(":")[0] for line in changed] == ["1", "3", "6"]
    assert fodp.check(model.train()) == []
    assert any(parameter is weight for parameter in model.parameters())
    fodp.clipped_sum(model, lambda m, x: m(x).square().sum(1), torch.randn(4, 3, 4, 4), 1.0)
    assert fodp.fix(model, norms=norms) == []


def test_fix_drops_what_tables_do_outside_of_the_release() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, max_norm=1.0, scale_grad_by_freq=True))
    assert len(fodp.fix(model)) == 2
    assert fodp.check(model) == []


def test_a_flat_batch_norm_does_not_become_a_norm_of_single_numbers() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6))
    fodp.fix(model)
    assert model(torch.randn(5, 3)).abs().sum() > 0


def test_fix_cannot_replace_the_model_itself() -> None:
    with pytest.raises(PrivacyError, match=r"the model itself.*nn\.Sequential"):
        fodp.fix(nn.BatchNorm1d(3))
