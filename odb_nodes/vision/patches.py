"""Images of their final size as the patches that a model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from odb_nodes.errors import SampleError

_SETTINGS = (
    "patch_size",
    "merge_size",
    "temporal_patch_size",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
)
"""The settings that decide the patches of an image of its final size; not that size's bounds."""


def make_patches(image_processor: Any, images: Sequence[Any]) -> dict[str, Any]:
    """Return the patches of images that need no resizing.

    Args:
        image_processor: the image processor of the model.
        images: Pillow images, RGB, or (H, W, 3) uint8 arrays.

    Returns:
        `pixel_values`: (patches, values) float32, and `image_grid_thw`: (images, 3) int64.
    """
    made = image_processor(images=list(images), do_resize=False, return_tensors="np")
    return {
        "pixel_values": np.ascontiguousarray(made["pixel_values"], dtype=np.float32),
        "image_grid_thw": np.asarray(made["image_grid_thw"], dtype=np.int64),
    }


def settings_of(image_processor: Any) -> dict[str, str]:
    """Return what decides which patches an image processor makes of images, by name."""
    values = {name: getattr(image_processor, name, None) for name in _SETTINGS}
    plain = {name: str(np.asarray(value).tolist()) for name, value in values.items()}
    return {"type": type(image_processor).__name__, **plain}


def check_settings(image_processor: Any, expected: Mapping[str, str]) -> None:
    """Raise a `SampleError` unless an image processor makes the patches that are expected."""
    found = settings_of(image_processor)
    if found == dict(expected):
        return
    differing = ", ".join(
        f"`{name}` ({found.get(name)} instead of {expected.get(name)})"
        for name in {**found, **expected}
        if found.get(name) != expected.get(name)
    )
    raise SampleError(
        "`image_processor` of the collate function must make the patches that the samples were "
        f"processed for, but differs in {differing}. Give both the same: "
        "`VisionLanguageCollate(..., image_processor=processor.image_processor)`."
    )
