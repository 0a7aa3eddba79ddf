"""Which replica gets a prompt: the one that has most of its prefix cached, unless it is much busier than another."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from dspark.state.prefix_cache import PrefixChain

_MAX_BLOCKS = 65_536


class PrefixAffinity:
    """Remembers which replica was given which blocks of tokens; the oldest are forgotten.

    Args:
        page_tokens: tokens of a block.
        slack: how many more requests than the least busy replica the one with the prefix may have.
        max_blocks: blocks that are remembered.
    """

    def __init__(self, page_tokens: int, slack: int, max_blocks: int = _MAX_BLOCKS) -> None:
        self.page_tokens = page_tokens
        self.slack = slack
        self.max_blocks = max_blocks
        self._owners: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, prompt_ids: Sequence[int], loads: Mapping[int, int]) -> int:
        """The replica for a prompt, remembered as the owner of its blocks.

        Args:
            prompt_ids: token ids.
            loads: requests of each replica that is up; at least one.
        """
        chain = PrefixChain(self.page_tokens)
        chain.extend(prompt_ids, len(prompt_ids) // self.page_tokens)
        least = min(loads.values())
        chosen = min(loads, key=lambda replica: (loads[replica], replica))
        for digest in reversed(chain.digests):
            owner = self._owners.get(digest, -1)
            if owner in loads and loads[owner] - least <= self.slack:
                chosen = owner
                break
        for digest in chain.digests:
            self._owners[digest] = chosen
            self._owners.move_to_end(digest)
        while len(self._owners) > self.max_blocks:
            self._owners.popitem(last=False)
        return chosen

    def forget(self, replica: int) -> None:
        """A replica has lost its cache."""
        for digest in [digest for digest, owner in self._owners.items() if owner == replica]:
            del self._owners[digest]
