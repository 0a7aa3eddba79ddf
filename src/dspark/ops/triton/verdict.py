"""The verdict on drafts: one program a request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.noise import Stream
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.launch import block_of
from dspark.ops.triton.noise import stream_key, uniform
from dspark.ops.verdict import ForcedChances, Judgement

_FORCED = tl.constexpr(int(Stream.FORCED))


@triton.jit(do_not_specialize=["T"])
def _judge(
    drawn, drafts, row_starts, verify_lens, chances, seeds, positions, tokens, counts, T, DRAFTS_ROW, DRAFTS_STEP,
    SEED_STRIDE, G: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    request, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    sent = tl.load(verify_lens + request)
    rows = tl.minimum(tl.load(row_starts + request) + tl.minimum(lanes, sent), T - 1)
    own = tl.load(drawn + rows)
    draft = tl.load(drafts + request * DRAFTS_ROW + lanes * DRAFTS_STEP, mask=lanes < G, other=-1)
    if chances is None:
        stands = own == draft
    else:
        stream = tl.full([BLOCK], _FORCED, tl.int64)
        key = stream_key(tl.load(seeds + request * SEED_STRIDE), tl.load(positions + request) + lanes, stream)
        chance = tl.load(chances + lanes, mask=lanes < G, other=0.0)
        stands = uniform(key, tl.zeros([BLOCK], tl.int32)).to(tl.float64) < chance
    accepted = tl.min(tl.where(stands & (lanes < sent), BLOCK, lanes), 0)
    token = tl.where(lanes < accepted, draft, tl.where(lanes == accepted, own, -1))
    tl.store(tokens + request * (G + 1) + lanes, token, mask=lanes <= G)
    tl.store(counts + request, accepted.to(tl.int64))


def judge_drafts(
    drawn: Tensor, drafts: Tensor, row_starts: Tensor, verify_lens: Tensor, forced: ForcedChances | None = None
) -> Judgement:
    """See `dspark.ops.verdict.judge_drafts`."""
    num_requests, width = drafts.shape
    tokens = torch.empty(num_requests, width + 1, dtype=torch.int64, device=drawn.device)
    counts = torch.empty(num_requests, dtype=torch.int64, device=drawn.device)
    if num_requests:
        chances, seeds, positions = forced or (None, None, None)
        positions = None if positions is None else positions.contiguous()
        early = early_launch()
        _judge[(num_requests,)](
            drawn, drafts, row_starts.contiguous(), verify_lens.contiguous(), chances, seeds, positions, tokens, counts,
            drawn.shape[0], *drafts.stride(), 0 if seeds is None else seeds.stride(0), width, block_of(width + 1),
            early, num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return Judgement(tokens, counts)
