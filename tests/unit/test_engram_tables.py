"""Engram tables as they are stored: every place and every twin gives exactly the stored rows."""

from dataclasses import replace

import pytest
import torch

from dspark import SamplingParams
from dspark.checkpoint.folder import SafetensorsFolder
from dspark.checkpoint.load import stored_values
from dspark.config import Config, HardwareFacts, admit
from dspark.engine import LLM
from dspark.models.build import load_model, read_plan
from dspark.models.facts import model_facts
from dspark.models.inventory import MemoryClass, expected_tensors
from dspark.models.model_bytes import held_bytes, planned_bytes
from dspark.ops.engram import engram_rows, hash_ngrams
from dspark.ops.opset import TORCH_OPS
from dspark.ops.table import StoredTable, TablePlace, table_rows

HEADS, LENGTH, WIDTH, PART = 3, 3, 48, 11
PRIMES = torch.tensor([[7, 11, 5], [9, 10, 8]])
OFFSETS = torch.arange(2 * HEADS).view(2, HEADS) * PART
MULTIPLIERS = torch.tensor([31, 17, 2**40 + 1])


def coded_table(place=TablePlace.DEVICE):
    """Every e4m3 code that is a number, scales from the smallest to the largest that keep values finite."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 127, (2 * HEADS * PART, WIDTH), generator=generator).to(torch.uint8)
    values |= torch.randint(0, 2, values.shape, generator=generator).to(torch.uint8) << 7
    scales = torch.randint(0, 240, (len(values), 2), generator=generator).to(torch.uint8)
    scales[0] = 0
    return StoredTable(values, scales, place)


def ngrams_of(num_rows):
    return torch.randint(0, 90, (num_rows, LENGTH), generator=torch.Generator().manual_seed(num_rows))


def values_of(table):
    factors = torch.exp2(table.scales.double() - 127).repeat_interleave(32, 1)[:, :WIDTH]
    return (table.values.view(torch.float8_e4m3fn).double() * factors).float()


@pytest.mark.parametrize("place", [TablePlace.DEVICE, TablePlace.MAPPED])
def test_rows_are_the_stored_values(place):
    table = coded_table(place)
    index = torch.tensor([[0, 5], [65, 0], [1, 2]])
    assert torch.equal(table_rows(table, index), values_of(table)[index])


@pytest.mark.parametrize("form", ["coded", "bf16", "parameter"])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_the_kernel_gives_the_same_bits(num_rows, form):
    kernel = pytest.importorskip("dspark.ops.triton.table")
    table = coded_table()
    if form == "bf16":
        table = StoredTable(torch.randn(table.shape).bfloat16(), None, TablePlace.DEVICE)
    elif form == "parameter":
        table = values_of(table)
    ngrams = ngrams_of(num_rows)
    expected = engram_rows(table, ngrams, MULTIPLIERS, PRIMES, OFFSETS)
    assert torch.equal(kernel.engram_rows(table, ngrams, MULTIPLIERS, PRIMES, OFFSETS), expected)
    assert expected.shape == (num_rows, 2 * HEADS, WIDTH)


def test_the_kernel_leaves_a_mapped_table_to_the_host():
    kernel = pytest.importorskip("dspark.ops.triton.table")
    ngrams, table = ngrams_of(4), coded_table(TablePlace.MAPPED)
    rows = kernel.engram_rows(table, ngrams, MULTIPLIERS, PRIMES, OFFSETS)
    assert torch.equal(rows, values_of(table)[hash_ngrams(ngrams, MULTIPLIERS, PRIMES, OFFSETS)])
    assert table.to("meta") is table, "a table of the host stays there"


@pytest.fixture(params=["v41_quant", "v41_bf16"])
def folder(request, shared_dir):
    return shared_dir / "golden" / request.param / "model"


def tables_of(model):
    return [layer.engram.embed.weight for layer in model.target.layers if layer.engram is not None]


@pytest.mark.parametrize(
    ("ops", "place"),
    [
        (TORCH_OPS, TablePlace.MAPPED),
        (replace(TORCH_OPS, reads_codes=True), TablePlace.DEVICE),
        (replace(TORCH_OPS, reads_codes=True), TablePlace.MAPPED),
    ],
)
def test_a_table_is_held_as_it_is_stored(folder, ops, place):
    model = load_model(folder, ops, with_draft=False, engram_tables=place)
    plan = read_plan(folder)
    with SafetensorsFolder(folder) as source:
        stored = [one for one in expected_tensors(plan) if one.name.endswith("engram.embed.weight")]
        for table, one in zip(tables_of(model), stored, strict=True):
            assert isinstance(table, StoredTable) and table.place is place
            every = torch.arange(table.shape[0])
            assert torch.equal(table_rows(table, every), stored_values(source, one).float())


def test_a_mapped_tensor_has_the_bytes_of_a_read_one(folder):
    with SafetensorsFolder(folder) as source:
        for name in source.entries:
            mapped, read = source.mapped(name), source.read(name)
            assert mapped.dtype == read.dtype and mapped.shape == read.shape
            assert torch.equal(mapped.contiguous().view(torch.uint8), read.contiguous().view(torch.uint8))


def test_a_mapped_table_changes_no_token(folder):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True, logprobs=0)
    found = [
        LLM(folder, max_num_seqs=2, max_model_len=64, engram_tables=place).generate([[5, 6, 7, 8]], params)[0]
        for place in ("device", "mapped")
    ]
    assert found[0].token_ids == found[1].token_ids and found[0].logprobs == found[1].logprobs


@pytest.mark.parametrize("place", TablePlace)
def test_tables_of_the_host_are_no_memory_of_the_device(folder, place):
    plan = replace(read_plan(folder), draft=None)
    packing = replace(TORCH_OPS, reads_codes=True)
    stored = sum(one.num_bytes for one in expected_tensors(plan) if one.memory_class == MemoryClass.ENGRAM_TABLE)
    without = planned_bytes(plan, packing, TablePlace.PINNED)
    assert stored > 0
    assert planned_bytes(plan, packing, place) == without + (stored if place is TablePlace.DEVICE else 0)
    if place is TablePlace.MAPPED:
        model = load_model(folder, with_draft=False, engram_tables=place)
        buffers = sum(value.nbytes for value in model.buffers())
        assert held_bytes(model) == sum(value.nbytes for value in model.parameters()) + buffers


@pytest.mark.parametrize(
    ("config", "hardware", "words"),
    [
        (Config(engram_tables="pinned"), HardwareFacts(), "needs an accelerator"),
        (Config(engram_tables="mapped"), HardwareFacts("cuda", 1, has_graphs=True), "no captured pass can wait for"),
    ],
)
def test_what_cannot_be_read_where_it_lies_is_refused(folder, config, hardware, words):
    facts = model_facts(read_plan(folder))
    assert any(words in refusal for refusal in admit(config, facts, hardware=hardware).refusals)
    device = replace(config, engram_tables="device")
    assert not any("engram" in refusal for refusal in admit(device, facts, hardware=hardware).refusals)


def test_a_model_without_tables_is_told(shared_dir):
    facts = model_facts(read_plan(shared_dir / "golden" / "v4_quant" / "model"))
    assert any("has no Engram tables" in note for note in admit(Config(engram_tables="mapped"), facts).notes)
