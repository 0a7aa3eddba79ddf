"""What a server under a soak run holds: memory, pages, images, requests, second by second, and whether it grows."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.bench.bootstrap import Interval
from dspark.bench.serve_scrape import read_samples

_BIN_S = 10.0
_BLOCK_BINS = 6
_NUM_RESAMPLES = 2000
_MIN_BINS = 12
# A leak is growth that is sure and that matters: its interval lies above this share of the memory at the start.
MAX_GROWTH_SHARE = 0.02


@dataclass(frozen=True)
class Sample:
    """One moment; None where the server or the system does not tell.

    Attributes:
        at_s: since the start of the load.
        rss_bytes, num_files, num_threads: of the server's process.
        num_running, num_waiting: requests with state, and without.
        num_pages, num_free_pages, num_cached_pages: in all, held by nobody, held by the prefix cache alone.
        num_images, image_bytes: of the prefix cache.
        num_steps, num_preemptions: since the server's start.
    """

    at_s: float
    rss_bytes: int | None = None
    num_files: int | None = None
    num_threads: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    num_pages: int | None = None
    num_free_pages: int | None = None
    num_cached_pages: int | None = None
    num_images: int | None = None
    image_bytes: int | None = None
    num_steps: int | None = None
    num_preemptions: int | None = None

    @property
    def num_held_pages(self) -> int | None:
        """Pages that neither lie free nor belong to the prefix cache alone."""
        if self.num_pages is None or self.num_free_pages is None or self.num_cached_pages is None:
            return None
        return self.num_pages - self.num_free_pages - self.num_cached_pages

    @property
    def is_idle(self) -> bool:
        """No request is there."""
        return self.num_running == 0 and self.num_waiting == 0


def read_sample(at_s: float, pid: int | None, engine_page: str | None, metrics_page: str | None) -> Sample:
    """Put a sample together.

    Args:
        at_s: seconds since the start of the load.
        pid: of the server, where this machine runs it; else its memory is what its metrics say.
        engine_page: of /debug/engine.
        metrics_page: of /metrics.
    """
    loop = _loop_of(engine_page)
    prefix = loop.get("prefix") or {}
    return Sample(
        at_s,
        **_process(pid) if pid is not None else {"rss_bytes": _told_rss(metrics_page)},
        num_images=_int(prefix.get("images")),
        image_bytes=_int(prefix.get("image_bytes")),
        **{name: _int(loop.get(name)) for name in _LOOP_FIELDS},
    )


_LOOP_FIELDS = (
    *("num_running", "num_waiting", "num_pages", "num_free_pages", "num_cached_pages"),
    *("num_steps", "num_preemptions"),
)


def _loop_of(page: str | None) -> Mapping[str, Any]:
    try:
        value = json.loads(page or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    inner = value.get("loop")
    return inner if isinstance(inner, dict) else value


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _process(pid: int) -> dict[str, int | None]:
    """Memory, open files and threads of a process, where the system shows them."""
    folder = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        files = len(list((folder / "fd").iterdir()))
        rss = int(status["VmRSS"].split()[0]) * 1024
        return {"rss_bytes": rss, "num_files": files, "num_threads": int(status["Threads"])}
    except (OSError, KeyError, ValueError):
        return {"rss_bytes": None, "num_files": None, "num_threads": None}


def _told_rss(page: str | None) -> int | None:
    for name, _, value in read_samples(page or ""):
        if name == "process_resident_memory_bytes":
            return int(value)
    return None


@dataclass(frozen=True)
class Trend:
    """Growth of a quantity over a stretch.

    Attributes:
        start: its level at the beginning, by the fitted line.
        growth: over the whole stretch.
        interval: of the growth, 95 %.
        stretch_s: its length.
    """

    start: float
    growth: float
    interval: Interval
    stretch_s: float

    @property
    def is_flat(self) -> bool:
        """The growth is not sure, or too small to matter."""
        return self.interval[0] <= MAX_GROWTH_SHARE * self.start


def trend_of(samples: Sequence[Sample], value_of: Callable[[Sample], int | None], from_s: float) -> Trend | None:
    """Fit a line to the medians of ten-second bins.

    Samples in a row resemble each other, so the interval comes from resampling the residuals in blocks of a minute.

    Args:
        samples: in order of time.
        value_of: the quantity.
        from_s: where the warm-up ends.

    Returns:
        None with fewer than two minutes of values.
    """
    values = [(sample.at_s, value) for sample in samples if (value := value_of(sample)) is not None]
    known = np.array([pair for pair in values if pair[0] >= from_s], dtype=np.float64).reshape(-1, 2)
    bins = np.unique((known[:, 0] // _BIN_S).astype(np.int64))
    if len(bins) < _MIN_BINS:
        return None
    number = (known[:, 0] // _BIN_S).astype(np.int64)
    levels = np.array([np.median(known[number == one, 1]) for one in bins])
    times = (bins - bins[0]) * _BIN_S
    slope, start = np.polyfit(times, levels, 1)
    stretch = float(times[-1])
    slopes = _resampled_slopes(times, start + slope * times, levels - start - slope * times)
    low, high = np.percentile(slopes, (2.5, 97.5))
    return Trend(float(start), float(slope * stretch), (float(low * stretch), float(high * stretch)), stretch)


def _resampled_slopes(
    times: NDArray[np.float64], line: NDArray[np.float64], residuals: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Slopes of lines through the fitted one with residuals drawn in blocks, so that their likeness in time stays."""
    count = len(times)
    random = np.random.default_rng(0)
    starts = random.integers(0, count - _BLOCK_BINS + 1, (_NUM_RESAMPLES, -(-count // _BLOCK_BINS)))
    chosen = (starts[..., None] + np.arange(_BLOCK_BINS)).reshape(_NUM_RESAMPLES, -1)[:, :count]
    levels = line + residuals[chosen]
    centred = times - times.mean()
    return (levels @ centred) / (centred @ centred)


def columns_of(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The samples for JSON: a list for each quantity."""
    names = [field.name for field in fields(Sample)]
    rows = [astuple(sample) for sample in samples]
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}
