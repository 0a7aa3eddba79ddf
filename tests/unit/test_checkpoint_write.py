"""Writing: shards stay under their limit, and a folder is there whole or not at all."""

import pytest
import torch

from dspark.checkpoint import SafetensorsFolder, write_checkpoint
from dspark.config import CheckpointError


def numbered(count, size=100):
    return [(f"t{i:02d}", torch.full((size,), float(i))) for i in range(count)]


def test_shards_hold_at_most_their_limit(tmp_path):
    folder = write_checkpoint(tmp_path / "m", numbered(10), max_shard_bytes=1000)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    assert len(SafetensorsFolder(folder).entries) == 10


def test_a_tensor_above_the_limit_gets_its_own_shard(tmp_path):
    tensors = [("a", torch.zeros(1)), ("b", torch.zeros(1000)), ("c", torch.zeros(1))]
    folder = write_checkpoint(tmp_path / "m", tensors, max_shard_bytes=100)
    assert len(list(folder.glob("*.safetensors"))) == 3


def test_tied_and_sliced_tensors_are_written_as_they_look(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    folder = write_checkpoint(tmp_path / "m", [("whole", base), ("turned", base.T), ("row", base[1])])
    checkpoint = SafetensorsFolder(folder)
    assert torch.equal(checkpoint.read("turned"), base.T)
    assert torch.equal(checkpoint.read("row"), base[1])


def test_an_interruption_leaves_nothing(tmp_path):
    def failing():
        yield from numbered(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "m", failing(), max_shard_bytes=500)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_overwrite_keeps_the_former_folder(tmp_path):
    folder = write_checkpoint(tmp_path / "m", numbered(2))

    def failing():
        yield from numbered(5)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_checkpoint(folder, failing(), overwrite=True)
    assert len(SafetensorsFolder(folder).entries) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path):
    folder = write_checkpoint(tmp_path / "m", numbered(2))
    with pytest.raises(CheckpointError, match="exists already"):
        write_checkpoint(folder, numbered(3))
    write_checkpoint(folder, numbered(3), overwrite=True)
    assert len(SafetensorsFolder(folder).entries) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    "tensors", [[("a", torch.zeros(1)), ("a", torch.zeros(1))], [("a", torch.zeros(1, dtype=torch.complex64))]]
)
def test_what_the_layout_cannot_hold_is_refused(tmp_path, tensors):
    with pytest.raises(CheckpointError, match="tensor a"):
        write_checkpoint(tmp_path / "m", tensors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../config.json", "model.safetensors.index.json"])
def test_files_beside_the_shards_stay_beside_them(tmp_path, name):
    with pytest.raises(CheckpointError, match="no name for a file"):
        write_checkpoint(tmp_path / "m", numbered(1), files={name: b""})


@pytest.mark.parametrize("stranger", ["thesis.txt", "model.bin", "photos/"])
def test_a_folder_with_anything_else_in_it_is_never_replaced(tmp_path, stranger):
    folder = tmp_path / "model"
    write_checkpoint(folder, numbered(2), files={"config.json": b"{}"})
    if stranger.endswith("/"):
        (folder / stranger).mkdir()
    else:
        (folder / stranger).write_text("mine")
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointError, match=r"would be lost; choose another folder"):
        write_checkpoint(folder, numbered(3), files={"config.json": b"{}"}, overwrite=True)
    assert sorted(folder.iterdir()) == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_file_is_never_replaced_by_a_folder(tmp_path):
    file = tmp_path / "notes"
    file.write_text("mine")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        write_checkpoint(file, numbered(2), overwrite=True)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint(file / "model", numbered(2))
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_is_followed(tmp_path):
    folder, link = tmp_path / "model", tmp_path / "latest"
    write_checkpoint(folder, numbered(2))
    link.symlink_to(folder)
    write_checkpoint(link, numbered(3), overwrite=True)
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, folder]
