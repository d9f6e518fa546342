"""Collate function of text and images, for models that take all patches of a batch in one row."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from odb_nodes._core.checks import check_type
from odb_nodes.collate.check_packing import pretrained
from odb_nodes.collate.packed_collate import PackedCollate
from odb_nodes.collate.padding_collate import PaddingCollate
from odb_nodes.collate.token_rows import TOKEN_KEYS, length_of, of_group, row_of
from odb_nodes.errors import SampleError
from odb_nodes.planning.budget import Layout, TokenBudget
from odb_nodes.sample import IGNORE_INDEX
from odb_nodes.step_info import StepInfo
from odb_nodes.vision.images import check_image_processor, check_settings, make_patches

IMAGES_KEY = "images"
"""A list of (H, W, 3) uint8 arrays, which become patches when the batch is made."""
SETTINGS_KEY = "image_settings"
"""The settings that the patches of `images` are to be made with, see `settings_of`."""
TYPE_KEY = "mm_token_type_ids"
"""(L,) int64: 1 for the tokens of images, 0 for text. transformers 5 wants it beside images."""
PACKABLE = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),  # with positions of their own
    *("llava", "internvl"),
)
"""The `model_type`s that tests have shown to keep the samples of a row apart."""


@dataclass(frozen=True, kw_only=True)
class StepImages(PaddingCollate):
    """Pads text, and has images where any rank has some: sharded towers wait for each other."""

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


@dataclass(frozen=True, kw_only=True)
class DummyImage:
    """The smallest image that a model takes, placed after the text of a sample.

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

        Raises:
            SampleError: the sample has no `labels`, so that every token is supervised.
        """
        if "labels" not in sample:
            raise SampleError(
                "a sample must have `labels` where a `DummyImage` may be put behind its text, but "
                f"has {sorted(sample)}. Without labels the dummy's tokens would be learned."
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
        """Return a sample without its images and their tokens, for a step that it only fills."""
        image_keys = VisionLanguageCollate.image_keys
        left = {key: value for key, value in sample.items() if key not in image_keys}
        rows = _token_rows(left, token_keys)
        keep = rows["input_ids"] != self.image_token_id
        return {**left, **{key: row[keep] for key, row in rows.items()}}


def _token_rows(sample: Mapping[str, Any], token_keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of a sample that are one per token, as arrays."""
    found = {*token_keys, TYPE_KEY} & sample.keys()
    rows = {key: row_of(key, sample[key]) for key in found}
    return {key: row for key, row in rows.items() if len(row) == len(rows["input_ids"])}


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


@dataclass(frozen=True, kw_only=True)
class VisionLanguageCollate(StepImages):
    """Pads the text of samples, or packs it into one row, and joins their images.

    Text is padded as by `PaddingCollate`, or packed as by `PackedCollate` if there is a `model`.
    Beside the text's keys a batch with images has `pixel_values`, (patches, values) float32, and
    `image_grid_thw`, (images, 3) int64, in the order of the samples. A batch without images lacks
    both keys. Samples without `image_grid_thw` have `pixel_values` (images, C, H, W), which are
    joined alike.

    Of a padded batch, the model makes the position ids. A packed row has `position_ids`: (1, T) as
    of `PackedCollate`; for models that place images in time, height and width, (4, 1, T), those of
    the text and then the model's own, which its `get_rope_index` makes for each sample.

    If other ranks have images in a step and this one has none, the `dummy` goes behind its shortest
    sample. The batch gets no wider, unless all samples are about equally long or in one row. If no
    rank has images, but the sample that this one fills the step with does, they are taken out.

    Args:
        dummy: the image that makes up for missing ones, from `VisionLanguageProcessor.dummy_image`;
            `None` if no rank waits for images of another: one rank, or a tower that is not sharded.
        image_processor: the image processor that makes the patches of samples that carry `images`,
            see `VisionLanguageProcessor.late_patches`.
        modality: the name of images among the `StepInfo.modalities`.
        model: the model of transformers to make packed rows for; its weights are not kept. `None`
            for padded batches. `of` leaves it out for a padded budget.
        max_samples: most samples of a packed group, as in the `TokenBudget`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: there are `shapes` and a `dummy`; or the `model` might let the samples of a row
            see each other.
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
            remedy = "Pass `processor.image_processor`, that of the `VisionLanguageProcessor`."
            check_image_processor(self.image_processor, remedy)
        if self.shapes and self.dummy is not None:
            raise ValueError(
                "`shapes` must be () where there is a `dummy`, which may widen a batch beyond its "
                f"shape, but are {len(self.shapes)} instead."
            )
        if self.model is not None and self.side != "right":
            raise ValueError('`side` must be "right" where rows are packed, with a `model`.')
        if self.model is not None and not isinstance(self.model, PackedModel):
            object.__setattr__(self, "model", PackedModel.of(self.model, self.packable))

    @property
    def layout(self) -> Layout:
        """The layout of the budgets that this is for."""
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
                "`model` must be the model of transformers that packed rows are made for, but is "
                'None. Pass it, or take `layout="padded"`.'
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
        if found := [one for one in images if one is not None]:
            pixels, grids = zip(*found, strict=True)
            batch["pixel_values"] = torch.from_numpy(np.concatenate(pixels))
            if grids[0] is not None:
                batch["image_grid_thw"] = torch.from_numpy(np.concatenate(grids))
        if found and self.model is None:
            # Models place tokens by their images, and cannot place a row without any token.
            batch["attention_mask"][len(samples) :, :1] = 1
        return batch

    def _packed(
        self, texts: list[Mapping[str, Any]], images: list[tuple[Any, Any] | None]
    ) -> dict[str, Any]:
        """Return the batch of the text of samples in one row, with the positions of its tokens."""
        names = ("pad_token_id", "token_keys", "pad_to_multiple_of", "shapes", "max_samples")
        batch = PackedCollate(**{name: getattr(self, name) for name in names})(texts)
        if self.model.positions_from is None:
            return batch
        text = batch["position_ids"]
        places, start = text.repeat(3, 1), 0
        for index, (sample, found) in enumerate(zip(texts, images, strict=True)):
            stop = start + length_of(sample)
            if found is not None:
                keys = {"input_ids", TYPE_KEY} & sample.keys()
                rows = {key: row_of(key, sample[key]) for key in keys}
                try:
                    places[:, start:stop] = self.model.positions(rows, found[1])
                except SampleError as error:
                    raise of_group(error, index) from error
            start = stop
        batch["position_ids"] = torch.cat((text, places))[:, None]
        return batch

    def _dummy(self) -> DummyImage | None:
        return self.dummy

    def _with_dummy(self, samples: list[Mapping[str, Any]], dummy: DummyImage) -> dict[str, Any]:
        lengths = list(map(length_of, samples))
        shortest = lengths.index(min(lengths))  # where it seldom makes the batch wider
        grown = dummy.put_behind(samples[shortest], self.token_keys)
        return self([*samples[:shortest], grown, *samples[shortest + 1 :]])

    def _without_images(self, sample: Mapping[str, Any], dummy: DummyImage) -> Mapping[str, Any]:
        return dummy.take_out(sample, self.token_keys)

    def _images(self, samples: list[Mapping[str, Any]]) -> list[tuple[Any, Any] | None]:
        """Return patches and grids of samples, checked against their text; `None` without any."""
        images: list[tuple[Any, Any] | None] = []
        first: tuple[Any, Any] | None = None
        per_token = None  # patches, where they are known beforehand
        if self.dummy is not None:
            per_token = math.prod(self.dummy.grid_thw)
        elif self.image_processor is not None:
            per_token = int(self.image_processor.merge_size) ** 2
        for index, sample in enumerate(samples):
            if not self._has_images(sample):
                images.append(None)
                continue
            try:
                pixels, grid = found = self._patches_of(sample)
                if grid is None and self.dummy is not None:
                    raise SampleError(
                        "a sample with `pixel_values` must have `image_grid_thw`, as the `dummy` "
                        "has, but lacks it. Let the processor return it."
                    )
                if grid is not None:
                    per_token = _patches_per_token(sample, len(pixels), per_token)
                first = first or found
                if pixels.shape[1:] != (shape := first[0].shape[1:]):
                    raise SampleError(
                        f"`pixel_values` must have patches of {shape} values, as the samples "
                        f"before, but has {pixels.shape[1:]} instead. Give all sources image "
                        "processors with the same `patch_size` and `temporal_patch_size`."
                    )
                if (grid is None) != (first[1] is None):
                    raise SampleError(
                        "all samples of a group with `pixel_values` must have `image_grid_thw`, "
                        "or none, but only some have it. The model takes one of both."
                    )
            except SampleError as error:
                raise of_group(error, index) from error
            images.append(found)
        return images

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
        if "image_grid_thw" not in sample:
            return pixels, None
        grid = np.asarray(sample["image_grid_thw"], dtype=np.int64).reshape(-1, 3)
        if len(pixels) != (patches := int(grid.prod(axis=1).sum())):
            raise SampleError(
                f"`pixel_values` must have one row per patch of `image_grid_thw` ({patches}), but "
                f"has {len(pixels)} instead."
            )
        return pixels, grid


def _patches_per_token(sample: Mapping[str, Any], patches: int, expected: int | None) -> int | None:
    """Return the number of patches per image token, checked; `None` if it is not known."""
    if TYPE_KEY not in sample:
        return expected  # the model alone knows which tokens are an image's
    tokens = int(np.count_nonzero(row_of(TYPE_KEY, sample[TYPE_KEY]) == 1))
    if expected is None and tokens and patches % tokens == 0:
        expected = patches // tokens
    if expected is None or tokens * expected != patches:
        raise SampleError(
            f"`input_ids` must have an image token for each {expected or '`merge_size**2`'} of the "
            f"{patches} patches, but `{TYPE_KEY}` has {tokens} of them. Do not cut a text within "
            "its images: shorten its text before it is processed, or leave it out."
        )
    return expected
