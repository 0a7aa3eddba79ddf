"""Rows of a model that ranks share, in several batches: what the law compares, on any device."""

from pathlib import Path

import torch
from torch import Tensor

from dspark.engine.device import ops_for
from dspark.models.build import Model, load_model
from dspark.parallel.group import RankGroup
from support.row_reference import draft_blocks, keep_rows, same, write_rows
from support.tiny_models import NUM_VALID, tiny_state

LENGTHS = (10, 1, 5)
WAYS = {"parts": False, "whole experts": True}
BATCHES = ("in another order", "row by row", "each alone")

Rows = dict[str, Tensor]


def tokens_of(place: int) -> list[int]:
    count = LENGTHS[place]
    return torch.randint(2, NUM_VALID, (count,), generator=torch.Generator().manual_seed(place)).tolist()


@torch.inference_mode()
def rows_of(model: Model, chunk: int, order: tuple[int, ...]) -> Rows:
    """Logits, features, draft and its bias of some requests, written side by side in this order, `chunk` rows each.

    On the host, where rows of several devices can be compared.
    """
    state = tiny_state(model, max_query_len=max(LENGTHS))
    requests = {place: state.open() for place in order}
    rows: dict[str, list[Tensor]] = {f"{name} {place}": [] for name in ("logits", "hidden") for place in order}
    for start in range(0, max(LENGTHS[place] for place in order), chunk):
        running = [place for place in order if LENGTHS[place] > start]
        spans = [(requests[place], tokens_of(place)[: start + chunk]) for place in running]
        counts = [len(tokens) - start for _, tokens in spans]
        logits, hidden = write_rows(model, state, spans)
        for place, own, features in zip(running, logits.split(counts), hidden.split(counts), strict=True):
            rows[f"logits {place}"].append(own)
            rows[f"hidden {place}"].append(features)
            keep_rows(model, state, requests[place], features)
    drafts = draft_blocks(model, state, list(requests.values()), [tokens_of(place)[-1] for place in order])
    base = model.target.logits(drafts.normed).chunk(len(order))
    found = {name: torch.cat(parts).cpu() for name, parts in rows.items()}
    return found | {f"draft {place}": own.cpu() for place, own in zip(order, base, strict=True)}


def rank_rows(group: RankGroup, folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Rows]:
    """Rows of a model divided by inner widths and by whole experts, in several batches."""
    found = {}
    for name, whole_experts in WAYS.items():
        model = load_model(folder, ops_for(device), dtype, device=device, ranks=group, whole_experts=whole_experts)
        found[name] = rows_of(model, 10, (0, 1, 2))
        found[f"{name}, in another order"] = rows_of(model, 10, (2, 0, 1))
        found[f"{name}, row by row"] = rows_of(model, 1, (1, 2, 0))
        alone = [rows_of(model, 4, (place,)) for place in range(len(LENGTHS))]
        found[f"{name}, each alone"] = alone[0] | alone[1] | alone[2]
        found[f"{name}, held"] = {"share": torch.tensor([float(sum(x.numel() for x in model.parameters()))])}
    return found


def require_one_model(ranks: list[dict[str, Rows]]) -> None:
    """All ranks have the same bits, and so have all batches."""
    for found in ranks[1:]:
        for batch, rows in found.items():
            assert all(same(rows[name], ranks[0][batch][name]) for name in rows), f"ranks differ, {batch}"
    found = ranks[0]
    for way in WAYS:
        for batch in BATCHES:
            rows = found[f"{way}, {batch}"]
            assert all(same(rows[name], found[way][name]) for name in rows), f"{way}, {batch}"
