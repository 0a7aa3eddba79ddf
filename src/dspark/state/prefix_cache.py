"""Cached prefixes: pages shared by the content of whole blocks, and images of the state at chosen positions.

A prefix can be continued only from a position with an image, because the windows of all layers cannot be rebuilt from
pages. A hit restores the state bit for bit, drafter included, and reruns nothing before the image.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from dspark.state.model_state import ModelState, RequestState, StateImage

_DIGEST_BYTES = 32

Key = tuple[bytes, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """Counts since the start.

    Attributes:
        lookups, hits: requests that asked, and that found something.
        prompt_tokens, cached_tokens: tokens of those requests, and how many of them were found.
        images, image_bytes: held now.
        evictions: images dropped for memory or pages.
    """

    lookups: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    image_bytes: int = 0
    evictions: int = 0


@dataclass
class PrefixChain:
    """Digests of a request's whole blocks; digest i covers blocks 0..i. Grows with the request's final tokens."""

    page_tokens: int
    digests: list[bytes] = field(default_factory=list)

    def key(self, token_ids: Sequence[int], length: int) -> Key:
        """Names the first `length` tokens: the digest of their whole blocks, and the tokens after those."""
        num_blocks = length // self.page_tokens
        self.extend(token_ids, num_blocks)
        before = self.digests[num_blocks - 1] if num_blocks else b""
        return before, tuple(token_ids[num_blocks * self.page_tokens : length])

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Digest the first blocks, as far as that has not been done."""
        while len(self.digests) < num_blocks:
            start = len(self.digests) * self.page_tokens
            block = np.asarray(token_ids[start : start + self.page_tokens], dtype=np.int64)
            before = self.digests[-1] if self.digests else b""
            self.digests.append(blake2b(before + block.tobytes(), digest_size=_DIGEST_BYTES).digest())


@dataclass(eq=False)
class CachedPrefix:
    """An image, the digests of its whole blocks, and the tokens after them."""

    key: Key
    image: StateImage
    digests: tuple[bytes, ...]


class PrefixCache:
    """Images of prefixes, least recently used first out.

    Args:
        state: holds pages and images.
        max_image_bytes: of saved ring rows; the pages are the state's own and give way when it needs them.
    """

    def __init__(self, state: ModelState, max_image_bytes: int) -> None:
        self.state = state
        self.max_image_bytes = max_image_bytes
        self._entries: OrderedDict[Key, CachedPrefix] = OrderedDict()
        self._tails: dict[bytes, dict[tuple[int, ...], CachedPrefix]] = {}
        self._pages: dict[bytes, tuple[int, int]] = {}  # digest of a block -> its page, images that share it
        self._holders: dict[int, int] = {}  # page -> images that hold it
        self._statistics = PrefixStatistics()

    @property
    def statistics(self) -> PrefixStatistics:
        """Counts since the start, and what is held now."""
        return replace(self._statistics, images=len(self._entries))

    def chain(self) -> PrefixChain:
        """Digests of a new request."""
        return PrefixChain(self.state.page_tokens)

    def find(self, chain: PrefixChain, token_ids: Sequence[int], max_len: int) -> StateImage | None:
        """The image of the longest cached prefix of at most `max_len` tokens; counts nothing and keeps the order."""
        entry = self._find(chain, token_ids, max_len)
        return entry.image if entry else None

    def take(self, chain: PrefixChain, token_ids: Sequence[int], max_len: int) -> StateImage | None:
        """`find`, counted as a lookup, and the image is now the most recently used."""
        entry = self._find(chain, token_ids, max_len)
        found = entry.image.committed if entry else 0
        if entry:
            self._entries.move_to_end(entry.key)
        counts = self._statistics
        self._statistics = replace(
            counts,
            lookups=counts.lookups + 1,
            hits=counts.hits + bool(found),
            prompt_tokens=counts.prompt_tokens + len(token_ids),
            cached_tokens=counts.cached_tokens + found,
        )
        return entry.image if entry else None

    def _find(self, chain: PrefixChain, token_ids: Sequence[int], max_len: int) -> CachedPrefix | None:
        page_tokens = self.state.page_tokens
        for num_blocks in range(max_len // page_tokens, -1, -1):
            before, _ = chain.key(token_ids, num_blocks * page_tokens)
            rest = tuple(token_ids[num_blocks * page_tokens : min((num_blocks + 1) * page_tokens, max_len)])
            fitting = [tail for tail in self._tails.get(before, ()) if tail == rest[: len(tail)]]
            if fitting:
                return self._tails[before][max(fitting, key=len)]
        return None

    def shared_len(self, chain: PrefixChain, token_ids: Sequence[int]) -> int:
        """Tokens of the leading blocks that some image holds: where this request parts from the others."""
        num_blocks = len(token_ids) // self.state.page_tokens
        chain.extend(token_ids, num_blocks)
        shared = 0
        while shared < num_blocks and chain.digests[shared] in self._pages:
            shared += 1
        return shared * self.state.page_tokens

    def keep(self, chain: PrefixChain, token_ids: Sequence[int], request: RequestState, at: int) -> None:
        """Save a request's state at a position, if it is not there yet; older images give way.

        Args:
            token_ids: the request's final tokens, at least `at` of them.
            at: see `ModelState.image`.
        """
        key = chain.key(token_ids, at)
        if at == 0 or key in self._entries:
            if key in self._entries:
                self._entries.move_to_end(key)
            return
        image = self.state.image(request, at)
        self._add(CachedPrefix(key, image, tuple(chain.digests[: at // self.state.page_tokens])))
        while self._statistics.image_bytes > self.max_image_bytes:
            self._drop(next(iter(self._entries.values())))

    def _add(self, entry: CachedPrefix) -> None:
        """Enter an image; its blocks that are cached already use the cached pages."""
        known = []
        for digest in entry.digests:
            if digest not in self._pages:
                break
            known.append(self._pages[digest][0])
        self.state.adopt_pages(entry.image, known)
        for digest, page in zip(entry.digests, entry.image.pages, strict=False):
            self._pages[digest] = (page, self._pages.get(digest, (page, 0))[1] + 1)
        for page in entry.image.pages:
            self._holders[page] = self._holders.get(page, 0) + 1
        self._entries[entry.key] = entry
        self._tails.setdefault(entry.key[0], {})[entry.key[1]] = entry
        self._count_bytes(entry.image.ring_bytes)

    def _drop(self, entry: CachedPrefix) -> None:
        del self._entries[entry.key]
        tails = self._tails[entry.key[0]]
        del tails[entry.key[1]]
        if not tails:
            del self._tails[entry.key[0]]
        for digest in entry.digests:
            page, count = self._pages.pop(digest)
            if count > 1:
                self._pages[digest] = (page, count - 1)
        for page in entry.image.pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
        self._count_bytes(-entry.image.ring_bytes)
        self._statistics = replace(self._statistics, evictions=self._statistics.evictions + 1)
        self.state.drop(entry.image)

    def _count_bytes(self, change: int) -> None:
        self._statistics = replace(self._statistics, image_bytes=self._statistics.image_bytes + change)

    def is_reclaimable(self, page: int) -> bool:
        """Whether images alone hold a page."""
        return page in self._holders and self.num_other_holders(page) == 0

    def num_other_holders(self, page: int) -> int:
        """Holders of a page that are no images of the cache."""
        return self.state.pages.num_holders(page) - self._holders.get(page, 0)

    @property
    def num_reclaimable(self) -> int:
        """Pages that would be free without the cache."""
        return sum(map(self.is_reclaimable, self._holders))

    def make_room(self, num_pages: int) -> bool:
        """Drop images until so many pages are free; False, dropping none, where that cannot be reached."""
        free = self.state.pages
        if free.num_free + self.num_reclaimable < num_pages:
            return False
        for entry in list(self._entries.values()):
            if free.num_free >= num_pages:
                break
            if any(map(self.is_reclaimable, entry.image.pages)):
                self._drop(entry)
        return True

    def clear(self) -> int:
        """Drop everything; returns how many images there were."""
        entries = list(self._entries.values())
        for entry in entries:
            self._drop(entry)
        return len(entries)

    def check_integrity(self) -> None:
        """Assert that the indexes agree with the images."""
        entries = self._entries.values()
        assert sum(map(len, self._tails.values())) == len(entries), "images without a tail entry, or the reverse"
        assert self._statistics.image_bytes == sum(entry.image.ring_bytes for entry in entries), "bytes are miscounted"
        holders: dict[int, int] = {}
        blocks: dict[bytes, int] = {}
        for entry in entries:
            assert entry.image in self.state.images, "an image of the cache is not held by the state"
            for page in entry.image.pages:
                holders[page] = holders.get(page, 0) + 1
            for digest, page in zip(entry.digests, entry.image.pages, strict=False):
                assert self._pages[digest][0] == page, "an image holds another page than its block's"
                blocks[digest] = blocks.get(digest, 0) + 1
        assert holders == self._holders, "pages of images are miscounted"
        assert blocks == {digest: count for digest, (_, count) in self._pages.items()}, "blocks are miscounted"
