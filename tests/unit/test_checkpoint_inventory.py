"""The inventory of a model equals what the golden checkpoints hold, and the published totals of the released ones."""

import json
import math

import pytest

from dspark.checkpoint import SafetensorsFolder, match_tensors
from dspark.models import deepseek_v4, deepseek_v41
from dspark.models.inventory import DRAFT_PREFIX, expected_tensors, skip_rules

PARSERS = {module.MODEL_TYPE: module.parse_config for module in (deepseek_v4, deepseek_v41)}


def plan_of(config):
    return PARSERS[config["model_type"]](config)


def read_config(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", ["v41_bf16", "v41_quant", "v4_bf16", "v4_quant"])
def test_a_golden_checkpoint_holds_exactly_the_inventory(shared_dir, case):
    folder = shared_dir / "golden" / case / "model"
    plan = plan_of(read_config(folder / "config.json"))
    checkpoint = SafetensorsFolder(folder)
    match = match_tensors(checkpoint.entries, expected_tensors(plan), skip_rules(plan))
    assert len(match.plans) + len(match.skipped) == len(checkpoint.entries)
    assert all(item.reason.startswith("vision") for item in match.skipped)
    without = match_tensors(
        checkpoint.entries, expected_tensors(plan, with_draft=False), skip_rules(plan, with_draft=False)
    )
    drafts = [item for item in match.plans if item.memory_class.startswith(DRAFT_PREFIX)]
    assert len(without.plans) + len(drafts) == len(match.plans)


def test_every_coded_weight_has_its_scale(shared_dir):
    config = read_config(shared_dir / "golden" / "v41_quant" / "model" / "config.json")
    tensors = {item.name: item for item in expected_tensors(plan_of(config))}
    coded = [item for item in tensors.values() if item.encoding != "plain"]
    assert {item.encoding for item in coded} == {"fp8", "fp4"}
    assert {item.scale for item in coded} == {name for name in tensors if name.endswith(".scale")}


def test_the_released_v4_flash_has_its_published_totals(shared_dir):
    config = read_config(shared_dir / "facts" / "configs" / "deepseek-v4-flash-0731.json")
    tensors = expected_tensors(plan_of(config))
    assert len(tensors) == len({item.name for item in tensors}) == 72_317
    assert sum(item.num_bytes for item in tensors) == 166_878_536_440


def test_the_released_v41_flash_has_its_published_totals(shared_dir):
    """The published figures count the vision tower, which is not loaded; here it is added up by hand."""
    config = read_config(shared_dir / "facts" / "configs" / "deepseek-v4.1-flash.json")
    plan = plan_of(config)
    tensors = expected_tensors(plan)
    vision = vision_shapes(config["vision_config"], plan.hidden_size)
    biases = [layer.moe.num_experts for layer in (*plan.layers, *plan.draft.stages)]
    assert len(tensors) + len(vision) + len(biases) == 96_085
    vision_bytes = 2 * sum(map(math.prod, vision)) + 4 * sum(biases)
    assert sum(item.num_bytes for item in tensors) + vision_bytes == 510_286_023_000


def vision_shapes(vision, width):
    """bf16 shapes of tower, aligner and the three image tokens."""
    H, F, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    block = [(3 * H, H), (3 * H,), (H, H), (H,), (2 * F, H), (H, F), (H,), (H,)]
    stem = [(H, 3 * patch**2), (H,), (H,)]
    aligner = [(width, H * vision["downsample_ratio"] ** 2), (width,), (width, width), (width,)]
    return block * vision["num_hidden_layers"] + stem + aligner + [(width,)] * 3
