"""What ranks send each other in a pass, from the plan alone: it takes time beside the bytes and the products."""

from dataclasses import asdict, dataclass
from typing import Any

from dspark.bench.roofline import Roofline, RooflineRow
from dspark.layers.plans import ModelPlan
from dspark.models.inventory import expected_tensors

_SUM_BYTES, _LOGIT_BYTES, _ENGRAM_BYTES, _DECISION_BYTES = 2, 4, 2, 8


@dataclass(frozen=True)
class PlannedExchanges:
    """Of one pass or one round.

    Attributes:
        sums: one after each half of a layer.
        gathers: one for the logits, one for each Engram layer, and in rounds on the device one for what rank 0 decides.
        num_bytes: of one rank's tensors.
    """

    sums: int = 0
    gathers: int = 0
    num_bytes: int = 0

    def __add__(self, other: "PlannedExchanges") -> "PlannedExchanges":
        return PlannedExchanges(self.sums + other.sums, self.gathers + other.gathers, self.num_bytes + other.num_bytes)


def target_exchanges(plan: ModelPlan, ranks: int, num_rows: int) -> PlannedExchanges:
    """Those of a target pass whose rows all have logits."""
    widths = [one.shape[0] for one in expected_tensors(plan) if one.name.endswith("engram.wkv.weight")]
    engram = PlannedExchanges(0, len(widths), num_rows * sum(widths) // ranks * _ENGRAM_BYTES)
    return _halves(plan, len(plan.layers), num_rows) + _logits(plan, ranks, num_rows) + engram


def draft_exchanges(plan: ModelPlan, ranks: int, num_rows: int) -> PlannedExchanges:
    """Those of a draft pass; the Markov head is whole on every rank."""
    assert plan.draft is not None
    return _halves(plan, len(plan.draft.stages), num_rows) + _logits(plan, ranks, num_rows)


def exchanges_json(model: Roofline, row: RooflineRow) -> dict[str, Any]:
    """Of a plain pass and of a round, at one number of requests."""
    count, width = row.num_requests, model.plan.draft.block_size if model.plan.draft else 0
    plain = target_exchanges(model.plan, model.ranks, count) + _decision(count, 2)
    both = target_exchanges(model.plan, model.ranks, row.num_rows) + _decision(count, 2 + width)
    if width:
        both += draft_exchanges(model.plan, model.ranks, count * width) + _decision(count, 1 + width)
    return {"requests": row.num_requests, "plain": asdict(plain), "round": asdict(both)}


def _halves(plan: ModelPlan, num_layers: int, num_rows: int) -> PlannedExchanges:
    sums = 2 * num_layers
    return PlannedExchanges(sums, 0, sums * num_rows * plan.hidden_size * _SUM_BYTES)


def _decision(num_requests: int, num_integers: int) -> PlannedExchanges:
    """Accepted drafts and emitted tokens of each request, or its drafts and their number."""
    return PlannedExchanges(0, 1, num_requests * num_integers * _DECISION_BYTES)


def _logits(plan: ModelPlan, ranks: int, num_rows: int) -> PlannedExchanges:
    return PlannedExchanges(0, 1, num_rows * plan.vocab_size // ranks * _LOGIT_BYTES)
