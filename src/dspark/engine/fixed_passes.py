"""Passes of a fixed shape: all that they need of their requests is in integer columns and pages, none of it by name.

What a graph captures is one call of these. Who fills the columns is free: the host (`dspark.engine.pass_graphs`), or
the round before (`dspark.engine.device_round`).
"""

from dataclasses import dataclass

from torch import Tensor

from dspark.models.build import Model
from dspark.models.decoder import PassTokens
from dspark.models.dspark_draft import DsparkDraft
from dspark.ops.draw import DrawKind, DrawParams
from dspark.ops.places import RowPlaces
from dspark.state.model_state import ModelState
from dspark.state.row_views import BlockRowView, RowView


@dataclass(frozen=True)
class PassRows:
    """The T rows of a target pass.

    Attributes:
        token_ids: [T] int64.
        places: where the rows belong.
        ngrams: [T, n] int64 as in `PassTokens`, or None.
    """

    token_ids: Tensor
    places: RowPlaces
    ngrams: Tensor | None


@dataclass(frozen=True)
class FixedTarget:
    """The target's pass over rows of a fixed number, logits of every row included."""

    model: Model
    state: ModelState

    def run(self, rows: PassRows, capacity: int) -> tuple[Tensor, Tensor | None]:
        """Logits [T, V] and target_hidden [T, n * D]; `capacity` positions of a request can be seen."""
        target = self.model.target
        view = RowView(self.state, rows.places, capacity, target.ops)
        output = target(PassTokens(rows.token_ids, rows.ngrams), view)
        return target.logits(output.hidden), output.target_hidden


class FixedDraft:
    """The draft's passes over a fixed number of rows or of blocks.

    Args:
        num_valid_tokens: real vocabulary size.
    """

    def __init__(self, model: Model, state: ModelState, block_size: int, num_valid_tokens: int) -> None:
        assert model.draft is not None
        self.draft: DsparkDraft = model.draft
        self.target = model.target
        self.state = state
        self.block_size = block_size
        self.num_valid_tokens = num_valid_tokens

    def keep(self, target_hidden: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write the window rows of tokens [N]; those with slot -1 are none."""
        ops, places = self.target.ops, dict[int, Tensor]()
        for key, rows in self.draft.context_rows(target_hidden, positions):
            ring = self.state.rings[key]
            count = ring.shape[1]
            if count not in places:
                places[count] = ops.window_places(slots, positions, 1, count).flatten()
            ops.write_rows(ring.view(-1, ring.shape[2]), places[count], rows)

    def blocks(self, anchors: Tensor, starts: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Base logits [R, G, V] and hidden [R, G, D] of the blocks that begin with the anchors [R] at `starts` [R]."""
        view = BlockRowView(self.state, starts, slots, self.block_size, self.target.ops)
        out = self.draft(self.draft.block_tokens(anchors, self.block_size), view, self.target)
        shape = (anchors.shape[0], self.block_size, -1)
        return self.target.logits(out.normed).view(shape), out.hidden.view(shape)

    def draw(
        self, anchors: Tensor, starts: Tensor, slots: Tensor, params: DrawParams, kind: DrawKind
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens [R, G] and confidence logits [R, G]: the loop of `DSparkProposer`, without a wait.

        Args:
            params: of the R requests or more. kind: the largest among them.
        """
        logits, hidden = self.blocks(anchors, starts, slots)
        base = logits[:, :, : self.num_valid_tokens]
        return self.draft.draw_blocks(base, hidden, anchors, starts, params, kind)
