"""Whole images and volumes as arrays: checked, and joined by padding or by resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odb_nodes._core.checks import check_count
from odb_nodes.collate.token_rows import of_group
from odb_nodes.errors import SampleError

AXES = "HWD"
Array = npt.NDArray[Any]
Size = tuple[int, ...]
"""Height and width of an image; of a volume also its depth."""


def check_size(name: str, size: Sequence[int]) -> None:
    """Raise unless `size` is the size of an image or of a volume."""
    if not isinstance(size, tuple) or len(size) not in (2, 3):
        raise ValueError(f"`{name}` must be (H, W) or (H, W, D), but is {size!r:.80} instead.")
    for axis, length in zip(AXES, size, strict=False):
        check_count(f"{axis} of `{name}`", length)


def images_of(found: Any, dimensions: int | None) -> list[Array]:
    """Return the images of a sample."""
    images = [] if found is None else list(map(_array_of, found))
    allowed = (2, 3) if dimensions is None else (dimensions,)
    for image in images:
        if image.ndim - 1 not in allowed or 0 in image.shape:
            shapes = " or ".join(f"(C, {', '.join(AXES[:axes])})" for axes in allowed)
            lacks_channels = image.ndim in allowed and 0 not in image.shape
            raise SampleError(
                f"an image of `pixel_values` must be {shapes}, with pixels, but has shape "
                f"{image.shape} instead. A sample has a list of images: of one, `[image]`."
                + " One without an axis of channels gets it by `image[None]`."
                * lacks_channels
            )
    return images


def _array_of(image: Any) -> Array:
    """Return an image as an array."""
    if isinstance(image, torch.Tensor) and image.requires_grad:
        raise SampleError(
            "an image of `pixel_values` must have no graph, which a batch would lose. Make it "
            "under `torch.no_grad()`, or pass `image.detach()`."
        )
    try:
        array = np.asarray(image)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SampleError(f"an image of `pixel_values` cannot become an array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise SampleError(
            f"an image of `pixel_values` must hold real numbers, but is of {array.dtype} instead. "
            "Convert it in processing; the parts of a complex image can be channels."
        )
    return array


def check_alike(images: Sequence[list[Array]]) -> None:
    """Raise a `SampleError` unless all images of a group can be in one tensor."""
    first: Array | None = None
    for index, of_sample in enumerate(images):
        for image in of_sample:
            first = image if first is None else first
            if image.ndim != first.ndim:
                raise of_group(
                    SampleError(
                        "images (C, H, W) and volumes (C, H, W, D) must not be in one group, but "
                        f"this is {image.shape}, and one before is {first.shape}. In processing, "
                        "give images a depth of 1 (`image[..., None]`), or train on them apart."
                    ),
                    index,
                )
            if (image.shape[0], image.dtype) != (first.shape[0], first.dtype):
                raise of_group(
                    SampleError(
                        "the images of a group must have the same channels and dtype, but have "
                        f"{first.shape[0]} of {first.dtype} and {image.shape[0]} of {image.dtype} "
                        "instead. Convert them in processing."
                    ),
                    index,
                )


def resized(image: Array, size: Size) -> Array:
    """Return an image or a volume at another size, of its own dtype.

    Bilinear with antialiasing, or trilinear, which torch has no antialiasing for. Computed in
    floating point; integers and booleans are rounded to the nearest.
    """
    if image.shape[1:] == size:
        return image
    values = torch.from_numpy(image.astype(np.result_type(image.dtype, np.float32)))[None]
    if len(size) == 2:
        made = torch.nn.functional.interpolate(values, size, mode="bilinear", antialias=True)
    else:
        made = torch.nn.functional.interpolate(values, size, mode="trilinear")
    pixels = made[0].numpy()
    return (np.rint(pixels) if image.dtype.kind in "biu" else pixels).astype(image.dtype)


def padded(images: Sequence[list[Array]], most: int) -> Array:
    """Return the images of all rows in one array, padded with 0 in number and size."""
    every = [image for of_row in images for image in of_row]
    largest = [max(lengths) for lengths in zip(*(image.shape[1:] for image in every), strict=True)]
    pixels = np.zeros((len(images), most, every[0].shape[0], *largest), every[0].dtype)
    for row, of_row in enumerate(images):
        for place, image in enumerate(of_row):
            pixels[row, place][tuple(map(slice, image.shape))] = image
    return pixels


def count_patches(size: Size, patch_size: int | Size) -> int:
    """Return how many patches cover an image or a volume; a part of a patch counts as one.

    Args:
        size: its size.
        patch_size: pixels of a side of a patch, or of each side.

    Raises:
        TypeError: a side is no integer.
        ValueError: a side is below 1, or a patch has another number of sides.
    """
    sides = patch_size if isinstance(patch_size, Sequence) else (patch_size,) * len(size)
    if len(sides) != len(size):
        raise ValueError(
            f"`patch_size` must be an integer, or have {len(size)} sides for images of {size}, but "
            f"is {patch_size!r:.80} instead."
        )
    for side in sides:
        check_count("patch_size", side)
    return math.prod(-(-length // side) for length, side in zip(size, sides, strict=True))
