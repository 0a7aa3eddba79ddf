"""Speculative decoding without a model in it: propose, choose verify lengths, verify, count."""

from dspark.speculative.dspark import DraftBlock, DraftModel, DSparkProposer
from dspark.speculative.forced import ForcedAcceptance
from dspark.speculative.lengths import (
    FixedLengths,
    LengthPolicy,
    ThresholdLengths,
    ThroughputLengths,
    drafting_pays,
    fixed_lengths,
    schedule_lengths,
    threshold_lengths,
)
from dspark.speculative.profile import CalibrationProfile, load_profile
from dspark.speculative.proposer import (
    ContinuationProposer,
    NoProposer,
    Proposal,
    ProposalRequest,
    Proposer,
    RequestId,
)
from dspark.speculative.statistics import AcceptanceStatistics, Estimate, wilson
from dspark.speculative.survival import compute_survival
from dspark.speculative.verify import Verdict, VerifySpan, verify

__all__ = [
    "AcceptanceStatistics",
    "CalibrationProfile",
    "ContinuationProposer",
    "DSparkProposer",
    "DraftBlock",
    "DraftModel",
    "Estimate",
    "FixedLengths",
    "ForcedAcceptance",
    "LengthPolicy",
    "NoProposer",
    "Proposal",
    "ProposalRequest",
    "Proposer",
    "RequestId",
    "ThresholdLengths",
    "ThroughputLengths",
    "Verdict",
    "VerifySpan",
    "compute_survival",
    "drafting_pays",
    "fixed_lengths",
    "load_profile",
    "schedule_lengths",
    "threshold_lengths",
    "verify",
    "wilson",
]
