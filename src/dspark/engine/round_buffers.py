"""What rounds on the device know of their requests, one column each, and what the host learns of a round."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.engine.request import Request
from dspark.ops.rounds import NUM_SCALARS, RoundTable, aligned_rows
from dspark.speculative.device_lengths import Bounds
from dspark.state.spans import page_table

# Rounds that may be out at a time, the one that is prepared, and one whose blocks are read later than its verdict.
NUM_TURNS = 4


class RoundBuffers:
    """Columns of up to R requests. The host writes them when requests enter; from then on rounds move them.

    Attributes:
        table: what rounds move on.
        pages: [R, P] int64, of the requests.
        budget: [1] int64, drafts that all requests together may verify.
        outcome: [R, 3 + G] int64, of the last round: verify_len, num_accepted, then the tokens that it emits.
        proposal: [R, 1 + 2 * G] int64: verify_len, drafts, bits of the float32 confidence logits.
    """

    def __init__(self, num_requests: int, width: int, max_ngram: int, max_pages: int, device: torch.device) -> None:
        self._history_len = max(max_ngram - 1, 0)
        count = NUM_SCALARS + width + self._history_len
        self.pages = torch.zeros(num_requests, max_pages, dtype=torch.int64, device=device)
        self.table = RoundTable(aligned_rows(self.pages, count, num_requests).zero_(), width)
        self.budget = torch.zeros(1, dtype=torch.int64, device=device)
        self.outcome = torch.zeros(num_requests, 3 + width, dtype=torch.int64, device=device)
        self.proposal = torch.zeros(num_requests, 1 + 2 * width, dtype=torch.int64, device=device)
        self._page_upload, self._bound_upload = Upload(self.pages), Upload(self.table.asked)
        self._num_pages: list[int] = []
        self._bounds: Bounds | None = None

    def first(self, count: int) -> RoundTable:
        """The columns of the first requests, all of them where there are fewer."""
        return RoundTable(self.table.words[:, :count], self.table.width)

    def columns(self, requests: Sequence[Request]) -> list[list[int]]:
        """The columns of requests that stand at their anchors, and empty ones, as plain numbers."""
        columns = [self._column(request) for request in requests]
        return columns + [self._empty()] * (self.table.words.shape[1] - len(columns))

    def write(self, columns: Sequence[Sequence[int]]) -> None:
        """Set all columns."""
        self.table.words.copy_(torch.tensor(columns, dtype=torch.int64).T)
        self._num_pages, self._bounds = [], None

    def _column(self, request: Request) -> list[int]:
        assert request.state is not None and request.num_pending == 1, "a request that is not at its anchor"
        draft = request.draft
        drafts = draft.token_ids if draft else [0] * self.table.width
        before = request.token_ids[-1 - self._history_len : -1]
        return [
            request.token_ids[-1],
            request.state.committed,
            request.max_len,
            request.state.slot,
            self.table.width,
            draft.verify_len if draft else 0,
            *drafts,
            *[-1] * (self._history_len - len(before)),
            *before,
        ]

    def _empty(self) -> list[int]:
        return [0, 0, 0, -1, 0, 0, *[0] * self.table.width, *[-1] * self._history_len]

    def set_pages(self, tables: Sequence[Sequence[int]]) -> bool:
        """Write the pages of the first requests where they have changed; what stands behind them is not read.

        Returns:
            whether they have.
        """
        sizes = [len(pages) for pages in tables]
        if sizes == self._num_pages:
            return False
        self._num_pages = sizes
        self._page_upload.write(self.pages[: len(tables), : max(sizes)], page_table(tables))
        return True

    def set_bounds(self, bounds: Bounds) -> bool:
        """What may be verified of the blocks that are launched next; tells whether that is new."""
        if bounds == self._bounds:
            return False
        self._bounds = bounds
        self._bound_upload.write(self.table.asked[: len(bounds.lengths)], bounds.lengths)
        self.budget.fill_(bounds.budget)
        return True


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
