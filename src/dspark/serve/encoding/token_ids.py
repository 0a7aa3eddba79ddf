"""From the pieces of a prompt to its token ids."""

from collections.abc import Sequence
from itertools import groupby

from dspark.engine.tokenizer import TextTokenizer
from dspark.serve.encoding.protocol import PromptPiece


def piece_ids(tokenizer: TextTokenizer, pieces: Sequence[PromptPiece]) -> list[int]:
    """Ids of a prompt. Neighbouring plain pieces are one text: where it is cut must not show in its tokens."""
    token_ids: list[int] = []
    for is_token, group in groupby(pieces, key=lambda piece: piece.is_token):
        text = "".join(piece.text for piece in group)
        token_ids += tokenizer.encode(text) if is_token else tokenizer.encode_plain(text)
    return token_ids
