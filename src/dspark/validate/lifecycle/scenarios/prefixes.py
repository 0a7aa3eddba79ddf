"""Scenarios of sharing a past: cache hits, forks, samples, images."""

import tempfile
from pathlib import Path

from dspark.validate.lifecycle.by_hand import ByHand
from dspark.validate.lifecycle.driver import Driver
from dspark.validate.lifecycle.evidence import require
from dspark.validate.lifecycle.ledger import Ledger
from dspark.validate.lifecycle.scenarios.endings import find_stops
from dspark.validate.lifecycle.scenarios.prompts import hot, prompt, settings, two_pages
from dspark.validate.lifecycle.stored_image import read_image, write_image
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.wishes import Wish


def warm_equals_cold(subject: Subject) -> Ledger:
    """The second identical prompt hits the cache: same tokens, same rounds, as many drafts accepted as when cold."""
    driver = Driver(subject, settings(subject))
    wish = hot(subject, two_pages(subject), 6)
    driver.submit("cold", wish)
    driver.run_on()
    driver.submit("warm", wish)
    driver.run()
    cold, warm = driver.ledger.done["cold"], driver.ledger.done["warm"]
    require(cold.num_cached_tokens == 0, "the first prompt was computed")
    require(warm.num_cached_tokens >= subject.page_tokens, "the second prompt came from the cache")
    rounds = [[(each.draft_ids, each.num_accepted) for each in tally.records] for tally in (cold, warm)]
    assert rounds[0] == rounds[1], "the drafts of a warm request are not those of a cold one"
    require(not subject.block_size or driver.events["accepted drafts"] > 0, "drafts were accepted")
    driver.events["cached prompt tokens"] = warm.num_cached_tokens
    return driver.ledger


def next_turn_after_stop_inside_block(subject: Subject) -> Ledger:
    """A stop inside an accepted block ends a turn; the next turn is cached up to that stop."""
    found = [wish for wish in find_stops(subject, Driver(subject, settings(subject))) if wish.params.stop_token_ids]
    require(bool(found), "some round accepted several drafts")
    driver = Driver(subject, settings(subject))
    wish = found[0].with_params(stop_token_ids=())
    driver.submit("turn", found[0])
    driver.run_on()
    turn = driver.ledger.done["turn"]
    require(turn.is_cut_inside_block, "the stop lay inside an accepted block")
    history = turn.wish.prompt_ids + turn.answer.token_ids
    driver.submit("next turn", Wish(history + prompt(subject, 5, 1), wish.params))
    driver.run()
    cached = driver.ledger.done["next turn"].num_cached_tokens
    assert cached >= len(history) - 1, f"the next turn found {cached} of {len(history)} tokens in the cache"
    driver.events["cached prompt tokens"] = cached
    return driver.ledger


def hit_on_running_prefix(subject: Subject) -> Ledger:
    """A request continues the prompt of one that still runs, and shares its pages while both write on."""
    driver = Driver(subject, settings(subject))
    first = hot(subject, two_pages(subject), 7)
    driver.submit("first", first)
    while not driver.ledger.live["first"].answer.token_ids:
        driver.step()
    second = Wish(first.prompt_ids + prompt(subject, 4, 2), first.params)
    driver.submit("second", second)
    for _ in range(50):
        if driver.ledger.live["second"].emissions or "first" not in driver.ledger.live:
            break
        driver.step()
    require("first" in driver.ledger.live, "the first request still ran")
    require(driver.ledger.live["second"].num_cached_tokens >= subject.page_tokens, "its prefix was found in the cache")
    driver.run()
    return driver.ledger


def prompts_that_part(subject: Subject) -> Ledger:
    """Prompts of one length: some share their first page and part, one shares nothing; each finds its own past only."""
    driver = Driver(subject, settings(subject))
    page, length = subject.page_tokens, two_pages(subject)
    first = hot(subject, length, 12)
    for number in range(4):
        shared = 0 if number == 3 else page + 5
        text = first.prompt_ids[:shared] + prompt(subject, length, 20 + number)[shared:]
        driver.submit(number, Wish(text, first.params) if number else first)
        driver.run_on()
    driver.finish()
    cached = [driver.ledger.done[number].num_cached_tokens for number in range(4)]
    assert cached[3] == 0, f"a prompt that shares nothing found {cached[3]} tokens in the cache"
    assert max(cached) <= page + 5, f"prompts that part after {page + 5} tokens found {cached}"
    require(max(cached) >= page, f"the shared page was found; cached are {cached}")
    return driver.ledger


def exact_prefix_fork(subject: Subject) -> Ledger:
    """Two forks leave a decoding request in the middle of a page, one with its noise and one with another."""
    hand = ByHand(subject, settings(subject, max_num_seqs=3))
    source = hand.start("source", hot(subject, subject.page_tokens - 6, 8))
    for _ in range(20):
        hand.step(["source"])
        if len(source.output_ids) >= 3 and hand.committed("source") % subject.page_tokens:
            break
    require("source" in hand.ledger.live, "the source still decoded")
    history, params = tuple(source.token_ids), hand.ledger.live["source"].wish.params
    hand.fork("source", "twin", Wish(history, params))
    hand.fork("source", "other", Wish(history, params).with_params(seed=99))
    hand.finish()
    answers = {name: tally.answer.token_ids for name, tally in hand.ledger.done.items()}
    length = len(history) - len(hand.ledger.done["source"].wish.prompt_ids)
    rest = answers["source"][length:]
    assert answers["twin"][: len(rest)] == rest, "a fork with the same noise goes another way"
    require(answers["other"] != answers["twin"], "other noise gives other tokens")
    return hand.ledger


def samples_forked_after_prefill(subject: Subject) -> Ledger:
    """Four samples of one prompt: the first computes it, the others continue from its state with noise of their own."""
    driver = Driver(subject, settings(subject, enable_prefix_caching=False))
    length = subject.page_tokens + 9
    wishes = [hot(subject, length, 9, seed=seed) for seed in range(4)]
    names = [f"sample {number}" for number in range(4)]
    driver.submit_samples(names, wishes)
    driver.run()
    shared = [driver.ledger.done[name].num_cached_tokens for name in names]
    driver.events["shared prompt tokens"] = sum(shared)
    require(shared[0] == 0 and min(shared[1:]) == length - 1, f"three samples shared the prompt; shared are {shared}")
    require(len({driver.ledger.done[name].answer.token_ids for name in names}) > 1, "the samples differ")
    return driver.ledger


def image_restored_across_stored_checkpoint(subject: Subject) -> Ledger:
    """A request's state goes through a file into an engine that has seen nothing, with pages and slots of its own."""
    length = subject.page_tokens + 7
    wish = hot(subject, length, 10)
    writer = ByHand(subject, settings(subject, max_num_seqs=2))
    writer.start("before", wish)
    while writer.committed("before") < length - 2:
        writer.step(["before"], chunk=length // 3 + 1 if writer.committed("before") + length // 3 + 1 < length else 1)
    image = writer.engine.image("before")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "image.safetensors"
        write_image(file, writer.engine.state, image)
        reader = ByHand(subject, settings(subject, max_num_seqs=2))
        reader.start("neighbour", hot(subject, 30, 11))
        reader.step(["neighbour"])
        restored = read_image(file, reader.engine.state)
    reader.start("after", wish, restored)
    reader.engine.state.drop(restored)
    require(reader.committed("after") == image.committed > subject.page_tokens, "the state was restored, not computed")
    require(reader.slot("after") != writer.slot("before"), "the request is in another slot")
    reader.finish()
    writer.engine.state.drop(image)
    writer.finish()
    tallies = (writer.ledger.done["before"], reader.ledger.done["after"])
    rounds = [[record.draft_ids for record in tally.records] for tally in tallies]
    assert rounds[0] == rounds[1], "the drafts after a restored image are others"
    reader.ledger.events["restored tokens"] = image.committed
    return reader.ledger
