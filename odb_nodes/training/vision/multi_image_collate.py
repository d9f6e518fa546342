"""Collate function for text and whole images or volumes, in any number and size per sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from odb_nodes._support.checks import check_count
from odb_nodes.core.collate.token_rows import of_group
from odb_nodes.errors import SampleError
from odb_nodes.training.vision.collate import StepImages

Array = npt.NDArray[Any]
Size = tuple[int, ...]
"""Height and width of an image, and depth of a volume."""
_AXES = "HWD"


@dataclass(frozen=True, kw_only=True)
class MultiImageCollate(StepImages):
    """Pads the text of samples as `PaddingCollate` does, and pads or resizes their images.

    A sample with images has `pixel_values`: a sequence of images, each (C, H, W), or of volumes,
    each (C, H, W, D); or an array of several, (n, C, H, W) or (n, C, H, W, D). Put a single volume
    into a list. All images of a batch have the same number of dimensions, channels and dtype. Other
    keys, such as `id` and `task`, become a tensor of B numbers or a list of B values. The batch
    also has:

    - `pixel_values`: (B, most images, C, H, W) or (B, most images, C, H, W, D), of the images'
      dtype, at the size `resize`, or padded with 0 to the largest side. A batch without images
      lacks it.
    - `image_mask`: (B, most images) bool, True for images and False for padding.
    - `image_sizes`: (B, most images, 2 or 3) int64, height, width and depth of the images in
      the samples; 0 for padding.

    B is the number of samples, unless there are `shapes`. If other ranks have images in a step but
    this rank has none, its batch gets an image of float32 zeros, which the mask excludes. If only
    filler samples have images in a step, these images are removed.

    Args:
        resize: the (H, W) or (H, W, D) to resize all images to, bilinear with antialiasing, or
            trilinear; integers and booleans are rounded. `None`: images are padded.
        dummy_shape: the (C, H, W) or (C, H, W, D) of the image of zeros, which the model must
            accept; `None` for no such image.
        modality: the name of images among the `StepInfo.modalities`.

    Raises:
        TypeError, ValueError: an argument is not valid, or `dummy_shape` differs from `resize`.
    """

    draws_random_numbers: ClassVar[bool] = False
    resize: Size | None = None
    dummy_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resize is not None:
            _check_size("resize", self.resize)
        if self.dummy_shape is not None:
            if not isinstance(self.dummy_shape, tuple) or len(self.dummy_shape) not in (3, 4):
                raise ValueError(
                    "`dummy_shape` must be (C, H, W) or (C, H, W, D), but is "
                    f"{self.dummy_shape!r:.80} instead."
                )
            check_count("dummy_shape[0]", self.dummy_shape[0])
            _check_size("dummy_shape[1:]", self.dummy_shape[1:])
            if self.resize not in (None, self.dummy_shape[1:]):
                raise ValueError(
                    f"`dummy_shape` must be (C, *resize), as all images are {self.resize}, but is "
                    f"{self.dummy_shape} instead."
                )

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`."""
        self.check_mappings(samples)
        images = self._images(samples)
        batch = super().__call__(list(map(self._text_of, samples)))
        images += [[] for _ in range(len(batch["attention_mask"]) - len(samples))]
        return {**batch, **self._joined(images)}

    def count_patches(self, sample: Mapping[str, Any], patch_size: int | Size) -> int:
        """Return the patches of a sample, for `Observation.patches` and `TokenBudget.max_patches`.

        Images count at the size `resize`, or else at their own size: the padding depends on the
        other samples of the group.

        Args:
            sample: a processed sample.
            patch_size: side of a patch in pixels, or one number for each side. A partial patch
                counts as a whole one.

        Raises:
            SampleError: an image is not (C, H, W) or (C, H, W, D).
            TypeError, ValueError: `patch_size` is not valid, or has another number of sides than an
                image.
        """
        patches = 0
        for image in self._images_of(sample):
            size = self.resize or image.shape[1:]
            sides = patch_size if isinstance(patch_size, Sequence) else (patch_size,) * len(size)
            if len(sides) != len(size):
                raise ValueError(
                    f"`patch_size` must be an integer, or have {len(size)} sides for images of "
                    f"{size}, but is {patch_size!r:.80} instead."
                )
            for side in sides:
                check_count("patch_size", side)
            patches += math.prod(-(-axis // side) for axis, side in zip(size, sides, strict=True))
        return patches

    def _dummy(self) -> tuple[int, ...] | None:
        return self.dummy_shape

    def _with_dummy(self, samples: list[Mapping[str, Any]], dummy: Any) -> dict[str, Any]:
        batch = self(samples)
        rows = len(batch["image_mask"])
        batch["pixel_values"] = torch.zeros(rows, 1, *dummy)
        batch["image_mask"] = torch.zeros(rows, 1, dtype=torch.bool)
        batch["image_sizes"] = torch.zeros(rows, 1, len(dummy) - 1, dtype=torch.int64)
        return batch

    def _dimensions(self) -> int | None:
        """Return the dimensions of an image's size if `resize` or `dummy_shape` tells them."""
        return len(self.resize or (self.dummy_shape or ())[1:]) or None

    def _images(self, samples: Sequence[Mapping[str, Any]]) -> list[list[Array]]:
        """Return the images of each sample, checked to fit into one tensor."""
        batch_keys = {"image_mask", "image_sizes"}
        images: list[list[Array]] = []
        first: Array | None = None
        for index, sample in enumerate(samples):
            try:
                for key in batch_keys & sample.keys():
                    raise SampleError(
                        f"`{type(self).__name__}` adds {key!r} to the batch, but the sample has "
                        "this key. Rename it in processing."
                    )
                images.append(self._images_of(sample))
                for image in images[-1]:
                    first = image if first is None else first
                    _check_alike(first, image)
            except SampleError as error:
                raise of_group(error, index) from error
        return images

    def _images_of(self, sample: Mapping[str, Any]) -> list[Array]:
        dimensions = self._dimensions()
        images = []
        allowed = (2, 3) if dimensions is None else (dimensions,)
        values = sample.get("pixel_values")
        for value in () if values is None else values:
            if hasattr(value, "getbands"):  # a Pillow image, (H, W, C) as an array
                raise SampleError(
                    "an image of `pixel_values` must be an array, (C, H, W), but is a Pillow "
                    "image, whose channels come last. Convert it in processing: "
                    '`np.asarray(image.convert("RGB")).transpose(2, 0, 1)`.'
                )
            try:
                is_bfloat16 = getattr(value, "dtype", None) is torch.bfloat16
                image = np.asarray(value.float() if is_bfloat16 else value)
            except (TypeError, ValueError, RuntimeError) as error:  # ragged, or with a graph
                raise SampleError(
                    f"an image of `pixel_values` cannot become an array: {error}"
                ) from error
            is_real = image.dtype.kind in "biuf"
            if image.ndim - 1 not in allowed or 0 in image.shape or not is_real:
                shapes = " or ".join(f"(C, {', '.join(_AXES[:axes])})" for axes in allowed)
                raise SampleError(
                    f"an image of `pixel_values` must be {shapes}, with pixels that are real "
                    f"numbers, but is {image.shape} of {image.dtype} instead. Put a single image "
                    "into a list, `[image]`, and add a missing channel axis by `image[None]`."
                )
            images.append(image)
        return images

    def _joined(self, images: Sequence[list[Array]]) -> dict[str, torch.Tensor]:
        counts = np.array(list(map(len, images)))
        mask = np.arange(counts.max()) < counts[:, None]
        every = [image for row_images in images for image in row_images]
        axes = every[0].ndim - 1 if every else self._dimensions() or 2
        sizes = np.zeros((*mask.shape, axes), np.int64)
        arrays = {"image_mask": mask, "image_sizes": sizes}
        if every:
            sizes[mask] = [image.shape[1:] for image in every]
            if self.resize is not None:
                every = [resized(image, self.resize) for image in every]
            largest = np.max([image.shape for image in every], axis=0)
            pixels = np.zeros((*mask.shape, *largest), every[0].dtype)
            for place, image in zip(np.argwhere(mask), every, strict=True):
                pixels[tuple(place)][tuple(map(slice, image.shape))] = image
            arrays["pixel_values"] = pixels
        return {key: torch.from_numpy(array) for key, array in arrays.items()}


def _check_size(name: str, size: Any) -> None:
    if not isinstance(size, tuple) or len(size) not in (2, 3):
        raise ValueError(f"`{name}` must be (H, W) or (H, W, D), but is {size!r:.80} instead.")
    for axis, length in zip(_AXES, size, strict=False):
        check_count(f"{axis} of {name}", length)


def _check_alike(first: Array, image: Array) -> None:
    if (image.ndim, len(image), image.dtype) != (first.ndim, len(first), first.dtype):
        raise SampleError(
            "the images of a group must have the same dimensions, channels and dtype, but this is "
            f"{image.shape} of {image.dtype}, and an earlier image {first.shape} of {first.dtype}. "
            "Convert them in processing; among volumes, give images a depth of 1 "
            "(`image[..., None]`)."
        )


def resized(image: Array, size: Size) -> Array:
    """Return an image or volume at another size, computed in floating point, in its dtype."""
    if image.shape[1:] == size:
        return image
    values = torch.from_numpy(image.astype(np.result_type(image.dtype, np.float32)))[None]
    if len(size) == 2:
        scaled = torch.nn.functional.interpolate(values, size, mode="bilinear", antialias=True)
    else:
        scaled = torch.nn.functional.interpolate(values, size, mode="trilinear")
    pixels = scaled[0].numpy()
    return (np.rint(pixels) if image.dtype.kind in "biu" else pixels).astype(image.dtype)
