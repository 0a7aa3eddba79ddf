"""How an engine shares memory out: weights, what passes work in, state, and a margin that stays free."""

from dataclasses import asdict, dataclass
from typing import Any

from dspark.config import Config
from dspark.config.errors import ConfigError
from dspark.engine.device_memory import Room
from dspark.state.geometry import StateSizes

_GIB = 2**30
# The most that images of prefixes may take of what is left beside the weights.
_IMAGE_SHARE = 0.125


@dataclass(frozen=True)
class MemoryPlan:
    """Who holds what, in bytes; of one rank where several share the model.

    Attributes:
        place: the device, in words. total: of it.
        weights: of target and draft.
        slots: what all requests hold whatever their length.
        images: of prefixes, at most.
        workspaces: what passes work in, graphs included; 0 where the margin must hold it.
        is_measured: whether `workspaces` was measured, by running the largest passes.
        margin: what stays free. left: what nobody needs.
        num_slots: requests that run at once. max_len: tokens of a request at most.
        page_bytes, page_tokens, num_pages: of growing rows.
        num_ranks: that hold as much each.
    """

    place: str
    total: int
    weights: int
    slots: int
    images: int
    workspaces: int
    is_measured: bool
    margin: int
    left: int
    num_slots: int
    max_len: int
    page_bytes: int
    page_tokens: int
    num_pages: int
    num_ranks: int = 1

    @property
    def state(self) -> int:
        """Rings, pages and images."""
        return self.slots + self.images + self.num_pages * self.page_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of all pages."""
        return self.num_pages * self.page_tokens

    @property
    def num_full_requests(self) -> int:
        """Requests of full length that run at once."""
        return min(self.num_slots, self.num_pages // pages_for(self.max_len, self.page_tokens))

    @property
    def num_possible(self) -> int:
        """Requests of full length that would fit, had they slots."""
        each = self.slots // self.num_slots + pages_for(self.max_len, self.page_tokens) * self.page_bytes
        return self.num_full_requests + self.left // each

    def sentence(self) -> str:
        """For people."""
        passes = gib(self.workspaces) if self.is_measured else "not measured, but in the margin"
        holder = f"each of {self.num_ranks} ranks has " if self.num_ranks > 1 else ""
        return (
            f"{self.num_full_requests} of {self.num_slots} requests of up to {self.max_len} tokens fit at once, "
            f"{self.num_tokens} tokens of pages in all; {holder}weights {gib(self.weights)}, state {gib(self.state)}, "
            f"graphs and workspaces {passes}, margin {gib(self.margin)}, {gib(self.left)} left of the "
            f"{gib(self.total)} of {self.place}"
        )

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        more = ("state", "num_tokens", "num_full_requests", "num_possible")
        return asdict(self) | {name: getattr(self, name) for name in more}


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages of a request of so many tokens."""
    return -(-num_tokens // page_tokens)


def gib(num_bytes: float) -> str:
    """Three digits in GiB."""
    return f"{num_bytes / _GIB:.3g} GiB"


def _or_raise(room: Room) -> str:
    """The remedy that a setting of the margin is."""
    return f"raise {room.margin_setting}, " if room.margin_setting else ""


def require_weights_fit(room: Room, weights: int) -> None:
    """Refuse a model before it is read. Raises ConfigError."""
    if weights > room.spendable:
        raise ConfigError(
            f"the weights need {gib(weights)}, and of the {gib(room.total)} of {room.place} {gib(room.free)} are free, "
            f"with a margin of {gib(room.margin)} to keep: free some, {_or_raise(room)}use a larger device, or divide "
            "the model by tensor_parallel_size"
        )


def plan_memory(
    config: Config, sizes: StateSizes, room: Room, *, weights: int, max_len: int, workspaces: int, is_measured: bool
) -> MemoryPlan:
    """Share out what is left beside the weights.

    Pages are made for every request at full length, or as many as fit.

    Args:
        config: says how many requests run, and may say how many pages there are.
        sizes: of state. room: with the weights in place. weights: for the record.
        max_len: tokens of a request at most.
        workspaces: what passes work in, see `MemoryPlan`.
    Raises:
        ConfigError: not even one request of full length fits, or not the pages that are asked for.
    """
    slots = config.max_num_seqs * sizes.slot_bytes
    images = min(config.prefix_cache_bytes, int(room.spendable * _IMAGE_SHARE))
    left = room.spendable - slots - images - workspaces
    if left < 0:
        raise ConfigError(
            f"beside the weights {gib(room.spendable)} are left on {room.place}: rings of {config.max_num_seqs} "
            f"requests take {gib(slots)} and passes {gib(workspaces)}; {_or_raise(room)}lower max_num_seqs or "
            "max_num_batched_tokens"
        )
    fitting = left // sizes.page_bytes if sizes.page_bytes else None
    num_pages = _num_pages(config, sizes, fitting, max_len, left)
    return MemoryPlan(
        place=room.place,
        total=room.total,
        weights=weights,
        slots=slots,
        images=images,
        workspaces=workspaces,
        is_measured=is_measured,
        margin=room.margin,
        left=left - num_pages * sizes.page_bytes,
        num_slots=config.max_num_seqs,
        max_len=max_len,
        page_bytes=sizes.page_bytes,
        page_tokens=sizes.page_tokens,
        num_pages=num_pages,
        num_ranks=config.tensor_parallel_size,
    )


def _num_pages(config: Config, sizes: StateSizes, fitting: int | None, max_len: int, left: int) -> int:
    """As many as asked for, or for every request at full length, or as many as fit; `fitting` is None without limit."""
    for_one = pages_for(max_len, sizes.page_tokens)
    wanted = config.max_num_pages or config.max_num_seqs * for_one
    if fitting is None or wanted <= fitting:
        return wanted
    if config.max_num_pages is not None and fitting:
        raise ConfigError(f"max_num_pages {wanted} take {gib(wanted * sizes.page_bytes)}: {fitting} fit, use that")
    if not fitting:
        raise ConfigError(
            f"{gib(left)} are left for pages and one of {sizes.page_tokens} tokens takes {gib(sizes.page_bytes)}: free "
            "memory, or lower max_num_seqs or max_num_batched_tokens"
        )
    if fitting < for_one:
        raise ConfigError(
            f"a request of max_model_len {max_len} tokens needs {gib(for_one * sizes.page_bytes)} of pages and "
            f"{gib(left)} are left for them: set max_model_len to {fitting * sizes.page_tokens} or less"
        )
    return fitting
