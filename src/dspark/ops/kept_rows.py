"""Rows on their way from a product into the state: norm, rotation, Hadamard transform, fake quantisation.

Products leave sums [sections, T, N]: several maps of one input side by side, in sections that whoever reads them adds
from the first to the last and rounds to the dtype of the rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.ops.compress import Groups, PoolShape, pool_groups
from dspark.ops.hadamard import hadamard
from dspark.ops.linear import linear
from dspark.ops.norm import rms_norm
from dspark.ops.places import RingRows
from dspark.ops.quantise import quantise_fp4, quantise_fp4_e4m3, quantise_fp8
from dspark.ops.rope import Turn, apply_rope


@dataclass(frozen=True)
class RowForm:
    """What becomes of a rotated row: a Hadamard transform, then fake quantisation.

    Attributes:
        kind: none, fp8, fp4 or fp4_e4m3. group: elements that share a scale. skip: last elements that stay as they are.
    """

    kind: str
    group: int
    skip: int = 0
    hadamard: bool = False


class RowNorm(Protocol):
    """A norm of rows: its weight [K] and epsilon."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


def joint_sums_of(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Sequence[Tensor]], Tensor]:
    """Products side by side, from the `linear` of one set of twins."""

    def joint_sums(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Products of x [T, K] with several weights side by side: sums [1, T, N], see the module."""
        return torch.cat([product(x, weight) for weight in weights], dim=1).unsqueeze(0)

    return joint_sums


joint_sums = joint_sums_of(linear)


def added(sums: Tensor, column: int, width: int, dtype: torch.dtype) -> Tensor:
    """[T, width] values of some columns of sums [sections, T, N]."""
    total = sums[0, :, column : column + width]
    for section in sums[1:]:
        total = total + section[:, column : column + width]
    return total.to(dtype)


@dataclass(frozen=True)
class RowOps:
    """Ops on kept rows, from the parts of one set of twins: `rms_norm`, `apply_rope`, quantisers and `pool_groups`."""

    norm: Callable[[Tensor, Tensor | None, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    quantisers: Mapping[str, Callable[[Tensor, int], Tensor]]
    pool: Callable[[Tensor, Tensor], Tensor]

    def form_rows(self, rows: Tensor, turn: Turn, form: RowForm) -> Tensor:
        """Rows [T, K] or [T, H, K] turned by `turn` (see `dspark.ops.rope.rotations`) and put in their form."""
        return self._formed(self.rope(rows, *turn), form)

    def _formed(self, rows: Tensor, form: RowForm) -> Tensor:
        if form.hadamard:
            rows = hadamard(rows)
        if form.kind == "none":
            return rows
        quantise = self.quantisers[form.kind]
        if not form.skip:
            return quantise(rows, form.group)
        head, tail = rows.split((rows.shape[-1] - form.skip, form.skip), dim=-1)
        return torch.cat((quantise(head, form.group), tail), dim=-1)

    def key_rows(
        self,
        sums: Tensor,
        column: int,
        dtype: torch.dtype,
        norm: RowNorm,
        turn: Turn,
        form: RowForm,
        home: RingRows | None,
    ) -> Tensor:
        """Rows of `dtype` from the columns of sums [sections, T, N] that start at `column`: norm, turn, form.

        Args:
            home: the ring that the rows go to, None where nobody keeps them.
        Returns:
            [T, K], or the ring that has them now.
        """
        rows = added(sums, column, norm.weight.shape[0], dtype)
        rows = self.form_rows(self.norm(rows, norm.weight, norm.eps), turn, form)
        if home is None:
            return rows
        home.write(rows)
        return home.ring

    def latents(
        self,
        sums: Tensor,
        dtype: torch.dtype,
        query: tuple[RowNorm, RowForm],
        key: tuple[RowNorm, RowForm],
        turn: Turn,
        home: RingRows | None,
    ) -> tuple[Tensor, Tensor]:
        """Query latents [T, Q], which are not turned, and window keys as `key_rows`, from sums [sections, T, Q + K]."""
        norm, form = query
        rows = added(sums, 0, norm.weight.shape[0], dtype)
        latent = self._formed(self.norm(rows, norm.weight, norm.eps), form)
        return latent, self.key_rows(sums, rows.shape[1], dtype, key[0], turn, key[1], home)

    def keep_rows(self, rows: Tensor, norm: RowNorm, turn: Turn, form: RowForm, groups: Groups) -> None:
        """Write rows [C, K], normalised, turned and in their form, as those of `groups`."""
        groups.keep(self.form_rows(self.norm(rows, norm.weight, norm.eps), turn, form))

    def compress(
        self,
        sums: Tensor,
        dtype: torch.dtype,
        shape: PoolShape,
        bias: Tensor | None,
        norm: RowNorm,
        turn: Turn,
        form: RowForm,
        groups: Groups,
    ) -> Tensor:
        """Pool the groups that a pass completes, and keep the inputs of those that stay open.

        Args:
            sums: [sections, T, N]. bias: [ratio, projected] float32 on the gates, by place in the group, or None.
            norm: of the pooled row. turn: of the groups' positions. form: of the written row.
        Returns:
            [C, width] of `dtype`: the normalised rows before they are turned.
        """
        values = added(sums, shape.column, shape.projected, dtype)
        if shape.is_gated:
            gates = added(sums, shape.column + shape.projected, shape.projected, dtype).float()
            if bias is not None:
                gates = gates + bias[groups.row_positions % shape.ratio]
            pooled = self._pooled(torch.cat((values.float(), gates), dim=-1), shape, groups).to(dtype)
        else:
            pooled = values[: groups.positions.shape[0]]
        latent = self.norm(pooled, norm.weight, norm.eps)
        groups.keep(self.form_rows(latent, turn, form))
        return latent

    def _pooled(self, rows: Tensor, shape: PoolShape, groups: Groups) -> Tensor:
        inputs, exists = groups.exchange(rows)
        values, gates = inputs.chunk(2, dim=-1)
        gates = gates.masked_fill(~exists.unsqueeze(-1), float("-inf"))
        if shape.overlap:
            values, gates = _join_halves(values, shape), _join_halves(gates, shape)
        return self.pool(values, gates)


def _join_halves(rows: Tensor, shape: PoolShape) -> Tensor:
    """[C, 2M, 2K] -> [C, 2M, K]: the previous group gives its first channels, the own group its second."""
    ratio, width = shape.ratio, shape.width
    return torch.cat((rows[:, :ratio, :width], rows[:, ratio:, width:]), dim=1)


TORCH_ROWS = RowOps(
    rms_norm, apply_rope, {"fp8": quantise_fp8, "fp4": quantise_fp4, "fp4_e4m3": quantise_fp4_e4m3}, pool_groups
)
