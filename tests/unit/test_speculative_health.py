"""Draft health: stops drafting on a low mean, tries again after counted rounds, goes on above a higher mean.

Case A4: acceptance that falls to nothing is noticed, said, counted, and drafting stops. Nothing depends on time.
"""

import logging
import random

import pytest

from dspark.config import DraftHealthConfig, SpeculativeConfig
from dspark.config.errors import ConfigError
from dspark.config.speculative_json import read_speculative_json
from dspark.speculative.health import DraftHealth, HealthState

RULES = DraftHealthConfig(floor=1.5, recovery=2.0, window=4, probe_after=6, probe_rounds=3)


def feed(health, accepted_lens):
    """One request: a round is drafted whenever drafting is on."""
    states = []
    for accepted_len in accepted_lens:
        drafted = health.is_drafting
        health.observe(accepted_len if drafted else 1, was_drafted=drafted)
        states.append(health.state)
    return states


def test_drafting_goes_on_at_the_floor():
    health = DraftHealth(RULES)
    assert set(feed(health, [1, 2] * 20)) == {HealthState.DRAFTING}
    assert health.reason == "" and health.is_well


def test_drafting_stops_when_a_full_window_is_below_the_floor():
    """Not before: three bad rounds are no window."""
    health = DraftHealth(RULES)
    assert feed(health, [1, 1, 1]) == [HealthState.DRAFTING] * 3
    assert feed(health, [2]) == [HealthState.RESTING]
    assert health.counts.fallbacks == 1 and not health.is_drafting
    assert health.reason == ("the accepted length fell to 1.25, below 1.5; drafting is tried again after 6 rounds")


def test_a_probe_comes_after_so_many_rounds_and_a_bad_one_rests_again():
    health = DraftHealth(RULES)
    states = feed(health, [1] * (4 + 6 + 3 + 6 + 3))
    assert [state.name[0] for state in states] == list("DDDR" + "RRRRRP" + "PPR" + "RRRRRP" + "PPR")
    assert (health.counts.fallbacks, health.counts.probes, health.counts.rounds_off) == (1, 2, 12)
    assert health.counts.recoveries == 0 and not health.is_well


def test_hysteresis_what_is_enough_to_go_on_is_not_enough_to_start_again():
    """A mean of 1.75 lies between floor and recovery."""
    health = DraftHealth(RULES)
    feed(health, [1] * 4)
    feed(health, [1] * 6)
    assert health.state is HealthState.PROBING
    assert health.reason.endswith("below 1.5; drafting is being tried again")
    feed(health, [2, 2, 1])
    assert health.state is HealthState.RESTING
    assert health.reason.startswith("the accepted length fell to 1.67, below 2;")
    feed(health, [1] * 6 + [2, 2, 2])
    assert health.state is HealthState.DRAFTING and health.counts.recoveries == 1
    assert health.reason == ""
    feed(health, [2, 2, 1, 1] * 5)
    assert health.state is HealthState.DRAFTING


def test_rounds_begun_before_a_change_count_for_nothing():
    """Other requests still hold drafts when drafting stops, and have none when a probe begins."""
    health = DraftHealth(RULES)
    feed(health, [1] * 4)
    for _ in range(50):
        health.observe(6, was_drafted=True)
    assert health.state is HealthState.RESTING and health.counts.rounds_off == 0
    for _ in range(6):
        health.observe(1, was_drafted=False)
    assert health.state is HealthState.PROBING
    for _ in range(50):
        health.observe(1, was_drafted=False)
    assert health.state is HealthState.PROBING and health.counts.rounds_off == 6


def test_without_rules_drafting_never_stops():
    health = DraftHealth(None)
    assert set(feed(health, [1] * 5000)) == {HealthState.DRAFTING}


def test_the_same_rounds_give_the_same_changes():
    rng = random.Random(3)
    rounds = [rng.choice([1, 1, 1, 2, 3]) for _ in range(400)]
    first, second = DraftHealth(RULES), DraftHealth(RULES)
    assert feed(first, rounds) == feed(second, rounds)
    assert first.counts == second.counts and first.counts.fallbacks > 1 and first.counts.recoveries > 0


def test_every_change_is_logged(caplog):
    """Trials only for those who look closely: a busy engine makes one every few seconds."""
    caplog.set_level(logging.DEBUG, logger="dspark.engine")
    feed(DraftHealth(RULES), [1] * (4 + 6 + 3 + 6) + [3] * 3)
    assert [(record.levelname, record.getMessage().split(" because")[0]) for record in caplog.records] == [
        ("WARNING", "speculation is not running"),
        ("DEBUG", "speculation is tried again for 3 rounds"),
        ("DEBUG", "speculation is still not running"),
        ("DEBUG", "speculation is tried again for 3 rounds"),
        ("INFO", "speculation is running again: the accepted length is 3.00"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"floor": 0.9}, "draft health floor must be at least 1.0"),
        ({"floor": 2.0, "recovery": 1.5}, "recovery 1.5 is below the floor 2"),
        ({"window": 0}, "draft health window must be at least 1"),
        ({"probe_rounds": True}, "draft health probe_rounds must be an integer"),
    ],
)
def test_rules_that_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        DraftHealthConfig(**changes)


def test_health_is_on_unless_it_is_switched_off():
    assert SpeculativeConfig().draft_health == DraftHealthConfig()
    assert SpeculativeConfig(draft_health=None).draft_health is None
    with pytest.raises(ConfigError, match=r"draft_health must be a DraftHealthConfig or None, not 1\.5"):
        SpeculativeConfig(draft_health=1.5)


def test_rules_may_be_written_as_json():
    def read(text):
        return read_speculative_json(text, adaptive=SpeculativeConfig()).draft_health

    assert read("{}") == DraftHealthConfig()
    assert read('{"draft_health": null}') is None
    assert read('{"draft_health": {"floor": 1.2, "window": 9}}') == DraftHealthConfig(floor=1.2, window=9)
    with pytest.raises(ConfigError, match="draft_health holds the unknown key 'flor'; did you mean floor"):
        read('{"draft_health": {"flor": 1.2}}')
