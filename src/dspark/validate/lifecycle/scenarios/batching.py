"""Scenarios of sharing: passes, slots, padding, verify lengths."""

from itertools import pairwise

from dspark.engine.core import RUNNING
from dspark.validate.lifecycle.by_hand import ByHand
from dspark.validate.lifecycle.driver import Driver
from dspark.validate.lifecycle.evidence import require
from dspark.validate.lifecycle.ledger import Ledger
from dspark.validate.lifecycle.scenarios.prompts import hot, settings, two_pages, wish
from dspark.validate.lifecycle.subject import Subject


def mixed_stochastic_requests(subject: Subject) -> Ledger:
    """Greedy and sampled requests with every filter and penalty share passes, some arriving while others decode."""
    bias = {subject.eos_token_ids[0]: 1.0, subject.num_valid_tokens - 1: -4.0}
    favourites = dict.fromkeys((5, 6, 7), 9.0)
    wishes = [
        wish(subject, 5, 1, logprobs=2),
        hot(subject, 17, 2),
        hot(subject, 2, 3, temperature=0.7, top_p=0.9, min_p=0.02),
        hot(subject, 33, 4, temperature=1.2, top_k=12),
        wish(subject, 9, 5, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2),
        hot(subject, 11, 6, repetition_penalty=0.9, frequency_penalty=0.3, logit_bias=bias, logprobs=3),
        hot(subject, 1, 7, temperature=0.05, seed=2**64 - 1),
        hot(subject, 40, 8, temperature=5.0, sampler="ratio"),
        # Three favourites come again within a block, so penalties must count the drafts before each row.
        hot(subject, 6, 9, temperature=1.0, logit_bias=favourites, presence_penalty=2.0, frequency_penalty=2.0),
    ]
    driver = Driver(subject, settings(subject))
    for number, each in enumerate(wishes):
        driver.submit(number, each)
        if number > 3:
            driver.step()
    driver.run()
    require(driver.events["steps with several requests"] > 4, "requests shared passes")
    require(not subject.block_size or driver.events["accepted drafts"] > 0, "drafts were accepted")
    return driver.ledger


def slot_reuse_and_output_cap(subject: Subject) -> Ledger:
    """Nine requests go through two slots, each with another limit on its output; none gets a token more or less."""
    driver = Driver(subject, settings(subject, max_num_seqs=2))
    caps = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    for number, cap in enumerate(caps):
        driver.submit(number, hot(subject, 3 + 5 * number, number, max_tokens=cap))
    driver.run()
    given = [len(driver.ledger.done[number].answer.token_ids) for number in range(len(caps))]
    assert given == caps, f"limits {caps} gave {given} tokens"
    reasons = {tally.answer.finish_reason for tally in driver.ledger.done.values()}
    assert reasons == {"length"}, f"limits were reached, and the reasons given are {reasons}"
    require(driver.events["steps with several requests"] > 2, "both slots were in use at once")
    return driver.ledger


def varying_verify_lengths(subject: Subject) -> Ledger:
    """The number of verified drafts changes every round and differs between requests: 0, 3, 5, 1, 5 ..."""
    hand = ByHand(subject, settings(subject, max_num_seqs=3))
    names = ["a", "b", "c"]
    for number, name in enumerate(names):
        hand.start(name, hot(subject, 6 + 11 * number, number))
    pattern = [0, 3, 5, 1, 5, 2, 0, 4, 5, 0, 0, 5]
    for step in range(400):
        if not hand.ledger.live:
            break
        hand.step(names, verify_lens={name: pattern[(step + 5 * k) % 12] for k, name in enumerate(names)})
    hand.finish()
    records = [record for tally in hand.ledger.done.values() for record in tally.records]
    # The last rounds of a request are short by themselves, so every width up to the model's must have been seen.
    seen = {record.verify_len for record in records}
    require(seen >= {0, 1, subject.block_size}, f"verify lengths 0 to {subject.block_size} were used; seen {seen}")
    require(hand.events["rounds with accepted drafts"] > 0, "drafts were accepted")
    require(hand.events["rounds with rejected drafts"] > 0, "drafts were rejected")
    return hand.ledger


def padding_rows_inert(subject: Subject) -> Ledger:
    """Passes are padded with rows that belong to nobody, while every slot, also number 0, belongs to somebody."""
    hand = ByHand(subject, settings(subject, max_num_seqs=2))
    hand.start("a", hot(subject, two_pages(subject), 1))
    hand.start("b", hot(subject, 7, 2))
    for step in range(400):
        if not hand.ledger.live:
            break
        hand.step(["a", "b"] if step % 2 else ["b"], chunk=9, num_padding=(1, 3, 8)[step % 3])
    hand.finish()
    require(hand.events["padding rows"] > 0, "passes had padding rows")
    require(hand.events["steps with several requests"] > 0, "requests shared padded passes")
    return hand.ledger


def urgent_request_overtakes(subject: Subject) -> Ledger:
    """With one slot, a request of lower priority value arrives last and runs before those that wait."""
    driver = Driver(subject, settings(subject, max_num_seqs=1))
    for number in range(3):
        driver.submit(f"patient {number}", hot(subject, 9, number, max_tokens=6))
    driver.step()
    driver.submit("urgent", hot(subject, 9, 7, max_tokens=6), priority=-1)
    driver.run()
    order = list(driver.ledger.done)
    require(order.index("urgent") < 2, f"the urgent request went first; the order was {order}")
    return driver.ledger


def draft_health_stops_and_resumes(subject: Subject) -> Ledger:
    """Drafting stops where it gains too little and is tried again, in the middle of requests; no token changes."""
    driver = Driver(subject, settings(subject, max_num_seqs=2, health_window=2, health_floor=3.0))
    seen: list[bool] = []
    for group in range(6):
        for number in range(4 * group, 4 * group + 4):
            driver.submit(number, hot(subject, 5 + number, number, temperature=(1.0, 4.0)[number % 2]))
        while driver.loop.has_work:
            driver.step()
            seen.append(driver.loop.status().speculation == RUNNING)
        if set(pairwise(seen)) >= {(True, False), (False, True)}:
            break
    driver.finish()
    changes = [after for before, after in pairwise(seen) if before != after]
    driver.events["drafting stopped"], driver.events["drafting resumed"] = changes.count(False), changes.count(True)
    require(False in changes and True in changes, f"drafting stopped and resumed; changes seen: {changes}")
    return driver.ledger
