"""An image without weight in the loss, for a rank that has none where other ranks do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from odb_nodes.collate.token_rows import row_of
from odb_nodes.errors import SampleError
from odb_nodes.sample import IGNORE_INDEX

IMAGES_KEY = "images"
"""A list of (H, W, 3) uint8 arrays, which become patches when the batch is made."""
SETTINGS_KEY = "image_settings"
"""The settings that the patches of `images` are to be made with, see `settings_of`."""
IMAGE_KEYS = ("pixel_values", "image_grid_thw", IMAGES_KEY, SETTINGS_KEY)
TYPE_KEY = "mm_token_type_ids"
"""(L,) int64: 1 for the tokens of images, 0 for text. transformers 5 wants it beside images."""


@dataclass(frozen=True, kw_only=True)
class DummyImage:
    """The smallest image that a model takes, to be put behind the text of a sample.

    It passes through the vision tower, so this rank takes part in that tower's collectives. Its
    tokens come last, where no other token of a causal model sees them, and they are not supervised:
    loss and gradients are the same as without it, and the tower's are zero. Only an auxiliary loss
    over all tokens, such as that of experts, counts them.

    Args:
        token_ids: the tokens that stand for the image in a text.
        image_token_id: the token among them that stands for a merged patch.
        grid_thw: the number of patches in time, height and width.
        patch_values: values per patch: channels x temporal size x height x width.
    """

    token_ids: tuple[int, ...]
    image_token_id: int
    grid_thw: tuple[int, int, int]
    patch_values: int

    def put_behind(self, sample: Mapping[str, Any], token_keys: tuple[str, ...]) -> dict[str, Any]:
        """Return a sample without images with this one behind its text.

        Args:
            sample: a processed sample, with `input_ids` and `labels`.
            token_keys: the keys with a value per token.

        Raises:
            SampleError: the sample has no `labels`, so that every token is supervised.
        """
        if "labels" not in sample:
            raise SampleError(
                "a sample must have `labels` where a `DummyImage` may be put behind its text, but "
                f"has {sorted(sample)}. Without labels the dummy's tokens would be learned."
            )
        ids = np.array(self.token_ids, dtype=np.int64)
        is_image = (ids == self.image_token_id).astype(np.int64)
        tokens = len(row_of("input_ids", sample["input_ids"]))
        grown = {TYPE_KEY: np.zeros(tokens, np.int64), **sample}
        added = {
            "input_ids": ids,
            "labels": np.full(len(ids), IGNORE_INDEX),
            "attention_mask": np.ones(len(ids), np.int64),
            TYPE_KEY: is_image,
        }
        for key in (*token_keys, TYPE_KEY):
            if key in grown and len(row := row_of(key, grown[key])) == tokens:
                grown[key] = np.concatenate((row, added.get(key, np.zeros(len(ids), row.dtype))))
        patches = int(np.prod(self.grid_thw))
        grown["pixel_values"] = np.zeros((patches, self.patch_values), np.float32)
        grown["image_grid_thw"] = np.array([self.grid_thw], dtype=np.int64)
        return grown

    def take_out(self, sample: Mapping[str, Any], token_keys: tuple[str, ...]) -> dict[str, Any]:
        """Return a sample without its images and their tokens, for a step that it only fills."""
        ids = row_of("input_ids", sample["input_ids"])
        keep = ids != self.image_token_id
        left = {key: value for key, value in sample.items() if key not in IMAGE_KEYS}
        for key in (*token_keys, TYPE_KEY):
            if key in left and len(row := row_of(key, left[key])) == len(ids):
                left[key] = row[keep]
        return left
