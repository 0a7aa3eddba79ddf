"""From a row of logits to a token: penalties, filters, keyed noise, log-probabilities."""

from dspark.ops.noise import Stream, gumbel_noise, keyed_uniform
from dspark.sampling.batch import SamplingBatch
from dspark.sampling.constraint import ConstraintWalk, TokenConstraint
from dspark.sampling.draw import draw, filtered_probabilities
from dspark.sampling.logprobs import Logprobs, logprobs
from dspark.sampling.rows import (
    RequestSampling,
    RowSampling,
    is_plain_greedy,
    uses_ratio_test,
)

__all__ = [
    "ConstraintWalk",
    "Logprobs",
    "RequestSampling",
    "RowSampling",
    "SamplingBatch",
    "Stream",
    "TokenConstraint",
    "draw",
    "filtered_probabilities",
    "gumbel_noise",
    "is_plain_greedy",
    "keyed_uniform",
    "logprobs",
    "uses_ratio_test",
]
