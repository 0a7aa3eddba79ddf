"""The set of op twins that a model is built with: chosen once, reported by name, never switched silently."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.ops import (
    attention,
    draw,
    engram,
    experts,
    hyper,
    index,
    kept_rows,
    linear,
    markov,
    norm,
    parts,
    places,
    quantise,
    rope,
    rounds,
    route,
    verdict,
)
from dspark.ops.branch import Branch, InOrder
from dspark.ops.experts import Output
from dspark.ops.kept_rows import RowForm, RowNorm
from dspark.ops.places import RingRows


@dataclass(frozen=True)
class OpSet:
    """The ops of the model math; every field has the signature of its torch twin.

    `stored` maps a weight parameter and its storage name to the values that the product uses: the identity where
    parameters already hold stored values, fake quantisation while training. Where `reads_codes` holds, products take
    coded and bf16 weights as they are stored (`dspark.ops.packing`) beside float32 ones.
    """

    name: str
    linear: Callable[[Tensor, Tensor], Tensor]
    linear_wide: Callable[[Tensor, Tensor], Tensor]
    grouped_linear: Callable[[Tensor, Tensor, int, int], Tensor]
    attend: Callable[..., Tensor]
    linear_terms: Callable[[Tensor, Tensor], Output]
    sum_terms: Callable[[Output], Tensor]
    shared_expert: Callable[..., Any]
    mixture: Callable[..., Output]
    index_scores: Callable[[Tensor, Tensor, int, index.IndexKeys], Tensor]
    pick_rows: Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
    quantise_fp8: Callable[[Tensor, int], Tensor]
    stored: Callable[[Tensor, str], Tensor]
    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor]
    rotations: Callable[[Tensor, Tensor], rope.Turn]
    row_rotations: Callable[[Tensor, rope.TurnTable], list[rope.Turn]]
    joint_sums: Callable[..., Tensor]
    beside: Callable[[torch.device, str], Branch]
    form_rows: Callable[[Tensor, rope.Turn, RowForm], Tensor]
    key_rows: Callable[[Tensor, int, torch.dtype, RowNorm, rope.Turn, RowForm, RingRows | None], Tensor]
    latents: Callable[
        [Tensor, torch.dtype, tuple[RowNorm, RowForm], tuple[RowNorm, RowForm], rope.Turn, RingRows | None],
        tuple[Tensor, Tensor],
    ]
    keep_rows: Callable[..., None]
    compress: Callable[..., Tensor]
    embed_streams: Callable[[Tensor, Tensor, int, torch.dtype], Tensor]
    read_streams: Callable[..., hyper.HalfInput]
    read_head: Callable[..., tuple[Tensor, Tensor]]
    collapse_streams: Callable[[Tensor, Tensor], Tensor]
    expand_streams: Callable[[Output, Tensor, hyper.StreamMix], Tensor]
    mean_streams: Callable[[Tensor], Tensor]
    engram_rows: Callable[..., Tensor]
    engram_add: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
    route_rows: Callable[..., route.Route]
    visible_places: Callable[[places.RowPlaces, int, int, int], Tensor]
    page_places: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    pass_places: Callable[[places.RowPlaces, places.PlaceJobs], list[places.GroupPlaces]]
    request_places: Callable[[Tensor, int, int, int], Tensor]
    sum_parts: Callable[[Tensor], Tensor]
    best_tokens: Callable[[Tensor], Tensor]
    draw_rows: Callable[[Tensor, Tensor, Tensor, draw.DrawParams, draw.DrawKind], Tensor]
    draw_blocks: Callable[..., Tensor]
    confidence_logits: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    judge_drafts: Callable[..., verdict.Judgement]
    lay_rows: Callable[[rounds.RoundTable, int], rounds.RoundRows]
    move_on: Callable[..., Tensor]
    open_blocks: Callable[[rounds.RoundTable], rounds.Blocks]
    lay_blocks: Callable[[Tensor, Tensor, Tensor, int, int, int, int], rounds.BlockRows]
    keep_blocks: Callable[..., None]
    reads_codes: bool = False


TORCH_OPS = OpSet(
    name="torch",
    linear=linear.linear,
    linear_wide=linear.linear_wide,
    grouped_linear=linear.grouped_linear,
    attend=attention.attend,
    linear_terms=linear.linear,
    sum_terms=experts.sum_terms,
    shared_expert=experts.shared_expert,
    mixture=experts.mixture,
    index_scores=index.index_scores,
    pick_rows=index.pick_rows,
    quantise_fp8=quantise.quantise_fp8,
    stored=lambda weight, storage: weight,
    rms_norm=norm.rms_norm,
    rotations=rope.rotations,
    row_rotations=rope.row_rotations,
    joint_sums=kept_rows.joint_sums,
    beside=lambda device, name: InOrder(),
    form_rows=kept_rows.TORCH_ROWS.form_rows,
    key_rows=kept_rows.TORCH_ROWS.key_rows,
    latents=kept_rows.TORCH_ROWS.latents,
    keep_rows=kept_rows.TORCH_ROWS.keep_rows,
    compress=kept_rows.TORCH_ROWS.compress,
    embed_streams=hyper.embed_streams,
    read_streams=hyper.TORCH_READER.read_streams,
    read_head=hyper.TORCH_READER.read_head,
    collapse_streams=hyper.collapse_streams,
    expand_streams=hyper.expand_streams,
    mean_streams=hyper.mean_streams,
    engram_rows=engram.engram_rows,
    engram_add=engram.engram_add,
    route_rows=route.route_rows,
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
    visible_places=places.visible_places,
    page_places=places.page_places,
    pass_places=places.pass_places,
    request_places=places.request_places,
    sum_parts=parts.sum_parts,
)


def ops_for(device: torch.device) -> OpSet:
    """The twins for a device; those of Triton are imported only where they run."""
    if device.type == "cpu":
        return TORCH_OPS
    ops: OpSet = importlib.import_module("dspark.ops.opset_triton").TRITON_OPS
    return ops
