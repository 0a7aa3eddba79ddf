"""Pages of growing rows: a reference-counted allocator."""

from dspark.config.errors import DSparkError


class OutOfPagesError(DSparkError):
    """No free page is left; the caller preempts or refuses."""


class PageAllocator:
    """Hands out page numbers 0..num_pages-1; a page may be shared by forks and images."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free page, held once. Raises OutOfPagesError."""
        if not self._free:
            raise OutOfPagesError(
                f"all {self.num_pages} pages are in use: raise the number of pages or run fewer requests"
            )
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> int:
        """Hold a page once more."""
        if self._holders[page] < 1:
            raise AssertionError(f"page {page} is shared but not held")
        self._holders[page] += 1
        return page

    def release(self, page: int) -> None:
        """Give one hold back; the page is free when nobody holds it."""
        if self._holders[page] < 1:
            raise AssertionError(f"page {page} is released but not held")
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)

    def num_holders(self, page: int) -> int:
        """Requests and images that hold a page."""
        return self._holders[page]

    def check_integrity(self, held: dict[int, int]) -> None:
        """Assert that `held` (page -> holders) is exactly what the allocator believes."""
        expected = [held.get(page, 0) for page in range(self.num_pages)]
        assert expected == self._holders, f"page holders differ: {expected} against {self._holders}"
        free = sorted(self._free)
        assert free == [page for page in range(self.num_pages) if expected[page] == 0], "free list differs from holders"
