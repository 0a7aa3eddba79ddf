"""A tokenizer for models whose weights are random: every token is a number."""

from collections.abc import Sequence

from dspark.engine.tokenizer import TextTokenizer


class RandomText(TextTokenizer):
    """Token t is the text " t"; there is no file, and nothing is encoded."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.special_ids = frozenset()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Numbers between spaces."""
        return "".join(f" {token_id}" for token_id in token_ids)
