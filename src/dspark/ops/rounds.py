"""What a round does besides its passes and draws, where its requests lie on the device: rows, commit, blocks.

A request is one column of a table. Its first word is the anchor; the committed tokens before it, as many as Engram
reads, and the drafts after it complete the text that a round works on.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.ops.places import window_places

NUM_SCALARS = 6


@dataclass(frozen=True)
class RoundTable:
    """Columns of R requests.

    A request has rows while its anchor is not the last token that it can hold; an empty column has a limit of 0.

    Attributes:
        words: [6 + G + n - 1, R] int64: anchors, positions, limits, slots, asked, verify_lens, then G drafts, then the
            tokens before the anchor, oldest first, -1 before the start; n is Engram's.
        width: G.
    """

    words: Tensor
    width: int

    @property
    def anchors(self) -> Tensor:
        """[R], the last emitted token."""
        return self.words[0]

    @property
    def positions(self) -> Tensor:
        """[R], of the anchor: the committed length."""
        return self.words[1]

    @property
    def limits(self) -> Tensor:
        """[R], tokens that a request can ever hold."""
        return self.words[2]

    @property
    def slots(self) -> Tensor:
        """[R]."""
        return self.words[3]

    @property
    def asked(self) -> Tensor:
        """[R], drafts that the host lets be verified."""
        return self.words[4]

    @property
    def verify_lens(self) -> Tensor:
        """[R], drafts that the next round verifies."""
        return self.words[5]

    @property
    def drafts(self) -> Tensor:
        """[R, G]."""
        return self.words[NUM_SCALARS : NUM_SCALARS + self.width].T

    @property
    def history(self) -> Tensor:
        """[R, n - 1]."""
        return self.words[NUM_SCALARS + self.width :].T

    @property
    def history_len(self) -> int:
        """n - 1."""
        return self.words.shape[0] - NUM_SCALARS - self.width

    def text(self) -> Tensor:
        """[R, n + G]: history, anchor, drafts."""
        return torch.cat((self.history, self.anchors[:, None], self.drafts), dim=1)


def aligned_rows(like: Tensor, num_rows: int, size: int) -> Tensor:
    """Unset int64 rows [num_rows, size], each of which begins at a multiple of 16 bytes, as kernels want them."""
    return like.new_empty(num_rows, size + size % 2)[:, :size]


class RoundRows(NamedTuple):
    """The T rows of a round: those of a request are its anchor and its drafts, padding follows all of them.

    Attributes:
        token_ids, positions, slots: [T]; padding has slot -1.
        owners: [T] the column of each row's request; padding has the last.
        drawers: [T] the same, -1 for padding.
        draws: [T] the position of the token that a row draws, the one behind its own.
        offsets: [T] a row's place among those of its request.
        ngrams: [T, n] the row's own token and its predecessors.
        starts, counts: [R] first row and number of rows of each request.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    owners: Tensor
    drawers: Tensor
    draws: Tensor
    offsets: Tensor
    ngrams: Tensor
    starts: Tensor
    counts: Tensor


def lay_rows(table: RoundTable, num_rows: int) -> RoundRows:
    """The anchor and the drafts of every request, one request after the other, then padding up to `num_rows`.

    Example: verify lengths 2, of a request at its end, and 0 in 6 rows give the owners 0 0 0 2 and twice padding.
    """
    counts = torch.where(table.positions + 1 < table.limits, 1 + table.verify_lens, 0)
    stops = counts.cumsum(0)
    starts = stops - counts
    row = torch.arange(num_rows, device=counts.device)
    is_row = row < stops[-1]
    owners = torch.searchsorted(stops, row, right=True).clamp_(max=len(counts) - 1)
    offsets = torch.where(is_row, row - starts[owners], 0)
    back = torch.arange(0, -1 - table.history_len, -1, device=counts.device)
    ngrams = table.text()[owners[:, None], table.history_len + offsets[:, None] + back]
    ngrams = torch.where(is_row[:, None], ngrams, -1)
    positions = torch.where(is_row, table.positions[owners] + offsets, 0)
    return RoundRows(
        ngrams[:, 0].clamp(min=0),
        positions,
        torch.where(is_row, table.slots[owners], -1),
        owners,
        torch.where(is_row, owners, -1),
        positions + 1,
        offsets,
        ngrams,
        starts,
        counts,
    )


def move_on(table: RoundTable, rows: RoundRows, num_accepted: Tensor, token_ids: Tensor, outcome: Tensor) -> Tensor:
    """Commit a round: the anchor's row and those of accepted drafts become final, the bonus is the next anchor.

    Nothing waits for verification afterwards, until drafts are proposed.

    Args:
        table: moved on. rows: as they were laid.
        num_accepted: [R]. token_ids: [R, 1 + G], the accepted drafts and then the bonus.
        outcome: [R, 3 + G], set to verify_len, num_accepted and the tokens; of a column without rows it means nothing.
    Returns:
        [T] slots of the rows that became final, -1 for the others.
    """
    outcome.copy_(torch.cat((table.verify_lens[:, None], num_accepted[:, None], token_ids), dim=1))
    is_running = rows.counts > 0
    last = torch.arange(1, 1 + table.history_len, device=token_ids.device) + num_accepted[:, None]
    history = table.text().gather(1, last)
    table.history.copy_(torch.where(is_running[:, None], history, table.history))
    bonus = token_ids.gather(1, num_accepted[:, None])[:, 0]
    table.anchors.copy_(torch.where(is_running, bonus, table.anchors))
    table.positions.add_(torch.where(is_running, num_accepted + 1, 0))
    table.verify_lens.zero_()
    return torch.where(rows.offsets <= num_accepted[rows.owners], rows.slots, -1)


class Blocks(NamedTuple):
    """slots: [R], -1 where a request wants no drafts. limits: [R] drafts that may be verified."""

    slots: Tensor
    limits: Tensor


def open_blocks(table: RoundTable) -> Blocks:
    """What the next blocks may hold. A request that has one token left draws it without drafts."""
    num_left = table.limits - table.positions - 1
    limits = torch.minimum(table.asked, num_left - 1).clamp_(min=0)
    return Blocks(torch.where(num_left > 1, table.slots, -1), limits)


class BlockRows(NamedTuple):
    """The rows of R blocks of G, block by block.

    Attributes:
        token_ids, positions: [R * G].
        draws: [R] the position of a block's first draft.
        window: [R * G, W] ring places of the tokens before the row's block, -1 none.
        own: [R * G, G] the rows of the row's block.
    """

    token_ids: Tensor
    positions: Tensor
    draws: Tensor
    window: Tensor
    own: Tensor


def lay_blocks(
    anchors: Tensor, starts: Tensor, slots: Tensor, width: int, noise_id: int, reach: int, ring_rows: int
) -> BlockRows:
    """Rows of blocks.

    Args:
        anchors, starts: [R] int64, the first token of each block and its position; `noise_id` follows.
        slots: [R] int64, -1 for padding, which has no window.
        width: G. reach: W. ring_rows: of a slot.
    """
    token_ids = anchors.new_full((len(anchors), width), noise_id)
    token_ids[:, 0] = anchors
    offsets = torch.arange(width, device=starts.device)
    window = window_places(slots, starts - 1, reach, ring_rows).repeat_interleave(width, dim=0)
    own = block_rows(len(anchors), width, starts.device)
    return BlockRows(token_ids.flatten(), (starts[:, None] + offsets).flatten(), starts + 1, window, own)


def block_rows(num_blocks: int, width: int, device: torch.device) -> Tensor:
    """[R * G, G]: the rows of its own block for every row of R blocks."""
    own = torch.arange(num_blocks * width, device=device).view(num_blocks, width)
    return own.repeat_interleave(width, dim=0)


def keep_blocks(table: RoundTable, drafts: Tensor, confidence: Tensor, verify_lens: Tensor, proposal: Tensor) -> None:
    """Let blocks wait for verification.

    Args:
        drafts: [R, G]. confidence: [R, G] float32. verify_lens: [R].
        proposal: [R, 1 + 2 * G], set to verify_len, the drafts, and the bits of the confidences.
    """
    table.drafts.copy_(drafts)
    table.verify_lens.copy_(verify_lens)
    bits = confidence.contiguous().view(torch.int32).to(torch.int64)
    proposal.copy_(torch.cat((verify_lens[:, None], drafts, bits), dim=1))
