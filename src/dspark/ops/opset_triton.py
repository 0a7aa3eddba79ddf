"""The Triton twins as a set; importing this needs triton, so it is imported only where a device is chosen."""

from dspark.ops.opset import OpSet
from dspark.ops.triton import (
    attention,
    compress,
    elementwise,
    engram,
    hyper,
    index,
    norm,
    plain_product,
    quantise,
    rope,
    route,
    rows,
)

TRITON_OPS = OpSet(
    name="triton",
    linear=plain_product.linear,
    sparse_attention=attention.sparse_attention,
    routed_experts=plain_product.routed_experts,
    index_scores=index.index_scores,
    quantise_fp8=quantise.quantise_fp8,
    quantise_fp4=quantise.quantise_fp4,
    quantise_fp4_e4m3=quantise.quantise_fp4_e4m3,
    stored=lambda weight, storage: weight,
    rms_norm=norm.rms_norm,
    apply_rope=rope.apply_rope,
    pool_groups=compress.pool_groups,
    gate_and_up=elementwise.gate_and_up,
    stream_rstd=norm.stream_rstd,
    mix_streams=hyper.mix_streams,
    collapse_streams=hyper.collapse_streams,
    expand_streams=hyper.expand_streams,
    mean_streams=hyper.mean_streams,
    engram_gate=engram.engram_gate,
    choose_experts=route.choose_experts,
    weigh_experts=route.weigh_experts,
    write_rows=rows.write_rows,
)
