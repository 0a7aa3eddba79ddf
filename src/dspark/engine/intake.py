"""What a request must be like to be taken in, as far as that depends on the model and not on what runs."""

from collections.abc import Iterable, Sequence

from dspark.config.errors import ConfigError
from dspark.config.sampling import SamplingParams


def check_request(
    prompt_ids: Sequence[int], params: SamplingParams, *, max_model_len: int, num_valid_tokens: int
) -> None:
    """Refuse what no pass could compute.

    Raises:
        ConfigError: the prompt is empty or too long, or an id has no token.
    """
    if not prompt_ids:
        raise ConfigError("the prompt is empty: give at least one token")
    if len(prompt_ids) >= max_model_len:
        raise ConfigError(
            f"the prompt has {len(prompt_ids)} tokens and the context holds {max_model_len} with at least one "
            "for the output: shorten the prompt or raise max_model_len"
        )
    _require_known_ids("the prompt", prompt_ids, num_valid_tokens)
    _require_known_ids("stop_token_ids", params.stop_token_ids, num_valid_tokens)
    _require_known_ids("logit_bias", params.logit_bias or (), num_valid_tokens)


def _require_known_ids(name: str, token_ids: Iterable[int], num_valid_tokens: int) -> None:
    """Refuse ids without a token: rows of a padded vocabulary have none."""
    wrong = [token for token in token_ids if not 0 <= token < num_valid_tokens]
    if wrong:
        raise ConfigError(f"{name} holds the token id {wrong[0]}; ids go from 0 to {num_valid_tokens - 1}")
