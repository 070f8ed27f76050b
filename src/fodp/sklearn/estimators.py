"""The three estimators: a model, a plan from declared public numbers, and one private fit by `fodp.Trainer`."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fodp.data.models import cross_entropy
from fodp.data.schema import Schema, read_schema
from fodp.errors import ConfigurationError, DataError
from fodp.ledger import Ledger
from fodp.options.rate import AUTO
from fodp.plan import Plan
from fodp.sklearn import habits, targets
from fodp.sklearn.inputs import by_schema, checked_rows, declared_bounds, scaled
from fodp.sklearn.papers import for_private_steps, for_public_rows
from fodp.state.ledgers import refuse_other_ledger
from fodp.support import checks
from fodp.support.checks import shown
from fodp.trainer import Trainer

Build = Callable[[int, int], nn.Module]
PublicSchema = Schema | Mapping[str, Any] | str | Path
_NO_SIZE = (
    "state public_size=, about how many rows there are, as anybody may know it: counted from the rows it would tell "
    "who is in them"
)
_NO_BOUNDS = (
    "declare bounds=(low, high), one pair for all features or one for each, or schema= for a table: features are "
    "clipped to them, and read off the data they would tell who is in it"
)
_NO_CLASSES = (
    "declare classes=, the labels that may occur or how many there are (0, 1, ...): read off the data they would tell "
    "which ones are in it"
)
_NO_TARGET_BOUNDS = (
    "declare target_bounds=(low, high), between which what is predicted lies: targets are clipped to them"
)
_LARGEST_BATCH = 4096  # unless batch is given


class _Private(BaseEstimator):  # type: ignore[misc]
    """What the estimators share: every number that a plan takes is declared, none is read off the rows."""

    epsilon: float
    delta: float | None
    public_size: int | None
    bounds: Any
    schema: PublicSchema | None
    epochs: float
    batch: float | None
    clip_norm: float
    lr: float | str
    method: str | None
    params: Mapping[str, Any] | None
    ledger: Ledger | Callable[[], Ledger] | None
    random_state: int | None
    data_is_public: bool
    allow_private_preprocessing: bool

    _AUTO_RATIO: float
    """What lr="auto" takes for `auto_ratio`: chosen by `benchmarks/sklearn_rates.py`, on made-up and public data."""

    def plan(self) -> Plan:
        """The plan of a fit, and with it ε, δ and the statement, before any data is touched."""
        checks.positive("epsilon", self.epsilon)
        if self.random_state is not None:
            checks.whole("random_state", self.random_state, minimum=0)
        size = self._declared_size()
        params = {"lr": self.lr, **self._named_params()}
        if self.method is not None and "average" not in params:  # the recipe has its own
            params |= {"average": "tail", "average_share": 0.5}
        if params["lr"] == AUTO:
            params.setdefault("auto_ratio", self._AUTO_RATIO)
        return Plan.calibrated(
            target_epsilon=self.epsilon,
            delta=self.delta,
            public_size=size,
            # Few steps on large batches: with noise for few steps, half of a small set a step beats a tenth.
            batch=max(1.0, min(size / 2, _LARGEST_BATCH)) if self.batch is None else self.batch,
            epochs=self.epochs,
            clip_norm=self.clip_norm,
            method=self.method,
            params=params,
            seed=self.random_state,
        )

    def _declared_size(self) -> int:
        size = self._size()
        if size is None:
            raise ConfigurationError(_NO_SIZE)
        return checks.whole("public_size", size)

    def _size(self) -> int | None:
        if self.public_size is None and self.schema is not None:
            return read_schema(self.schema).public_size
        return self.public_size

    def _named_params(self) -> dict[str, Any]:
        if self.params is not None and not isinstance(self.params, Mapping):
            raise ConfigurationError(f"params must be a dictionary of the method's numbers, got {shown(self.params)}")
        return dict(self.params or {})

    def _refuse_before_the_rows(self) -> None:
        """What can be refused without a look at the rows, all of it at once."""
        for name in ("data_is_public", "allow_private_preprocessing"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ConfigurationError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        if not self.data_is_public:
            habits.refuse_searches()
        elif self.ledger is not None:
            raise ConfigurationError(
                "a fit on rows that are declared public (data_is_public=True) has nothing to charge: leave out "
                "ledger=, or data_is_public= if the rows are private"
            )
        refuse_other_ledger(self.ledger, may_open=True)
        undeclared = self._undeclared()
        if undeclared:
            raise ConfigurationError("; and ".join(undeclared))

    def _undeclared(self) -> list[str]:
        size = [_NO_SIZE] if self._size() is None else []
        if self.bounds is not None and self.schema is not None:
            return [*size, "give bounds= or schema=, whose columns have theirs, not both"]
        return [*size, *([_NO_BOUNDS] if self.bounds is None and self.schema is None else [])]

    def _train(self, rows: Any, goals: Tensor, outputs: int, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        """One private fit; everything is checked before anything is charged."""
        plan, public = self.plan(), bool(self.data_is_public)
        inputs = self._inputs(rows)
        if len(inputs) != len(goals):
            raise DataError(
                "X and y must have one target for each row: the first without its partner is "
                f"{min(len(inputs), len(goals))} (counted from 0)"
            )
        numbers = rows if self.schema is None else inputs.numpy()
        habits.refuse_two_kinds(numbers, public)
        uncovered = [] if public else habits.private_steps()
        if not self.allow_private_preprocessing:
            habits.refuse_private_steps(uncovered)
        if not public:
            self._say_what_is_unsafe(plan, uncovered)
            if self.schema is None and not uncovered:
                habits.warn_of_standardised_rows(rows)
        model = self._model(inputs.shape[1], outputs)
        trainer = Trainer(model, loss, TensorDataset(inputs, goals), plan, ledger=self.ledger)
        habits.remember(numbers, public, charged=self.ledger is not None)
        result = trainer.fit()
        if result.reason == "interrupted":
            raise KeyboardInterrupt(f"the fit was interrupted; its epsilon, {result.epsilon:.3g}, is spent")
        self.model_ = copy.deepcopy(model).double().eval().requires_grad_(False)  # float64: alike in any company
        self.plan_, self.n_iter_ = plan, result.steps
        self.epsilon_ = math.inf if public else result.epsilon
        card = trainer.privacy_card()
        self.privacy_card_ = for_public_rows(card) if public else for_private_steps(card, uncovered)

    def statement(self) -> str:
        """The guarantee of the fitted model in plain English."""
        check_is_fitted(self)
        return str(self.privacy_card_["statement"])

    def _say_what_is_unsafe(self, plan: Plan, uncovered: Sequence[str]) -> None:
        size = self._declared_size()
        if uncovered:
            checks.warn(
                f"the guarantee does not cover {'; and '.join(uncovered)} (allow_private_preprocessing=True): the "
                "statement and the card say so"
            )
        if plan.delta >= 1 / size:
            checks.warn(
                f"delta {plan.delta:g} is not below 1/{size}, one over the public size: publishing one row drawn at "
                f"random would satisfy it. A smaller one: {0.1 / size:.0e}"
            )
        if plan.seed is not None:
            checks.warn(
                "random_state makes masks and noise repeatable, for research: whoever knows it subtracts the noise. "
                "Leave it None for data of real people"
            )

    def _model(self, inputs: int, outputs: int) -> nn.Module:
        with torch.random.fork_rng(devices=[], enabled=self.random_state is not None):
            if self.random_state is not None:
                torch.manual_seed(self.random_state)
            return self._build(inputs, outputs)

    def _build(self, inputs: int, outputs: int) -> nn.Module:
        raise NotImplementedError

    def _checked_rows(self, rows: Any, reset: bool) -> Any:
        """The rows as the estimator takes them: a table with a schema, or finite numbers."""
        if self.schema is not None:
            if reset:
                names = [column.name for column in read_schema(self.schema).columns]
                self.feature_names_in_, self.n_features_in_ = np.array(names, dtype=object), len(names)
            return rows
        return checked_rows(self, rows, reset)

    def _inputs(self, rows: Any) -> Tensor:
        if self.schema is not None:
            return by_schema(rows, self.schema)
        return scaled(rows, *declared_bounds("bounds", self.bounds, rows.shape[1]))

    def _outputs(self, rows: Any) -> NDArray[np.float64]:
        check_is_fitted(self)
        found = self._checked_rows(rows, reset=False)
        inputs = self._inputs(found)
        habits.warn_of_learning_from_outputs(found if self.schema is None else inputs.numpy())
        with torch.no_grad():
            return np.asarray(self.model_(inputs.double()).numpy())

    def __sklearn_clone__(self) -> "_Private":
        """A copy that is not fitted and keeps to the same ledger, which is one book however many write in it.

        A search is refused here: it catches the errors of a fit and reports its own, and lets those of a copy through.
        """
        if not self.data_is_public:
            habits.refuse_searches()
        given = {
            name: value if name == "ledger" else clone(value, safe=False)
            for name, value in self.get_params(deep=False).items()
        }
        return type(self)(**given)

    def __getstate__(self) -> Any:
        if isinstance(self.ledger, Ledger):
            raise ConfigurationError(
                "an open ledger cannot be pickled, and without it the copy would spend unseen: give a function that "
                f"opens it, ledger=functools.partial(fodp.Ledger, {str(self.ledger.path)!r}, dataset=...)"
            )
        return super().__getstate__()

    def __sklearn_tags__(self) -> Any:
        return dataclasses.replace(super().__sklearn_tags__(), non_deterministic=self.random_state is None)


class _PublicScore:
    """Stands before scikit-learn's own `score`."""

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The score on rows that are public; a score on private rows is private, and no ε covers it."""
        assert isinstance(self, _Private)
        check_is_fitted(self)
        rows = self._checked_rows(X, reset=False)
        habits.warn_of_private_score(rows if self.schema is None else self._inputs(rows).numpy())
        return float(super().score(X, y, sample_weight=sample_weight))  # type: ignore[misc]


class PrivateClassifier(_PublicScore, ClassifierMixin, _Private):  # type: ignore[misc]
    """A neural network that learns classes with (ε, δ)-differential privacy.

    Guarantee: each `fit` is (ε, δ)-differentially private under adding or removing one row, if every number that is
    declared here is public: none may be computed from the rows. Several fits on the same rows add up (`ledger`).
    Features are clipped to `bounds` or read by a public `schema`, so that no scaler is fitted. Without `random_state`
    masks and noise come from the operating system.

    Args:
        epsilon, delta: what a fit may spend; the noise is calibrated to it. δ is by default 1e-5, or about a tenth of
            one over the public size where that is less.
        public_size: about how many rows there are, known without counting them; with a schema it may stand there.
        classes: the labels that may occur, or how many (0 to classes - 1).
        bounds: (low, high) of the features, or one pair for each.
        schema: for tables, columns with bounds or values (docs/your-data.md), a dictionary or a .toml or .json file.
        hidden: the sizes of hidden layers; or `model(inputs, outputs)`, which returns a torch.nn.Module.
        epochs, batch: how often each row is drawn, and how many rows a step draws, on average; the batch is by default
            half of the public size and at most 4096.
        clip_norm, lr, method, params: of the plan; the defaults need no tuning. Without a method it is the recipe
            (`fodp.methods.recipe`), as everywhere.
        ledger: a `fodp.Ledger`, or a function that opens one, in which every fit is charged.
        random_state: for research; None for data of real people.
        data_is_public: declares the rows of `fit` public, for searches (GridSearchCV): the fit is the same, nothing is
            charged, and the card claims no privacy.
        allow_private_preprocessing: trains behind steps of a pipeline that look at more than one row (StandardScaler,
            PCA); the statement and the card say that they are not covered.

    Attributes after `fit`: `model_`, `classes_`, `plan_`, `epsilon_`, `n_iter_` (steps), `privacy_card_`.

    Raises (by `fit`, before anything is charged):
        ConfigurationError: a number that is missing or does not fit, a search, a private step in front.
        DataError: a row or a label that does not fit, named by its number.
        BudgetError: the ledger's budget has no room for the fit.

    Example:
        >>> import numpy as np
        >>> rows = np.random.default_rng(0).uniform(-1, 1, (500, 2))
        >>> model = PrivateClassifier(epsilon=4, public_size=500, classes=2, bounds=(-1, 1))
        >>> model.fit(rows, rows[:, 0] > 0).predict(rows[:3]).shape
        (3,)
    """

    _AUTO_RATIO = 6.0

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float | None = None,
        public_size: int | None = None,
        classes: Any = None,
        bounds: Any = None,
        schema: PublicSchema | None = None,
        hidden: Sequence[int] | Build = (64,),
        epochs: float = 50,
        batch: float | None = None,
        clip_norm: float = 1.0,
        lr: float | str = "auto",
        method: str | None = None,
        params: Mapping[str, Any] | None = None,
        ledger: Ledger | Callable[[], Ledger] | None = None,
        random_state: int | None = None,
        data_is_public: bool = False,
        allow_private_preprocessing: bool = False,
    ):
        self.epsilon, self.delta, self.public_size, self.classes = epsilon, delta, public_size, classes
        self.bounds, self.schema, self.hidden = bounds, schema, hidden
        self.epochs, self.batch, self.clip_norm, self.lr = epochs, batch, clip_norm, lr
        self.method, self.params, self.ledger, self.random_state = method, params, ledger, random_state
        self.data_is_public, self.allow_private_preprocessing = data_is_public, allow_private_preprocessing

    def fit(self, X: Any, y: Any) -> "PrivateClassifier":
        """Train privately, once. Labels outside of the declared classes are refused before anything is charged."""
        self._refuse_before_the_rows()
        classes = targets.declared_classes(self.classes)
        X = self._checked_rows(X, reset=True)
        _refuse_no_target(self, y)
        places = targets.places(y, classes)
        self.classes_ = classes
        self._train(X, torch.from_numpy(places), len(classes), cross_entropy)
        return self

    def _build(self, inputs: int, outputs: int) -> nn.Module:
        return _network(self.hidden, inputs, outputs)

    def _undeclared(self) -> list[str]:
        return [*([_NO_CLASSES] if self.classes is None else []), *super()._undeclared()]

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The model's probabilities, one column for each of `classes_`."""
        return functional.softmax(torch.from_numpy(self._outputs(X)), dim=1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable of `classes_` for each row."""
        outputs = self._outputs(X)
        return np.asarray(self.classes_[outputs.argmax(axis=1)])


class PrivateLogisticRegression(PrivateClassifier):
    """Logistic regression with (ε, δ)-differential privacy: `PrivateClassifier` with one layer that begins at zero.

    With few rows or a small ε it is often better than a network, which has more parameters to add noise to. Guarantee,
    arguments and refusals are those of `PrivateClassifier`, without `hidden`. After a fit with `bounds`, `coef_` and
    `intercept_` are those of the features as they came, within their bounds.

    Example:
        >>> import numpy as np
        >>> rows = np.random.default_rng(0).uniform(-1, 1, (500, 2))
        >>> model = PrivateLogisticRegression(epsilon=4, public_size=500, classes=2, bounds=(-1, 1))
        >>> model.fit(rows, rows[:, 0] > 0).coef_.shape
        (2, 2)
    """

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float | None = None,
        public_size: int | None = None,
        classes: Any = None,
        bounds: Any = None,
        schema: PublicSchema | None = None,
        epochs: float = 50,
        batch: float | None = None,
        clip_norm: float = 1.0,
        lr: float | str = "auto",
        method: str | None = None,
        params: Mapping[str, Any] | None = None,
        ledger: Ledger | Callable[[], Ledger] | None = None,
        random_state: int | None = None,
        data_is_public: bool = False,
        allow_private_preprocessing: bool = False,
    ):
        self.epsilon, self.delta, self.public_size, self.classes = epsilon, delta, public_size, classes
        self.bounds, self.schema = bounds, schema
        self.epochs, self.batch, self.clip_norm, self.lr = epochs, batch, clip_norm, lr
        self.method, self.params, self.ledger, self.random_state = method, params, ledger, random_state
        self.data_is_public, self.allow_private_preprocessing = data_is_public, allow_private_preprocessing

    def fit(self, X: Any, y: Any) -> "PrivateLogisticRegression":
        """Train privately, once. Labels outside of the declared classes are refused before anything is charged."""
        super().fit(X, y)
        if self.schema is None:
            lows, highs = declared_bounds("bounds", self.bounds, self.n_features_in_)
            weight, bias = (part.numpy() for part in self.model_.parameters())
            self.coef_ = weight * 2 / (highs - lows)
            self.intercept_ = bias - weight.sum(axis=1) - self.coef_ @ lows
        return self

    def _build(self, inputs: int, outputs: int) -> nn.Module:
        layer = nn.Linear(inputs, outputs)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer


class PrivateRegressor(_PublicScore, RegressorMixin, _Private):  # type: ignore[misc]
    """A neural network that learns a number with (ε, δ)-differential privacy.

    Guarantee, arguments and refusals are those of `PrivateClassifier`, with `target_bounds` (low, high) instead of
    classes: what may be predicted. Targets are clipped to them, and the loss is Huber's, which keeps the gradient of a
    far-off row short.

    Example:
        >>> import numpy as np
        >>> rows = np.random.default_rng(0).uniform(-1, 1, (500, 2))
        >>> model = PrivateRegressor(epsilon=4, public_size=500, target_bounds=(-1, 1), bounds=(-1, 1))
        >>> model.fit(rows, rows[:, 0]).predict(rows[:3]).shape
        (3,)
    """

    _AUTO_RATIO = 2.0

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float | None = None,
        public_size: int | None = None,
        target_bounds: tuple[float, float] | None = None,
        bounds: Any = None,
        schema: PublicSchema | None = None,
        hidden: Sequence[int] | Build = (64,),
        epochs: float = 50,
        batch: float | None = None,
        clip_norm: float = 1.0,
        lr: float | str = "auto",
        method: str | None = None,
        params: Mapping[str, Any] | None = None,
        ledger: Ledger | Callable[[], Ledger] | None = None,
        random_state: int | None = None,
        data_is_public: bool = False,
        allow_private_preprocessing: bool = False,
    ):
        self.epsilon, self.delta, self.public_size, self.target_bounds = epsilon, delta, public_size, target_bounds
        self.bounds, self.schema, self.hidden = bounds, schema, hidden
        self.epochs, self.batch, self.clip_norm, self.lr = epochs, batch, clip_norm, lr
        self.method, self.params, self.ledger, self.random_state = method, params, ledger, random_state
        self.data_is_public, self.allow_private_preprocessing = data_is_public, allow_private_preprocessing

    def fit(self, X: Any, y: Any) -> "PrivateRegressor":
        """Train privately, once. Targets are clipped to their declared bounds."""
        self._refuse_before_the_rows()
        lows, highs = declared_bounds("target_bounds", self.target_bounds, 1)
        X = self._checked_rows(X, reset=True)
        _refuse_no_target(self, y)
        goals = scaled(targets.numbers(y)[:, None], lows, highs)[:, 0]
        self._train(X, goals, 1, _huber)
        return self

    def _build(self, inputs: int, outputs: int) -> nn.Module:
        return _network(self.hidden, inputs, outputs)

    def _undeclared(self) -> list[str]:
        return [*([_NO_TARGET_BOUNDS] if self.target_bounds is None else []), *super()._undeclared()]

    def predict(self, X: Any) -> NDArray[np.float64]:
        """A number within the declared bounds for each row."""
        low, high = np.asarray(self.target_bounds, dtype=np.float64)
        return (self._outputs(X)[:, 0].clip(-1, 1) + 1) / 2 * (high - low) + low


def _refuse_no_target(estimator: _Private, y: Any) -> None:
    if y is None:
        raise DataError(f"{type(estimator).__name__} requires y to be passed, but the target y is None")


def _huber(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return functional.huber_loss(model(inputs).flatten(), targets, reduction="none", delta=0.25)


def _network(hidden: Sequence[int] | Build, inputs: int, outputs: int) -> nn.Module:
    """Tanh layers: bounded activations keep per-example gradients short."""
    if callable(hidden):
        model = hidden(inputs, outputs)
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"hidden(inputs, outputs) must return a torch.nn.Module, got {shown(model)}")
        return copy.deepcopy(model)  # a second fit must not go on from the first, under the epsilon of one
    if isinstance(hidden, str) or not isinstance(hidden, Sequence | np.ndarray):
        raise ConfigurationError(
            f"hidden must be the sizes of hidden layers, (64,), or a function (inputs, outputs) that returns a "
            f"torch.nn.Module; got {shown(hidden)}"
        )
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(inputs, checks.whole("a size in hidden", size)), nn.Tanh()]
        inputs = int(size)
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))
