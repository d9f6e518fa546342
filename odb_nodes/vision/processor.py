"""A conversation with images as a sample: the `process_fn` of a vision-language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from odb_nodes._core.checks import check_bool, check_type
from odb_nodes._core.hashing import tokenizer_name
from odb_nodes.errors import SampleError
from odb_nodes.sample import IGNORE_INDEX, Skipped
from odb_nodes.vision.arguments import (
    ORDER,
    check_image_processor,
    check_names,
    check_tokenizer,
)
from odb_nodes.vision.chat import ChatTemplate, Part
from odb_nodes.vision.dummy import IMAGES_KEY, SETTINGS_KEY, TYPE_KEY, DummyImage
from odb_nodes.vision.images import ImageError, ImageReader
from odb_nodes.vision.patches import make_patches, settings_of
from odb_nodes.vision.policy import BadImages


@dataclass(frozen=True)
class VisionLanguageProcessor:
    """Turns a record into a sample for Qwen2-VL and models like it; runs in the workers.

    A record is a mapping with `messages` (see `ChatTemplate.render`), one of the assistant or more,
    `images` for the image parts without one of their own, and `id`, which errors name. An image is
    a path, the bytes of a file, or a Pillow image. The text is tokenized part by part, so no text
    can pass for a special token, and each image becomes `grid.prod() / merge_size**2` image tokens.
    Nothing is cut off: the `TokenBudget` says what becomes of long samples.

    Args:
        tokenizer: a tokenizer of transformers.
        image_processor: the image processor of the model, `Qwen2VLImageProcessorPil` of
            transformers (before version 5, `Qwen2VLImageProcessor`) or one like it, which
            rescales, normalizes and cuts patches. `ImageReader` decodes and resizes for it.
        template: the form of the conversation, which also says which tokens are supervised.
        bad_images: the treatment of samples whose images cannot be used.
        max_image_pixels: most pixels of an image before it is resized.
        keep: the keys of a record that its sample keeps, if the record has them.
        late_patches: whether samples carry `images`, one byte a value, of which the
            `image_processor` of the `VisionLanguageCollate` makes `pixel_values`. This takes an
            eighth of the memory, in the pool and between processes, and more work per batch.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the tokenizer lacks a token of the template.
    """

    tokenizer: Any
    image_processor: Any
    _: KW_ONLY
    template: ChatTemplate = field(default_factory=ChatTemplate)
    bad_images: BadImages = field(default_factory=BadImages)
    max_image_pixels: int = ImageReader.max_image_pixels
    keep: tuple[str, ...] = ("id",)
    late_patches: bool = False
    _read: ImageReader = field(init=False, repr=False)
    _special: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check()
        processor, template = self.image_processor, self.template
        read = ImageReader(
            multiple=processor.patch_size * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
            max_image_pixels=self.max_image_pixels,
            resample=int(processor.resample),
        )
        names = ("start", "end", "image_start", "image_token", "image_end")
        special = {
            token: _token_id(self.tokenizer, name, token)
            for name in names
            for token in [getattr(template, name)]
        }
        object.__setattr__(self, "_read", read)
        object.__setattr__(self, "_special", special)

    @property
    def fingerprint_name(self) -> str:
        """The settings that decide the samples, which the state of a graph is checked against."""
        parts = (
            tokenizer_name(self.tokenizer),
            self._special,
            self._read,
            self.template,
            self.bad_images,
            settings_of(self.image_processor),
            f"keep={self.keep}",
            f"late_patches={self.late_patches}",
        )
        return f"{type(self).__qualname__}({', '.join(map(str, parts))})"

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any] | Skipped:
        """Return the sample of a record.

        Returns:
            `input_ids`, `labels` (-100 where not supervised) and `mm_token_type_ids` (1 for image
            tokens), (L,) int64. With images, `pixel_values`: (patches, C x temporal x height x
            width of a patch) float32, and `image_grid_thw`: (images, 3) int64; with `late_patches`
            `images` instead of `pixel_values`: a list of (H, W, 3) uint8, and `image_settings`: how
            patches are to be made of them, as strings. And what `keep` names. Or `Skipped`,
            by `bad_images`.
        """
        if not isinstance(record, Mapping):
            raise SampleError(
                f"a record must be a mapping with `messages`, but is {record!r:.100} instead."
            )
        with _naming(record):
            parts = self._parts(record)
        images = self._images(record, [part.content for part in parts if part.kind == "image"])
        if isinstance(images, Skipped):
            return images
        vision = self._patches(images)
        with _naming(record):
            tokens = self._tokens(parts, vision.get("image_grid_thw", np.empty((0, 3), np.int64)))
        return {**{key: record[key] for key in self.keep if key in record}, **tokens, **vision}

    def dummy_image(self) -> DummyImage:
        """Return the smallest image, for a `VisionLanguageCollate` of several ranks."""
        processor, template = self.image_processor, self.template
        tokens = (template.image_start, template.image_token, template.image_end)
        channels, side = 3, processor.patch_size
        return DummyImage(
            token_ids=tuple(self._special[token] for token in tokens),
            image_token_id=self._special[template.image_token],
            grid_thw=(1, processor.merge_size, processor.merge_size),
            patch_values=channels * processor.temporal_patch_size * side * side,
        )

    def _check(self) -> None:
        check_tokenizer("tokenizer", self.tokenizer)
        made = "`AutoImageProcessor.from_pretrained(...)` makes that of a model."
        check_image_processor("image_processor", self.image_processor, f"{ORDER}; {made}")
        check_type("template", self.template, ChatTemplate, "Pass `ChatTemplate(...)`.")
        remedy = 'Pass `BadImages(corrupt="skip")`, or `BadImages.skipped()` for all reasons.'
        check_type("bad_images", self.bad_images, BadImages, remedy)
        check_names("keep", self.keep)
        check_bool("late_patches", self.late_patches)

    def _parts(self, record: Mapping[str, Any]) -> list[Part]:
        if "messages" not in record:
            raise SampleError(
                f"a record must have `messages`, but has {sorted(map(str, record))} instead."
            )
        images = record.get("images")
        parts = self.template.render(record["messages"], () if images is None else images)
        if not any(part.supervised for part in parts):
            raise SampleError(
                "`messages` must have one of the assistant, but have none, so there is nothing to "
                "learn from them. Leave such records out of the data, or return `Skipped` for them."
            )
        return parts

    def _images(self, record: Mapping[str, Any], sources: list[Any]) -> list[Any] | Skipped:
        images = []
        for number, source in enumerate(sources):
            try:
                with _naming(record):
                    images.append(self._read(source))
            except ImageError as error:
                message = f"{_describe(record, number, source)} cannot be used: {error}."
                if self.bad_images.skips(error.reason):
                    return Skipped(error.reason, message)
                raise SampleError(
                    f"{message} Mend or remove it, or leave such samples out with "
                    f'`bad_images=BadImages({error.reason}="skip")`.'
                ) from error
            except OSError as error:
                raise SampleError(
                    f"{_describe(record, number, source)} cannot be read: {error}. The file is "
                    "there, so the sample is not skipped."
                ) from error
        return images

    def _patches(self, images: list[Any]) -> dict[str, Any]:
        if not images:
            return {}
        if not self.late_patches:
            return make_patches(self.image_processor, images)
        arrays = [np.array(image) for image in images]  # writable, as torchvision wants them
        side = self.image_processor.patch_size
        grids = [(1, array.shape[0] // side, array.shape[1] // side) for array in arrays]
        return {
            IMAGES_KEY: arrays,
            SETTINGS_KEY: settings_of(self.image_processor),
            "image_grid_thw": np.array(grids, dtype=np.int64),
        }

    def _tokens(self, parts: list[Part], grids: Any) -> dict[str, Any]:
        image_id = self._special[self.template.image_token]
        counts = iter((grids.prod(axis=1) // self.image_processor.merge_size**2).tolist())
        ids: list[int] = []
        supervised: list[bool] = []
        for part in parts:
            if part.kind == "image":
                added = [image_id] * next(counts)
            elif part.kind == "special":
                added = [self._special[part.content]]
            else:
                added = self.tokenizer(
                    part.content, add_special_tokens=False, split_special_tokens=True
                )["input_ids"]
                if image_id in added:
                    raise SampleError(
                        f"the text {part.content!r:.100} has {self.template.image_token!r}, and "
                        "this tokenizer takes it for an image. Remove it from the text."
                    )
            ids += added
            supervised += [part.supervised] * len(added)
        input_ids = np.array(ids, dtype=np.int64)
        return {
            "input_ids": input_ids,
            "labels": np.where(supervised, input_ids, IGNORE_INDEX),
            TYPE_KEY: (input_ids == image_id).astype(np.int64),
        }


def _token_id(tokenizer: Any, name: str, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or found == getattr(tokenizer, "unk_token_id", None):
        raise ValueError(
            f"`tokenizer` must have the token {token!r} (`{name}` of the template), but lacks it. "
            "Add it as a special token, or pass a `ChatTemplate` with those that it has."
        )
    return int(found)


def _describe(record: Mapping[str, Any], number: int, source: Any) -> str:
    if isinstance(source, bytes):
        what = f"{len(source)} bytes"
    elif hasattr(source, "mode") and hasattr(source, "size"):  # a Pillow image
        what = f"a `PIL.Image.Image` of mode {source.mode}, {' x '.join(map(str, source.size))}"
    else:
        what = f"{str(source)!r:.200}"
    return f"image {number} ({what}) of {_name_of(record)}"


def _name_of(record: Mapping[str, Any]) -> str:
    named = [f"{key} {record[key]!r:.100}" for key in ("source", "id") if key in record]
    return f"the sample{' with ' + ', '.join(named) if named else ''}"


@contextmanager
def _naming(record: Mapping[str, Any]) -> Iterator[None]:
    """Name the record in what is wrong with it."""
    try:
        yield
    except SampleError as error:
        raise SampleError(f"{_name_of(record)} cannot be used: {error}") from error
