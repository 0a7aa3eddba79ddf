"""Scenarios of endings: stops, end of sequence and limits inside an accepted block."""

from dspark.validate.lifecycle.catalogue import FORMS
from dspark.validate.lifecycle.driver import Driver
from dspark.validate.lifecycle.evidence import require
from dspark.validate.lifecycle.ledger import Ledger, Tally
from dspark.validate.lifecycle.scenarios.prompts import hot, settings
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.wishes import Wish

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def stop_inside_accepted_block(subject: Subject) -> Ledger:
    """A stop token, and a stop string over two tokens, lie inside accepted blocks; nothing after them comes out."""
    found = find_stops(subject, Driver(subject, settings(subject)))
    require(bool(found), "some round accepted several drafts of new tokens")
    driver = Driver(subject, settings(subject, spare_rows=200))
    for number, stopped in enumerate(found):
        driver.submit(number, stopped)
    driver.run()
    ended = driver.ledger.done.values()
    assert {tally.answer.finish_reason for tally in ended} == {"stop"}, "a stop was passed over"
    tokens = [tally for tally in ended if tally.is_cut_inside_block and tally.wish.params.stop_token_ids]
    texts = [tally for tally in ended if tally.is_cut_inside_block and tally.wish.params.stop]
    driver.events["stop tokens inside a block"] = len(tokens)
    driver.events["stop strings inside a block"] = len(texts)
    require(bool(tokens), "a stop token was an accepted draft")
    require(bool(texts), "a stop string was completed by an accepted draft")
    return driver.ledger


def find_stops(subject: Subject, driver: Driver) -> list[Wish]:
    """Requests that stop at the second token of a round, by token and by text; none where no round allows it."""
    found: list[Wish] = []
    for group in range(6):
        for number in range(4 * group, 4 * group + 4):
            driver.submit(number, hot(subject, 4 + number, number))
        driver.run_on()
        for number in range(4 * group, 4 * group + 4):
            found += _stops_of(subject, driver.ledger.done[number])
        if any(wish.params.stop for wish in found):
            break
    driver.finish()
    return found


def _stops_of(subject: Subject, tally: Tally) -> list[Wish]:
    """Stops inside rounds with at least three accepted drafts, or two where the draft is narrow."""
    tokens, wanted = tally.answer.token_ids, min(3, subject.block_size)
    for record in tally.records:
        start = record.anchor_position + 1 - len(tally.wish.prompt_ids)
        if record.num_accepted < wanted or record.num_emitted <= record.num_accepted:
            continue
        second = tokens[start + 1]
        if second in tokens[: start + 1]:
            continue
        before, whole = subject.tokenizer.decode(tokens[:start]), subject.tokenizer.decode(tokens[: start + 2])
        text = whole[len(before) :]
        stops = [tally.wish.with_params(stop_token_ids=(second,))]
        if len(text) > 1 and _REPLACEMENT not in text and text not in whole[:-1]:
            stops.append(tally.wish.with_params(stop=(text,)))
        return stops
    return []


def end_of_sequence_inside_accepted_block(subject: Subject) -> Ledger:
    """The end-of-sequence token is an accepted draft: the output ends there, and the bonus is never seen."""
    driver = Driver(subject, settings(subject, max_num_seqs=8))
    eos = subject.eos_token_ids[0]
    ended: list[Tally] = []
    for group in range(6):
        for number in range(8 * group, 8 * group + 8):
            bias = {eos: float(2 + number % 6)}
            driver.submit(number, hot(subject, 3 + number % 7, number, logit_bias=bias, ignore_eos=False))
        driver.run_on()
        ended = [tally for tally in driver.ledger.done.values() if _is_ended_by(tally, eos)]
        if ended:
            break
    driver.finish()
    driver.events["end of sequence inside a block"] = len(ended)
    require(bool(ended), "an accepted draft was the end of sequence")
    return driver.ledger


def _is_ended_by(tally: Tally, eos: int) -> bool:
    """Whether an accepted draft ended the output, and was this token."""
    answer = tally.answer
    return tally.is_cut_inside_block and answer.finish_reason == "stop" and answer.token_ids[-1] == eos


def output_cap_inside_block(subject: Subject) -> Ledger:
    """max_tokens is smaller than a block: exactly so many tokens come out, accepted drafts among them."""
    driver = Driver(subject, settings(subject))
    for number in range(16):
        driver.submit(number, hot(subject, 5 + number, number, max_tokens=3))
    driver.run()
    lengths = {len(tally.answer.token_ids) for tally in driver.ledger.done.values()}
    assert lengths == {3}, f"max_tokens 3 gave {lengths} tokens"
    longest = max(record.verify_len for tally in driver.ledger.done.values() for record in tally.records)
    assert longest <= 2, f"{longest} drafts were verified where two more tokens are wanted at most"
    require(driver.events["accepted drafts"] > 0, "drafts were accepted under the limit")
    return driver.ledger


def structured_output_inside_accepted_block(subject: Subject) -> Ledger:
    """Outputs of a given form: drafts are masked like the target's rows, and rejected ones take their steps back."""
    driver = Driver(subject, settings(subject))
    for number in range(9):
        params = {"structured": FORMS[number % len(FORMS)], "ignore_eos": False}
        driver.submit(number, hot(subject, 6 + number, number, **params))
    driver.run()
    require(driver.events["accepted drafts"] > 0 or not subject.block_size, "drafts of the right form were accepted")
    require(driver.events["rounds with rejected drafts"] > 0 or not subject.block_size, "drafts were rejected")
    return driver.ledger


def context_limit_inside_block(subject: Subject) -> Ledger:
    """The context is full in the middle of a block, long before max_tokens: exactly the tokens that fit come out."""
    driver = Driver(subject, settings(subject, max_num_seqs=2, spare_rows=200))
    left = [1, 2, 4, 7]
    for number, room in enumerate(left):
        driver.submit(number, hot(subject, subject.max_model_len - room, number, max_tokens=100))
    driver.run()
    answers = [driver.ledger.done[number].answer for number in range(len(left))]
    given = [(len(answer.token_ids), answer.finish_reason) for answer in answers]
    assert given == [(room, "length") for room in left], f"room for {left} tokens gave {given}"
    return driver.ledger
