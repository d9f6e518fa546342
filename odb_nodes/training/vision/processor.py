"""The `process_fn` of a vision-language model: a conversation with images becomes a sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from odb_nodes._support.checks import check_bool, check_names, check_type, describe
from odb_nodes._support.hashing import tokenizer_name
from odb_nodes.core.sample import IGNORE_INDEX, Skipped
from odb_nodes.errors import SampleError
from odb_nodes.training.vision.collate import IMAGES_KEY, SETTINGS_KEY, TYPE_KEY, DummyImage
from odb_nodes.training.vision.images import (
    BadImages,
    ImageError,
    ImageReader,
    check_image_processor,
    make_patches,
    settings_of,
)

_ORDER = "The order is `VisionLanguageProcessor(tokenizer, image_processor)`;"


class Part(NamedTuple):
    """A part of a rendered conversation.

    Attributes:
        kind: `"text"`, a `"special"` token, or an `"image"`.
        content: the text, the token's name, or the image.
        supervised: whether the model is trained to write it.
    """

    kind: Literal["text", "special", "image"]
    content: Any
    supervised: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The conversation format of Qwen2-VL: `<|im_start|>role`, a line, content, `<|im_end|>`.

    Only the assistant's text and the token that ends it are supervised.

    Args:
        system: the system message for conversations without one; `None` to add none.
        start: the token that begins a message.
        end: the token that ends a message.
        image_start: the token before an image.
        image_token: the token of one merged patch of an image.
        image_end: the token after an image.
    """

    system: str | None = "You are a helpful assistant."
    start: str = "<|im_start|>"
    end: str = "<|im_end|>"
    image_start: str = "<|vision_start|>"
    image_token: str = "<|image_pad|>"
    image_end: str = "<|vision_end|>"

    def render(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any] = ()
    ) -> list[Part]:
        """Return the parts of a conversation, with adjacent texts joined.

        Args:
            messages: one or more, each with `role`, `"system"`, `"user"` or `"assistant"`, and
                `content`: a string, or a list of `{"type": "text", "text": ...}` and
                `{"type": "image", "image": ...}`.
            images: the images for image parts without `image`, in order.

        Raises:
            SampleError: a message has another form, there is none, or the number of images differs
                from the number of parts.
        """
        if not _is_list(messages) or not messages:
            raise _wrong_messages(messages)
        if not _is_list(images):
            raise SampleError(
                f"`images` must be a list of images, but is {describe(images)} instead. Put a "
                "single image into a list: `[image]`."
            )
        parts = _with_joined_texts(self._parts(messages))
        missing = [
            number
            for number, part in enumerate(parts)
            if part.kind == "image" and part.content is None
        ]
        if len(missing) != len(images):
            raise SampleError(
                f"`images` must have one image per image part without an `image` ({len(missing)}), "
                f'but has {len(images)}. Put {{"type": "image"}} where they belong, or add them.'
            )
        for number, image in zip(missing, images, strict=True):
            parts[number] = Part("image", image)
        return parts

    def _parts(self, messages: Sequence[Any]) -> Iterator[Part]:
        for number, message in enumerate(messages):
            match message:
                case {"role": "system" | "user" | "assistant" as role, "content": str(text)}:
                    content = [{"type": "text", "text": text}]
                case {"role": "system" | "user" | "assistant" as role, "content": [*content]}:
                    pass
                case _:
                    raise _wrong_messages(message)
            if number == 0 and role != "system" and self.system is not None:
                yield from self._message("system", [{"type": "text", "text": self.system}])
            yield from self._message(role, content)

    def _message(self, role: str, content: list[Any]) -> Iterator[Part]:
        supervised = role == "assistant"
        yield Part("special", self.start)
        yield Part("text", f"{role}\n")
        for entry in content:
            match entry:
                case {"type": "text", "text": str(text)}:
                    yield Part("text", text, supervised)
                case {"type": "image"}:
                    yield Part("special", self.image_start)
                    yield Part("image", entry.get("image"))
                    yield Part("special", self.image_end)
                case _:
                    raise _wrong_messages(entry)
        yield Part("special", self.end, supervised)
        yield Part("text", "\n")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _wrong_messages(value: Any) -> SampleError:
    return SampleError(
        '`messages` must be a list of {"role": "system", "user" or "assistant", "content": ...}, '
        'with a string or a list of {"type": "text", "text": ...} and {"type": "image", "image": '
        f"...}} as `content`, but {value!r:.100} is not. Correct it, or leave it out."
    )


def _with_joined_texts(parts: Iterable[Part]) -> list[Part]:
    """Join adjacent texts, which must be tokenized as one."""
    joined: list[Part] = []
    for (kind, supervised), run in groupby(parts, lambda part: (part.kind, part.supervised)):
        if kind == "text":
            joined.append(Part(kind, "".join(part.content for part in run), supervised))
        else:
            joined += run
    return joined


@dataclass(frozen=True)
class VisionLanguageProcessor:
    """Turns a record into a sample for Qwen2-VL and similar models; runs in the workers.

    A record is a mapping with `messages` (see `ChatTemplate.render`), of which the assistant writes
    at least one. It may have `images`, for image parts without `image`, and an `id`, which errors
    name. An image is a path, the bytes of a file, or a Pillow image. The text is tokenized part by
    part, so text is never read as a special token, and each image becomes `grid.prod() /
    merge_size**2` image tokens. Nothing is truncated: see `TokenBudget` for long samples.

    Args:
        tokenizer: a tokenizer of transformers.
        image_processor: the image processor of the model, `Qwen2VLImageProcessorPil` of
            transformers (before version 5, `Qwen2VLImageProcessor`) or a similar one, which
            rescales, normalizes and cuts patches after an `ImageReader` decodes and resizes.
        template: the format of the conversation, which also decides the supervised tokens.
        bad_images: the policies for samples whose images cannot be used.
        max_image_pixels: most pixels of an image before it is resized.
        keep: keys that a sample keeps from its record.
        late_patches: whether samples carry `images`, one byte a value, and the `image_processor` of
            the `VisionLanguageCollate` makes their `pixel_values`. This takes an eighth of the
            memory, in the pool and between processes, and more work per batch.

    Raises:
        TypeError: an argument has a wrong type.
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
        special = {}
        for name in ("start", "end", "image_start", "image_token", "image_end"):
            token = getattr(template, name)
            special[token] = _token_id(self.tokenizer, name, token)
        object.__setattr__(self, "_read", read)
        object.__setattr__(self, "_special", special)

    def _check(self) -> None:
        needed = ("__call__", "__len__", "convert_tokens_to_ids")
        tokenizer = self.tokenizer
        if isinstance(tokenizer, type) or not all(hasattr(tokenizer, name) for name in needed):
            raise TypeError(
                f"`tokenizer` must be a tokenizer of transformers, but is {describe(tokenizer)} "
                f"instead. {_ORDER} `AutoTokenizer.from_pretrained(...)` makes the tokenizer."
            )
        remedy = "`AutoImageProcessor.from_pretrained(...)` makes the image processor."
        check_image_processor(self.image_processor, f"{_ORDER} {remedy}")
        check_type("template", self.template, ChatTemplate, "Pass `ChatTemplate(...)`.")
        remedy = 'Pass `BadImages(corrupt="skip")`, or `BadImages.skipped()` for all reasons.'
        check_type("bad_images", self.bad_images, BadImages, remedy)
        object.__setattr__(self, "keep", check_names("keep", self.keep))
        check_bool("late_patches", self.late_patches)

    @property
    def fingerprint_name(self) -> str:
        """The settings that decide the samples, for the fingerprint in states."""
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
            `images` instead of `pixel_values`: a list of (H, W, 3) uint8, and `image_settings`: the
            settings for their patches, as strings. The keys in `keep`. Or `Skipped`, by
            `bad_images`.
        """
        if not isinstance(record, Mapping):
            raise SampleError(
                f"a record must be a mapping with `messages`, but is {record!r:.100} instead."
            )
        names = [f"{key} {record[key]!r:.100}" for key in ("source", "id") if key in record]
        subject = f"the sample with {', '.join(names)}" if names else "the sample"
        blame = f"{subject} cannot be used:"
        try:
            parts = self._parts(record)
            vision = self._vision([part.content for part in parts if part.kind == "image"])
            kept = {key: record[key] for key in self.keep if key in record}
            return {**kept, **self._tokens(parts, vision.get("image_grid_thw", ())), **vision}
        except ImageError as error:
            if self.bad_images.skips(error.reason):
                return Skipped(error.reason, f"{blame} {error}.")
            raise SampleError(
                f"{blame} {error}. Repair or remove the image, or skip such samples with "
                f'`bad_images=BadImages({error.reason}="skip")`.'
            ) from error
        except SampleError as error:
            raise SampleError(f"{blame} {error}") from error

    def dummy_image(self) -> DummyImage:
        """Return the smallest image, for a `VisionLanguageCollate` of several ranks."""
        processor, template = self.image_processor, self.template
        tokens = (template.image_start, template.image_token, template.image_end)
        channels = 3
        side = processor.patch_size
        return DummyImage(
            token_ids=tuple(self._special[token] for token in tokens),
            image_token_id=self._special[template.image_token],
            grid_thw=(1, processor.merge_size, processor.merge_size),
            patch_values=channels * processor.temporal_patch_size * side * side,
        )

    def _parts(self, record: Mapping[str, Any]) -> list[Part]:
        if "messages" not in record:
            raise SampleError(
                f"a record must have `messages`, but has {sorted(map(str, record))} instead."
            )
        images = record.get("images")
        parts = self.template.render(record["messages"], () if images is None else images)
        if not any(part.supervised for part in parts):
            raise SampleError(
                "`messages` must have one of the assistant, but have none, so no token is "
                "supervised. Leave such records out of the data, or return `Skipped` for them."
            )
        return parts

    def _vision(self, sources: list[Any]) -> dict[str, Any]:
        """Return the keys of a sample that hold its images."""
        images = []
        for number, source in enumerate(sources):
            where = f"image {number} ({_describe_image(source)})"
            try:
                images.append(self._read(source))
            except ImageError as error:
                raise ImageError(error.reason, f"{where}: {error}") from error
            except OSError as error:
                raise SampleError(
                    f"{where} cannot be read: {error}. The file exists, so the sample is not "
                    "skipped."
                ) from error
        if not images:
            return {}
        if not self.late_patches:
            return make_patches(self.image_processor, images)
        arrays = [np.array(image) for image in images]  # writable, for torchvision
        side = self.image_processor.patch_size
        grids = [(1, array.shape[0] // side, array.shape[1] // side) for array in arrays]
        return {
            IMAGES_KEY: arrays,
            SETTINGS_KEY: settings_of(self.image_processor),
            "image_grid_thw": np.array(grids, dtype=np.int64),
        }

    def _tokens(self, parts: list[Part], grids: Iterable[Any]) -> dict[str, Any]:
        image_id = self._special[self.template.image_token]
        counts = (int(grid.prod()) // self.image_processor.merge_size**2 for grid in grids)
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
                        f"the text {part.content!r:.100} has {self.template.image_token!r}, which "
                        "this tokenizer reads as an image. Remove it from the text."
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
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == getattr(tokenizer, "unk_token_id", None):
        raise ValueError(
            f"`tokenizer` must have the token {token!r} (`{name}` of the template), but lacks it. "
            "Add it as a special token, or pass a `ChatTemplate` with the tokenizer's tokens."
        )
    return int(token_id)


def _describe_image(source: Any) -> str:
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    if hasattr(source, "mode") and hasattr(source, "size"):
        return f"a Pillow image of mode {source.mode}, {' x '.join(map(str, source.size))}"
    return f"{str(source)!r:.200}"
