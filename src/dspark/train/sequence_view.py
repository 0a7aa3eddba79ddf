"""State views of whole windows for training: nothing is stored, every row sees its own window's past through masks.

Where the inference views hand out row numbers, these hand out boolean masks [B or 1, queries, keys]; the training
twin of sparse attention reads them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops.attention import Sources
from dspark.ops.index import IndexKeys


class SequenceView:
    """`StateView` over B windows of S tokens, rows ordered by window.

    Args:
        batch, length: B and S. S is a multiple of every compression ratio.
        window: tokens that a query sees uncompressed.
        dense: queries attend every visible compressed row instead of the picked ones.
    """

    def __init__(self, batch: int, length: int, window: int, device: torch.device, dense: bool) -> None:
        self.batch = batch
        self.length = length
        self.dense = dense
        self.step = torch.arange(length, device=device)
        self.positions = self.step.repeat(batch)
        back = self.step.unsqueeze(1) - self.step
        self._window = ((back >= 0) & (back < window)).unsqueeze(0)
        self._rows: dict[str, Tensor] = {}

    def window_keys(self, key: str, rows: Tensor) -> Sources:
        """See `StateView.window_keys`; the index is a mask [1, S, S]."""
        return [(rows, self._window)]

    def groups(self, key: str, ratio: int, reach: int) -> "WindowGroups":
        """See `StateView.groups`."""
        positions = self.step[::ratio].repeat(self.batch)
        return WindowGroups(positions, self.positions, self.batch, ratio, reach, key, self._rows)

    def appended(self, key: str) -> Tensor:
        """See `StateView.appended`: the rows of all windows, [B * C, K]."""
        return self._rows[key]

    def visible(self, ratio: int) -> Tensor:
        """See `StateView.visible`."""
        return (self.positions + 1) // ratio

    def max_visible(self, ratio: int) -> int:
        """See `StateView.max_visible`."""
        return self.length // ratio

    def visible_places(self, ratio: int) -> Tensor:
        """See `StateView.visible_places`: the mask [1, S, C] of all visible rows."""
        every = torch.arange(self.length // ratio, device=self.step.device)
        return (every < ((self.step + 1) // ratio).unsqueeze(1)).unsqueeze(0)

    def addresses(self, ratio: int, rows: Tensor) -> Tensor:
        """The mask [B, S, C] of the picked rows [B * S, J], or of all visible rows [1, S, C] where `dense`."""
        if self.dense:
            return self.visible_places(ratio)
        count = self.length // ratio
        picked = torch.zeros(rows.shape[0], count + 1, dtype=torch.bool, device=rows.device)
        picked.scatter_(1, torch.where(rows < 0, count, rows), True)
        return picked[:, :count].view(self.batch, self.length, count)

    def index_keys(self, key: str, ratio: int) -> IndexKeys:
        """See `StateView.index_keys`; each window owns its part of the rows."""
        rows = self._rows[key]
        windows = torch.arange(self.batch, device=rows.device)
        places = torch.arange(rows.shape[0], device=rows.device).view(self.batch, -1)
        return IndexKeys(rows, places, windows.repeat_interleave(self.length))


@dataclass(frozen=True)
class WindowGroups:
    """`Groups` of whole windows: every row of the pass is a member, and the compressed rows go into `kept` by key."""

    positions: Tensor
    row_positions: Tensor
    batch: int
    ratio: int
    reach: int
    key: str
    kept: dict[str, Tensor]

    def exchange(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `Groups.exchange`."""
        groups = rows.view(self.batch, -1, self.ratio, rows.shape[-1])
        exists = torch.ones(groups.shape[:3], dtype=torch.bool, device=rows.device)
        if self.reach > self.ratio:
            groups = torch.cat((torch.roll(groups, 1, dims=1), groups), dim=2)
            exists = torch.cat((exists, exists), dim=2)
            exists[:, 0, : self.ratio] = False
        return groups.flatten(0, 1), exists.flatten(0, 1)

    def keep(self, rows: Tensor) -> None:
        """See `Groups.keep`."""
        self.kept[self.key] = rows


class BlockView:
    """View of A draft blocks in each of B windows: a block sees the context below its anchor and itself.

    Args:
        anchors: [B, A] anchor positions. Rows are ordered by window, anchor, block position.
        block_size: G. length: S, context rows of a window. window: context tokens that a block sees.
    """

    def __init__(self, anchors: Tensor, block_size: int, length: int, window: int) -> None:
        batch, num_anchors = anchors.shape
        self.batch = batch
        self.context: dict[str, Tensor] = {}
        offsets = torch.arange(block_size, device=anchors.device)
        self.positions = (anchors.unsqueeze(-1) + offsets).flatten()
        own = torch.arange(num_anchors, device=anchors.device).repeat_interleave(block_size)
        anchor_of_row = anchors.repeat_interleave(block_size, dim=1).unsqueeze(-1)
        step = torch.arange(length, device=anchors.device)
        context = (step < anchor_of_row) & (step >= anchor_of_row - window)
        block = (own.unsqueeze(1) == own).expand(batch, -1, -1)
        self._mask = torch.cat((context, block), dim=2)

    def window_keys(self, key: str, rows: Tensor) -> Sources:
        """Context and block rows [B * (S + A * G), K] and the mask [B, A * G, S + A * G]."""
        context = self.context[key].view(self.batch, -1, rows.shape[-1])
        joined = torch.cat((context.to(rows.dtype), rows.view(self.batch, -1, rows.shape[-1])), dim=1)
        return [(joined.flatten(0, 1), self._mask)]
