"""Collate function of text and images, for models that take all patches of a batch in one row."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from odb_nodes._compat.transformers import rope_index_module
from odb_nodes._support.checks import check_type
from odb_nodes.core.collate.check_packing import pretrained
from odb_nodes.core.collate.packed_collate import PackedCollate
from odb_nodes.core.collate.padding_collate import PaddingCollate
from odb_nodes.core.collate.token_rows import TOKEN_KEYS, length_of, of_group, token_array
from odb_nodes.core.planning.budget import Layout, TokenBudget
from odb_nodes.core.sample import IGNORE_INDEX
from odb_nodes.core.step_info import StepInfo
from odb_nodes.errors import SampleError
from odb_nodes.training.vision.images import check_image_processor, check_settings, make_patches

IMAGES_KEY = "images"
"""A list of (H, W, 3) uint8 arrays, which become patches when the batch is made."""
SETTINGS_KEY = "image_settings"
"""The image processor's settings for the patches of `images`, see `settings_of`."""
TYPE_KEY = "mm_token_type_ids"
"""(L,) int64: 1 for the tokens of images, 0 for text. transformers 5 needs it beside images."""
PACKABLE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "internvl")
"""The `model_type`s for which tests show that the samples of a packed row do not mix."""


@dataclass(frozen=True, kw_only=True)
class StepImages(PaddingCollate):
    """Pads text; if any rank has images in a step, every rank's batch has some, at least the dummy.

    A sharded vision tower computes on all ranks together.
    """

    pixel_keys: ClassVar[tuple[str, ...]] = ("pixel_values",)
    """Keys whose values are images."""
    image_keys: ClassVar[tuple[str, ...]] = pixel_keys
    """Keys that are removed together with the images, such as their sizes."""
    modality: str = "image"

    def collate_step(self, samples: list[Mapping[str, Any]], info: StepInfo) -> dict[str, Any]:
        """Return the batch of `samples`, with images if any rank has some in this step."""
        self.check_mappings(samples)
        dummy = self._dummy()
        has_images = any(map(self._has_images, samples))
        step_has_images = self.modality in info.modalities
        if dummy is None or has_images == step_has_images:
            return self(samples)
        if step_has_images:
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
        values = (sample.get(key) for key in self.pixel_keys)
        return any(images is not None and len(images) > 0 for images in values)

    def _text_of(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        return {key: value for key, value in sample.items() if key not in self.image_keys}

    def _dummy(self) -> Any:
        """Return the dummy for missing images; `None` if there is none."""
        raise NotImplementedError

    def _with_dummy(self, samples: list[Mapping[str, Any]], dummy: Any) -> dict[str, Any]:
        """Return the batch of samples that have no images, with the dummy."""
        raise NotImplementedError

    def _without_images(self, sample: Mapping[str, Any], _dummy: Any) -> Mapping[str, Any]:
        """Return the sample of a filler step without its images."""
        return self._text_of(sample)


@dataclass(frozen=True, kw_only=True)
class DummyImage:
    """The smallest image that a model takes, placed after the text of a sample.

    It passes through the vision tower, so this rank takes part in the tower's collectives. Its
    tokens come last, where no other token of a causal model sees them, and they are not supervised:
    they change no loss and no gradient, and the tower's gradients are zero. Only an auxiliary loss
    over all tokens, such as a router's, counts them.

    Args:
        token_ids: the tokens of the image in a text.
        image_token_id: the token among them of a merged patch.
        grid_thw: the number of patches in time, height and width.
        patch_values: values per patch: channels x temporal size x height x width.
    """

    token_ids: tuple[int, ...]
    image_token_id: int
    grid_thw: tuple[int, int, int]
    patch_values: int

    def put_behind(self, sample: Mapping[str, Any], token_keys: tuple[str, ...]) -> dict[str, Any]:
        """Return a sample that has no images, with this image after its text.

        Raises:
            SampleError: the sample has no `labels`, so every token is supervised.
        """
        if "labels" not in sample:
            raise SampleError(
                "a sample must have `labels` if a `DummyImage` may be put behind its text, but "
                f"has {sorted(sample)}. Without labels, the dummy's tokens would be trained on."
            )
        ids = np.array(self.token_ids, dtype=np.int64)
        added = {
            "input_ids": ids,
            "labels": np.full(len(ids), IGNORE_INDEX),
            "attention_mask": np.ones(len(ids), np.int64),
            TYPE_KEY: (ids == self.image_token_id).astype(np.int64),
        }
        grown = {TYPE_KEY: np.zeros(length_of(sample), np.int64), **sample}
        for key, row in _token_rows(grown, token_keys).items():
            grown[key] = np.concatenate((row, added.get(key, np.zeros(len(ids), row.dtype))))
        grown["pixel_values"] = np.zeros((math.prod(self.grid_thw), self.patch_values), np.float32)
        grown["image_grid_thw"] = np.array([self.grid_thw], dtype=np.int64)
        return grown

    def take_out(self, sample: Mapping[str, Any], token_keys: tuple[str, ...]) -> dict[str, Any]:
        """Return a sample without its images and their tokens, for a filler step."""
        image_keys = VisionLanguageCollate.image_keys
        text = {key: value for key, value in sample.items() if key not in image_keys}
        rows = _token_rows(text, token_keys)
        keep = rows["input_ids"] != self.image_token_id
        return {**text, **{key: row[keep] for key, row in rows.items()}}


def _token_rows(sample: Mapping[str, Any], token_keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of a sample with an entry per token, as arrays."""
    keys = {*token_keys, TYPE_KEY} & sample.keys()
    rows = {key: token_array(key, sample[key]) for key in keys}
    return {key: row for key, row in rows.items() if len(row) == len(rows["input_ids"])}


@dataclass(frozen=True)
class PackedModel:
    """How a model places the tokens of a sample; small, and picklable."""

    # Has `get_rope_index`, without weights; `None` if tokens are numbered in order.
    positions_from: Any = field(repr=False)

    @classmethod
    def of(cls, model: Any, packable: tuple[str, ...]) -> PackedModel:
        """Return the `PackedModel` of a model that keeps the samples of a packed row apart."""
        base = pretrained(model)
        if base is None:
            raise TypeError(
                "`model` must be a model of transformers, for which to pack rows with images, but "
                f"is a `{type(model).__name__}` instead."
            )
        kind = base.config.model_type
        if kind not in packable:
            raise ValueError(
                f"`model` must keep the samples of a packed row apart, as the types "
                f'{", ".join(packable)} do; but for `{type(base).__name__}`, of type "{kind}", no '
                'test shows it. Take `layout="padded"`, or try it: see "Packed rows" in the docs '
                "of images."
            )
        return cls(rope_index_module(base))

    def positions(self, rows: dict[str, Any], grid: Any) -> torch.Tensor:
        """Return the positions of the tokens of a sample that has images, (dimensions, L) int64."""
        rope_index = self.positions_from.get_rope_index
        inputs = {key: torch.from_numpy(row[None]) for key, row in rows.items()}
        accepted = inspect.signature(rope_index).parameters  # no token types before version 5
        try:
            inputs["image_grid_thw"] = torch.from_numpy(grid)
            places, _ = rope_index(**{key: inputs[key] for key in inputs if key in accepted})
            return places[:, 0].reshape(-1, len(rows["input_ids"]))  # type: ignore[no-any-return]
        except (IndexError, RuntimeError, StopIteration, TypeError) as error:
            raise SampleError(
                f"the model cannot place the tokens of a sample with images: {error!r:.200}. It "
                "must have `image_grid_thw` and `mm_token_type_ids`, with a run of image tokens "
                "for each image, and other tokens between them."
            ) from error


@dataclass(frozen=True, kw_only=True)
class VisionLanguageCollate(StepImages):
    """Pads the text of samples, or packs it into one row, and joins their images.

    Text is padded as by `PaddingCollate`, or packed as by `PackedCollate` if there is a `model`.
    A batch with images also has `pixel_values`, (patches, values) float32, and `image_grid_thw`,
    (images, 3) int64, in the order of the samples; a batch without images lacks both keys. If
    samples have no `image_grid_thw`, their `pixel_values` (images, C, H, W) are joined.

    For a padded batch, the model makes the position ids. A packed row has `position_ids`: (1, T) as
    of `PackedCollate`; for models that place images in time, height and width, (4, 1, T): the
    positions in the text, and then the model's `get_rope_index` of each sample.

    If other ranks have images in a step but this rank has none, the `dummy` goes after the shortest
    sample of this rank. This widens the batch only if all samples are about equally long, or
    packed. If only filler samples have images in a step, these images are removed.

    Args:
        dummy: the image that replaces missing ones, from `VisionLanguageProcessor.dummy_image`;
            `None` on one rank, or if the vision tower is not sharded.
        image_processor: the image processor for samples that carry `images`, see
            `VisionLanguageProcessor.late_patches`.
        modality: the name of images among the `StepInfo.modalities`.
        model: the model of transformers to pack rows for, without keeping its weights; `None` for
            padded batches. `of` ignores it for a padded budget.
        max_samples: most samples of a packed group, as in the `TokenBudget`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: there are `shapes` and a `dummy`; or no test shows that the `model` keeps the
            samples of a row apart.
    """

    draws_random_numbers: ClassVar[bool] = False
    pixel_keys: ClassVar[tuple[str, ...]] = ("pixel_values", IMAGES_KEY)
    image_keys: ClassVar[tuple[str, ...]] = (*pixel_keys, "image_grid_thw", SETTINGS_KEY)
    packable: ClassVar[tuple[str, ...]] = PACKABLE
    token_keys: tuple[str, ...] = (*TOKEN_KEYS, TYPE_KEY)
    dummy: DummyImage | None
    image_processor: Any = None
    model: Any = None
    max_samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dummy is not None:
            remedy = "Pass `processor.dummy_image()`, with the parentheses, or None for no dummy."
            check_type("dummy", self.dummy, DummyImage, remedy)
        if self.image_processor is not None:
            remedy = "Pass `processor.image_processor` of the `VisionLanguageProcessor`."
            check_image_processor(self.image_processor, remedy)
        if self.shapes and self.dummy is not None:
            raise ValueError(
                "`shapes` must be () if there is a `dummy`, which may widen a batch beyond its "
                f"shape, but are {len(self.shapes)} instead."
            )
        if self.model is not None and self.side != "right":
            raise ValueError('`side` must be "right" with a `model`, for which rows are packed.')
        if self.model is not None and not isinstance(self.model, PackedModel):
            object.__setattr__(self, "model", PackedModel.of(self.model, self.packable))

    @property
    def layout(self) -> Layout:
        """The layout of budgets that this function fits."""
        return "padded" if self.model is None else "packed"

    @classmethod
    def of(
        cls, budget: int | TokenBudget, *, model: Any = None, **options: Any
    ) -> VisionLanguageCollate:
        """Return the collate function for the groups of a budget, padded or packed."""
        budget = TokenBudget.of(budget)
        if budget.layout == "padded":
            return super().of(budget, **options)
        if model is None:
            raise ValueError(
                "`model` must be the model of transformers to pack rows for, but is None. Pass it, "
                'or take `layout="padded"`.'
            )
        return super().of(budget, model=model, max_samples=budget.max_samples, **options)

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`, which may have images or not."""
        self.check_mappings(samples)
        texts = list(map(self._text_of, samples))
        if any(TYPE_KEY in text for text in texts):
            texts = [
                text if has_images else {TYPE_KEY: np.zeros(length_of(text), np.int64), **text}
                for text, has_images in zip(texts, map(self._has_images, samples), strict=True)
            ]
        images = self._images(samples)
        batch = super().__call__(texts) if self.model is None else self._packed(texts, images)
        pairs = [pair for pair in images if pair is not None]
        if pairs:
            pixels, grids = zip(*pairs, strict=True)
            batch["pixel_values"] = torch.from_numpy(np.concatenate(pixels))
            if grids[0] is not None:
                batch["image_grid_thw"] = torch.from_numpy(np.concatenate(grids))
            if self.model is None:
                # Models place tokens by their images, and fail at a row without any token.
                batch["attention_mask"][len(samples) :, :1] = 1
        return batch

    def _packed(
        self, texts: list[Mapping[str, Any]], images: list[tuple[Any, Any] | None]
    ) -> dict[str, Any]:
        """Return the batch of texts in one row, with the positions of their tokens."""
        names = ("pad_token_id", "token_keys", "pad_to_multiple_of", "shapes", "max_samples")
        batch = PackedCollate(**{name: getattr(self, name) for name in names})(texts)
        if self.model.positions_from is None:
            return batch
        text = batch["position_ids"]
        places = text.repeat(3, 1)
        start = 0
        for index, (sample, pair) in enumerate(zip(texts, images, strict=True)):
            stop = start + length_of(sample)
            if pair is not None:
                keys = {"input_ids", TYPE_KEY} & sample.keys()
                rows = {key: token_array(key, sample[key]) for key in keys}
                try:
                    places[:, start:stop] = self.model.positions(rows, pair[1])
                except SampleError as error:
                    raise of_group(error, index) from error
            start = stop
        batch["position_ids"] = torch.cat((text, places))[:, None]
        return batch

    def _dummy(self) -> DummyImage | None:
        return self.dummy

    def _with_dummy(self, samples: list[Mapping[str, Any]], dummy: DummyImage) -> dict[str, Any]:
        lengths = list(map(length_of, samples))
        shortest = lengths.index(min(lengths))  # The batch seldom becomes wider.
        grown = dummy.put_behind(samples[shortest], self.token_keys)
        return self([*samples[:shortest], grown, *samples[shortest + 1 :]])

    def _without_images(self, sample: Mapping[str, Any], dummy: DummyImage) -> Mapping[str, Any]:
        return dummy.take_out(sample, self.token_keys)

    def _images(self, samples: list[Mapping[str, Any]]) -> list[tuple[Any, Any] | None]:
        """Return the checked (patches, grid) of each sample; `None` without images."""
        images: list[tuple[Any, Any] | None] = []
        first: tuple[Any, Any] | None = None
        per_token = None  # patches per image token, if known
        if self.dummy is not None:
            per_token = math.prod(self.dummy.grid_thw)
        elif self.image_processor is not None:
            per_token = int(self.image_processor.merge_size) ** 2
        for index, sample in enumerate(samples):
            if not self._has_images(sample):
                images.append(None)
                continue
            try:
                pair = self._patches_of(sample)
                pixels, grid = pair
                if grid is None and self.dummy is not None:
                    raise SampleError(
                        "a sample with `pixel_values` must have `image_grid_thw`, like the "
                        "`dummy`, but lacks it. Let the processor return it."
                    )
                if grid is not None:
                    per_token = _patches_per_token(sample, len(pixels), per_token)
                first = first or pair
                first_pixels, first_grid = first
                if pixels.shape[1:] != first_pixels.shape[1:]:
                    raise SampleError(
                        f"`pixel_values` must have patches of {first_pixels.shape[1:]} values, as "
                        f"the samples before, but has {pixels.shape[1:]} instead. Give all sources "
                        "image processors with the same `patch_size` and `temporal_patch_size`."
                    )
                if (grid is None) != (first_grid is None):
                    raise SampleError(
                        "all samples of a group with `pixel_values` must have `image_grid_thw`, "
                        "or none, but only some have it. A model takes only one of the two forms."
                    )
            except SampleError as error:
                raise of_group(error, index) from error
            images.append(pair)
        return images

    def _patches_of(self, sample: Mapping[str, Any]) -> tuple[Any, Any]:
        if "pixel_values" not in sample:
            if self.image_processor is None:
                raise SampleError(
                    f"a sample has `{IMAGES_KEY}`, but no `pixel_values`: pass "
                    "`image_processor=processor.image_processor` to make them, or leave out "
                    "`late_patches` of the processor."
                )
            if SETTINGS_KEY in sample:
                check_settings(self.image_processor, sample[SETTINGS_KEY])
            sample = {**sample, **make_patches(self.image_processor, sample[IMAGES_KEY])}
        pixels = sample["pixel_values"]
        if isinstance(pixels, torch.Tensor):
            pixels = pixels.float().numpy(force=True)  # numpy has no bfloat16
        pixels = np.asarray(pixels, dtype=np.float32)
        if "image_grid_thw" not in sample:
            return pixels, None
        grid = np.asarray(sample["image_grid_thw"], dtype=np.int64).reshape(-1, 3)
        patches = int(grid.prod(axis=1).sum())
        if len(pixels) != patches:
            raise SampleError(
                f"`pixel_values` must have one row per patch of `image_grid_thw` ({patches}), but "
                f"has {len(pixels)} instead."
            )
        return pixels, grid


def _patches_per_token(sample: Mapping[str, Any], patches: int, expected: int | None) -> int | None:
    """Return the number of patches per image token, checked; `None` if it is unknown."""
    if TYPE_KEY not in sample:
        return expected  # Only the model knows the image tokens.
    tokens = int(np.count_nonzero(token_array(TYPE_KEY, sample[TYPE_KEY]) == 1))
    if expected is None and tokens and patches % tokens == 0:
        expected = patches // tokens
    if expected is None or tokens * expected != patches:
        raise SampleError(
            f"`input_ids` must have an image token for each {expected or '`merge_size**2`'} of the "
            f"{patches} patches, but `{TYPE_KEY}` has {tokens} of them. Do not cut a text within "
            "its images: shorten the text before processing, or leave the sample out."
        )
    return expected
