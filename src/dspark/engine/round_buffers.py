"""What rounds on the device know of their requests, one column each, and what the host learns of a round."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.engine.fixed_passes import PassRows
from dspark.engine.request import Request
from dspark.speculative.device_lengths import Bounds
from dspark.state.row_views import RowPlaces

_SCALARS = 6
# Rounds that may be out at a time, the one that is prepared, and one whose blocks are read later than its verdict.
NUM_TURNS = 4


class RoundBuffers:
    """Columns of up to R requests. The host writes them when requests enter; from then on rounds move them.

    A request may write while its anchor is not the last token that it can hold: a column that is empty, or whose
    request has reached its end, has no rows.

    Attributes:
        anchors, positions: [R] int64, the last emitted token and its position, which is the committed length.
        limits: [R] int64, tokens that a request can ever hold; 0 in an empty column.
        slots: [R] int64.
        asked: [R] int64, drafts that the host lets be verified.
        verify_lens: [R] int64, drafts that the next round verifies.
        drafts: [R, G] int64.
        history: [R, n - 1] int64, the tokens before the anchor, oldest first, -1 before the start; n is Engram's.
        pages: [R, P] int64.
        budget: [1] int64, drafts that all requests together may verify.
        outcome: [R, 3 + G] int64, of the last round: verify_len, num_accepted, then the tokens that it emits.
        proposal: [R, 1 + 2 * G] int64: verify_len, drafts, bits of the float32 confidence logits.
    """

    def __init__(self, num_requests: int, width: int, max_ngram: int, max_pages: int, device: torch.device) -> None:
        self.width = width
        self.history_len = max(max_ngram - 1, 0)
        count = _SCALARS + width + self.history_len
        self.table = torch.zeros(count, num_requests, dtype=torch.int64, device=device)
        self.anchors, self.positions, self.limits, self.slots, self.asked, self.verify_lens = self.table[:_SCALARS]
        self.drafts = self.table[_SCALARS : _SCALARS + width].T
        self.history = self.table[_SCALARS + width :].T
        self.pages = torch.zeros(num_requests, max_pages, dtype=torch.int64, device=device)
        self.budget = torch.zeros(1, dtype=torch.int64, device=device)
        self.outcome = torch.zeros(num_requests, 3 + width, dtype=torch.int64, device=device)
        self.proposal = torch.zeros(num_requests, 1 + 2 * width, dtype=torch.int64, device=device)
        self._page_upload, self._bound_upload = Upload(self.pages), Upload(self.asked)
        self._num_pages: list[int] = []
        self._bounds: Bounds | None = None

    def enter(self, requests: Sequence[Request]) -> None:
        """Write the columns of requests that stand at their anchors; all others become empty."""
        self.write(self.columns(requests))

    def columns(self, requests: Sequence[Request]) -> list[list[int]]:
        """All columns, as plain numbers."""
        columns = [self._column(request) for request in requests]
        return columns + [self._empty()] * (self.table.shape[1] - len(columns))

    def write(self, columns: Sequence[Sequence[int]]) -> None:
        """Set all columns."""
        self.table.copy_(torch.tensor(columns, dtype=torch.int64).T)
        self._num_pages, self._bounds = [], None

    def _column(self, request: Request) -> list[int]:
        assert request.state is not None and request.num_pending == 1, "a request that is not at its anchor"
        draft = request.draft
        drafts = draft.token_ids if draft else [0] * self.width
        before = request.token_ids[-1 - self.history_len : -1]
        return [
            request.token_ids[-1],
            request.state.committed,
            request.max_len,
            request.state.slot,
            self.width,
            draft.verify_len if draft else 0,
            *drafts,
            *[-1] * (self.history_len - len(before)),
            *before,
        ]

    def _empty(self) -> list[int]:
        return [0, 0, 0, -1, 0, 0, *[0] * self.width, *[-1] * self.history_len]

    def set_pages(self, tables: Sequence[Sequence[int]]) -> bool:
        """Write the pages of the first requests where they have changed; what stands behind them is not read.

        Returns:
            whether they have.
        """
        sizes = [len(pages) for pages in tables]
        if sizes == self._num_pages:
            return False
        self._num_pages = sizes
        longest = max(sizes)
        padded = [[*pages, *[0] * (longest - len(pages))] for pages in tables]
        self._page_upload.write(self.pages[: len(tables), :longest], padded)
        return True

    def set_bounds(self, bounds: Bounds) -> bool:
        """What may be verified of the blocks that are launched next; tells whether that is new."""
        if bounds == self._bounds:
            return False
        self._bounds = bounds
        self._bound_upload.write(self.asked[: len(bounds.lengths)], bounds.lengths)
        self.budget.fill_(bounds.budget)
        return True


@dataclass(frozen=True)
class RoundRows:
    """Rows of a round: those of its pass, and where each request's begin.

    Attributes:
        rows: of the pass; the rows of a request are its anchor and its drafts, padding follows all of them.
        owners: [T] int64, the column of each row's request, -1 for padding.
        offsets: [T] int64, a row's place among those of its request.
        starts, counts: [R] int64, each request's first row and number of rows.
    """

    rows: PassRows
    owners: Tensor
    offsets: Tensor
    starts: Tensor
    counts: Tensor


def lay_rows(buffers: RoundBuffers, num_rows: int) -> RoundRows:
    """The anchor and the drafts of every request, one request after the other, then padding up to `num_rows`.

    Example: lengths 2, none and 0 in 6 rows give the owners 0 0 0 2 and twice padding.
    """
    count = min(num_rows, buffers.table.shape[1])
    positions, verify_lens = buffers.positions[:count], buffers.verify_lens[:count]
    counts = torch.where(positions + 1 < buffers.limits[:count], 1 + verify_lens, 0)
    stops = counts.cumsum(0)
    starts = stops - counts
    row = torch.arange(num_rows, device=counts.device)
    is_row = row < stops[-1]
    owners = torch.searchsorted(stops, row, right=True).clamp_(max=count - 1)
    offsets = torch.where(is_row, row - starts[owners], 0)
    tokens = torch.cat((buffers.history[:count], buffers.anchors[:count, None], buffers.drafts[:count]), dim=1)
    back = torch.arange(0, -1 - buffers.history_len, -1, device=counts.device)
    ngrams = tokens[owners[:, None], buffers.history_len + offsets[:, None] + back]
    ngrams = torch.where(is_row[:, None], ngrams, -1)
    places = RowPlaces(
        torch.where(is_row, positions[owners] + offsets, 0),
        torch.where(is_row, buffers.slots[:count][owners], -1),
        owners,
        buffers.pages[:count],
    )
    rows = PassRows(ngrams[:, 0].clamp(min=0), places, ngrams if buffers.history_len else None)
    return RoundRows(rows, torch.where(is_row, owners, -1), offsets, starts, counts)


def move_on(buffers: RoundBuffers, laid: RoundRows, num_accepted: Tensor, token_ids: Tensor) -> None:
    """Commit a round: the anchor's row and those of accepted drafts become final, the bonus is the next anchor.

    Nothing waits for verification afterwards, until drafts are proposed.

    Args:
        num_accepted: [R] int64. token_ids: [R, 1 + G] int64, the accepted drafts and then the bonus.
    """
    count = len(laid.counts)
    verify_lens, anchors, drafts, history = (
        tensor[:count] for tensor in (buffers.verify_lens, buffers.anchors, buffers.drafts, buffers.history)
    )
    buffers.outcome[:count] = torch.cat((verify_lens[:, None], num_accepted[:, None], token_ids), dim=1)
    is_running = laid.counts > 0
    if buffers.history_len:
        tokens = torch.cat((history, anchors[:, None], drafts), dim=1)
        last = torch.arange(1, 1 + buffers.history_len, device=tokens.device) + num_accepted[:, None]
        history.copy_(torch.where(is_running[:, None], tokens.gather(1, last), history))
    bonus = token_ids.gather(1, num_accepted[:, None])[:, 0]
    anchors.copy_(torch.where(is_running, bonus, anchors))
    buffers.positions[:count] += torch.where(is_running, num_accepted + 1, 0)
    verify_lens.zero_()


class Upload:
    """Host memory from which the device is written between launches, without a wait for what runs.

    It is used in turns: a copy may still be waiting for its round when the next is prepared.
    """

    def __init__(self, target: Tensor) -> None:
        is_cuda = target.device.type == "cuda"
        self._hosts = [torch.zeros(target.numel(), dtype=target.dtype, pin_memory=is_cuda) for _ in range(NUM_TURNS)]
        self._num_written = 0

    def write(self, target: Tensor, values: Sequence[int] | Sequence[Sequence[int]]) -> None:
        """Set a part of the tensor once all that was launched before has run."""
        host = self._hosts[self._num_written % NUM_TURNS][: target.numel()].view(target.shape)
        self._num_written += 1
        host.copy_(torch.tensor(values, dtype=target.dtype))
        target.copy_(host, non_blocking=True)


class Landing:
    """Where a result of a round lands on the host: memory that the device writes, and the event behind the copy."""

    def __init__(self, source: Tensor) -> None:
        self._source = source
        is_cuda = source.device.type == "cuda"
        self._host = torch.zeros(source.shape, dtype=source.dtype, pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None

    def send(self, num_requests: int) -> None:
        """Copy the first requests' rows as soon as what was launched before has run."""
        self._host[:num_requests].copy_(self._source[:num_requests], non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> Tensor:
        """The copy; it stays until the next one is sent."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
