"""Teams of ranks for tests, and what is left of them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark.engine.ranks.failure import TimeLimits
from dspark.engine.ranks.team import Team

LIMITS = TimeLimits(call_s=2.0, setup_s=120.0)


@contextmanager
def team_of_ranks(size: int = 2, limits: TimeLimits = LIMITS) -> Iterator[Team]:
    """A team on the CPU that leaves no process behind."""
    team = Team(size, "cpu", limits)
    try:
        yield team
    finally:
        team.close()
        assert not any(map(is_alive, team.process_ids))


def is_alive(process_id: int) -> bool:
    """Whether a process runs; what has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Until something is so; it must become so soon."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    assert condition()
