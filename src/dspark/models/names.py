"""Where each tensor of the official layout goes in our modules, both ways.

Example: `layers.3.ffn.experts.7.w3.weight` is the second half of the rows of `target.layers.3.ffn.experts.w13[7]`;
`mtp.2.norm.weight` of a three-stage draft is `draft.norm.weight`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from dspark.layers.moe import RoutedExperts

_RULES: tuple[tuple[str, str], ...] = (
    (r"^mtp\.0\.(main_proj|main_norm)\.weight$", r"draft.\1.weight"),
    (r"^mtp\.\d+\.norm\.weight$", r"draft.norm.weight"),
    (r"^mtp\.\d+\.hc_head_(fn|base|scale)$", r"draft.collapse.\1"),
    (r"^mtp\.\d+\.markov_head\.(?:embed|markov_w1)\.weight$", r"draft.markov_embed.weight"),
    (r"^mtp\.\d+\.markov_head\.(?:head|markov_w2)\.weight$", r"draft.markov_head.weight"),
    (r"^mtp\.\d+\.confidence_head\.proj\.weight$", r"draft.confidence.weight"),
    (r"^hc_head_(fn|base|scale)$", r"target.collapse.\1"),
    (r"^mtp\.(\d+)\.", r"draft.stages.\1."),
    (r"^(?!draft\.|target\.)", r"target."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".hc_\1.\2"),
    (r"\.engram\.(q|k)_weight$", r".engram.\1_weight"),
)
_EXPERT = re.compile(r"^(.*\.ffn\.experts)\.(\d+)\.w([123])\.weight$")
_SHARED = re.compile(r"^(.*\.ffn\.shared_experts)\.w([13])\.weight$")


@dataclass(frozen=True)
class Place:
    """A parameter or buffer by path, the expert in it, and the half of its rows (0 gate, 1 up); None is the whole."""

    path: str
    expert: int | None = None
    half: int | None = None


def place_of(name: str) -> Place:
    """The place of a tensor of the official layout."""
    for pattern, replacement in _RULES:
        name = re.sub(pattern, replacement, name)
    if expert := _EXPERT.match(name):
        prefix, number, weight = expert[1], int(expert[2]), expert[3]
        return Place(f"{prefix}.w2", number) if weight == "2" else Place(f"{prefix}.w13", number, int(weight == "3"))
    if shared := _SHARED.match(name):
        return Place(f"{shared[1]}.w13.weight", half=int(shared[2] == "3"))
    return Place(name)


def view_of(place: Place, model: nn.Module) -> Tensor:
    """The storage that a place names, as a view that can be copied into."""
    owner, _, leaf = place.path.rpartition(".")
    module = model.get_submodule(owner)
    tensor: Tensor = getattr(module, leaf).detach()
    if place.expert is not None:
        assert isinstance(module, RoutedExperts)
        tensor = tensor[module.held.index(place.expert)]
    if place.half is not None:
        tensor = tensor.chunk(2, dim=0)[place.half]
    return tensor


def unfilled(model: nn.Module, places: Iterable[Place]) -> list[str]:
    """Parameters that no tensor of the checkpoint fills; empty when the inventory and the modules agree."""
    filled = {place.path for place in places}
    return sorted(name for name, _ in model.named_parameters() if name not in filled)
