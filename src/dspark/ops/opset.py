"""The set of op twins that a model is built with: chosen once, reported by name, never switched silently."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops import (
    attention,
    compress,
    draw,
    engram,
    experts,
    hyper,
    index,
    linear,
    markov,
    norm,
    parts,
    quantise,
    rope,
    route,
    rows,
    verdict,
)


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
    grouped_linear: Callable[[Tensor, Tensor, int], Tensor]
    sparse_attention: Callable[[Tensor, list[tuple[Tensor, Tensor]], Tensor, float], Tensor]
    mixture: Callable[..., Tensor]
    index_scores: Callable[[Tensor, Tensor, index.IndexKeys], Tensor]
    pick_rows: Callable[[Tensor, Tensor, int], Tensor]
    quantise_fp8: Callable[[Tensor, int], Tensor]
    quantise_fp4: Callable[[Tensor, int], Tensor]
    quantise_fp4_e4m3: Callable[[Tensor, int], Tensor]
    stored: Callable[[Tensor, str], Tensor]
    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor]
    apply_rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    pool_groups: Callable[[Tensor, Tensor], Tensor]
    gate_and_up: Callable[[Tensor, float], Tensor]
    embed_streams: Callable[[Tensor, Tensor, int, torch.dtype], Tensor]
    read_streams: Callable[..., hyper.HalfInput]
    read_head: Callable[..., tuple[Tensor, Tensor]]
    collapse_streams: Callable[[Tensor, Tensor], Tensor]
    expand_streams: Callable[[Tensor, Tensor, hyper.StreamMix], Tensor]
    mean_streams: Callable[[Tensor], Tensor]
    engram_gate: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    route_rows: Callable[..., route.Route]
    write_rows: Callable[[Tensor, Tensor, Tensor], None]
    sum_parts: Callable[[Tensor], Tensor]
    draw_rows: Callable[[Tensor, Tensor, Tensor, draw.DrawParams, draw.DrawKind], Tensor]
    draw_blocks: Callable[..., Tensor]
    confidence_logits: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    judge_drafts: Callable[..., verdict.Judgement]
    reads_codes: bool = False


TORCH_OPS = OpSet(
    name="torch",
    linear=linear.linear,
    linear_wide=linear.linear_wide,
    grouped_linear=linear.grouped_linear,
    sparse_attention=attention.sparse_attention,
    mixture=experts.mixture,
    index_scores=index.index_scores,
    pick_rows=index.pick_rows,
    quantise_fp8=quantise.quantise_fp8,
    quantise_fp4=quantise.quantise_fp4,
    quantise_fp4_e4m3=quantise.quantise_fp4_e4m3,
    stored=lambda weight, storage: weight,
    rms_norm=norm.rms_norm,
    apply_rope=rope.apply_rope,
    pool_groups=compress.pool_groups,
    gate_and_up=experts.gate_and_up,
    embed_streams=hyper.embed_streams,
    read_streams=hyper.TORCH_READER.read_streams,
    read_head=hyper.TORCH_READER.read_head,
    collapse_streams=hyper.collapse_streams,
    expand_streams=hyper.expand_streams,
    mean_streams=hyper.mean_streams,
    engram_gate=engram.engram_gate,
    route_rows=route.route_rows,
    write_rows=rows.write_rows,
    draw_rows=draw.draw_rows,
    draw_blocks=markov.draw_blocks,
    confidence_logits=markov.confidence_logits,
    judge_drafts=verdict.judge_drafts,
    sum_parts=parts.sum_parts,
)


def ops_for(device: torch.device) -> OpSet:
    """The twins for a device; those of Triton are imported only where they run."""
    if device.type == "cpu":
        return TORCH_OPS
    ops: OpSet = importlib.import_module("dspark.ops.opset_triton").TRITON_OPS
    return ops
