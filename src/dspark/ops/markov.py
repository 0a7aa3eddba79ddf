"""The draft's light heads: the loop that draws a block left to right, and the confidence in its tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops.draw import DrawKind, DrawParams, draw_rows
from dspark.ops.linear import linear


@dataclass(frozen=True)
class MarkovHead:
    """Low-rank bias on the next token's logits: row `x` of `embed` [V, K] times `weight` [V, K] (DSpark eq. 5)."""

    embed: Tensor
    weight: Tensor


def draw_blocks_of(product: Callable[[Tensor, Tensor], Tensor], draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`draw_blocks` out of a product and a draw."""

    def draw_blocks(
        base: Tensor, anchors: Tensor, positions: Tensor, head: MarkovHead, params: DrawParams, kind: DrawKind
    ) -> Tensor:
        """Draw blocks token by token, each from its base logits plus the bias of the token before it.

        Args:
            base: [R, G, V] float32, without columns of padding.
            anchors: [R] int64, the token before each block.
            positions: [R] int64, of the first token of each block.
            head: gives the bias; the rows of its weight from V on are padding.
            params: of the R requests.
            kind: the largest kind among them.
        Returns:
            [R, G] int64.
        """
        owners = torch.arange(base.shape[0], device=base.device)
        previous, tokens = anchors, []
        for k in range(base.shape[1]):
            bias = product(head.embed[previous], head.weight).float()[:, : base.shape[2]]
            previous = draw(base[:, k] + bias, owners, positions + k, params, kind)
            tokens.append(previous)
        return torch.stack(tokens, dim=1)

    return draw_blocks


def confidence_logits_of(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """`confidence_logits` out of a product."""

    def confidence_logits(hidden: Tensor, previous_ids: Tensor, embed: Tensor, weight: Tensor) -> Tensor:
        """Logit of the chance that a draft is accepted (DSpark eq. 7).

        Args:
            hidden: [N, D], any float dtype. previous_ids: [N] int64, the tokens before the drafts.
            embed: [V, K]. weight: [1, D + K].
        Returns:
            [N] float32.
        """
        return product(torch.cat((hidden.float(), embed[previous_ids]), dim=-1), weight).squeeze(-1)

    return confidence_logits


draw_blocks = draw_blocks_of(linear, draw_rows)
confidence_logits = confidence_logits_of(linear)
