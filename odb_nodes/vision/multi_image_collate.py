"""Collate function of text and whole images, in any number and size per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from odb_nodes.collate.token_rows import of_group
from odb_nodes.errors import SampleError
from odb_nodes.vision.step_images import StepImages


@dataclass(frozen=True, kw_only=True)
class MultiImageCollate(StepImages):
    """Pads the text of samples as `PaddingCollate` does, and their images in number and size.

    A sample with images has `pixel_values`: a sequence of images, each (C, H, W), or one array.
    Other keys, such as `id` and `task`, become a tensor of B numbers or a list of B values. Beside
    these a batch has:

    - `pixel_values`: (B, most images, C, largest H, largest W), padded with 0, of the images'
      dtype. Left out of a batch without images.
    - `image_mask`: (B, most images) bool, True for images and False for padding.
    - `image_sizes`: (B, most images, 2) int64, height and width without the padding.

    B is the number of samples, unless there are `shapes`. If other ranks have images in a step and
    this one has none, it gets one of zeros, float32, that the mask leaves out. If no rank has
    images, those of a sample that only fills the step are left out.

    Args:
        dummy_shape: the (C, H, W) of the image of zeros, which the model must accept; `None` for
            no such image.
        modality: the name of images among the `StepInfo.modalities`.
    """

    draws_random_numbers: ClassVar[bool] = False
    dummy_shape: tuple[int, int, int] | None = None

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`.

        Raises:
            TypeError, ValueError, SampleError: as `PaddingCollate`.
            SampleError: an image is not (C, H, W), or they differ in C or dtype.
        """
        self.check_mappings(samples)
        batch = super().__call__(list(map(self._text_of, samples)))
        rows = len(batch["attention_mask"])
        return {**batch, **_padded([_images_of(samples, i) for i in range(len(samples))], rows)}

    def _dummy(self) -> tuple[int, int, int] | None:
        return self.dummy_shape

    def _with_dummy(self, samples: list[Mapping[str, Any]], dummy: Any) -> dict[str, Any]:
        batch = self(samples)
        rows = len(batch["image_mask"])
        batch["pixel_values"] = torch.zeros(rows, 1, *dummy)
        batch["image_mask"] = torch.zeros(rows, 1, dtype=torch.bool)
        batch["image_sizes"] = torch.zeros(rows, 1, 2, dtype=torch.int64)
        return batch


def _images_of(samples: Sequence[Mapping[str, Any]], index: int) -> list[Any]:
    found = samples[index].get("pixel_values")
    images = [] if found is None else [np.asarray(image) for image in found]
    for image in images:
        if image.ndim != 3:
            what = "an image of `pixel_values`"
            error = SampleError(f"{what} must be (C, H, W), but has shape {image.shape} instead.")
            raise of_group(error, index)
    return images


def _padded(images: Sequence[list[Any]], rows: int) -> dict[str, torch.Tensor]:
    counts = np.zeros(rows, np.int64)
    counts[: len(images)] = list(map(len, images))
    most = int(counts.max())
    sizes = np.zeros((rows, most, 2), np.int64)
    arrays = {"image_mask": np.arange(most) < counts[:, None], "image_sizes": sizes}
    if most:
        every = [image for of_sample in images for image in of_sample]
        kinds = {(image.shape[0], image.dtype) for image in every}
        if len(kinds) > 1:
            raise SampleError(
                f"the images of a group must have the same channels and dtype, but have "
                f"{sorted(map(str, kinds))} instead."
            )
        ((channels, dtype),) = kinds
        height, width = (max(image.shape[axis] for image in every) for axis in (1, 2))
        pixels = np.zeros((rows, most, channels, height, width), dtype)
        for row, of_sample in enumerate(images):
            for place, image in enumerate(of_sample):
                sizes[row, place] = image.shape[1:]
                pixels[row, place, :, : image.shape[1], : image.shape[2]] = image
        arrays["pixel_values"] = pixels
    return {key: torch.from_numpy(array) for key, array in arrays.items()}
