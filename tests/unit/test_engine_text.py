"""Text is a function of the tokens: pieces handed out at any times add up to it, and it ends before the first stop."""

import random
import time

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


def test_long_stop_strings_cost_what_the_text_costs():
    """64 of 100,000 characters, each of which the text spells for a while: their own length must not be paid."""
    stops = [f"{'b' * 99_999}{number}" for number in range(64)]
    stream, taken = TextStream("".join, stops), []
    began = time.process_time()
    for number in range(2_000):
        assert not stream.push("a" if number % 500 == 499 else "b")
        taken.append(stream.take())
    assert time.process_time() - began < 5
    assert "".join(taken) == ("b" * 499 + "a") * 4
    assert stream.take(is_final=True) == ""


@pytest.mark.parametrize("token", [0x80, 0xE4, 256])
def test_bytes_that_become_no_character_do_not_wait_for_ever(token):
    """Nor do tokens without text: each is decoded a few times, however many of them come."""
    counted = 0

    def decode(token_ids):
        nonlocal counted
        counted += len(token_ids)
        return decode_bytes([each for each in token_ids if each < 256])

    stream, rng, taken = TextStream(decode, ("STOP",)), random.Random(token), []
    for _ in range(3_000):
        assert not stream.push(token)
        if rng.random() < 0.5:
            taken.append(stream.take())
    assert counted < 60 * 3_000
    assert len("".join(taken)) > 2_900 or token == 256
    for each in "a你STO".encode():
        assert not stream.push(each)
    assert stream.push(ord("P"))
    taken.append(stream.take(is_final=True))
    assert "".join(taken) == decode_bytes([each for each in [token] * 3_000 if each < 256]) + "a你"


def test_broken_bytes_are_cut_where_no_character_is():
    """Any bytes and any cuts: the text is that of all bytes together."""
    rng = random.Random(3)
    for _ in range(300):
        tokens = [rng.choice([0x80, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 256]) for _ in range(rng.randint(1, 80))]
        text, _, _ = read(lambda ids: decode_bytes([each for each in ids if each < 256]), tokens, (), rng)
        assert text == decode_bytes([each for each in tokens if each < 256])
