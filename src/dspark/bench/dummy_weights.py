"""A model of real shapes with random weights, made on the device in the form in which its products read them.

What a checkpoint's loading would leave behind, without a checkpoint: coded weights are packed, bf16 ones stay bf16, all
others are float32. No weight exists in any other form on the way, so a model may fill the device.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from dspark.bench.kernel_shapes import Form
from dspark.bench.random_weights import random_weight
from dspark.checkpoint.plan import TensorPlan
from dspark.layers.engram import Engram, EngramTable
from dspark.layers.linear import Embedding, GroupedLinear, LinearGroup
from dspark.layers.moe import HashRouter, RoutedExperts
from dspark.layers.plans import ModelPlan, Storage
from dspark.models.build import Model
from dspark.models.engram_storage import set_table
from dspark.models.model_bytes import model_without_memory, packed_parts
from dspark.models.packed_weights import join_maps
from dspark.models.sharding import shard_plan
from dspark.ops.opset import OpSet
from dspark.ops.packing import GROUP_ROWS, Kind, PackedWeight
from dspark.ops.table import TABLE_GROUP, StoredTable, TablePlace
from dspark.parallel.group import ALONE, RankGroup
from dspark.parallel.shard import Shard

# Codes of e4m3 are large: with scales lowered by 2^4 a map of a few thousand columns keeps the size of its input, so
# that a row's route depends on its own token more than on what all rows of a request have in common.
_LOWER_SCALES = 0x04040404
# Codes without this bit are numbers; under this scale, 2^-6, rows of them have about unit variance.
_NO_NAN, _TABLE_SCALE = 0xF7, 121
_FP8_FORMS = {(32, 32): Form.FP8_32, (128, 128): Form.FP8_128}


def dummy_model(
    plan: ModelPlan,
    ops: OpSet,
    dtype: torch.dtype,
    device: torch.device,
    ranks: RankGroup = ALONE,
    whole_experts: bool = False,
    engram_tables: TablePlace = TablePlace.DEVICE,
) -> Model:
    """A model whose weights are random, the same on every call; what ranks divide differs from rank to rank.

    Args:
        plan: of the geometry. ops, dtype, device, ranks, whole_experts, engram_tables: as for `load_model`.
    """
    model = model_without_memory(shard_plan(plan, Shard(ranks.rank, ranks.size, whole_experts)), ops, dtype, ranks)
    divided = _divided_weights(plan, model)
    generator, own = (torch.Generator(device=device).manual_seed(seed) for seed in (0, 1 + ranks.rank))
    packed = packed_parts(model)
    for number, (path, parts) in enumerate(packed.items()):
        seed = number + len(packed) * ranks.rank if path in divided else number
        _set_packed(model, path, parts, device, seed)
    if ops.reads_codes or engram_tables is not TablePlace.DEVICE:
        _set_tables(model, engram_tables, device)
    for owner, name, path in _empty_parameters(model):
        _fill_values(owner, name, device, own if path in divided else generator)
    for module in model.modules():
        if isinstance(module, HashRouter):
            _fill_routes(module, generator, device)
    if plan.ngrams is not None:
        model.target.token_map = torch.arange(plan.vocab_size) % plan.ngrams.compressed_vocab_size
    if ops.reads_codes:
        join_maps(model)
    return model.to(device).eval()


def without_draft(model: Model) -> Model:
    """A model for plain decoding that shares all modules of another; it captures nothing for a draft."""
    target = model.target
    plain = model_without_memory(replace(model.plan, draft=None), target.ops, target.dtype, target.ranks)
    for name, child in target.named_children():
        setattr(plain.target, name, child)
    plain.target.token_map = target.token_map
    return plain.eval()


def with_ops(model: Model, ops: OpSet) -> Model:
    """A model of other ops that shares all weights of another."""
    twin = model_without_memory(model.plan, ops, model.target.dtype, model.target.ranks)
    for module, source in zip(twin.modules(), model.modules(), strict=True):
        module._parameters, module._buffers = source._parameters, source._buffers
        for key, value in vars(source).items():
            if isinstance(value, Tensor | PackedWeight | StoredTable):
                setattr(module, key, value)
            elif isinstance(value, LinearGroup):
                getattr(module, key).share(value)
    return twin.eval()


def _divided_weights(plan: ModelPlan, model: Model) -> frozenset[str]:
    """Parameters of a rank's part that are smaller than those of the whole plan."""
    if model.plan.shard.size == 1:
        return frozenset()
    whole = dict(model_without_memory(plan, model.target.ops).named_parameters())
    return frozenset(name for name, own in model.named_parameters() if own.shape != whole[name].shape)


def _set_packed(model: Model, path: str, parts: list[TensorPlan], device: torch.device, seed: int) -> None:
    """Put a random weight in place of a parameter, as `fill_packed` puts a stored one."""
    owner, _, leaf = path.rpartition(".")
    module = model.get_submodule(owner)
    *stack, N, K = getattr(module, leaf).shape
    is_whole = not isinstance(module, GroupedLinear) or N // module.groups % GROUP_ROWS == 0
    form = _form_of(parts[0]) if is_whole else Form.BF16
    weight = random_weight(form, stack[0] if stack else 1, N, K, device, seed)
    del module._parameters[leaf]
    if isinstance(weight, PackedWeight) and weight.kind is Kind.FP8:
        weight.scales.sub_(_LOWER_SCALES)
    if isinstance(weight, Tensor):
        weight = nn.Parameter(weight if isinstance(module, RoutedExperts) else weight[0], requires_grad=False)
    setattr(module, leaf, weight)


def _set_tables(model: Model, place: TablePlace, device: torch.device) -> None:
    """Random Engram tables in their storage form, where they are wanted; no file is mapped, so that is the host too."""
    where = device if place is TablePlace.DEVICE else torch.device("cpu")
    generator = torch.Generator(device=where).manual_seed(0)
    for module in model.modules():
        if isinstance(module, Engram):
            shape = module.embed.weight.shape
            if module.storage is Storage.FP8_ROW:
                values = torch.empty(shape, dtype=torch.uint8, device=where).random_(generator=generator)
                values.bitwise_and_(_NO_NAN)
                groups = -(-shape[1] // TABLE_GROUP)
                scales = torch.full((shape[0], groups), _TABLE_SCALE, dtype=torch.uint8, device=where)
                table = StoredTable(values, scales, place)
            else:
                values = torch.empty(shape, dtype=torch.bfloat16, device=where).normal_(generator=generator)
                table = StoredTable(values, None, place)
            set_table(module.embed, table, device)


def _form_of(one: TensorPlan) -> Form:
    if one.encoding == "fp4":
        return Form.FP4
    return _FP8_FORMS.get(one.block, Form.BF16) if one.block else Form.BF16


def _empty_parameters(model: Model) -> Iterator[tuple[nn.Module, str, str]]:
    """Module, name and path of all parameters that have no memory yet."""
    for place, module in list(model.named_modules()):
        for name, value in list(module.named_parameters(recurse=False)):
            if value.is_meta:
                yield module, name, f"{place}.{name}"


def _fill_values(owner: nn.Module, name: str, device: torch.device, generator: torch.Generator) -> None:
    """Values of a parameter: small ones for maps, ones for norms."""
    empty = getattr(owner, name)
    values = torch.empty(empty.shape, device=device)
    if empty.dim() >= 2:
        # Rows of tables are vectors of unit variance; maps keep the size of what they are given.
        deviation = 1.0 if isinstance(owner, Embedding | EngramTable) else empty.shape[-1] ** -0.5
        values.normal_(0, deviation, generator=generator)
    elif name in ("weight", "scale"):
        values.fill_(1.0)
    else:
        values.zero_()
    setattr(owner, name, nn.Parameter(values, requires_grad=False))


def _fill_routes(router: HashRouter, generator: torch.Generator, device: torch.device) -> None:
    """Different random experts for every token."""
    rows, topk = router.tid2eid.shape
    scores = torch.rand(rows, router.plan.num_experts, generator=generator, device=device)
    router.tid2eid = scores.topk(topk, dim=-1).indices
