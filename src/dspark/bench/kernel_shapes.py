"""Weights whose products are measured: the shapes of the two released models, by the width of their residual stream."""

from dataclasses import dataclass
from enum import StrEnum

ROW_COUNTS = (1, 6, 24, 96, 384)


class Form(StrEnum):
    """How a weight is stored: bf16, fp8 in blocks of 128 or 32, fp4."""

    BF16 = "bf16"
    FP8_128 = "fp8 128x128"
    FP8_32 = "fp8 32x32"
    FP4 = "fp4"


@dataclass(frozen=True)
class LinearShape:
    """A weight [N, K]; `groups` parts of its rows each read their own K columns. `float_out`: results in float32."""

    name: str
    N: int
    K: int
    form: Form
    groups: int = 1
    float_out: bool = False


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of a layer and the shared one: w13 [E, 2F, D] and w2 [E, D, F]."""

    num_experts: int
    topk: int
    D: int
    F: int
    shared: Form

    @property
    def group(self) -> int:
        """Columns that share an activation scale."""
        return 128 if self.shared is Form.FP8_128 else 32


@dataclass(frozen=True)
class Geometry:
    """One model's products."""

    name: str
    linears: tuple[LinearShape, ...]
    experts: ExpertShape


def _geometry(
    name: str, D: int, F: int, num_experts: int, q_rank: int, index_heads: int, compressed: int, form: Form
) -> Geometry:
    """A model with 64 heads of 512, eight output groups of rank 1024 and 129,280 tokens."""
    linears = (
        LinearShape("wq_a", q_rank, D, form),
        LinearShape("wkv", 512, D, form),
        LinearShape("wq_a + wkv joined", q_rank + 512, D, form),
        LinearShape("wq_b", 64 * 512, q_rank, form),
        LinearShape("wo_a", 8 * 1024, 8 * 512, form, groups=8),
        LinearShape("wo_b", D, 8 * 1024, form),
        LinearShape("indexer wq_b", index_heads * 128, q_rank, form),
        LinearShape("compressor wkv", compressed, D, Form.BF16),
        LinearShape("shared w13", 2 * F, D, form),
        LinearShape("shared w2", D, F, form),
        LinearShape("router", num_experts, D, Form.BF16, float_out=True),
        LinearShape("head", 129280, D, Form.BF16, float_out=True),
    )
    return Geometry(name, linears, ExpertShape(num_experts, 6, D, F, form))


GEOMETRIES = (
    _geometry("width 4096", 4096, 2048, 256, 1024, 64, 1024, Form.FP8_128),
    _geometry("width 5120", 5120, 2304, 384, 1280, 32, 512, Form.FP8_32),
)
