"""Strict, streamed loading: every tensor of a checkpoint is taken, or skipped for a stated reason, or an error."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dspark.checkpoint.folder import TensorSource
from dspark.checkpoint.formats import dequantise_fp4, dequantise_fp8
from dspark.checkpoint.header import TensorEntry
from dspark.checkpoint.plan import SkippedTensor, SkipRule, TensorPlan
from dspark.config.errors import CheckpointError

MAX_NAMES = 20


@dataclass(frozen=True)
class Match:
    """A checkpoint accounted for: what will be loaded, in reading order, and what is left out."""

    plans: tuple[TensorPlan, ...]
    skipped: tuple[SkippedTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Payload bytes of what is loaded."""
        return sum(plan.num_bytes for plan in self.plans)


def match_tensors(
    entries: Mapping[str, TensorEntry], plans: Iterable[TensorPlan], skip_rules: Sequence[SkipRule] = ()
) -> Match:
    """Compare what a model expects with what a checkpoint holds.

    Raises:
        CheckpointError: tensors are missing, unexpected, or of another shape or dtype; one message lists up to 20
            names of each kind.
    """
    expected = {plan.name: plan for plan in plans}
    skipped, unexpected = _split_rest(entries, expected, skip_rules)
    faults = {
        "missing": [name for name in expected if name not in entries],
        "unexpected": unexpected,
        "wrong shape": list(_wrong_shapes(entries, expected)),
        "wrong dtype": list(_wrong_dtypes(entries, expected)),
    }
    if any(faults.values()):
        raise CheckpointError(describe_faults(faults, next(iter(entries.values()), None)))
    return Match(tuple(sorted(expected.values(), key=lambda plan: _place(entries[plan.name]))), tuple(skipped))


def stream_tensors(
    source: TensorSource, plans: Iterable[TensorPlan], skip_rules: Sequence[SkipRule] = ()
) -> Iterator[tuple[TensorPlan, Tensor]]:
    """Match, then yield each planned tensor in file order, one at a time.

    Only the tensor in the caller's hands is held here, so that loading peaks at what the caller keeps plus the largest
    tensor. Everything is matched before the first tensor is read: an error never leaves a partial model.
    """
    return read_matched(source, match_tensors(source.entries, plans, skip_rules))


def read_matched(source: TensorSource, match: Match) -> Iterator[tuple[TensorPlan, Tensor]]:
    """Yield the tensors of a match, one at a time."""
    for plan in match.plans:
        yield plan, source.read(plan.name)


def stored_values(source: TensorSource, plan: TensorPlan) -> Tensor:
    """A tensor's values: as they are, or its codes times their scales in float32."""
    tensor = source.read(plan.name)
    if plan.scale is None:
        return tensor
    scale = source.read(plan.scale)
    if plan.encoding == "fp4":
        return dequantise_fp4(tensor, scale)
    assert plan.block is not None
    return dequantise_fp8(tensor, scale, plan.block)


def describe_faults(faults: Mapping[str, Sequence[str]], entry: TensorEntry | None = None) -> str:
    """One message for all kinds of faults, each with its first names and the count of the rest."""
    where = f"{entry.file.parent}: " if entry else ""
    parts = [f"{len(names)} {kind}: {_first_names(names)}" for kind, names in faults.items() if names]
    return (
        f"{where}the checkpoint does not match its config.json; "
        + "; ".join(parts)
        + ". Use the complete checkpoint that this config.json belongs to."
    )


def _first_names(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _split_rest(
    entries: Mapping[str, TensorEntry], expected: Mapping[str, TensorPlan], rules: Sequence[SkipRule]
) -> tuple[list[SkippedTensor], list[str]]:
    """What nobody expects: skipped by a rule, or unexpected."""
    skipped, unexpected = [], []
    for name, entry in entries.items():
        if name in expected:
            continue
        rule = next((rule for rule in rules if rule.matches(name)), None)
        if rule is None:
            unexpected.append(name)
        else:
            skipped.append(SkippedTensor(name, rule.reason, entry.num_bytes))
    return skipped, unexpected


def _wrong_shapes(entries: Mapping[str, TensorEntry], expected: Mapping[str, TensorPlan]) -> Iterator[str]:
    for name, plan in expected.items():
        if name in entries and entries[name].shape != tuple(plan.shape):
            yield f"{name} is {list(entries[name].shape)}, {list(plan.shape)} expected"


def _wrong_dtypes(entries: Mapping[str, TensorEntry], expected: Mapping[str, TensorPlan]) -> Iterator[str]:
    for name, plan in expected.items():
        if name in entries and entries[name].dtype != plan.dtype:
            yield f"{name} is {entries[name].dtype}, {plan.dtype} expected"


def _place(entry: TensorEntry) -> tuple[str, int]:
    return entry.file.name, entry.offset
