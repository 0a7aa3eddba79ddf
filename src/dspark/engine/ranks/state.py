"""Stores of an engine on several ranks: rank 0 says what is copied, and every rank copies its own.

All stores hold the same rows on every rank, because keys have one head, which ranks do not divide.
"""

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from dspark.engine.ranks.share import Share
from dspark.state.model_state import ModelState, RequestState, StateImage


class Stores(Protocol):
    """What copies need of a rank's part. images: saved ring rows by number."""

    state: ModelState
    images: dict[int, dict[str, Tensor]]


class RankedState(ModelState):
    """Rank 0's stores, whose copies are made by all ranks.

    Attributes:
        share: set before the first request.
    """

    share: Share[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._numbers: WeakKeyDictionary[StateImage, int] = WeakKeyDictionary()
        self._num_images = 0

    def image(self, request: RequestState, at: int | None = None) -> StateImage:
        """See `ModelState.image`."""
        image = super().image(request, at)
        self.share.tell(save_image, self._number(image), request.slot, image.committed)
        return image

    def adopt(self, image: StateImage, load: Callable[..., dict[str, Tensor]], *args: Any) -> None:
        """Take in an image that rank 0 made by `load(state, *args)`, as every other rank does now."""
        self.share.ask(load_image, self._number(image), load, *args)

    def _number(self, image: StateImage) -> int:
        self._num_images += 1
        self._numbers[image] = self._num_images
        return self._num_images

    def drop(self, image: StateImage) -> None:
        """See `ModelState.drop`."""
        super().drop(image)
        self.share.tell(drop_image, self._numbers[image])

    def _fill(self, slot: int, image: StateImage) -> None:
        super()._fill(slot, image)
        self.share.tell(restore_image, self._numbers[image], slot, image.committed)

    def copy_page(self, source: int, target: int) -> None:
        """See `ModelState.copy_page`."""
        super().copy_page(source, target)
        self.share.tell(copy_page, source, target)


def save_image(part: Stores, number: int, slot: int, at: int) -> None:
    """Copy the ring rows of a slot as they were at a position."""
    part.images[number] = part.state.saved_rings(slot, at)


def load_image(part: Stores, number: int, load: Callable[..., dict[str, Tensor]], *args: Any) -> None:
    """Make an image by other means than a copy."""
    part.images[number] = load(part.state, *args)


def restore_image(part: Stores, number: int, slot: int, at: int) -> None:
    """Put the ring rows of an image into a slot."""
    part.state.restore_rings(part.images[number], slot, at)


def drop_image(part: Stores, number: int) -> None:
    """Forget an image."""
    del part.images[number]


def copy_page(part: Stores, source: int, target: int) -> None:
    """Copy the rows of a page."""
    part.state.copy_page(source, target)
