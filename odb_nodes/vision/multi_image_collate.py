"""Collate function: a few whole images per sample, of any number and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from odb_nodes.collate.padding_collate import PaddingCollate
from odb_nodes.collate.token_rows import of_group
from odb_nodes.errors import SampleError
from odb_nodes.step_info import StepInfo
from odb_nodes.vision.dummy import check_agreed


@dataclass(frozen=True, kw_only=True)
class MultiImageCollate(PaddingCollate):
    """Pads the text of samples as `PaddingCollate` does, and their images in number and size.

    Samples have `pixel_values`: a sequence of images, each (C, H, W), or one array; or they lack
    the key. What else they have, such as `id` and `task`, becomes a tensor of B numbers or a list
    of B values. Beside these a batch has:

    - `pixel_values`: (B, most images, C, largest H, largest W), 0 where there is nothing; of the
      images' dtype. Left out of a batch without images.
    - `image_mask`: (B, most images) bool, where an image is.
    - `image_sizes`: (B, most images, 2) int64, height and width without the padding.

    B is the number of samples, unless there are `shapes`. Where other ranks have images in a step
    and this one has none, it gets one of zeros, float32, that the mask leaves out; where none has,
    those of a sample that is filled with are left out.

    Args:
        dummy_shape: (C, H, W) of that image, which the model must accept; `None` for none.
        modality: name of images among the `StepInfo.modalities`.
    """

    dummy_shape: tuple[int, int, int] | None = None
    modality: str = "image"

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`.

        Raises:
            TypeError, ValueError, SampleError: as `PaddingCollate`.
            SampleError: an image is not (C, H, W), or they differ in C or dtype.
        """
        self.check_mappings(samples)
        batch = super().__call__([_without_images(sample) for sample in samples])
        rows = len(batch["attention_mask"])
        return {**batch, **_padded([_images_of(samples, i) for i in range(len(samples))], rows)}

    def collate_step(self, samples: list[Mapping[str, Any]], info: StepInfo) -> dict[str, Any]:
        """Return the batch of `samples`, with images where any rank has some in this step.

        Raises:
            ValueError: this rank has images, but the step's `modalities` do not say so.
        """
        self.check_mappings(samples)
        agreed = self.modality in info.modalities
        if self.dummy_shape is not None and info.is_filler and not agreed:
            samples = [_without_images(sample) for sample in samples]
        batch = self(samples)
        if self.dummy_shape is None or agreed == ("pixel_values" in batch):
            return batch
        if not agreed:
            check_agreed(self.modality, info)
            return batch
        rows = len(batch["image_mask"])
        batch["pixel_values"] = torch.zeros(rows, 1, *self.dummy_shape)
        batch["image_mask"] = torch.zeros(rows, 1, dtype=torch.bool)
        batch["image_sizes"] = torch.zeros(rows, 1, 2, dtype=torch.int64)
        return batch


def _without_images(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in sample.items() if key != "pixel_values"}


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
