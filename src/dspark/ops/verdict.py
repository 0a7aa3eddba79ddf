"""Which drafts of a verify pass stand, where they are drawn: the leading ones that equal what the target drew."""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.ops.noise import Stream, keyed_uniform


class Judgement(NamedTuple):
    """token_ids: [R, G + 1] int64, accepted drafts and then the bonus, -1 after it. num_accepted: [R] int64."""

    token_ids: Tensor
    num_accepted: Tensor


class ForcedChances(NamedTuple):
    """Acceptance that is drawn instead of found.

    chances: [G] float64, of each draft once those before it are accepted. seeds, positions: [R] int64, key of the
    uniforms: a request's seed and the position of its first draft.
    """

    chances: Tensor
    seeds: Tensor
    positions: Tensor


def judge_drafts(
    drawn: Tensor, drafts: Tensor, row_starts: Tensor, verify_lens: Tensor, forced: ForcedChances | None = None
) -> Judgement:
    """Accept leading drafts and add the target's own token after them.

    Args:
        drawn: [T] int64, the target's token at every row of the pass.
        drafts: [R, G] int64; what lies beyond a request's verify length is not read.
        row_starts: [R] int64, the anchor's row of each request; its rows follow one another.
        verify_lens: [R] int64, drafts that were sent, at most G.
        forced: decides in place of the comparison.
    """
    width = drafts.shape[1]
    steps = torch.arange(width + 1, device=drawn.device)
    rows = (row_starts[:, None] + torch.minimum(steps, verify_lens[:, None])).clamp(max=drawn.shape[0] - 1)
    own = drawn[rows]
    stands = own[:, :-1] == drafts if forced is None else _forced_to_stand(forced, width)
    stands = stands & (steps[:-1] < verify_lens[:, None])
    num_accepted = stands.long().cumprod(1).sum(1)
    is_draft, is_bonus = steps < num_accepted[:, None], steps == num_accepted[:, None]
    padded = torch.cat((drafts, drafts.new_full((drafts.shape[0], 1), -1)), dim=1)
    return Judgement(torch.where(is_draft, padded, torch.where(is_bonus, own, -1)), num_accepted)


def _forced_to_stand(forced: ForcedChances, width: int) -> Tensor:
    """[R, G] whether the uniform of each draft's position is below its chance."""
    num_requests = forced.seeds.shape[0]
    positions = forced.positions[:, None] + torch.arange(width, device=forced.seeds.device)
    seeds = forced.seeds[:, None].expand(-1, width)
    uniform = keyed_uniform(seeds.flatten(), positions.flatten(), Stream.FORCED).view(num_requests, width)
    return uniform.to(torch.float64) < forced.chances
