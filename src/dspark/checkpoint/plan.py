"""What a model expects of a checkpoint: one TensorPlan a tensor, and rules for what is left out on purpose."""

from dataclasses import dataclass
from typing import Literal

from dspark.checkpoint.dtypes import tensor_bytes

Block = tuple[int, int]
Encoding = Literal["plain", "fp8", "fp4"]


@dataclass(frozen=True)
class TensorPlan:
    """One expected tensor, as it is stored.

    Args:
        name: in the official layout.
        shape: as stored: a packed fp4 weight [N, K / 2] is planned with its packed shape.
        dtype: name in the safetensors header.
        memory_class: what the bytes are for (attention, experts, draft ...), for reports.
        encoding: "plain" values, or codes that a scale tensor completes.
        scale: name of the scale tensor of a coded weight.
        block: rows and columns of a coded weight that share a scale.
        layer: decoder layer, or draft stage under the draft classes; -1 for what belongs to none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    memory_class: str = "other"
    encoding: Encoding = "plain"
    scale: str | None = None
    block: Block | None = None
    layer: int = -1

    @property
    def num_bytes(self) -> int:
        """Payload bytes on disk."""
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class SkipRule:
    """Tensors that are in the checkpoint and not wanted: by the start or the end of their names.

    Args:
        reason: in words, for the report: "vision tower: text only".
        prefixes, suffixes: a name with any of these is skipped, unless it is expected by name.
    """

    reason: str
    prefixes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        """True when a tensor of this name is left out."""
        return name.startswith(self.prefixes or ("\0",)) or name.endswith(self.suffixes or ("\0",))


@dataclass(frozen=True)
class SkippedTensor:
    """A tensor of the checkpoint that is not loaded, and why."""

    name: str
    reason: str
    num_bytes: int
