"""A checkpoint folder: what is whole is read exactly, in part or in full; what is broken is named, never half read."""

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.checkpoint import SafetensorsFolder, release_fingerprint, write_checkpoint
from dspark.checkpoint.folder import INDEX_NAME
from dspark.config import CheckpointError

TENSORS = {
    "a.weight": torch.arange(60, dtype=torch.float32).view(6, 10),
    "b.weight": torch.arange(24).to(torch.bfloat16).view(2, 3, 4),
    "c.scale": torch.tensor([[120, 127], [130, 1]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "d.codes": torch.arange(-8, 8, dtype=torch.int8).view(4, 4),
    "e.ids": torch.tensor([[2**40, -1], [0, 7]]),
    "f.scalar": torch.tensor(3.5),
    "g.empty": torch.zeros(0, 4),
}


def equal(left, right):
    as_bytes = [value.contiguous().reshape(-1).view(torch.uint8) for value in (left, right)]
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(*as_bytes)


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "model", TENSORS.items(), files={"config.json": b"{}"}, max_shard_bytes=200)


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def holder(folder, name):
    return folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][name]


def rewrite_index(folder, change):
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def rewrite_header(file, change):
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_every_dtype_is_read_as_it_was_written(folder):
    assert len(shards(folder)) > 1
    with SafetensorsFolder(folder) as checkpoint:
        assert set(checkpoint.entries) == set(TENSORS)
        assert all(equal(checkpoint.read(name), value) for name, value in TENSORS.items())
        assert checkpoint.num_bytes == checkpoint.index_total_bytes == sum(value.nbytes for value in TENSORS.values())


def test_rows_and_columns_are_the_slices_of_the_whole(folder):
    checkpoint, whole = SafetensorsFolder(folder), TENSORS["a.weight"]
    assert equal(checkpoint.read("a.weight", rows=slice(2, 5)), whole[2:5])
    assert equal(checkpoint.read("a.weight", columns=slice(3, 7)), whole[:, 3:7])
    assert equal(checkpoint.read("a.weight", rows=slice(4, None), columns=slice(None, 2)), whole[4:, :2])
    assert equal(checkpoint.read("b.weight", rows=slice(1, 2)), TENSORS["b.weight"][1:2])
    assert checkpoint.read("a.weight", rows=slice(3, 3)).shape == (0, 10)


@pytest.mark.parametrize("part", [slice(0, 7), slice(-1, 2), slice(0, 6, 2), slice(5, 2)])
def test_rows_outside_the_tensor_are_refused(folder, part):
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        SafetensorsFolder(folder).read("a.weight", rows=part)


def test_parts_that_a_tensor_does_not_have_are_refused(folder):
    checkpoint = SafetensorsFolder(folder)
    with pytest.raises(CheckpointError, match=r"f\.scalar"):
        checkpoint.read("f.scalar", rows=slice(0, 1))
    with pytest.raises(CheckpointError, match=r"b\.weight"):
        checkpoint.read("b.weight", columns=slice(0, 1))
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.read("nothing")


def test_column_slices_of_a_tensor_larger_than_the_buffer(tmp_path):
    whole = torch.arange(5000 * 300, dtype=torch.float32).view(5000, 300)
    checkpoint = SafetensorsFolder(write_checkpoint(tmp_path / "m", [("w", whole)]))
    assert torch.equal(checkpoint.read("w", columns=slice(100, 120)), whole[:, 100:120])


def test_a_single_file_needs_no_index(folder, tmp_path):
    single = tmp_path / "single"
    write_checkpoint(single, TENSORS.items())
    (single / "model-00001-of-00001.safetensors").rename(single / "model.safetensors")
    (single / INDEX_NAME).unlink()
    checkpoint = SafetensorsFolder(single)
    assert all(equal(checkpoint.read(name), value) for name, value in TENSORS.items())


@pytest.mark.parametrize("keep", [0, 5, 8, 40])
def test_a_shard_cut_in_its_header_is_named(folder, keep):
    victim = holder(folder, "a.weight")
    victim.write_bytes(victim.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=f"{victim.name}.*truncated"):
        SafetensorsFolder(folder)


def test_a_shard_cut_in_its_payload_names_the_tensor(folder):
    victim = holder(folder, "a.weight")
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{victim.name}.*truncated.*tensor .* is not whole"):
        SafetensorsFolder(folder)


def test_a_file_that_shrinks_after_opening_is_noticed(folder):
    checkpoint, victim = SafetensorsFolder(folder), holder(folder, "a.weight")
    victim.write_bytes(victim.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"ended inside tensor a\.weight"):
        checkpoint.read("a.weight")


def test_bytes_behind_the_last_tensor_are_corruption(folder):
    victim = holder(folder, "a.weight")
    victim.write_bytes(victim.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="behind the last tensor"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize(
    "content", [b"\xff" * 64, b"not a tensor file at all, but long enough to look", b"version https"]
)
def test_a_file_of_another_kind_is_named(folder, content):
    victim = holder(folder, "a.weight")
    victim.write_bytes(content)
    with pytest.raises(CheckpointError, match=victim.name):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe", b'{"a": 1}', b'{"a": {}, "a": {}}', b"[" * 100_000])
def test_a_header_that_is_no_header_is_corrupt(folder, text):
    victim = holder(folder, "a.weight")
    victim.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=f"{victim.name}.*corrupt"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "F64X"},
        {"dtype": None},
        {"shape": [6, -10]},
        {"shape": [6, 10.0]},
        {"shape": "6x10"},
        {"shape": [6, 11]},
        {"data_offsets": [0]},
        {"data_offsets": [240, 0]},
        {"data_offsets": [0, 10**15]},
        {"data_offsets": [4, 244]},
        {"data_offsets": [-4, 236]},
    ],
)
def test_a_wrong_entry_names_file_and_tensor(folder, fields):
    victim = holder(folder, "a.weight")
    rewrite_header(victim, lambda header: header["a.weight"].update(fields))
    with pytest.raises(CheckpointError, match=rf"{victim.name}.*a\.weight"):
        SafetensorsFolder(folder)


def test_overlapping_tensors_are_corrupt(tmp_path):
    folder = write_checkpoint(tmp_path / "m", [("x", torch.zeros(4)), ("y", torch.zeros(4))])
    rewrite_header(shards(folder)[0], lambda header: header["y"].update({"data_offsets": [8, 24]}))
    with pytest.raises(CheckpointError, match="overlaps"):
        SafetensorsFolder(folder)


def test_a_missing_shard_is_named_with_its_tensors(folder):
    victim = holder(folder, "a.weight")
    victim.unlink()
    with pytest.raises(CheckpointError, match=rf"{victim.name}: missing shard, which holds .*"):
        SafetensorsFolder(folder)


def test_an_index_that_names_a_tensor_nobody_holds(folder):
    rewrite_index(folder, lambda index: index["weight_map"].update(ghost=shards(folder)[0].name))
    with pytest.raises(CheckpointError, match="tensor ghost"):
        SafetensorsFolder(folder)


def test_a_tensor_that_the_index_does_not_name(folder):
    # d.codes and its neighbours share a shard, so that the shard is still opened
    rewrite_index(folder, lambda index: index["weight_map"].pop("d.codes"))
    with pytest.raises(CheckpointError, match=r"d\.codes is not in"):
        SafetensorsFolder(folder)


def test_a_tensor_in_two_shards(folder):
    shutil.copy(holder(folder, "a.weight"), folder / "model-copy.safetensors")
    rewrite_index(folder, lambda index: index["weight_map"].update(more="model-copy.safetensors"))
    with pytest.raises(CheckpointError, match=r"a\.weight is also in"):
        SafetensorsFolder(folder)


def test_an_index_that_looks_in_the_wrong_shard(folder):
    other = next(shard.name for shard in shards(folder) if shard != holder(folder, "a.weight"))
    rewrite_index(folder, lambda index: index["weight_map"].update({"a.weight": other}))
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "weights.bin", 7, None])
def test_an_index_never_leads_out_of_the_folder(folder, shard):
    rewrite_index(folder, lambda index: index["weight_map"].update({"a.weight": shard}))
    with pytest.raises(CheckpointError, match="no shard of this folder"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": []}', '{"weight_map": {}}', "null", "{'a': 1}"])
def test_a_bad_index_is_named(folder, text):
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        SafetensorsFolder(folder)


def test_shards_without_an_index_and_empty_folders(folder, tmp_path):
    (folder / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match="missing, though there are shards"):
        SafetensorsFolder(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds neither"):
        SafetensorsFolder(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no such folder"):
        SafetensorsFolder(tmp_path / "nowhere")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_an_error_of_ours_or_harmless(folder, tmp_path, data):
    """Random bytes in header or index: the folder opens and reads, or is refused; nothing else is ever raised."""
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged, dirs_exist_ok=True)
    victim = data.draw(st.sampled_from([*shards(damaged), damaged / INDEX_NAME]))
    content = bytearray(victim.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content), 400) - 1))] = data.draw(st.integers(0, 255))
    victim.write_bytes(content[: data.draw(st.sampled_from([None, len(content) // 2]))])
    try:
        with SafetensorsFolder(damaged) as checkpoint:
            for name in checkpoint.entries:
                checkpoint.read(name)
    except CheckpointError:
        pass


def test_the_fingerprint_follows_the_release_not_the_path(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert release_fingerprint(copy) == release_fingerprint(folder)
    (copy / "config.json").write_text('{"changed": true}')
    assert release_fingerprint(copy) != release_fingerprint(folder)
