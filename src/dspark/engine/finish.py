"""Where an output ends: stop tokens, stop strings, end of sequence, length. Cut here and only here, token by token."""

from collections.abc import Sequence

from dspark.engine.request import Request


def take_tokens(request: Request, token_ids: Sequence[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Append tokens to a request until one ends it; sets `finish_reason` then.

    The token that ends the output is part of `token_ids`; of the text it is part only where it is neither a stop
    token nor completes a stop string.

    Returns:
        the tokens that were taken, at least one.
    """
    taken = []
    constraint = request.live_constraint()
    for token in token_ids:
        request.token_ids.append(token)
        taken.append(token)
        if constraint is not None and not constraint.advance(token):
            request.finish_reason = "error"
            break
        request.finish_reason = _reason(request, token, eos_token_ids)
        if request.finish_reason is not None:
            break
    return taken


def _reason(request: Request, token: int, eos_token_ids: Sequence[int]) -> str | None:
    """Why the output ends with this token, or None.

    A structured output is only offered an end-of-sequence id where it may end, so that one always ends it.
    """
    ignores_eos = request.params.ignore_eos and request.params.structured is None
    if token in request.params.stop_token_ids or (token in eos_token_ids and not ignores_eos):
        return "stop"
    if request.text.push(token):
        return "stop"
    return "length" if request.num_left == 0 else None
