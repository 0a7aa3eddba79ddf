"""Coloured streaming prints exactly the emitted text, whatever the boundaries of tokens and characters."""

import io

import pytest

from dspark.cli.console import ACCEPTED_STYLE
from dspark.cli.token_text import TokenText
from dspark.config.sampling import SamplingParams
from support.fake_engine import ByteTokenizer, FakeLLM


def printed(llm, *, is_colored):
    file = io.StringIO()
    printer = TokenText(file, ByteTokenizer().decode, is_colored=is_colored)
    for emission in llm.stream("", SamplingParams()):
        printer.show(emission)
    return file.getvalue()


def without_color(text):
    for code in ("\x1b[32m", "\x1b[0m"):
        text = text.replace(code, "")
    return text


@pytest.mark.parametrize("text", ["plain text", "[bold]no markup[/bold] :smile:", "é日本語😀 end", "a\n\n  b\tc\n"])
@pytest.mark.parametrize("accepted", [0, 1, 2, 5])
def test_text_is_printed_as_it_is(text, accepted):
    llm = FakeLLM(text=text, accepted=accepted)
    assert printed(llm, is_colored=False) == text
    assert without_color(printed(llm, is_colored=True)) == text


def test_accepted_drafts_have_their_own_color():
    assert ACCEPTED_STYLE == "green"
    assert printed(FakeLLM(text="abcde", accepted=3), is_colored=True) == "a\x1b[32mbcd\x1b[0me"


def test_a_character_that_ends_in_the_bonus_is_the_targets():
    # After the first byte, a round accepts "b" and the first two bytes of the euro sign; its last byte is the bonus.
    assert printed(FakeLLM(text="ab€", accepted=3), is_colored=True) == "a\x1b[32mb\x1b[0m€"
