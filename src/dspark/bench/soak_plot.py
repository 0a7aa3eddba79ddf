"""The soak report as a picture; needs the optional package matplotlib."""

from typing import Any

from dspark.bench.plot import as_png, new_figure
from dspark.bench.soak_report import SoakReport

_PANELS = (
    ("memory of the server", "MiB", (("resident", "rss_bytes", 2**20), ("cached images", "image_bytes", 2**20))),
    ("pages", "pages", (("held by requests", "num_held_pages", 1), ("of the cache alone", "num_cached_pages", 1))),
    ("requests", "requests", (("running", "num_running", 1), ("waiting", "num_waiting", 1))),
)


def plot_soak(report: SoakReport) -> bytes:
    """Draw memory, pages and requests over the time of the load.

    Returns:
        A PNG file's bytes.

    Raises:
        DSparkError: matplotlib is not installed.
    """
    figure = new_figure(14.0, 3.8)
    for axes, (title, unit, series) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for label, name, scale in series:
            _draw(axes, report, label, name, scale)
        axes.set_title(title)
        axes.set_xlabel("seconds of load")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    return as_png(figure)


def _draw(axes: Any, report: SoakReport, label: str, name: str, scale: int) -> None:
    points = [(sample.at_s, getattr(sample, name)) for sample in report.log.samples]
    known = [(at, value / scale) for at, value in points if value is not None]
    axes.plot([at for at, _ in known], [value for _, value in known], linewidth=0.8, label=label)
