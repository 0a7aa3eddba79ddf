"""Model geometries by name or file, and plans cut to what one device holds.

The package carries the keys and values of released configurations; a file may be any config.json of a known family.
"""

import json
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from dspark.config.errors import DSparkError
from dspark.layers.plans import EngramPlan, LayerPlan, ModelPlan
from dspark.models.registry import parse_config


@dataclass(frozen=True)
class Geometry:
    """A plan, and what it is called. `cuts` says in words what was left out of it."""

    name: str
    plan: ModelPlan
    cuts: tuple[str, ...] = ()


def geometry_names() -> list[str]:
    """Names of the geometries in the package."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def read_geometry(name: str, num_layers: int | None = None, engram_rows: int | None = None) -> Geometry:
    """A geometry by its name in the package, or from a config.json.

    Args:
        name: one of `geometry_names`, or the path of a file.
        num_layers: the first so many layers only; None takes all.
        engram_rows: rows of each Engram table at most; None takes all.
    Raises:
        DSparkError: there is no such name or file, it describes no known model, or it has fewer layers.
    """
    path = _folder() / f"{name}.json" if name in geometry_names() else Path(name)
    geometry = Geometry(path.stem if path.stem != "config" else path.parent.name, parse_config(_read(path, name)))
    if num_layers is not None:
        geometry = cut_layers(geometry, num_layers)
    return geometry if engram_rows is None else cut_engram(geometry, engram_rows)


def cut_layers(geometry: Geometry, num_layers: int) -> Geometry:
    """The first layers; the draft then reads the last ones of them.

    Raises:
        DSparkError: there are not so many layers, or fewer than the draft reads.
    """
    plan = geometry.plan
    least = len(plan.draft.target_layer_ids) if plan.draft else 1
    if not least <= num_layers <= len(plan.layers):
        raise DSparkError(f"--layers is {num_layers}: {geometry.name} can be cut to {least} to {len(plan.layers)}")
    if num_layers == len(plan.layers):
        return geometry
    layers, draft = plan.layers[:num_layers], plan.draft
    if draft is not None:
        draft = replace(draft, target_layer_ids=tuple(range(num_layers - least, num_layers)))
    ngrams = plan.ngrams if any(layer.engram for layer in layers) else None
    cut = f"{num_layers} of {len(plan.layers)} layers"
    return Geometry(geometry.name, replace(plan, layers=layers, draft=draft, ngrams=ngrams), (*geometry.cuts, cut))


def cut_engram(geometry: Geometry, max_rows: int) -> Geometry:
    """Engram tables of at most `max_rows` rows: as many look-ups of rows as long, in less memory.

    Raises:
        DSparkError: a table would have fewer rows than look-ups.
    """
    layers, cuts = [], []
    for layer in geometry.plan.layers:
        if layer.engram is not None and layer.engram.num_rows > max_rows:
            smaller = _smaller_table(layer, layer.engram, max_rows)
            cuts.append(f"Engram table of layer {layer.index}: {smaller.num_rows:,} of {layer.engram.num_rows:,} rows")
            layer = replace(layer, engram=smaller)
        layers.append(layer)
    return Geometry(geometry.name, replace(geometry.plan, layers=tuple(layers)), (*geometry.cuts, *cuts))


def _smaller_table(layer: LayerPlan, engram: EngramPlan, max_rows: int) -> EngramPlan:
    """Each hash goes into an equal part of the table; the parts need no prime numbers of rows to be timed."""
    count = sum(len(heads) for heads in engram.primes)
    part = max_rows // count
    if part < 1:
        raise DSparkError(f"--engram-rows is {max_rows}: layer {layer.index} looks {count} rows up for each token")
    offsets = iter(range(0, count * part, part))
    return replace(
        engram,
        num_rows=count * part,
        primes=tuple(tuple(part for _ in heads) for heads in engram.primes),
        offsets=tuple(tuple(next(offsets) for _ in heads) for heads in engram.primes),
    )


def _folder() -> Path:
    return Path(str(files("dspark"))) / "assets" / "geometries"


def _read(path: Path, name: str) -> dict[str, Any]:
    if not path.is_file():
        raise DSparkError(f"{name} is no geometry and no file: give {' or '.join(geometry_names())}, or a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DSparkError(f"{path} cannot be read as JSON ({error}): give the config.json of a model") from error
    if not isinstance(config, dict):
        raise DSparkError(f"{path} is not a JSON object: give the config.json of a model")
    return config
