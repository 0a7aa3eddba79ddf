"""Values that are not numbers, put wherever no request may ever read again: what reads one of them shows it."""

from dspark.state.model_state import ModelState, RequestState, tail_key


def poison(state: ModelState) -> None:
    """Overwrite everything that no request may ever read again: free slots and pages, and rows out of reach."""
    held = {page for image in state.images for page in image.pages}
    held |= {page for request in state.requests for page in request.pages}
    open_slots = {request.slot for request in state.requests}
    nan = float("nan")
    for ring in state.rings.values():
        for slot in set(range(state.num_slots)) - open_slots:
            ring[slot] = nan
    for key, rows in state.appends.items():
        per_page = state.page_tokens // state.append_ratios[key]
        for page in set(range(state.pages.num_pages)) - held:
            rows[page * per_page : (page + 1) * per_page] = nan
        for request in state.requests:
            for group in range(
                (request.committed + request.ahead) // state.append_ratios[key], len(request.pages) * per_page
            ):
                rows[request.pages[group // per_page] * per_page + group % per_page] = nan
    for request in state.requests:
        _poison_rings(state, request)


def _poison_rings(state: ModelState, request: RequestState) -> None:
    """A pass at `committed` reaches `reach - 1` rows back; a draft block, which keeps no rows of its own, one more."""
    rings = [(ring.key, ring.reach - (not ring.key.startswith("mtp"))) for ring in state.geometry.windows]
    rings += [(tail_key(ring.key), ring.reach - 1) for ring in state.geometry.tails]
    for key, back in rings:
        store = state.rings[key]
        stop = request.committed + request.ahead
        reached = {position % store.shape[1] for position in range(max(request.committed - back, 0), stop)}
        for row in set(range(store.shape[1])) - reached:
            store[request.slot, row] = float("nan")
