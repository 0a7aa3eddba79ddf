"""Sums and exchanges between the accelerators of one host: each writes its values into the memory of all others.

A value travels as a 64-bit word: 32 bits of it, and the number of the call. Words are written in one piece, so a reader
sees for each word by itself that it is there; nothing else is waited for, and no barrier is needed. Every rank has an
inbox with two sides, taken by even and odd calls. A side is written again two calls later, and by then its words have
been read: a rank that sends call n + 2 has received all of call n + 1, which nobody sent before it had read call n.

The number of a call lies on the device, so that a launch from a graph continues the count.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import round_bf16
from dspark.ops.triton.launch import INTERPRETED, packed

PROGRAMS = 128
SIDES = 2
_GATHER, _SUM_F32, _SUM_BF16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SUMS = {torch.float32: _SUM_F32.value, torch.bfloat16: _SUM_BF16.value}
_SMALL_BLOCK, _LARGE_BLOCK = 256, 512


@triton.jit
def _exchange(
    x, out, inboxes, calls, count, columns, capacity: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, WAYS: tl.constexpr, KIND: tl.constexpr, SENDS: tl.constexpr,
    RECEIVES: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Words x [count] of this rank to all others; theirs summed, or side by side in rows of RANKS * columns words."""
    begin(EARLY)
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    side = (call & 1) * RANKS * capacity
    lanes = tl.arange(0, BLOCK)
    if SENDS:
        for first in range(program * BLOCK, count, PROGRAMS * BLOCK):
            places = first + lanes
            inside = places < count
            words = tl.load(x + places, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
            words |= call.to(tl.int64) << 32
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    inbox = tl.multiple_of(tl.load(inboxes + peer).to(tl.pointer_type(tl.int64)), 16)
                    tl.store(inbox + side + RANK * capacity + places, words, mask=inside, cache_modifier=".wt")
    if RECEIVES:
        inbox = tl.multiple_of(tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64)), 16) + side
        sources = tl.arange(0, WAYS)[:, None]
        is_peer = (sources < RANKS) & (sources != RANK)
        for first in range(program * BLOCK, count, PROGRAMS * BLOCK):
            places = first + lanes
            inside = places < count
            wanted = is_peer & inside[None, :]
            missing = 1
            while missing > 0:
                found = tl.load(inbox + sources * capacity + places[None, :], mask=wanted, other=0, volatile=True)
                missing = tl.max((wanted & ((found >> 32).to(tl.int32) != call)).to(tl.int32))
            low = tl.zeros([BLOCK], dtype=tl.float32)
            high = tl.zeros([BLOCK], dtype=tl.float32)
            for source in tl.static_range(RANKS):
                if source == RANK:
                    words = tl.load(x + places, mask=inside, other=0)
                else:
                    words = tl.load(inbox + source * capacity + places, mask=inside, other=0, volatile=True)
                    words = words.to(tl.int32)
                if KIND == _GATHER:
                    rows = places // columns
                    targets = (rows * RANKS + source).to(tl.int64) * columns + places - rows * columns
                    tl.store(out + targets, words, mask=inside)
                elif KIND == _SUM_F32:
                    value = words.to(tl.float32, bitcast=True)
                    low = value if source == 0 else low + value
                else:
                    value = (words << 16).to(tl.float32, bitcast=True)
                    low = value if source == 0 else low + value
                    value = (words & -65536).to(tl.float32, bitcast=True)
                    high = value if source == 0 else high + value
            if KIND == _SUM_F32:
                tl.store(out + places, low.to(tl.int32, bitcast=True), mask=inside)
            elif KIND == _SUM_BF16:
                below = round_bf16(low, PLAIN).to(tl.int32, bitcast=True) >> 16
                above = round_bf16(high, PLAIN).to(tl.int32, bitcast=True)
                tl.store(out + places, above | (below & 0xFFFF), mask=inside)
        tl.store(calls + program, call)


class Inboxes:
    """The inboxes of all ranks as this rank sees them.

    Attributes:
        capacity: words of the longest message.
    """

    def __init__(self, addresses: list[int], rank: int, capacity: int, device: torch.device) -> None:
        """Args:
        addresses: of every rank's inbox, `SIDES` * ranks * `capacity` int64 words that were zero before any call.
        """
        self.capacity = capacity
        self._rank, self._size = rank, len(addresses)
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor can travel: whole words, and not too many."""
        return 0 < x.nbytes <= 4 * self.capacity and x.nbytes % 4 == 0

    def takes_sum(self, x: Tensor) -> bool:
        """Whether a sum of such tensors can be made."""
        return x.dtype in _SUMS and self.takes(x)

    def sum(self, x: Tensor, sends: bool = True, receives: bool = True) -> Tensor:
        """See `dspark.parallel.group.RankGroup.sum`; one launch, or two of which one sends and one receives."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._launch(x, out, _SUMS[x.dtype], 1, sends, receives)
        return out

    def gather_columns(self, x: Tensor, sends: bool = True, receives: bool = True) -> Tensor:
        """Rows [T, n] of all ranks side by side; n is whole words."""
        num_rows, columns = x.shape
        out = torch.empty(num_rows, self._size * columns, dtype=x.dtype, device=x.device)
        self._launch(x, out, _GATHER.value, columns * x.dtype.itemsize // 4, sends, receives)
        return out

    def _launch(self, x: Tensor, out: Tensor, kind: int, columns: int, sends: bool, receives: bool) -> None:
        words, results = (packed(part).view(-1).view(torch.int32) for part in (x, out))
        count, early = words.numel(), early_launch()
        block = _SMALL_BLOCK if count <= 4 * PROGRAMS * _SMALL_BLOCK else _LARGE_BLOCK
        _exchange[(PROGRAMS,)](
            words, results, self._addresses, self._calls, count, columns, self.capacity, self._rank, self._size,
            triton.next_power_of_2(self._size), kind, sends, receives, PROGRAMS, block, early, INTERPRETED,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
