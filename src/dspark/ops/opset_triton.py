"""The Triton twins as a set; importing this needs triton, so it is imported only where a device is chosen."""

import torch
from torch import Tensor

from dspark.ops.experts import Terms, mixture_of, shared_expert_of
from dspark.ops.linear import grouped_linear_of
from dspark.ops.opset import OpSet
from dspark.ops.packing import GROUP_ROWS, PackedWeight
from dspark.ops.route import Route
from dspark.ops.triton import (
    attention,
    compress,
    draw,
    elementwise,
    engram,
    experts,
    hyper,
    index,
    kept_rows,
    linear,
    markov,
    norm,
    parts,
    pick,
    places,
    quantise,
    rope,
    rounds,
    route,
    streams,
    table,
    verdict,
)
from dspark.ops.triton.beside import Beside
from dspark.ops.triton.experts import Quantiser, SharedRows, Weights

_grouped_by_parts = grouped_linear_of(linear.linear, quantise.quantise_fp8)
_mixture_of_parts = mixture_of(experts.routed_experts)
_shared_expert_of_parts = shared_expert_of(linear.linear, elementwise.gate_and_up)


def grouped_linear(x: Tensor, weight: Tensor | PackedWeight, groups: int, quant_group: int) -> Tensor:
    """See `dspark.ops.linear.grouped_linear`; groups that are no whole blocks of rows are multiplied one by one."""
    if isinstance(weight, Tensor) and (weight.dtype == torch.float32 or weight.shape[0] // groups % GROUP_ROWS):
        return _grouped_by_parts(x, weight, groups, quant_group)
    if quant_group:
        return linear.quantised_linear(x, weight, groups, quant_group)
    return linear.linear(x, weight, groups=groups)


def shared_expert(x: Tensor, weights: Weights, limit: float, quantise: Quantiser, group: int) -> Tensor | SharedRows:
    """See `dspark.ops.experts.shared_expert_of`; for bf16 rows and stored weights beside what is launched next."""
    if x.dtype == torch.float32 or _has_float32(weights):
        return _shared_expert_of_parts(x, weights, limit, quantise, group)
    stacks = [weight.unsqueeze(0) if isinstance(weight, Tensor) else weight for weight in weights]
    return experts.shared_expert(x, (stacks[0], stacks[1]), limit, group)


def mixture(
    x: Tensor,
    route: Route,
    weights: Weights,
    shared: Tensor | SharedRows,
    limit: float,
    quantise: Quantiser,
    group: int,
) -> Tensor | Terms:
    """See `dspark.ops.experts.mixture_of`."""
    if isinstance(shared, Tensor):
        return _mixture_of_parts(x, route, weights, shared, limit, quantise, group)
    return experts.mixture(x, route, weights, shared, limit, group)


def linear_terms(x: Tensor, weight: Tensor | PackedWeight) -> Tensor | Terms:
    """See `dspark.ops.linear.linear`; the sum over the sections of a product is left to the reader."""
    if x.dtype == torch.float32 or _has_float32((weight,)):
        return linear.linear(x, weight)
    return Terms(None, linear.product_parts(x, weight.unsqueeze(0) if isinstance(weight, Tensor) else weight), x.dtype)


def sum_terms(terms: Tensor | Terms) -> Tensor:
    """[T, D] of what a half's last op gave."""
    return terms if isinstance(terms, Tensor) else experts.sum_terms(terms)


def _has_float32(weights: tuple[Tensor | PackedWeight, ...]) -> bool:
    return any(isinstance(weight, Tensor) and weight.dtype == torch.float32 for weight in weights)


TRITON_OPS = OpSet(
    name="triton",
    linear=linear.linear,
    linear_wide=lambda x, weight: linear.linear(x, weight, torch.float32),
    grouped_linear=grouped_linear,
    attend=attention.attend,
    linear_terms=linear_terms,
    sum_terms=sum_terms,
    shared_expert=shared_expert,
    mixture=mixture,
    index_scores=index.index_scores,
    pick_rows=pick.pick_rows,
    quantise_fp8=quantise.quantise_fp8,
    stored=lambda weight, storage: weight,
    rms_norm=norm.rms_norm,
    rotations=rope.rotations,
    row_rotations=rope.row_rotations,
    joint_sums=linear.joint_sums,
    beside=Beside,
    form_rows=kept_rows.form_rows,
    key_rows=kept_rows.key_rows,
    latents=kept_rows.latents,
    keep_rows=kept_rows.keep_rows,
    compress=compress.compress,
    embed_streams=streams.embed_streams,
    read_streams=hyper.read_streams,
    read_head=hyper.read_head,
    collapse_streams=streams.collapse_streams,
    expand_streams=streams.expand_streams,
    mean_streams=streams.mean_streams,
    engram_rows=table.engram_rows,
    engram_add=engram.engram_add,
    route_rows=route.route_rows,
    visible_places=places.visible_places,
    page_places=places.page_places,
    pass_places=places.pass_places,
    request_places=places.request_places,
    sum_parts=parts.sum_parts,
    best_tokens=draw.best_tokens,
    draw_rows=draw.draw_rows,
    draw_blocks=markov.draw_blocks,
    confidence_logits=markov.confidence_logits,
    judge_drafts=verdict.judge_drafts,
    lay_rows=rounds.lay_rows,
    move_on=rounds.move_on,
    open_blocks=rounds.open_blocks,
    lay_blocks=rounds.lay_blocks,
    keep_blocks=rounds.keep_blocks,
    reads_codes=True,
)
