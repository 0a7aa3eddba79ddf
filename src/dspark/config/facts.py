"""What admission must know of a model, the hardware and the engine, as plain numbers; models and engines fill these."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ShardedDimension:
    """A dimension that tensor parallelism divides.

    Args:
        name: in words, for the message.
        size: the whole dimension.
        unit: smallest piece that may go to a rank (a quantisation block; 1 where any split will do).
        when: with which layout of experts the dimension is divided.
    """

    name: str
    size: int
    unit: int = 1
    when: Literal["always", "expert_parallel", "tensor_parallel"] = "always"

    def divides_by(self, parts: int) -> bool:
        """True when every part is a whole number of units; what is not divided needs none."""
        return parts == 1 or self.size % (parts * self.unit) == 0


@dataclass(frozen=True)
class ModelFacts:
    """One model, reduced to what the rules of admission compare.

    Args:
        name: family in words, for messages.
        max_position_embeddings: longest context the model was made for, in tokens.
        vocab_size: rows of the embedding.
        draft_methods: drafters that this checkpoint carries; empty without draft stages.
        draft_block_size: trained width of the draft block, in tokens; 0 without a drafter.
        sharded: dimensions that tensor parallelism divides.
        fingerprint: identity of the release; a drafter must carry its target's.
        has_vision: the checkpoint also holds a vision tower, which is not loaded.
        has_engram: it has Engram tables.
    """

    name: str
    max_position_embeddings: int
    vocab_size: int
    draft_methods: tuple[str, ...] = ()
    draft_block_size: int = 0
    sharded: tuple[ShardedDimension, ...] = ()
    fingerprint: str = ""
    has_vision: bool = False
    has_engram: bool = False


@dataclass(frozen=True)
class HardwareFacts:
    """The devices that this process may use: their kind, their number, and whether they can capture graphs."""

    kind: Literal["cpu", "cuda"] = "cpu"
    num_devices: int = 1
    has_graphs: bool = False


@dataclass(frozen=True)
class EngineFacts:
    """What one engine can do, for the rules that compare settings with it.

    Args:
        name: in words, for messages.
        devices: kinds of device that it runs on.
        max_ranks: ranks that may share a model.
        index_cache_dtype: how it stores index keys, whatever is asked for.
        idle_devices: accelerators of this machine that it leaves idle.
    """

    name: str
    devices: tuple[str, ...] = ("cpu",)
    max_ranks: int = 8
    index_cache_dtype: str = "bf16"
    idle_devices: int = 0
