"""Memory that a benchmark of a whole model needs, checked before anything is made."""

import os
from dataclasses import dataclass

import torch

from dspark.bench.dummy_weights import model_bytes
from dspark.bench.geometry import Geometry
from dspark.config import Config
from dspark.config.errors import DSparkError
from dspark.engine.assembly import INDEX_DTYPE
from dspark.engine.device import TORCH_DTYPES, Placement
from dspark.models.facts import model_facts
from dspark.state.geometry import page_bytes, rewind_rows, ring_rows, state_geometry

# For graphs, activations of a prefill chunk, and what the allocator cannot hand out again.
_DEVICE_MARGIN = 6 * 10**9
_HOST_MARGIN = 10**9


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of the weights and of one request's state, and what is available for both."""

    weights: int
    request: int
    available: int

    @property
    def num_requests(self) -> int:
        """Requests that fit beside the weights."""
        return max(self.available - self.weights, 0) // self.request


def check_memory(geometry: Geometry, config: Config, placement: Placement) -> MemoryNeed:
    """What a model and its requests take.

    Raises:
        DSparkError: they do not fit; the message says what does.
    """
    need = MemoryNeed(
        model_bytes(geometry.plan, placement.ops), request_bytes(geometry, config), available_bytes(placement.device)
    )
    needed = need.weights + config.max_num_seqs * need.request
    if needed > need.available:
        num_layers = len(geometry.plan.layers)
        fitting = int(num_layers * max(need.available - config.max_num_seqs * need.request, 0) / need.weights)
        parts = (
            f"{need.weights / 1e9:.1f} of weights, {need.request / 1e9:.3f} for each of {config.max_num_seqs} requests"
        )
        raise DSparkError(
            f"{geometry.name} with {num_layers} layers needs {needed / 1e9:.1f} GB ({parts}) and "
            f"{need.available / 1e9:.1f} GB are free beside a margin: lower --layers to about {fitting}, or lower "
            "--requests, --context or --engram-rows"
        )
    return need


def request_bytes(geometry: Geometry, config: Config) -> int:
    """State of one request at the full length of a configuration."""
    stores = state_geometry(geometry.plan)
    assert config.max_model_len is not None
    pages = request_pages(geometry, config.max_model_len)
    value_bytes = TORCH_DTYPES[config.kv_cache_dtype].itemsize
    queries = 1 + config.draft_width(model_facts(geometry.plan))
    rewind = rewind_rows(stores, reuses_prefixes=config.enable_prefix_caching)
    rings = sum(ring_rows(ring, queries, rewind) * ring.width * value_bytes for ring in stores.windows)
    rings += sum(ring_rows(ring, queries, rewind) * ring.width * 4 for ring in stores.tails)
    return pages * page_bytes(stores, value_bytes, INDEX_DTYPE.itemsize) + rings


def request_pages(geometry: Geometry, max_len: int) -> int:
    """Pages for one request of so many tokens, with those that admission keeps free for it to grow into."""
    return -(-max_len // state_geometry(geometry.plan).page_tokens) + 2


def available_bytes(device: torch.device) -> int:
    """Free memory of a device, less a margin."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) - _DEVICE_MARGIN
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") - _HOST_MARGIN
