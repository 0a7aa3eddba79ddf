"""The largest passes of an engine, run once so that what they take of a device's memory can be measured.

The rehearsing engine has a state of one page, in which every request's pages are that page: rows overwrite each other,
and nobody reads the result. What a pass takes depends on its rows and on how far its requests reach, which are as in
the longest request.
"""

from dspark.config.sampling import SamplingParams
from dspark.engine.core import Engine
from dspark.engine.memory import pages_for
from dspark.engine.request import Request
from dspark.engine.run_ahead import run_ahead_of
from dspark.scheduler.plan import PlannedSpan, RequestId, StepPlan

# The first is the end of prefill for most requests, the second verifies whole blocks; as many run ahead after them.
_ROUNDS = 2


def rehearse(engine: Engine, num_requests: int, num_rows: int, max_len: int) -> None:
    """The longest prompt chunk at the end of the longest request, then whole rounds, read by the host and run ahead.

    Args:
        engine: over a state of its own, which is of no use afterwards; its graphs see `rehearsed_len` tokens.
        num_requests: that run at once. num_rows: of a pass at most. max_len: tokens of a request at most.
    """
    longest = max(max_len - _rows_behind(engine.state.max_query_len), 1)
    deep = _started(engine, "deep", longest, max_len)
    rows = min(num_rows, longest)
    assert deep.state is not None
    deep.state.committed = longest - rows
    # Rows of a prompt may be asked for, and then all of them have logits.
    deep.prompt_logprobs = [None] * (longest - rows + 1)
    engine.step(StepPlan((PlannedSpan("deep", rows),)))
    for number in range(1, num_requests):
        _started(engine, number, 1, max_len)
    for _ in range(_ROUNDS):
        engine.step(StepPlan(tuple(_whole_span(engine, request_id) for request_id in engine.requests)))
    _run_ahead(engine, num_rows)


def rehearsed_len(max_query_len: int, max_len: int) -> int:
    """Tokens of the longest request of a rehearsal: where `max_len` has no room for its rounds, they go further."""
    return max(max_len, 1 + _rows_behind(max_query_len))


def _rows_behind(max_query_len: int) -> int:
    """Rows after a prompt: the token that it ends with, those of all rounds, and more, so that no request ends."""
    return (2 + 2 * _ROUNDS) * max_query_len


def _run_ahead(engine: Engine, num_rows: int) -> None:
    """Rounds that stay on the device, where the engine has them."""
    ahead, requests = run_ahead_of(engine, num_rows), list(engine.requests.values())
    if ahead is not None and ahead.takes(requests):
        ahead.advance(requests)
        ahead.drain()


def _started(engine: Engine, request_id: RequestId, prompt_len: int, max_len: int) -> Request:
    """A request that holds the only page as often as it could need one, and does not end: a short one goes further."""
    end = rehearsed_len(engine.state.max_query_len, max_len)
    params = SamplingParams(max_tokens=end - prompt_len, ignore_eos=True, temperature=1.0)
    request = engine.add(request_id, [0] * prompt_len, params, end)
    engine.start(request_id)
    assert request.state is not None
    request.state.pages = [0] * pages_for(end, engine.state.page_tokens)
    return request


def _whole_span(engine: Engine, request_id: RequestId) -> PlannedSpan:
    """All that is known of a request, and its whole block."""
    draft = engine.requests[request_id].draft
    width = len(draft.token_ids) if draft is not None else 0
    if draft is not None:
        draft.verify_len = width
    return PlannedSpan(request_id, engine.needs(request_id).num_pending, width)
