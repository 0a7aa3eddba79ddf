"""Bytes on disk to named tensors: the official safetensors layout, storage formats, strict and streamed loading."""

from dspark.checkpoint.folder import SafetensorsFolder, TensorSource, release_fingerprint
from dspark.checkpoint.header import TensorEntry
from dspark.checkpoint.load import Match, match_tensors, read_matched, stream_tensors
from dspark.checkpoint.plan import SkippedTensor, SkipRule, TensorPlan
from dspark.checkpoint.write import write_checkpoint

__all__ = [
    "Match",
    "SafetensorsFolder",
    "SkipRule",
    "SkippedTensor",
    "TensorEntry",
    "TensorPlan",
    "TensorSource",
    "match_tensors",
    "read_matched",
    "release_fingerprint",
    "stream_tensors",
    "write_checkpoint",
]
