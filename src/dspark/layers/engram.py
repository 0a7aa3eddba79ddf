"""Engram layer: table rows of hashed n-grams, projected to keys and a value, gated into the streams."""

import torch
from torch import Tensor, nn

from dspark.layers.linear import Linear, parameter
from dspark.layers.plans import EngramPlan, HyperPlan, QuantPlan
from dspark.layers.quantisers import activation_quantiser
from dspark.ops.engram import hash_ngrams
from dspark.ops.hyper import Residual, written_streams
from dspark.ops.opset import OpSet
from dspark.parallel.group import ALONE, RankGroup


class EngramTable(nn.Module):
    """The table [rows, head_dim]: a parameter, or as it is stored (`dspark.ops.table`)."""

    def __init__(self, plan: EngramPlan) -> None:
        super().__init__()
        self.weight = parameter(plan.num_rows, plan.head_dim)


class Engram(nn.Module):
    """Adds gate * value to every residual stream."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(
        self,
        plan: EngramPlan,
        hyper: HyperPlan,
        hidden_size: int,
        quant: QuantPlan,
        ops: OpSet,
        ranks: RankGroup = ALONE,
    ) -> None:
        super().__init__()
        self.ranks = ranks if plan.parts > 1 else ALONE
        self.hyper = hyper
        self.ops = ops
        self.storage = quant.engram
        width = (plan.max_ngram - 1) * plan.num_heads * plan.head_dim
        self.embed = EngramTable(plan)
        self.wkv = Linear(width, (hyper.num_streams + 1) * hidden_size // plan.parts, quant.dense, ops)
        self.q_weight = parameter(hyper.num_streams, hidden_size)
        self.k_weight = parameter(hyper.num_streams, hidden_size)
        self.quantise = activation_quantiser(quant, ops)
        self.register_buffer("multipliers", torch.tensor(plan.multipliers), persistent=False)
        self.register_buffer("primes", torch.tensor(plan.primes), persistent=False)
        self.register_buffer("offsets", torch.tensor(plan.offsets), persistent=False)

    def hashes(self, ngrams: Tensor) -> Tensor:
        """Table rows [T, columns] of n-grams [T, n]."""
        return hash_ngrams(ngrams, self.multipliers, self.primes, self.offsets)

    def forward(self, residual: Residual, ngrams: Tensor) -> Residual:
        """The residual with whole streams to which the rows of ngrams [T, n], compressed ids, are added."""
        streams = written_streams(residual, self.ops.expand_streams)
        rows = self.ops.engram_rows(self.embed.weight, ngrams, self.multipliers, self.primes, self.offsets)
        found = self.ops.stored(rows, self.storage).flatten(1)
        projected = self.ranks.gather_columns(self.wkv(self.quantise(found.to(streams.dtype))))
        added = self.ops.engram_add(streams, projected, self.q_weight, self.k_weight, self.hyper.norm_eps)
        return Residual(added, residual.carried)
