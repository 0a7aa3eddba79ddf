"""Draws of rows and of whole blocks on fixed parameters; what they should be is what the torch twins draw."""

import torch
from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.ops.draw import DrawKind, DrawParams
from dspark.ops.markov import MarkovHead
from dspark.ops.opset import TORCH_OPS, OpSet
from dspark.ops.verdict import ForcedChances

PARAMS = {
    DrawKind.GREEDY: [SamplingParams()],
    DrawKind.SAMPLED: [
        SamplingParams(temperature=1.0, seed=2**64 - 3),
        SamplingParams(),
        SamplingParams(temperature=0.3, seed=7),
        SamplingParams(temperature=1e-30, seed=7),
    ],
    DrawKind.FILTERED: [
        SamplingParams(temperature=1.0, top_k=3, seed=5),
        SamplingParams(temperature=0.7, top_p=0.8, seed=6),
        SamplingParams(temperature=2.0, top_k=9, top_p=0.6, min_p=0.1, seed=2**63),
        SamplingParams(temperature=1.0, seed=8),
        SamplingParams(),
    ],
}


def params_of(kind: DrawKind, device: torch.device) -> DrawParams:
    return DrawParams(DrawParams.pack(PARAMS[kind]).words.to(device))


def logits_of(generator: torch.Generator, *shape: int) -> Tensor:
    """Coarse numbers, so that there are many ties."""
    return torch.randn(*shape, generator=generator, device="cpu").mul(4).round() / 2


def owners_of(kind: DrawKind, generator: torch.Generator, count: int) -> Tensor:
    return torch.randint(0, len(PARAMS[kind]), (count,), generator=generator, device="cpu")


def draw_inputs(kind: DrawKind, generator: torch.Generator, num_rows: int, width: int) -> tuple[Tensor, ...]:
    positions = torch.randint(0, 200_000, (num_rows,), generator=generator, device="cpu")
    return logits_of(generator, num_rows, width + 5), owners_of(kind, generator, num_rows), positions


def draw_tokens(ops: OpSet, kind: DrawKind, logits: Tensor, owners: Tensor, positions: Tensor) -> tuple[Tensor]:
    """Tokens of rows that end in columns of padding."""
    return (ops.draw_rows(logits[:, :-5], owners, positions, params_of(kind, logits.device), kind),)


def block_inputs(kind: DrawKind, generator: torch.Generator, num_blocks: int) -> tuple[Tensor, ...]:
    base = logits_of(generator, num_blocks, 2, 150)
    anchors = torch.randint(0, 150, (num_blocks,), generator=generator, device="cpu")
    positions = torch.randint(0, 200_000, (num_blocks,), generator=generator, device="cpu")
    return base, anchors, positions, owners_of(kind, generator, num_blocks)


def draw_blocks(
    ops: OpSet, kind: DrawKind, base: Tensor, anchors: Tensor, positions: Tensor, owners: Tensor
) -> tuple[Tensor]:
    """Tokens of blocks; the embedding is no bf16 number, the head's weight is stored as one where products read it."""
    generator = torch.Generator().manual_seed(3)
    embed = torch.randn(150, 40, generator=generator, device="cpu").to(base.device)
    weight = (torch.randn(160, 40, generator=generator, device="cpu") * 0.2).bfloat16().to(base.device)
    head = MarkovHead(embed, weight if ops.reads_codes else weight.float())
    params = params_of(kind, base.device).of_rows(owners)
    return (ops.draw_blocks(base, anchors, positions, head, params, kind),)


def confidence(ops: OpSet, hidden: Tensor, previous_ids: Tensor) -> tuple[Tensor]:
    """Confidence logits of rows of 70 numbers after tokens of rank 12."""
    embed, weight = confidence_weights(hidden.device)
    weight = weight.bfloat16() if ops.reads_codes else weight
    return (ops.confidence_logits(hidden, previous_ids, embed, weight),)


def naive_confidence(hidden: Tensor, previous_ids: Tensor) -> tuple[Tensor]:
    embed, weight = confidence_weights(hidden.device)
    return (torch.cat((hidden.double(), embed[previous_ids].double()), dim=1) @ weight[0].double(),)


def confidence_weights(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    embed = torch.randn(9, 12, generator=generator, device="cpu")
    return embed.to(device), torch.randn(1, 82, generator=generator, device="cpu").bfloat16().float().to(device)


def verdict_inputs(generator: torch.Generator, num_requests: int) -> tuple[Tensor, ...]:
    """Drafts [R, 3], what the target drew at the rows of each request [R, 4], lengths, positions."""
    drafts = torch.randint(0, 2, (num_requests, 3), generator=generator, device="cpu")
    drawn = torch.randint(0, 2, (num_requests, 4), generator=generator, device="cpu")
    lens = torch.randint(0, 4, (num_requests,), generator=generator, device="cpu")
    return drafts, drawn, lens, torch.randint(0, 900, (num_requests,), generator=generator, device="cpu")


def judge(ops: OpSet, drafts: Tensor, drawn: Tensor, lens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Found and forced verdicts of requests whose rows lie one after the other, without gaps."""
    steps = torch.arange(4, device=drawn.device)
    rows = drawn[steps <= lens[:, None]]
    starts = (lens + 1).cumsum(0) - lens - 1
    chances = torch.tensor([1.0, 0.6, 0.0], dtype=torch.float64, device=drawn.device)
    forced = ForcedChances(chances, positions * 31, positions)
    return (*ops.judge_drafts(rows, drafts, starts, lens), *ops.judge_drafts(rows, drafts, starts, lens, forced))


def on_torch(function, *fixed):
    """What the torch twins say."""
    return lambda *rows: function(TORCH_OPS, *fixed, *rows)
