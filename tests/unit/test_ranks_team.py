"""A team of ranks runs calls in step, each rank on its own part; what the ranks compute is not looked at here."""

import gc

import pytest

from dspark.engine.ranks.opening import root_of
from support import rank_calls
from support.rank_teams import team_of_ranks, wait_for


@pytest.fixture(scope="module")
def team():
    with team_of_ranks(3) as one:
        yield one


def test_every_rank_runs_a_call_on_its_own_part(team):
    share = root_of(team).derive(rank_calls.make_number, 5.0)
    assert share.run(rank_calls.total, 1.0) == 3 * 6.0 + 0 + 1 + 2
    assert share.ask(rank_calls.value) == [5.0, 6.0, 7.0]


def test_parts_are_made_of_parts(team):
    share = root_of(team).derive(rank_calls.make_number, 0.0).derive(rank_calls.make_larger, 10.0)
    assert share.ask(rank_calls.value) == [10.0, 11.0, 12.0]


def test_what_is_told_runs_on_the_followers_alone(team):
    share = root_of(team).derive(rank_calls.make_number, 0.0)
    share.tell(rank_calls.add, 7.0)
    assert share.ask(rank_calls.value) == [0.0, 8.0, 9.0]


def test_parts_that_nobody_holds_are_forgotten(team):
    share = root_of(team).derive(rank_calls.make_number, 0.0)
    assert team.is_used
    del share
    gc.collect()
    wait_for(lambda: not team.is_used and not team._gone)


def test_news_of_every_rank_reach_the_log(team, caplog):
    with caplog.at_level("INFO", "dspark.engine"):
        root_of(team).run(rank_calls.tell_news)
        wanted = {f"rank {rank} of 3: half of rank {rank}'s work is done" for rank in range(3)}
        wait_for(lambda: wanted <= set(caplog.messages))


def test_a_call_costs_little(team):
    """Not how little, which depends on the machine: `docs/measurements` has it."""
    root = root_of(team)
    for _ in range(200):
        root.run(rank_calls.nothing, list(range(30)))
    assert root.ask(rank_calls.process_id)[1:] == team.process_ids
