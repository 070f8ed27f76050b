"""Public linear maps of a parameter's gradients: a symmetric matrix on its rows, and one on its inputs.

For an outer product G = Σ_t b_t ⊗ a_t the map L·G·R is Σ_t (L·b_t) ⊗ (R·a_t): the engine maps what a layer was given
and what came back to it, and no gradient is materialised. A convolution is mapped over its channels, the same at every
place of the kernel; an embedding over its width, and by a number for each row.

Clipping sees mapped gradients only, so one example moves their sum by the clip norm whatever the maps are. They must be
public: made of shapes, releases, and inputs that are nobody's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fodp.clipping.layers.combine import Tied
from fodp.clipping.layers.convolutions import Convolution, Grouped
from fodp.clipping.layers.embeddings import Rows
from fodp.clipping.layers.segments import Ragged
from fodp.clipping.layers.uses import Dense, Outer, Product, Use


@dataclass(frozen=True, eq=False)
class Side:
    """A symmetric matrix diag(d) + U·diag(g)·Uᵀ with orthonormal columns in U: two products with a narrow one."""

    diagonal: Tensor  # [n], or a single number for all
    basis: Tensor | None = None  # U, [n, rank]
    gains: Tensor | None = None  # g, [rank]

    def along(self, tensor: Tensor, dim: int) -> Tensor:
        """The matrix times the tensor, along one of its dimensions."""
        dim, size = dim % tensor.dim(), tensor.shape[dim]
        after = math.prod(tensor.shape[dim + 1 :])
        if self.basis is None:
            scale = self.diagonal.to(tensor)
            return tensor * (scale if scale.dim() == 0 else scale.view(-1, *[1] * (tensor.dim() - 1 - dim)))
        if after == 1:
            return self._rows(tensor.reshape(-1, size)).reshape(tensor.shape)
        return self._columns(tensor.reshape(-1, size, after)).reshape(tensor.shape)

    def _rows(self, rows: Tensor) -> Tensor:
        """[rows, n] times the matrix."""
        if self.matrix is not None:
            return rows @ self.matrix.to(rows)
        diagonal, basis, gains = (part.to(rows) for part in self.tensors())
        return torch.addmm(rows * diagonal, (rows @ basis).mul_(gains), basis.t())

    def _columns(self, columns: Tensor) -> Tensor:
        """The matrix times [..., n, columns]."""
        if self.matrix is not None:
            return torch.matmul(self.matrix.to(columns), columns)
        diagonal, basis, gains = (part.to(columns) for part in self.tensors())
        inside = torch.matmul(basis.t(), columns).mul_(gains[:, None])
        return torch.matmul(basis, inside).add_(columns * (diagonal if diagonal.dim() == 0 else diagonal[:, None]))

    @cached_property
    def matrix(self) -> Tensor | None:
        """Written out where that is less to multiply by."""
        if self.basis is None or self.gains is None or self.basis.shape[0] > 2 * self.basis.shape[1]:
            return None
        whole = (self.basis * self.gains) @ self.basis.t()
        whole.diagonal().add_(self.diagonal)
        return whole

    @property
    def is_diagonal(self) -> bool:
        """Whether each entry is only multiplied by a number."""
        return self.basis is None

    def mean_square(self, size: int) -> float:
        """The mean of the matrix's squared singular values, ‖·‖²_F/n."""
        diagonal = self.diagonal.double().expand(size)
        total = diagonal.square().sum()
        if self.basis is not None and self.gains is not None:
            gains = self.gains.double()
            total = total + gains.square().sum() + 2 * (self.basis.double().square() @ gains * diagonal).sum()
        return float(total) / size

    def tensors(self) -> list[Tensor]:
        """What it is made of."""
        return [part for part in (self.diagonal, self.basis, self.gains) if part is not None]


@dataclass(frozen=True, eq=False)
class Kronecker:
    """factor·L·G·R of a parameter of this shape: L along its first dimension, R along its second; None: one."""

    shape: tuple[int, ...]
    left: Side | None
    right: Side | None
    factor: float = 1.0

    def __call__(self, tensor: Tensor, first: int = 0) -> Tensor:
        """Gradients, each of the parameter's shape from the dimension `first` on, mapped."""
        tensor = tensor * self.factor
        if self.left is not None:
            tensor = self.left.along(tensor, first)
        return tensor if self.right is None else self.right.along(tensor, first + 1)

    def map_(self, part: Tensor) -> Tensor:
        """One gradient of this parameter, flat or not, mapped in place."""
        return part.copy_(self(part.view(self.shape)).reshape(part.shape))

    @property
    def mean_square(self) -> float:
        """The mean of the map's squared singular values: the share of the noise that comes back from it."""
        left = 1.0 if self.left is None else self.left.mean_square(self.shape[0])
        right = 1.0 if self.right is None else self.right.mean_square(self.shape[1])
        return self.factor**2 * left * right

    def of(self, use: Use, exact: bool = False) -> Use:
        """The same gradients, mapped. `exact`: in float64, where no other example can change how one is rounded."""
        if isinstance(use, Ragged):
            return Ragged([(owners, self.of(part, exact)) for owners, part in use.parts], use.count)
        return self._cheap(use, exact) or Dense(self(_wider(use.dense().reshape(-1, *self.shape), exact), 1))

    def _cheap(self, use: Use, exact: bool) -> Use | None:
        """By small products; None where this map of this use has none."""
        if isinstance(use, Rows | Tied):
            return self._of_table(use, exact)
        if isinstance(use, Product):
            return self._of_product(use, exact)
        if isinstance(use, Grouped):
            found = self._cheap(use.of, exact)
            return Grouped(found, use.copies) if isinstance(found, Convolution) else None
        if not isinstance(use, Outer) or not self._fits(use):
            return None
        if isinstance(use, Convolution):
            return use.with_rows(
                lambda images: _along(self.right, _wider(images, exact), 1),
                lambda back: _along(self.left, _wider(back, exact) * self.factor, 1),
            )
        return self._of_outer(use, exact) if type(use) is Outer else None

    def _of_product(self, use: Product, exact: bool) -> Product | None:
        if (use.back.shape[1], use.inputs.shape[1]) != (self.shape[0], math.prod(self.shape[1:])):
            return None
        return Product(
            self._inputs(_wider(use.inputs, exact)), _along(self.left, _wider(use.back, exact) * self.factor, -1)
        )

    def _fits(self, use: Outer) -> bool:
        """Whether the use has this parameter's rows, in one group unless groups are mapped number by number."""
        groups, fan_out = use.back.shape[1], use.back.shape[3]
        alone = groups == 1 or (self.right is None and (self.left is None or self.left.is_diagonal))
        return alone and (groups * fan_out, use.fan_in) == (self.shape[0], math.prod(self.shape[1:]))

    def _of_outer(self, use: Outer, exact: bool) -> Outer:
        groups, back = use.back.shape[1], _wider(use.back, exact) * self.factor
        if groups > 1 and self.left is not None:
            back = back * self.left.diagonal.to(back).expand(self.shape[0]).view(groups, 1, -1)
        else:
            back = _along(self.left, back, -1)
        return Outer(self._inputs(_wider(use.inputs(), exact)), back)

    def _inputs(self, inputs: Tensor) -> Tensor:
        """Along the last dimension, or along the channels that it runs over."""
        if self.right is None or len(self.shape) <= 2:
            return _along(self.right, inputs, -1)
        by_channel: Tensor = inputs.unflatten(-1, (self.shape[1], -1))
        return self.right.along(by_channel, -2).flatten(-2)

    def _of_table(self, use: Rows | Tied, exact: bool) -> Use | None:
        """Rows by their numbers, widths by the matrix."""
        if len(self.shape) != 2 or not (self.left is None or self.left.is_diagonal):
            return None
        if isinstance(use, Tied):
            table, outer = self._of_table(use.table, exact), self._cheap(use.outer, exact)
            return Tied(table, outer) if isinstance(table, Rows) and isinstance(outer, Outer) else None
        back = _along(self.right, _wider(use.back, exact) * self.factor, -1)
        if self.left is not None:
            back = back * self.left.diagonal.to(back).expand(self.shape[0])[use.indices][..., None]
        return Rows(use.indices, back, use.table_rows)


Factor = float | Kronecker


def share(factor: Factor) -> float:
    """The mean squared factor by which a release is mapped back."""
    return factor.mean_square if isinstance(factor, Kronecker) else factor**2


def mapped_length(factor: Factor, tensor: Tensor) -> float:
    """The ℓ2 norm of a parameter's tensor times its factor, or in its map."""
    return float(factor(tensor).norm()) if isinstance(factor, Kronecker) else factor * float(tensor.norm())


def _along(side: Side | None, tensor: Tensor, dim: int) -> Tensor:
    return tensor if side is None else side.along(tensor, dim)


def _wider(tensor: Tensor, exact: bool) -> Tensor:
    return tensor.double() if exact else tensor


# --- maps from second moments -----------------------------------------------------------------------------------

WHOLE = 256  # dimensions up to which all eigenvectors are told apart
RANK = 32  # of more dimensions that many, and all others have one gain: two products with a narrow matrix
ROWS = 1024  # of which second moments are made: more only cost


def whitening(rows: Tensor, damping: float) -> Side:
    """(M/m + damping·1)^(-1/2) of the rows' second moment M with mean eigenvalue m, scaled to mean square one.

    In many dimensions the mean of all but the `RANK` largest eigenvalues is taken. Rows of nothing give the matrix one.
    """
    rows = _some(rows.double())
    size = rows.shape[1]
    rank = size if size <= WHOLE else RANK
    moments = rows.t() @ rows if size <= len(rows) else rows @ rows.t()
    trace = float(moments.trace())
    if not trace > 0 or not math.isfinite(trace):
        return Side(torch.ones((), dtype=rows.dtype, device=rows.device))
    values, vectors = torch.linalg.eigh(moments)
    values, vectors = values.flip(0)[:rank].clamp(min=0), vectors.flip(1)[:, :rank]
    known = values > 1e-10 * trace
    if size > len(rows):
        vectors = rows.t() @ (vectors / values.where(known, torch.ones_like(values)).sqrt())
    vectors = vectors.where(known, torch.zeros_like(vectors))  # a number of columns that rounding does not change
    relative = values.where(known, torch.zeros_like(values)) * (size / trace)
    left = size - int(known.sum())
    rest = max(0.0, size - float(relative.sum())) / left if left else 1.0
    other = (rest + damping) ** -0.5
    gains = (relative + damping).rsqrt().where(known, torch.full_like(relative, other))
    scale = math.sqrt(size / (float(gains[known].square().sum()) + left * other**2))
    return Side(torch.full((), other * scale, dtype=rows.dtype, device=rows.device), vectors, (gains - other) * scale)


def factors_of(use: Use | None, shape: Sequence[int]) -> tuple[Tensor | None, Tensor | None] | None:
    """What goes along the first and along the second dimension of a parameter, in rows; None: its use has no such form.

    Back-signals and inputs of outer products, with positions as rows; of a vector its gradients.
    """
    if isinstance(use, Grouped):
        use = use.of
    if isinstance(use, Tied):
        return None, use.outer.inputs().flatten(0, 2)
    if isinstance(use, Rows):
        return None, use.back.flatten(0, 1)
    if isinstance(use, Dense):
        return (use.gradients.flatten(1), None) if len(shape) == 1 else None
    if isinstance(use, Product):
        return (use.back, use.inputs) if len(shape) == 2 else None
    if isinstance(use, Convolution):
        back, images = use.images()
        if back.shape[1] != shape[0] or images.shape[1] != shape[1]:
            return None  # groups
        return back.movedim(1, -1).flatten(0, -2), images.movedim(1, -1).flatten(0, -2)
    if type(use) is Outer and use.back.shape[1] == 1 and len(shape) == 2:
        return use.back.flatten(0, 2), use.inputs().flatten(0, 2)
    return None


def _some(rows: Tensor) -> Tensor:
    """At most `ROWS` of the rows, evenly."""
    return rows if len(rows) <= ROWS else rows[torch.linspace(0, len(rows) - 1, ROWS, device=rows.device).long()]
