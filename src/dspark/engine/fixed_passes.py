"""Passes of a fixed shape: all that they need of their requests is in integer columns and pages, none of it by name.

What a graph captures is one call of these. Who fills the columns is free: the host (`dspark.engine.pass_graphs`), or
the round before (`dspark.engine.device_round`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.layers.attention import PassContext
from dspark.models.build import Model
from dspark.models.decoder import PassTokens
from dspark.models.dspark_draft import DsparkDraft
from dspark.ops.draw import DrawKind, DrawParams
from dspark.ops.places import RowPlaces
from dspark.ops.rope import TurnTable
from dspark.ops.rounds import BlockRows
from dspark.state.model_state import ModelState
from dspark.state.row_views import BlockRowView, RowView, place_jobs, ring_homes


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


class FixedTarget:
    """The target's pass over rows of a fixed number, logits of every row included."""

    def __init__(self, model: Model, state: ModelState) -> None:
        self.model = model
        self.state = state
        self._jobs = place_jobs(state)
        freqs = {key: block.attn.freqs for block in model.target.layers for key in block.attn.turn_keys}
        ratios = torch.tensor([max(ratio, 1) for _, ratio in freqs], device=state.device)
        self._turn_keys, self._turns = list(freqs), TurnTable(torch.stack(list(freqs.values())), ratios)

    def run(self, rows: PassRows, capacity: int) -> tuple[Tensor, Tensor | None]:
        """Logits [T, V] and target_hidden [T, n * D]; `capacity` positions of a request can be seen."""
        target, places = self.model.target, rows.places
        view = RowView(self.state, places, capacity, self._jobs, target.ops)
        turns = target.ops.row_rotations(places.positions, self._turns)
        context = PassContext(
            turns=dict(zip(self._turn_keys, turns, strict=True)),
            homes=ring_homes(self.state, places.slots, places.positions),
        )
        output = target(PassTokens(rows.token_ids, rows.ngrams), view, context)
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
        keys = [stage.name for stage in model.draft.plan.stages]
        # The stages see one window: its tokens, and the rows of its rings.
        (self._window,) = {(state.window_reach[key], state.rings[key].shape[1]) for key in keys}

    def keep(self, target_hidden: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write the window rows of tokens [N]; those with slot -1 are none."""
        self.draft.context_rows(target_hidden, positions, ring_homes(self.state, slots, positions))

    def blocks(self, anchors: Tensor, starts: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Base logits [R, G, V] and hidden [R, G, D] of the blocks that begin with the anchors [R] at `starts` [R]."""
        return self._run(self._laid(anchors, starts, slots))

    def _laid(self, anchors: Tensor, starts: Tensor, slots: Tensor) -> BlockRows:
        noise = self.draft.plan.noise_token_id
        return self.target.ops.lay_blocks(anchors, starts, slots, self.block_size, noise, *self._window)

    def _run(self, rows: BlockRows) -> tuple[Tensor, Tensor]:
        out = self.draft(rows.token_ids, BlockRowView(self.state, rows), self.target)
        shape = (len(rows.draws), self.block_size, -1)
        return self.target.logits(out.normed).view(shape), out.hidden.view(shape)

    def draw(
        self, anchors: Tensor, starts: Tensor, slots: Tensor, params: DrawParams, kind: DrawKind
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens [R, G] and confidence logits [R, G]: the loop of `DSparkProposer`, without a wait.

        Args:
            params: of the R requests or more. kind: the largest among them.
        """
        rows = self._laid(anchors, starts, slots)
        logits, hidden = self._run(rows)
        base = logits[:, :, : self.num_valid_tokens]
        return self.draft.draw_blocks(base, hidden, anchors, rows.draws, params, kind)
