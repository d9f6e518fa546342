"""Collate function of text and whole images or volumes, in any number and size per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from odb_nodes._core.checks import check_count, check_names
from odb_nodes.collate.token_rows import of_group
from odb_nodes.errors import SampleError
from odb_nodes.step_info import StepInfo
from odb_nodes.vision.step_images import StepImages
from odb_nodes.vision.whole_images import (
    Array,
    Size,
    check_alike,
    check_size,
    count_patches,
    images_of,
    padded,
    resized,
)


@dataclass(frozen=True, kw_only=True)
class MultiImageCollate(StepImages):
    """Pads the text of samples as `PaddingCollate` does, and pads or resizes their images.

    A sample with images has `pixel_values`: a sequence of images, each (C, H, W), or of volumes,
    each (C, H, W, D); or one array of several, (n, C, H, W) or (n, C, H, W, D): of a single volume,
    give a list. All images of a batch have the same number of dimensions, channels and dtype. Other
    keys, such as `id` and `task`, become a tensor of B numbers or a list of B values. Beside these
    a batch has:

    - `pixel_values`: (B, most images, C, H, W) or (B, most images, C, H, W, D), of the images'
      dtype: the largest of each side, padded with 0, or the size `resize`. Left out of a batch
      without images.
    - `image_mask`: (B, most images) bool, True for images and False for padding.
    - `image_sizes`: (B, most images, 2 or 3) int64, height, width and depth of the images as the
      samples have them; 0 for padding.
    - with `task_names`, in a loader: `task_names`, the B names of the samples' tasks; `task_ids`,
      (B,) int64, their numbers among the `task_names`, -1 for rows without a sample.

    Samples have other keys than these of their own, but for `pixel_values`.

    B is the number of samples, unless there are `shapes`. If other ranks have images in a step and
    this one has none, it gets one of zeros, float32, that the mask leaves out. If no rank has
    images, those of a sample that only fills the step are left out.

    Args:
        resize: the (H, W) or (H, W, D) that all images are resized to, bilinear with antialiasing,
            or trilinear; integers and booleans are rounded. `None`: they are padded.
        dummy_shape: the (C, H, W) or (C, H, W, D) of the image of zeros, which the model must
            accept; `None` for no such image.
        task_names: names of the tasks, in the order of their numbers; `()` to leave tasks out.
        modality: the name of images among the `StepInfo.modalities`.

    Raises:
        TypeError, ValueError: an argument is not valid, or `dummy_shape` is not of the size
            `resize`.
    """

    draws_random_numbers: ClassVar[bool] = False
    resize: Size | None = None
    dummy_shape: tuple[int, ...] | None = None
    task_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("task_names", self.task_names)
        if self.resize is not None:
            check_size("resize", self.resize)
        if self.dummy_shape is not None:
            check_count("C of `dummy_shape`", self.dummy_shape[0])
            check_size("dummy_shape[1:]", self.dummy_shape[1:])
            if self.resize not in (None, self.dummy_shape[1:]):
                raise ValueError(
                    f"`dummy_shape` must be (C, *resize), as all images are {self.resize}, but is "
                    f"{self.dummy_shape} instead."
                )

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`."""
        self.check_mappings(samples)
        self._check_keys(samples)
        batch = super().__call__(list(map(self._text_of, samples)))
        images = [self._images_of(sample, index) for index, sample in enumerate(samples)]
        images += [[] for _ in range(len(batch["attention_mask"]) - len(samples))]
        return {**batch, **self._joined(images)}

    def collate_step(self, samples: list[Mapping[str, Any]], info: StepInfo) -> dict[str, Any]:
        """Return the batch of `samples`, with images where any rank has some in this step.

        Raises:
            SampleError: a sample's task is not among the `task_names`; as when called.
            ValueError: this rank has images, but the step's `modalities` do not say so.
        """
        batch = super().collate_step(samples, info)
        if self.task_names:
            batch["task_ids"] = self._task_ids(info.row_tasks, len(batch["attention_mask"]))
            batch["task_names"] = [*info.row_tasks]
        return batch

    def count_patches(self, sample: Mapping[str, Any], patch_size: int | Size) -> int:
        """Return the patches of a sample, for `Observation.patches` and `TokenBudget.max_patches`.

        They are those of its images at the size that they have in a batch, without the padding:
        that depends on the samples that it is grouped with later. With `resize`, they are all that
        `pixel_values[image_mask]` has.

        Args:
            sample: a processed sample.
            patch_size: pixels of a side of a patch, or of each side. A part of a patch counts as
                one.

        Raises:
            SampleError: an image is not (C, H, W) or (C, H, W, D).
            TypeError, ValueError: `patch_size` is not valid, or has another number of sides than an
                image.
        """
        images = images_of(sample.get("pixel_values"), self._dimensions())
        sizes = [self.resize or image.shape[1:] for image in images]
        return sum(count_patches(size, patch_size) for size in sizes)

    def _dimensions(self) -> int | None:
        """Return the dimensions of an image's size, if they are known beforehand."""
        shape = self.resize or (self.dummy_shape or ())[1:]
        return len(shape) or None

    def _check_keys(self, samples: Sequence[Mapping[str, Any]]) -> None:
        made = ["image_mask", "image_sizes", *(["task_ids", "task_names"] * bool(self.task_names))]
        for index, sample in enumerate(samples):
            for key in made:
                if key in sample:
                    error = SampleError(
                        f"its key {key!r} is one that `{type(self).__name__}` gives the batch. "
                        "Rename it in processing."
                    )
                    raise of_group(error, index)

    def _images_of(self, sample: Mapping[str, Any], index: int) -> list[Array]:
        try:
            return images_of(sample.get("pixel_values"), self._dimensions())
        except SampleError as error:
            raise of_group(error, index) from error

    def _joined(self, images: Sequence[list[Array]]) -> dict[str, torch.Tensor]:
        check_alike(images)
        counts = np.array([len(of_row) for of_row in images])
        most = int(counts.max())
        given = [image.shape[1:] for of_row in images for image in of_row]
        mask = np.arange(most) < counts[:, None]
        axes = len(given[0]) if given else self._dimensions() or 2
        sizes = np.zeros((*mask.shape, axes), np.int64)
        arrays = {"image_mask": mask, "image_sizes": sizes}
        if given:
            sizes[mask] = given
            if (size := self.resize) is not None:
                images = [[resized(image, size) for image in of_row] for of_row in images]
            arrays["pixel_values"] = padded(images, most)
        return {key: torch.from_numpy(array) for key, array in arrays.items()}

    def _task_ids(self, tasks: Sequence[str], rows: int) -> torch.Tensor:
        ids = torch.full((rows,), -1)
        for index, task in enumerate(tasks):
            if task not in self.task_names:
                error = SampleError(
                    f"its task must be among `task_names`, {[*self.task_names]}, but is {task!r} "
                    "instead. `observe` tells it, or the name of the source."
                )
                raise of_group(error, index)
            ids[index] = self.task_names.index(task)
        return ids

    def _dummy(self) -> tuple[int, ...] | None:
        return self.dummy_shape

    def _with_dummy(self, samples: list[Mapping[str, Any]], dummy: Any) -> dict[str, Any]:
        batch = self(samples)
        rows = len(batch["image_mask"])
        batch["pixel_values"] = torch.zeros(rows, 1, *dummy)
        batch["image_mask"] = torch.zeros(rows, 1, dtype=torch.bool)
        batch["image_sizes"] = torch.zeros(rows, 1, len(dummy) - 1, dtype=torch.int64)
        return batch
