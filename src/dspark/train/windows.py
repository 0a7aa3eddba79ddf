"""Fixed-length training windows drawn from token arrays by domain: a pure function of (seed, step).

Nothing here has a position to save: the batch of step i is computed from i alone, so a run resumes at any step.
The tokens live on the training device (2 bytes each) and a batch is one gather.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from dspark.config.errors import DSparkError
from dspark.train.tokens import TokenArray

#: Share of the training tokens for each domain, in percent.
MIXTURE: dict[str, int] = {"code": 36, "docs": 22, "chat": 12, "math": 17, "prose": 13}


def plan_windows(starts: np.ndarray, num_tokens: int, window_len: int, offset: int = 0) -> np.ndarray:
    """Cut a flat token array into windows which prefer to begin where a document begins.

    A document that begins in the last quarter of a window and is cut there begins the next window, whole: with
    windows of 8 tokens and documents of 7 the windows begin at 0, 7, 14 and not at 0, 8, 16. So at most a
    quarter of the reading is repeated; a document cut elsewhere goes on in the next window.

    Args:
        starts: [documents] ascending first positions.
        num_tokens: length of the array.
        window_len: tokens of a window.
        offset: tokens skipped at the beginning; another value gives other windows of long documents.

    Returns:
        [windows] int64 first positions; the tokens after the last whole window are left out.

    Raises:
        DSparkError: not one window fits.
    """
    first = starts.tolist()
    windows: list[int] = []
    at = offset
    while at + window_len <= num_tokens:
        windows.append(at)
        end = at + window_len
        cut = first[bisect_right(first, end) - 1]
        at = cut if cut > at + window_len - max(1, window_len // 4) else end
    if not windows:
        raise DSparkError(
            f"{num_tokens - offset} tokens cannot fill a window of {window_len}: give more text or a smaller --seq-len"
        )
    return np.array(windows, dtype=np.int64)


def mixture_pattern(mixture: Mapping[str, int]) -> tuple[str, ...]:
    """Spread each domain evenly over sum(mixture) places: the domain of window j is pattern[j % len].

    Args:
        mixture: whole-number weights; all positive.

    Raises:
        DSparkError: there is no domain, or a weight is not positive.
    """
    if not mixture or any(weight < 1 for weight in mixture.values()):
        raise DSparkError(f"mixture weights must be positive whole numbers: {dict(mixture)}")
    places = [((k + 0.5) / weight, domain) for domain, weight in mixture.items() for k in range(weight)]
    return tuple(domain for _, domain in sorted(places))


class WindowSampler:
    """Decides which windows the batch of a step holds.

    Args:
        arrays: tokens of each domain.
        mixture: weight of each domain; see `mixture_pattern`.
        window_len: tokens of a window.
        seed: decides the order of the windows in every epoch of every domain.

    Raises:
        DSparkError: a domain of the mixture has no tokens.
    """

    def __init__(
        self, arrays: Mapping[str, TokenArray], mixture: Mapping[str, int], window_len: int, seed: int
    ) -> None:
        missing = sorted(set(mixture) - set(arrays))
        if missing:
            raise DSparkError(f"no tokens for the domains {', '.join(missing)} of the mixture")
        self.domains = tuple(mixture)
        self._arrays = [arrays[domain] for domain in self.domains]
        self._bases = np.concatenate(([0], np.cumsum([array.num_tokens for array in self._arrays])))
        self.window_len = window_len
        self._seed = seed
        pattern = [self.domains.index(domain) for domain in mixture_pattern(mixture)]
        self._pattern = np.array(pattern)
        # before[p, d]: windows of domain d among the first p places of the pattern.
        one_hot = np.eye(len(self.domains), dtype=np.int64)[self._pattern]
        self._before = np.concatenate((np.zeros((1, len(self.domains)), np.int64), one_hot.cumsum(0)))
        self._epoch_windows = lru_cache(maxsize=2 * len(self.domains))(self._shuffle_epoch)
        self._windows_per_epoch = [len(self._plan(index, 0)) for index in range(len(self.domains))]

    def flat_tokens(self) -> np.ndarray:
        """Return the tokens of all domains in one array, which the starts of `window_starts` index."""
        return np.concatenate([array.token_ids for array in self._arrays])

    def window_starts(self, step: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return first positions [B] in `flat_tokens` and domain indices [B] of the batch of a step."""
        place = np.arange(step * batch_size, (step + 1) * batch_size)
        rounds, inside = np.divmod(place, len(self._pattern))
        domain_index = self._pattern[inside]
        ordinal = rounds * self._before[-1, domain_index] + self._before[inside, domain_index]
        starts = [self._window(int(d), int(n)) for d, n in zip(domain_index, ordinal, strict=True)]
        return np.array(starts, dtype=np.int64), domain_index

    def epochs(self, num_windows: int) -> dict[str, float]:
        """Return how many times each domain has been read after num_windows windows of the mixture."""
        share = self._before[-1] / len(self._pattern)
        return {
            domain: num_windows * float(share[i]) / self._windows_per_epoch[i] for i, domain in enumerate(self.domains)
        }

    def _window(self, index: int, ordinal: int) -> int:
        epoch, at = divmod(ordinal, self._windows_per_epoch[index])
        return int(self._bases[index] + self._epoch_windows(index, epoch)[at])

    def _plan(self, index: int, epoch: int) -> np.ndarray:
        array = self._arrays[index]
        slack = max(0, array.num_tokens - self.window_len)
        offset = min((epoch * 5 * self.window_len // 13) % self.window_len, slack)
        return plan_windows(array.starts, array.num_tokens, self.window_len, offset)

    def _shuffle_epoch(self, index: int, epoch: int) -> np.ndarray:
        """Every epoch has as many windows as the first: missing ones are drawn again, surplus ones left out."""
        windows = np.random.default_rng((self._seed, index, epoch)).permutation(self._plan(index, epoch))
        return np.resize(windows, self._windows_per_epoch[index])


class TokenBatches:
    """Batches of token ids on a device.

    Args:
        sampler: which windows.
        batch_size: windows of a batch.
        device: where the flat tokens are kept and the batches appear.
    """

    def __init__(self, sampler: WindowSampler, batch_size: int, device: torch.device | str = "cpu") -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self._tokens = torch.from_numpy(sampler.flat_tokens()).to(device)
        self._reach = torch.arange(sampler.window_len, device=device)

    @property
    def tokens_per_batch(self) -> int:
        return self.batch_size * self.sampler.window_len

    def batch(self, step: int) -> torch.Tensor:
        """Return the batch of a step, [B, window_len] int64."""
        starts, _ = self.sampler.window_starts(step, self.batch_size)
        first = torch.from_numpy(starts).to(self._tokens.device, non_blocking=True)
        return self._tokens[first[:, None] + self._reach].long()


def heldout_batches(
    array: TokenArray, window_len: int, batch_size: int, num_batches: int, device: torch.device | str = "cpu"
) -> Iterator[torch.Tensor]:
    """Yield batches [batch_size, window_len] int64 of a domain's held-out windows, evenly spread over its text.

    Every batch is full, because a compiled model would be compiled again for another shape: a domain with too few
    windows gives fewer batches, and where it cannot fill one, some windows stand twice in it.
    """
    windows = plan_windows(array.starts, array.num_tokens, window_len)
    wanted = batch_size * max(1, min(num_batches, len(windows) // batch_size))
    picked = windows[np.linspace(0, len(windows) - 1, wanted).astype(int)]
    rows = picked[:, None] + np.arange(window_len)
    token_ids = torch.from_numpy(array.token_ids[rows].astype(np.int64))
    for part in token_ids.split(batch_size):
        yield part.to(device)


def describe_mixture(arrays: Mapping[str, TokenArray], domains: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return tokens, bytes and bytes per token of each domain, for the training record."""
    return {
        domain: {
            "tokens": arrays[domain].num_tokens,
            "bytes": arrays[domain].num_bytes,
            "bytes_per_token": round(arrays[domain].bytes_per_token, 3),
        }
        for domain in domains
    }
