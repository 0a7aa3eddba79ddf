"""Text is a function of the tokens: pieces handed out at any times add up to it, and it ends before the first stop."""

import random

import pytest

from dspark.engine.text import TextStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def decode_bytes(token_ids):
    """Every byte is a token, so that a character may be spread over up to four."""
    return bytes(token_ids).decode("utf-8", "replace")


PIECES = ["a", "b", "ab", "aba", "é", ""]


def decode_pieces(token_ids):
    return "".join(PIECES[token] for token in token_ids)


def read(decode, token_ids, stop, rng):
    """Feed tokens one by one, taking text now and then, as an engine does in blocks of any length."""
    stream, pieces, used = TextStream(decode, stop), [], 0
    for token in token_ids:
        used += 1
        if stream.push(token):
            break
        if rng.random() < 0.4:
            pieces.append(stream.take())
    pieces.append(stream.take(is_final=True))
    return "".join(pieces), stream.stopped, used


def expected(decode, token_ids, stop):
    """The first length at which a stop string is there, found by decoding everything again."""
    for length in range(1, len(token_ids) + 1):
        text = decode(token_ids[:length])
        places = [text.find(one) for one in stop if one in text]
        if places and not text.endswith(REPLACEMENT):
            return text[: min(places)], True, length
    return decode(token_ids), False, len(token_ids)


@pytest.mark.parametrize(
    "stop", [(), ("aa",), ("ab", "b"), ("bab", "aba"), ("aab", "ba", "bb"), ("éa",), ("abababab",)]
)
def test_pieces_add_up(stop):
    rng = random.Random(repr(stop))
    for _ in range(200):
        tokens = [rng.randrange(len(PIECES)) for _ in range(rng.randint(1, 12))]
        assert read(decode_pieces, tokens, stop, rng) == expected(decode_pieces, tokens, stop)


@pytest.mark.parametrize("stop", [(), ("ü",), ("😀",), ("ß😀", "aß")])
def test_characters_spread_over_tokens(stop):
    rng = random.Random(repr(stop))
    for _ in range(200):
        text = "".join(rng.choice("aßü😀") for _ in range(rng.randint(1, 8)))
        tokens = list(text.encode())
        assert read(decode_bytes, tokens, stop, rng) == expected(decode_bytes, tokens, stop)


def test_text_that_may_become_a_stop_string_waits():
    stream = TextStream(decode_bytes, ("END",))
    taken = []
    for byte in b"the EN":
        assert not stream.push(byte)
        taken.append(stream.take())
    assert taken == ["t", "h", "e", " ", "", ""]
    assert not stream.push(ord("T"))
    assert stream.take() == "ENT"


def test_half_a_character_waits_and_is_shown_at_the_end():
    stream = TextStream(decode_bytes)
    stream.push(ord("a"))
    stream.push("é".encode()[0])
    assert stream.take() == "a"
    assert stream.take(is_final=True) == REPLACEMENT
    assert stream.take(is_final=True) == ""


def test_nothing_of_a_stop_string_is_ever_handed_out():
    """However the text around it was cut into tokens."""
    for cut in range(1, 9):
        stream, pieces = TextStream("".join, ("STOP",)), []
        text = "go STOP on"
        for piece in (text[:cut], text[cut : cut + 2], text[cut + 2 :]):
            if stream.push(piece):
                break
            pieces.append(stream.take())
        pieces.append(stream.take(is_final=True))
        assert "".join(pieces) == "go "
        assert stream.stopped
