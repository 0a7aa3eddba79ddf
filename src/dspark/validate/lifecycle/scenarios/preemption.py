"""Scenarios of losing state: preemption, abort, exhaustion."""

from dspark.config.errors import ConfigError
from dspark.config.sampling import SamplingParams
from dspark.validate.lifecycle.by_hand import ByHand
from dspark.validate.lifecycle.driver import Driver
from dspark.validate.lifecycle.evidence import require
from dspark.validate.lifecycle.ledger import Ledger
from dspark.validate.lifecycle.scenarios.prompts import hot, prompt, settings, two_pages, wish
from dspark.validate.lifecycle.subject import Subject


def prefill_transition_preemption_with_reorder(subject: Subject) -> Ledger:
    """A long prompt loses its state between chunks and right after the last; others change places meanwhile."""
    hand = ByHand(subject, settings(subject, max_num_seqs=3))
    hand.start("left", hot(subject, 4, 1))
    hand.start("long", hot(subject, two_pages(subject), 2))
    hand.start("right", hot(subject, 21, 3))
    orders = [["left", "long", "right"], ["right", "left", "long"], ["long", "right", "left"]]
    prompt_len, between, after = two_pages(subject), 0, 0
    for step in range(60):
        hand.step(orders[step % 3], chunk=prompt_len // 3)
        if "long" not in hand.ledger.live or after:
            break
        committed = hand.committed("long")
        if between < 2 and 0 < committed < prompt_len:
            image = hand.engine.image("long") if between else None
            hand.preempt("long", image)
            between += 1
            if image is not None:
                hand.engine.state.drop(image)
        elif committed >= prompt_len:
            hand.preempt("long")
            after += 1
    hand.finish()
    hand.events["preemptions between chunks"] = between
    hand.events["preemptions right after prefill"] = after
    require(between == 2 and after == 1, "state was lost between chunks and right after the last one")
    return hand.ledger


def decode_preemption_with_reorder_after_verify(subject: Subject) -> Ledger:
    """Two requests lose their states right after a verify and replay in each other's slots, in another batch order."""
    hand = ByHand(subject, settings(subject, max_num_seqs=3))
    names = ["a", "b", "c"]
    for number, name in enumerate(names):
        hand.start(name, hot(subject, 12 + 9 * number, number))
    swaps = 0
    for _ in range(200):
        if len(hand.ledger.live) < 3 or swaps == 3:
            break
        emissions = hand.step(names)
        names.reverse()
        if any(emission.num_accepted for emission in emissions) and {"a", "b"} <= set(hand.ledger.live):
            hand.swap("a", "b")
            swaps += 1
    hand.finish()
    require(swaps > 0, "a verify with accepted drafts came before a preemption")
    require(hand.events["requests in another slot"] == swaps, "the requests changed slots")
    return hand.ledger


def repeated_preemption_of_one_request(subject: Subject) -> Ledger:
    """One request is stopped every other step, in prefill and in decoding, and still gives what it gives alone."""
    driver = Driver(subject, settings(subject, max_num_seqs=2, spare_rows=20, enable_prefix_caching=False))
    prompt_len = two_pages(subject)
    driver.submit("victim", hot(subject, prompt_len, 4))
    driver.submit("other", hot(subject, 8, 5))
    kinds = {"prefill": 0, "decoding": 0}
    for _ in range(400):
        if "victim" not in driver.ledger.live:
            break
        driver.step()
        driver.step()
        if driver.is_running("victim"):
            kind = "prefill" if driver.committed("victim") < prompt_len else "decoding"
            if kinds[kind] < 4:
                driver.preempt("victim")
                kinds[kind] += 1
    driver.run()
    require(min(kinds.values()) >= 2, f"the request was stopped in prefill and in decoding: {kinds}")
    return driver.ledger


def abort_and_survivor(subject: Subject) -> Ledger:
    """Requests are taken back while they wait, in the middle of prefill and while they decode; the others go on."""
    driver = Driver(subject, settings(subject, max_num_seqs=3, spare_rows=0))
    driver.submit("survivor", hot(subject, 10, 1, logprobs=2))
    driver.submit("decoding", hot(subject, 6, 2))
    driver.submit("prefill", hot(subject, two_pages(subject), 3))
    driver.submit("waiting", hot(subject, 5, 4))
    driver.submit("later", hot(subject, 14, 5))
    driver.step()
    driver.step()
    require(not driver.is_running("waiting"), "a request waited when it was taken back")
    driver.abort("waiting")
    driver.step()
    require(0 < driver.committed("prefill") < two_pages(subject), "a request was in prefill when it was taken back")
    driver.abort("prefill")
    require("decoding" in driver.ledger.live and bool(driver.ledger.live["decoding"].answer.token_ids), "one decoded")
    driver.abort("decoding")
    driver.run()
    require({"survivor", "later"} == set(driver.ledger.done), "the others ended")
    return driver.ledger


def abort_after_verify(subject: Subject) -> Ledger:
    """A request is taken back right after a verify, with a draft pending; a new one gets its slot and its name."""
    driver = Driver(subject, settings(subject, max_num_seqs=2))
    driver.submit("victim", hot(subject, 20, 1))
    driver.submit("survivor", hot(subject, 13, 2))
    for _ in range(100):
        emissions = driver.step()
        if any(emission.request_id == "victim" and emission.num_accepted for emission in emissions):
            break
    require(driver.is_running("victim"), "the victim still ran after a verify with accepted drafts")
    request = driver.loop.engine.requests["victim"]
    require(request.draft is not None, "a draft was pending")
    assert request.state is not None
    slot = request.state.slot
    driver.abort("victim")
    driver.submit("victim", hot(subject, 31, 3))
    driver.step()
    successor = driver.loop.engine.requests["victim"].state
    require(successor is not None and successor.slot == slot, "the new request got the slot of the old one")
    driver.run()
    return driver.ledger


def cache_exhaustion(subject: Subject) -> Ledger:
    """More prompts than the pages and the memory for images hold: images give way, and running requests stop."""
    length = two_pages(subject) - 10
    pages = -(-(length + subject.max_output) // subject.page_tokens) + 1
    engine = settings(subject, max_num_seqs=3, spare_rows=64, max_num_pages=pages, prefix_cache_bytes=2**18)
    driver = Driver(subject, engine)
    for number in range(7):
        # A few tokens under a page at first, so that they are let in together and grow into each other's pages.
        short = subject.page_tokens - 4
        driver.submit(number, hot(subject, length if number % 3 == 2 else short, number))
    driver.run()
    require(driver.events["evicted images"] > 0, "cached images gave way")
    require(driver.events["preemptions by the engine"] > 0, "pages ran out and a running request was stopped")
    return driver.ledger


def prompt_logprobs_in_chunks(subject: Subject) -> Ledger:
    """Prompt logprobs are collected over chunks, once, although the prompt is cached and its request is stopped."""
    driver = Driver(subject, settings(subject, max_num_seqs=2, spare_rows=0))
    plain = wish(subject, two_pages(subject), 3, max_tokens=3)
    driver.submit("cold", plain)
    driver.run_on()
    driver.submit("asks", plain.with_params(prompt_logprobs=2))
    driver.step()
    driver.step()
    require(0 < driver.committed("asks") < two_pages(subject), "the prompt was between chunks")
    driver.preempt("asks")
    driver.run()
    return driver.ledger


def refused_requests_hold_nothing(subject: Subject) -> Ledger:
    """Requests that can never run are refused with a sentence while another decodes, which does not notice."""
    pages = 2
    driver = Driver(subject, settings(subject, max_num_seqs=2, max_num_pages=pages))
    driver.submit("good", hot(subject, 12, 1))
    driver.step()
    room = pages * subject.page_tokens
    params = SamplingParams(max_tokens=4)
    refused: dict[str, tuple[tuple[int, ...], SamplingParams]] = {
        "no prompt": ((), params),
        "longer than the context": (prompt(subject, subject.max_model_len), params),
        "more pages than there are": (prompt(subject, room), params),
        "an unknown id": ((subject.num_valid_tokens,), params),
        "an unknown stop": ((1,), SamplingParams(stop_token_ids=(subject.num_valid_tokens,))),
        "good": ((1,), params),  # the name is in use
    }
    for name, (prompt_ids, own) in refused.items():
        assert _refusal(driver, name, prompt_ids, own), f"{name} was not refused with a sentence"
        driver.loop.check_integrity()
        driver.step()
    driver.run()
    driver.events["refusals"] = len(refused)
    return driver.ledger


def _refusal(driver: Driver, name: str, prompt_ids: tuple[int, ...], params: SamplingParams) -> str:
    """Why the engine refuses a request; empty where it takes it in."""
    try:
        driver.loop.add(name, prompt_ids, params)
    except ConfigError as error:
        return str(error)
    return ""
