"""Loading is strict and streamed: every tensor is taken, skipped with a reason, or named in one error."""

import tracemalloc

import numpy as np
import pytest
import torch

from dspark.checkpoint import (
    SafetensorsFolder,
    SkipRule,
    TensorPlan,
    match_tensors,
    stream_tensors,
    write_checkpoint,
)
from dspark.config import CheckpointError

PLANS = [TensorPlan("a", (2, 3), "F32"), TensorPlan("b", (4,), "BF16"), TensorPlan("c", (1,), "I8")]
TENSORS = {"a": torch.ones(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.ones(1).to(torch.int8)}
VISION = SkipRule("vision: only text is run", prefixes=("vision.",), suffixes=(".bias_vl",))


def write(tmp_path, tensors):
    return SafetensorsFolder(write_checkpoint(tmp_path / "m", tensors.items()))


def test_all_that_is_expected_is_yielded_once(tmp_path):
    loaded = {plan.name: tensor for plan, tensor in stream_tensors(write(tmp_path, TENSORS), PLANS)}
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


def test_skipped_tensors_are_listed_with_their_reason(tmp_path):
    extra = {"vision.w": torch.zeros(5), "x.bias_vl": torch.zeros(2)}
    match = match_tensors(write(tmp_path, TENSORS | extra).entries, PLANS, [VISION])
    assert {(item.name, item.num_bytes) for item in match.skipped} == {("vision.w", 20), ("x.bias_vl", 8)}
    assert {item.reason for item in match.skipped} == {VISION.reason}
    assert match.num_bytes == 24 + 8 + 1


def test_an_expected_tensor_is_never_skipped(tmp_path):
    plans = [*PLANS, TensorPlan("vision.w", (5,), "F32")]
    with pytest.raises(CheckpointError, match=r"1 missing: vision\.w"):
        match_tensors(write(tmp_path, TENSORS).entries, plans, [VISION])


def test_an_empty_rule_skips_nothing():
    assert not SkipRule("nothing").matches("a")


def test_all_faults_stand_in_one_message(tmp_path):
    source = write(tmp_path, {"a": torch.ones(3, 2), "b": torch.ones(4), "stray": torch.ones(1)})
    with pytest.raises(CheckpointError) as caught:
        list(stream_tensors(source, PLANS))
    message = str(caught.value)
    assert "1 missing: c" in message
    assert "1 unexpected: stray" in message
    assert "1 wrong shape: a is [3, 2], [2, 3] expected" in message
    assert "1 wrong dtype: b is F32, BF16 expected" in message
    assert str(source.folder) in message


def test_a_long_list_of_names_is_cut_after_twenty():
    plans = [TensorPlan(f"t{i:03d}", (1,), "F32") for i in range(50)]
    with pytest.raises(CheckpointError) as caught:
        match_tensors({}, plans)
    message = str(caught.value)
    assert "50 missing" in message
    assert "t019 and 30 more" in message
    assert "t020" not in message


def test_nothing_is_read_when_something_does_not_match(tmp_path):
    class Recorder:
        def __init__(self, folder):
            self.entries, self.reads = folder.entries, 0

        def read(self, name, rows=None, columns=None):
            self.reads += 1

    source = Recorder(write(tmp_path, TENSORS))
    with pytest.raises(CheckpointError):
        next(stream_tensors(source, PLANS[:2]))
    assert source.reads == 0


def test_loading_peaks_below_a_fifth_more_than_what_is_kept(tmp_path):
    """50 MB in 25 tensors are copied into preallocated memory; the peak over it is a tensor or two, not a shard."""
    rows, count = 500_000, 25
    tensors = ((f"t{i:02d}", torch.full((rows,), float(i))) for i in range(count))
    source = SafetensorsFolder(write_checkpoint(tmp_path / "m", tensors))
    plans = [TensorPlan(f"t{i:02d}", (rows,), "F32") for i in range(count)]
    tracemalloc.start()
    kept = {plan.name: np.array(tensor.numpy()) for plan, tensor in stream_tensors(counted(source), plans)}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    total = sum(value.nbytes for value in kept.values())
    assert total == rows * count * 4
    assert peak < 1.2 * total


def counted(source):
    """The source, with each tensor in memory that tracemalloc sees (torch's own allocator is invisible to it)."""

    class Counted:
        entries = source.entries

        def read(self, name, rows=None, columns=None):
            return torch.from_numpy(np.array(source.read(name, rows, columns).numpy()))

    return Counted()
