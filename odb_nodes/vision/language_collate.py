"""Collate function of text and images, for models that take all patches of a batch in one row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from odb_nodes._core.checks import check_type
from odb_nodes.collate.token_rows import TOKEN_KEYS, length_of, of_group, row_of
from odb_nodes.errors import SampleError
from odb_nodes.vision.arguments import check_image_processor
from odb_nodes.vision.dummy import IMAGE_KEYS, IMAGES_KEY, SETTINGS_KEY, TYPE_KEY, DummyImage
from odb_nodes.vision.patches import check_settings, make_patches
from odb_nodes.vision.step_images import StepImages


@dataclass(frozen=True, kw_only=True)
class VisionLanguageCollate(StepImages):
    """Pads the text of samples as `PaddingCollate` does, and joins their images.

    Beside the text's keys a batch with images has `pixel_values`, (patches, values) float32, and
    `image_grid_thw`, (images, 3) int64, in the order of the samples. A batch without images lacks
    both keys. Position ids are made by the model.

    If other ranks have images in a step and this one has none, the `dummy` goes behind its shortest
    sample. The batch gets no wider, unless all samples are about equally long. If no rank has
    images, but the sample that this one fills the step with does, they are taken out.

    Args:
        dummy: the image that makes up for missing ones, from `VisionLanguageProcessor.dummy_image`;
            `None` if no rank waits for images of another: one rank, or a tower that is not sharded.
        image_processor: the image processor that makes the patches of samples that carry `images`,
            see `VisionLanguageProcessor.late_patches`.
        modality: the name of images among the `StepInfo.modalities`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: there are `shapes` and a `dummy`.
    """

    draws_random_numbers: ClassVar[bool] = False
    pixel_keys: ClassVar[tuple[str, ...]] = ("pixel_values", IMAGES_KEY)
    image_keys: ClassVar[tuple[str, ...]] = IMAGE_KEYS
    token_keys: tuple[str, ...] = (*TOKEN_KEYS, TYPE_KEY)
    dummy: DummyImage | None
    image_processor: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dummy is not None:
            remedy = "Pass `processor.dummy_image()`, with the parentheses, or None for no dummy."
            check_type("dummy", self.dummy, DummyImage, remedy)
        if self.image_processor is not None:
            remedy = "Pass `processor.image_processor`, that of the `VisionLanguageProcessor`."
            check_image_processor("image_processor", self.image_processor, remedy)
        if self.shapes and self.dummy is not None:
            raise ValueError(
                "`shapes` must be () where there is a `dummy`, which may widen a batch beyond its "
                f"shape, but are {len(self.shapes)} instead."
            )

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`, which may have images or not."""
        self.check_mappings(samples)
        texts = list(map(self._text_of, samples))
        if any(TYPE_KEY in text for text in texts):
            texts = [{TYPE_KEY: np.zeros(length_of(text), np.int64), **text} for text in texts]
        batch = super().__call__(texts)
        images = self._images(samples)
        if images:
            pixels, grids = zip(*images, strict=True)
            batch["pixel_values"] = torch.from_numpy(np.concatenate(pixels))
            batch["image_grid_thw"] = torch.from_numpy(np.concatenate(grids))
            # Models place tokens by their images, and cannot place a row without any token.
            batch["attention_mask"][len(samples) :, :1] = 1
        return batch

    def _dummy(self) -> DummyImage | None:
        return self.dummy

    def _with_dummy(self, samples: list[Mapping[str, Any]], dummy: DummyImage) -> dict[str, Any]:
        # Behind the shortest sample it seldom makes the batch wider.
        lengths = list(map(length_of, samples))
        shortest = lengths.index(min(lengths))
        grown = dummy.put_behind(samples[shortest], self.token_keys)
        return self([*samples[:shortest], grown, *samples[shortest + 1 :]])

    def _without_images(self, sample: Mapping[str, Any], dummy: DummyImage) -> Mapping[str, Any]:
        return dummy.take_out(sample, self.token_keys)

    def _images(self, samples: list[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
        """Return patches and grids of the samples that have images, checked against their text."""
        images: list[tuple[Any, Any]] = []
        per_token = self._patches_per_token()
        for index, sample in enumerate(samples):
            if not self._has_images(sample):
                continue
            try:
                pixels, grid = self._patches_of(sample)
                per_token = _check_tokens(sample, len(pixels), per_token)
                if images and pixels.shape[1:] != (shape := images[0][0].shape[1:]):
                    raise SampleError(
                        f"`pixel_values` must have patches of {shape} values, as the samples "
                        f"before, but has {pixels.shape[1:]} instead. Give all sources image "
                        "processors with the same `patch_size` and `temporal_patch_size`."
                    )
            except SampleError as error:
                raise of_group(error, index) from error
            images.append((pixels, grid))
        return images

    def _patches_per_token(self) -> int | None:
        """Return the number of patches that are merged into a token, if it is known."""
        if self.dummy is not None:
            return math.prod(self.dummy.grid_thw)
        return None if self.image_processor is None else int(self.image_processor.merge_size) ** 2

    def _patches_of(self, sample: Mapping[str, Any]) -> tuple[Any, Any]:
        if "pixel_values" not in sample:
            if self.image_processor is None:
                raise SampleError(
                    f"a sample has `{IMAGES_KEY}`, but no `pixel_values`: pass "
                    "`image_processor=processor.image_processor`, which makes them, or leave out "
                    "`late_patches` of the processor."
                )
            if SETTINGS_KEY in sample:
                check_settings(self.image_processor, sample[SETTINGS_KEY])
            sample = {**sample, **make_patches(self.image_processor, sample[IMAGES_KEY])}
        pixels = sample["pixel_values"]
        if isinstance(pixels, torch.Tensor):
            pixels = pixels.float().numpy(force=True)  # numpy has no bfloat16
        pixels = np.asarray(pixels, dtype=np.float32)
        grid = np.asarray(sample.get("image_grid_thw", ()), dtype=np.int64).reshape(-1, 3)
        if len(pixels) != (patches := int(grid.prod(axis=1).sum())):
            raise SampleError(
                f"`pixel_values` must have one row per patch of `image_grid_thw` ({patches}), but "
                f"has {len(pixels)} instead."
            )
        return pixels, grid


def _check_tokens(sample: Mapping[str, Any], patches: int, per_token: int | None) -> int | None:
    """Return the number of patches per image token; `None` if it is not known."""
    if TYPE_KEY not in sample:
        return per_token  # the model alone knows which tokens are an image's
    tokens = int(np.count_nonzero(row_of(TYPE_KEY, sample[TYPE_KEY]) == 1))
    if per_token is None and tokens and patches % tokens == 0:
        per_token = patches // tokens
    if per_token is None or tokens * per_token != patches:
        of_each = "each `merge_size**2`" if per_token is None else f"each {per_token}"
        raise SampleError(
            f"`input_ids` must have an image token for {of_each} of the {patches} patches, but "
            f"`{TYPE_KEY}` has {tokens} of them. Do not cut a text within its images: shorten its "
            "text before it is processed, or leave it out."
        )
    return per_token
