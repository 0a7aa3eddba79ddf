"""The law with several ranks: a request in an engine of n ranks gives what it gives alone in an engine of n ranks.

Every answer is compared token for token and bit for bit by the validator itself, which drives the engine that ships
through random schedules. That the tokens are those of one rank is not promised: ranks group sums in their own way.
"""

import pytest

from dspark.validate.lifecycle.catalogue import Catalogue
from dspark.validate.lifecycle.episodes import make_episode, play
from dspark.validate.lifecycle.scenarios.registry import run_scenario
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.tiny import TINY_NAMES, write_tiny_checkpoint

SCENARIOS = (
    "image-restored-across-stored-checkpoint",
    "warm-equals-cold",
    "varying-verify-lengths",
    "abort-and-survivor",
)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return {
        name: Subject(name, write_tiny_checkpoint(folder / name, name, ranks=2), 512, 12, ranks=2)
        for name in TINY_NAMES
    }


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios(subjects, scenario):
    result = run_scenario(scenario, subjects["own-rows"])
    assert result.verdict == "passed", result.message


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_random_schedules(subjects, name, runs_ahead):
    catalogue = Catalogue(subjects[name], 3, 150)
    numbers = [number for number in range(60) if make_episode(catalogue, number).settings.runs_ahead == runs_ahead]
    for number in numbers[: 1 + runs_ahead]:  # rounds on the device are the shorter ones
        played = play(catalogue, make_episode(catalogue, number))
        assert played.failure is None, f"episode {number}: {played.failure}"
        assert played.num_steps
