"""Rows, commits and blocks of rounds on the device: each set of twins against plain loops over lists.

A request that has reached its end and an empty column have no rows, whatever lies beside them.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from dspark.ops.rounds import RoundTable
from support.op_sets import BACKENDS, backend


@dataclass
class Column:
    """A request as a round sees it."""

    anchor: int
    position: int
    limit: int
    slot: int
    asked: int
    verify_len: int
    drafts: list[int]
    history: list[int]

    @property
    def num_rows(self):
        return 1 + self.verify_len if self.position + 1 < self.limit else 0

    @property
    def text(self):
        return [*self.history, self.anchor, *self.drafts]


def columns_of(rng, count, width, history_len):
    found = []
    for _ in range(count):
        position = rng.randint(0, 40)
        limit = rng.choice([0, position, position + 1, position + 2, position + 3, 900])
        length = min(rng.randint(0, width), max(limit - position - 2, 0))
        drafts, history = ([rng.randrange(99) for _ in range(size)] for size in (width, history_len))
        slot = rng.randrange(9)
        found.append(Column(rng.randrange(99), position, limit, slot, rng.randint(0, width), length, drafts, history))
    return found


def table_of(columns, width, device):
    words = [
        [one.anchor, one.position, one.limit, one.slot, one.asked, one.verify_len, *one.drafts, *one.history]
        for one in columns
    ]
    return RoundTable(torch.tensor(words, dtype=torch.int64).T.contiguous().to(device), width)


@pytest.fixture(params=BACKENDS)
def twins(request):
    return backend(request.param)


@pytest.mark.parametrize(("count", "width", "history_len"), [(1, 5, 0), (3, 5, 2), (4, 1, 1), (7, 0, 2), (2, 0, 0)])
def test_a_round(twins, count, width, history_len):
    rng = random.Random(count)
    for _ in range(2 if twins.is_slow else 30):
        columns = columns_of(rng, count, width, history_len)
        total = sum(one.num_rows for one in columns)
        table = table_of(columns, width, twins.device)
        rows = twins.ops.lay_rows(table, max(total, 1) + rng.randint(0, 3))
        assert listed(rows) == laid(columns, len(rows.token_ids))
        accepted = [rng.randint(0, one.verify_len) for one in columns]
        tokens = [
            [*one.drafts[:taken], 77, *[-1] * (width - taken)] for one, taken in zip(columns, accepted, strict=True)
        ]
        outcome = torch.zeros(count, 3 + width, dtype=torch.int64, device=twins.device)
        kept = twins.ops.move_on(
            table, rows, *(torch.tensor(part).to(twins.device) for part in (accepted, tokens)), outcome
        )
        assert kept.tolist() == [
            slot if offset <= accepted[owner] else -1
            for slot, offset, owner in zip(
                rows.slots.tolist(), rows.offsets.tolist(), rows.owners.tolist(), strict=True
            )
        ]
        moved = [after(one, taken) for one, taken in zip(columns, accepted, strict=True)]
        assert torch.equal(table.words.cpu(), table_of(moved, width, "cpu").words)
        assert outcome.tolist() == [
            [one.verify_len, taken, *own] for one, taken, own in zip(columns, accepted, tokens, strict=True)
        ]


def listed(rows):
    return {name: part.tolist() for name, part in rows._asdict().items()}


def laid(columns, num_rows):
    padding = num_rows - sum(one.num_rows for one in columns)
    real = [(number, offset) for number, one in enumerate(columns) for offset in range(one.num_rows)]
    back = len(columns[0].history)
    ngrams = [columns[number].text[offset : back + offset + 1][::-1] for number, offset in real]
    counts = [one.num_rows for one in columns]
    return {
        "token_ids": [row[0] for row in ngrams] + [0] * padding,
        "positions": [columns[number].position + offset for number, offset in real] + [0] * padding,
        "slots": [columns[number].slot for number, _ in real] + [-1] * padding,
        "owners": [number for number, _ in real] + [len(columns) - 1] * padding,
        "drawers": [number for number, _ in real] + [-1] * padding,
        "draws": [columns[number].position + offset + 1 for number, offset in real] + [1] * padding,
        "offsets": [offset for _, offset in real] + [0] * padding,
        "ngrams": ngrams + [[-1] * (1 + back)] * padding,
        "starts": [sum(counts[:number]) for number in range(len(columns))],
        "counts": counts,
    }


def after(one, taken):
    if not one.num_rows:
        return Column(**{**vars(one), "verify_len": 0})
    text, back = one.text, len(one.history)
    return Column(
        77, one.position + taken + 1, one.limit, one.slot, one.asked, 0, one.drafts, text[taken + 1 : taken + 1 + back]
    )


def test_rows_of_blocks(twins):
    anchors, starts, slots = torch.tensor([[7, 8, 9], [13, 20, 2], [3, -1, 1]]).to(twins.device)
    assert listed(twins.ops.lay_blocks(anchors, starts, slots, 3, 99, 4, 11)) == {
        "token_ids": [7, 99, 99, 8, 99, 99, 9, 99, 99],
        "positions": [13, 14, 15, 20, 21, 22, 2, 3, 4],
        "draws": [14, 21, 3],
        "window": [[42, 43, 33, 34]] * 3 + [[-1] * 4] * 3 + [[-1, -1, 11, 12]] * 3,
        "own": [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3 + [[6, 7, 8]] * 3,
    }


def test_blocks(twins):
    rng, width = random.Random(5), 5
    columns = columns_of(rng, 6, width, 2)
    table = table_of(columns, width, twins.device)
    slots, limits = twins.ops.open_blocks(table)
    left = [one.limit - one.position - 1 for one in columns]
    assert slots.tolist() == [one.slot if rest > 1 else -1 for one, rest in zip(columns, left, strict=True)]
    assert limits.tolist() == [max(min(one.asked, rest - 1), 0) for one, rest in zip(columns, left, strict=True)]
    drafts = torch.randint(0, 99, (6, width), generator=torch.Generator().manual_seed(1))
    confidence = torch.randn(6, width, generator=torch.Generator().manual_seed(2))
    proposal = torch.zeros(6, 1 + 2 * width, dtype=torch.int64, device=twins.device)
    lengths = torch.tensor([0, 1, 2, 3, 4, 5])
    twins.ops.keep_blocks(table, *(part.to(twins.device) for part in (drafts, confidence, lengths)), proposal)
    assert torch.equal(table.drafts.cpu(), drafts)
    assert torch.equal(table.verify_lens.cpu(), lengths)
    assert torch.equal(table.positions.cpu(), torch.tensor([one.position for one in columns]))
    assert torch.equal(proposal[:, 0].cpu(), lengths)
    assert torch.equal(proposal[:, 1 : 1 + width].cpu(), drafts)
    assert torch.equal(proposal[:, 1 + width :].to(torch.int32).view(torch.float32).cpu(), confidence)
