"""Attention of each row over its own gathered keys, with a sink in the denominator."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.linear import batched_product
from dspark.ops.norm import rms_norm
from dspark.ops.rope import Turn, apply_rope

KEY_CHUNK = 128

Sources = list[tuple[Tensor, Tensor]]


def attend_of(
    norm: Callable[[Tensor, Tensor | None, float], Tensor],
    rope: Callable[[Tensor, Tensor, Tensor], Tensor],
    over_keys: Callable[[Tensor, Sources, Tensor, float], Tensor],
) -> Callable[..., Tensor]:
    """Attention of projected queries from its parts: `rms_norm`, `apply_rope` and `sparse_attention` of one set."""

    def attend(
        q: Tensor, turn: Turn, sources: Sources, sink: Tensor, scale: float, norm_eps: float | None = None
    ) -> Tensor:
        """Queries are normalised head by head and turned; what they find is turned back.

        Args:
            q: [T, H, K]. turn: rotations of the query positions.
            sources, sink, scale: see `sparse_attention`. norm_eps: None where heads are not normalised.
        Returns:
            [T, H, K] in the dtype of `q`.
        """
        cos, sin = turn
        if norm_eps is not None:
            q = norm(q, None, norm_eps)
        return rope(over_keys(rope(q, cos, sin), sources, sink, scale), cos, -sin)

    return attend


def sparse_attention(q: Tensor, sources: Sources, sink: Tensor, scale: float) -> Tensor:
    """softmax over the keys that `sources` name, values equal to keys, one key head shared by all query heads.

    Keys are taken in chunks of KEY_CHUNK and the chunks are added one after the other, so a longer index
    padded with -1 changes nothing: a masked chunk adds exact zeros.

    Args:
        q: [T, H, K].
        sources: pairs (rows [N, K], index [T, J]); -1 in an index is no key. A row sees the keys of all pairs.
        sink: [H] float32, logit of a value-less key; not scaled.
        scale: factor on q.k.
    Returns:
        [T, H, K] in the dtype of `q`.
    """
    keys, masked = gather_keys(sources)
    num_rows, num_heads, width = q.shape
    chunks = keys.shape[1] // KEY_CHUNK
    keys = keys.reshape(num_rows * chunks, KEY_CHUNK, width)
    queries = q.float().unsqueeze(1).expand(-1, chunks, -1, -1).reshape(-1, num_heads, width)
    scores = batched_product(queries, keys.transpose(1, 2)).mul_(scale)
    scores = scores.view(num_rows, chunks, num_heads, KEY_CHUNK)
    scores.masked_fill_(masked.view(num_rows, chunks, 1, KEY_CHUNK), float("-inf"))
    top = torch.maximum(scores.amax(dim=(1, 3)), sink)
    weights = torch.exp(scores - top[:, None, :, None])
    denominators = weights.sum(-1)
    values = batched_product(weights.flatten(0, 1), keys).view(num_rows, chunks, num_heads, width)
    total, denominator = values[:, 0], denominators[:, 0]
    for chunk in range(1, chunks):
        total = total + values[:, chunk]
        denominator = denominator + denominators[:, chunk]
    denominator = denominator + torch.exp(sink - top)
    return (total / denominator.unsqueeze(-1)).to(q.dtype)


attend = attend_of(rms_norm, apply_rope, sparse_attention)


def gather_keys(sources: Sources) -> tuple[Tensor, Tensor]:
    """Keys [T, J, K] float32 of all sources side by side and their mask [T, J] (True = no key); J in whole chunks."""
    index = torch.cat([index for _, index in sources], dim=1)
    keys = torch.cat([rows[index.clamp(min=0)].float() for rows, index in sources], dim=1)
    masked = index < 0
    if bool(masked.any()):
        # A weight of zero does not silence a key that is not a number: what stands in for a missing key must be finite.
        keys.masked_fill_(masked.unsqueeze(-1), 0.0)
    padding = -index.shape[1] % KEY_CHUNK
    if padding:
        masked = F.pad(masked, (0, padding), value=True)
        keys = F.pad(keys, (0, 0, 0, padding))
    return keys, masked
