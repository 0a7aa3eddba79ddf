"""The host's channel between rank 0 and one follower: two socket pairs, one for calls and one for signs of life."""

import pickle
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Call:
    """A function that every rank runs on its own part.

    Attributes:
        part: number of the part; 0 is the rank's own place.
        function: found by its name in the follower, so it belongs to a module.
        args: plain values; a tensor never crosses.
        limit_s: how long it may take.
        wants_reply: whether rank 0 waits for what it returns.
        makes: number under which a follower keeps what it returns as another part; 0 for none.
        forgets: parts that are gone.
    """

    part: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    limit_s: float
    wants_reply: bool = False
    makes: int = 0
    forgets: tuple[int, ...] = ()


class Link:
    """One end of a channel."""

    def __init__(self, calls_fd: int, beats_fd: int) -> None:
        self.calls = Connection(calls_fd)
        self.beats = Connection(beats_fd)

    def close(self) -> None:
        """Let the other end read the end of both."""
        self.calls.close()
        self.beats.close()


def encode(call: Call) -> bytes:
    """A call as bytes; made once for all followers."""
    fields = (call.part, call.function, call.args, call.limit_s, call.wants_reply, call.makes, call.forgets)
    return pickle.dumps(fields, protocol=pickle.HIGHEST_PROTOCOL)


def decode(message: bytes) -> Call:
    """The call that `encode` was given."""
    return Call(*pickle.loads(message))


def make_links() -> tuple[Link, tuple[socket.socket, socket.socket]]:
    """A link for rank 0, and the sockets of the other end, which one process inherits and nobody else."""
    calls, other_calls = socket.socketpair()
    beats, other_beats = socket.socketpair()
    return Link(calls.detach(), beats.detach()), (other_calls, other_beats)
