"""A state image in a file, and in the stores of another engine: rings as they are, pages by their rows."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.engine.ranks.state import RankedState
from dspark.state.model_state import ModelState, StateImage


def write_image(file: Path, state: ModelState, image: StateImage) -> None:
    """Save an image with the rows of its pages."""
    tensors = {f"ring.{key}": rows.contiguous() for key, rows in image.rings.items()}
    for key, rows in state.appends.items():
        tensors[f"rows.{key}"] = torch.cat([rows[_rows_of(state, key, page)] for page in image.pages])
    tensors["committed"] = torch.tensor([image.committed])
    save_file(tensors, file)


def read_image(file: Path, state: ModelState) -> StateImage:
    """Bring a saved image into a state of the same geometry; it holds pages of its own until it is dropped.

    Raises:
        OutOfPagesError: too few pages are free.
    """
    committed = int(load_file(file)["committed"])
    holder = state.open()
    state.reserve(holder, committed)
    pages = [state.pages.share(page) for page in holder.pages]
    image = StateImage(committed, read_rows(state, file, pages), pages)
    state.images.append(image)
    state.close(holder)
    if isinstance(state, RankedState):
        state.adopt(image, read_rows, file, pages)
    return image


def read_rows(state: ModelState, file: Path, pages: list[int]) -> dict[str, Tensor]:
    """Fill pages with the rows of a saved image; returns its ring rows."""
    tensors = load_file(file)
    for key, rows in state.appends.items():
        _fill_pages(state, key, rows, pages, tensors[f"rows.{key}"])
    return {key: tensors[f"ring.{key}"].to(state.device) for key in state.rings}


def _fill_pages(state: ModelState, key: str, rows: Tensor, pages: list[int], saved: Tensor) -> None:
    """Copy saved rows, page after page, to where the pages lie now."""
    for page, part in zip(pages, saved.split(state.page_tokens // state.append_ratios[key]), strict=True):
        rows[_rows_of(state, key, page)] = part.to(rows.device)


def _rows_of(state: ModelState, key: str, page: int) -> slice:
    """Rows of a page; page 3 of a ratio-2 store with 64 tokens a page has rows 96 to 127."""
    count = state.page_tokens // state.append_ratios[key]
    return slice(page * count, (page + 1) * count)
