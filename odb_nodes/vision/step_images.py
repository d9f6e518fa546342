"""Base of the collate functions with images: all ranks have some in a step, or none has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from odb_nodes.collate.padding_collate import PaddingCollate
from odb_nodes.step_info import StepInfo


@dataclass(frozen=True, kw_only=True)
class StepImages(PaddingCollate):
    """Pads text, and follows what the ranks have agreed on about the images of a step.

    Where towers are sharded, a rank without images would leave those with some waiting.
    """

    pixel_keys: ClassVar[tuple[str, ...]] = ("pixel_values",)
    """Keys of a sample that hold its images."""
    image_keys: ClassVar[tuple[str, ...]] = pixel_keys
    """Keys of a sample that its text does without."""
    modality: str = "image"

    def collate_step(self, samples: list[Mapping[str, Any]], info: StepInfo) -> dict[str, Any]:
        """Return the batch of `samples`, with images where any rank has some in this step."""
        self.check_mappings(samples)
        dummy = self._dummy()
        found, agreed = any(map(self._has_images, samples)), self.modality in info.modalities
        if dummy is None or found == agreed:
            return self(samples)
        if agreed:
            return self._with_dummy(samples, dummy)
        if info.is_filler:
            return self([self._without_images(sample, dummy) for sample in samples])
        if info.all_samples_this_step > info.local_samples:
            raise ValueError(
                f"step {info.step} has images on this rank, so {self.modality!r} must be among its "
                f"`modalities`, but they are {info.modalities}: ranks without images would leave "
                "this one waiting. Pass the name that the `RankAligner` has for images as "
                "`modality`, and let `observe` count the `patches` of samples that have some."
            )
        return self(samples)

    def _has_images(self, sample: Mapping[str, Any]) -> bool:
        held = (sample.get(key) for key in self.pixel_keys)
        return any(images is not None and len(images) > 0 for images in held)

    def _text_of(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        return {key: value for key, value in sample.items() if key not in self.image_keys}

    def _dummy(self) -> Any:
        """Return what makes up for missing images; `None` if nothing does."""
        raise NotImplementedError

    def _with_dummy(self, samples: list[Mapping[str, Any]], dummy: Any) -> dict[str, Any]:
        """Return the batch of samples that have no images, with the dummy."""
        raise NotImplementedError

    def _without_images(self, sample: Mapping[str, Any], _dummy: Any) -> Mapping[str, Any]:
        """Return a sample that only fills a step, as one that never had images."""
        return self._text_of(sample)
