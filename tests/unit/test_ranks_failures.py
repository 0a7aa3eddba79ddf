"""A team of ranks ends as a whole: within seconds, with one sentence, with no process left."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from dspark.engine.ranks.failure import RankError, TimeLimits
from dspark.engine.ranks.link import make_links
from dspark.engine.ranks.opening import root_of
from support import rank_calls
from support.rank_teams import is_alive, team_of_ranks, wait_for


class Listener:
    def __init__(self):
        self.heard = []

    def hear(self, error):
        self.heard.append(str(error))


def call_until(share, until):
    while time.monotonic() < until:
        share.run(rank_calls.total, 0.0)


def failure_of(team, share, provoke, seconds):
    """The error of the next calls after something was done to a rank, which must come soon."""
    share.run(rank_calls.total, 0.0)
    began = time.monotonic()
    provoke()
    with pytest.raises(RankError) as caught:
        call_until(share, began + 20.0)
    assert time.monotonic() - began < seconds
    wait_for(lambda: not any(map(is_alive, team.process_ids)))
    with pytest.raises(RankError, match=r"the engine has ended on all ranks"):
        share.run(rank_calls.total, 0.0)
    return str(caught.value)


def test_a_killed_follower_ends_the_team():
    listener = Listener()
    with team_of_ranks(3) as team:
        team.on_failure(listener.hear)
        share = root_of(team).derive(rank_calls.make_number, 0.0)
        told = failure_of(team, share, lambda: os.kill(team.process_ids[1], signal.SIGKILL), 5.0)
    assert "rank 2 of 3 has ended by signal SIGKILL" in told
    assert listener.heard == [told]


def test_a_stopped_follower_ends_the_team():
    with team_of_ranks() as team:
        share = root_of(team).derive(rank_calls.make_number, 0.0)
        told = failure_of(team, share, lambda: os.kill(team.process_ids[0], signal.SIGSTOP), 8.0)
    assert "rank 1 of 2 has not answered for" in told


def test_a_follower_that_stands_still_ends_the_team():
    with team_of_ranks() as team:
        root = root_of(team)
        root.run(rank_calls.stall, 1, 0.0)
        share = root.derive(rank_calls.make_number, 0.0)
        told = failure_of(team, share, lambda: root.run(rank_calls.stall, 1, 60.0), 8.0)
    assert "rank 1 of 2 stands still: stall has been running for" in told


def test_a_first_call_may_take_longer():
    with team_of_ranks(limits=TimeLimits(call_s=1.0, setup_s=60.0)) as team:
        root = root_of(team)
        root.run(rank_calls.stall, 1, 3.0)
        assert len(root.ask(rank_calls.process_id)) == 2


def test_an_error_of_a_follower_is_told():
    with team_of_ranks() as team:
        with pytest.raises(RankError, match="rank 1 of 2 has failed: ArithmeticError: no such number"):
            root_of(team).derive(rank_calls.fail_on, 1)
        wait_for(lambda: not any(map(is_alive, team.process_ids)))


def test_an_error_of_rank_0_is_its_own_and_ends_the_team():
    with team_of_ranks() as team:
        with pytest.raises(ArithmeticError):
            root_of(team).derive(rank_calls.fail_on, 0)
        wait_for(lambda: not any(map(is_alive, team.process_ids)))


PROGRAM = """
import os, sys, time
from dspark.engine.ranks.failure import TimeLimits
from dspark.engine.ranks.opening import root_of
from dspark.engine.ranks.team import team_of
from support import rank_calls
team = team_of(2, "cpu", TimeLimits(2.0, 120.0))
share = root_of(team).derive(rank_calls.make_number, 0.0)
print(*team.process_ids, flush=True)
while {condition}:
    share.run(rank_calls.total, 0.0)
"""


@contextmanager
def program(condition):
    """A program with a team, started without a guard of its main module, and the processes of its followers."""
    command = [sys.executable, "-c", PROGRAM.format(condition=condition)]
    path = os.pathsep.join(part for part in sys.path if part)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        followers = [int(part) for part in process.stdout.readline().split()]
        assert followers, process.stderr.read()
        yield process, followers
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "sentence"), [(signal.SIGKILL, "rank 0 has ended"), (signal.SIGSTOP, "rank 0 has not answered for")]
)
def test_followers_end_with_rank_0(number, sentence):
    with program("True") as (process, followers):
        process.send_signal(number)
        wait_for(lambda: not any(map(is_alive, followers)))
        process.kill()
        assert sentence in process.stderr.read()


def test_a_follower_that_nobody_calls_ends_quietly():
    """Rank 0 may be gone before its followers have learnt where they sit."""
    link, others = make_links()
    ends = [end.fileno() for end in others]
    command = [sys.executable, "-c", "from dspark.engine.ranks.follower import main; main()", *map(str, ends)]
    path = os.pathsep.join(part for part in sys.path if part)
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, pass_fds=ends, stderr=subprocess.PIPE, text=True, env=environment)
    for end in others:
        end.close()
    link.close()
    assert process.wait(60) == 0 and process.stderr.read() == ""


def test_ctrl_c_ends_all():
    with program("True") as (process, followers):
        process.send_signal(signal.SIGINT)
        process.wait(20)
        assert "KeyboardInterrupt" in process.stderr.read()
        wait_for(lambda: not any(map(is_alive, followers)))


def test_the_end_of_a_program_is_quiet():
    with program("False") as (process, followers):
        assert process.wait(20) == 0
        assert "rank" not in process.stderr.read()
        wait_for(lambda: not any(map(is_alive, followers)))
