"""What a packed row of text and images needs to know of a model, without its weights."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch

from odb_nodes.collate.check_packing import pretrained
from odb_nodes.errors import SampleError

PACKABLE = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),  # with positions of their own
    *("llava", "internvl"),
)
"""The `model_type`s that tests have shown to keep the samples of a row apart."""


@dataclass(frozen=True)
class PackedModel:
    """How a model places the tokens of a sample; small, and picklable."""

    # A model without its weights, which it cannot show; `None` where models number their tokens.
    positions_from: Any = field(repr=False)

    @classmethod
    def of(cls, model: Any, packable: tuple[str, ...]) -> PackedModel:
        """Return what is needed of a model that keeps the samples of a packed row apart."""
        if (own := pretrained(model)) is None:
            raise TypeError(
                "`model` must be a model of transformers, which packed rows of images are made "
                f"for, but is a `{type(model).__name__}` instead."
            )
        if (kind := own.config.model_type) not in packable:
            raise ValueError(
                f"`model` must keep the samples of a packed row apart, as the types "
                f'{", ".join(packable)} do; but `{type(own).__name__}`, of type "{kind}", is not '
                'known to. Take `layout="padded"`, or try it: see "Packed rows" in the docs of '
                "images."
            )
        found = next((one for one in own.modules() if hasattr(type(one), "get_rope_index")), None)
        if found is None:
            return cls(None)
        light = object.__new__(type(found))
        light.__dict__["config"] = found.config
        return cls(light)

    def positions(self, rows: dict[str, Any], grid: Any) -> torch.Tensor:
        """Return the positions of the tokens of a sample that has images, (dimensions, L) int64."""
        make = self.positions_from.get_rope_index
        given = {key: torch.from_numpy(row[None]) for key, row in rows.items()}
        taken = inspect.signature(make).parameters  # before version 5, no token types
        try:
            given["image_grid_thw"] = torch.from_numpy(grid)
            made, _ = make(**{key: value for key, value in given.items() if key in taken})
            return made[:, 0].reshape(-1, len(rows["input_ids"]))  # type: ignore[no-any-return]
        except (IndexError, RuntimeError, StopIteration, TypeError) as error:
            raise SampleError(
                f"the model cannot place the tokens of a sample with images: {error!r:.200}. It "
                "must have `image_grid_thw` and `mm_token_type_ids`, with a run of image tokens "
                "for each image, and other tokens between them."
            ) from error
