"""Images of their final size as the patches that a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def make_patches(image_processor: Any, images: Sequence[Any]) -> dict[str, Any]:
    """Return what an image processor of transformers makes of images that need no resizing.

    Args:
        image_processor: that of the model.
        images: Pillow images, RGB, or (H, W, 3) uint8 arrays.

    Returns:
        `pixel_values`: (patches, values) float32, and `image_grid_thw`: (images, 3) int64.
    """
    made = image_processor(images=list(images), do_resize=False, return_tensors="np")
    return {
        "pixel_values": np.ascontiguousarray(made["pixel_values"], dtype=np.float32),
        "image_grid_thw": np.asarray(made["image_grid_thw"], dtype=np.int64),
    }
