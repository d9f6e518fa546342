"""Images: decoded in little memory, with policies for bad ones; resized; cut into patches."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from odb_nodes._support.checks import check_choice, describe, import_extra, keep_count
from odb_nodes.errors import SampleError

if TYPE_CHECKING:
    from PIL.Image import Image

Reason = Literal["missing", "corrupt", "huge", "elongated"]
Policy = Literal["error", "skip"]
ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Image"

MAX_ASPECT_RATIO = 200
_ORIENTATION_TAG = 0x0112
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # orientation -> `PIL.Image.Transpose`
_LAST_FILTER = 5  # largest value of `PIL.Image.Resampling`
_URL = re.compile(r"(data:|[a-z][a-z0-9+.-]+://)", re.IGNORECASE)
_MOST_VALUE = 255  # largest value of a pixel
_DRAFT_GAP = 2.0  # least size of a decoded JPEG, as a multiple of the final size, as in Pillow


class ImageError(ValueError):
    """An image cannot be used.

    Attributes:
        reason: `"missing"`, `"corrupt"`, `"huge"` or `"elongated"`; see `BadImages`.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class BadImages:
    """What to do with a sample whose image cannot be used, by reason.

    `"error"` raises a `SampleError`; no sample before it is lost. `"skip"` skips the whole sample
    and counts it in `skipped_samples`, by the name of the field. A file that exists but cannot be
    read (no permission, a failing network file system) is always an error.

    Args:
        missing: the policy for a file that does not exist.
        corrupt: the policy for data that is no image, has no pixels or pixels outside 0..255, or
            is truncated or damaged.
        huge: the policy for an image with more pixels than the `ImageReader` allows.
        elongated: the policy for an image whose longer side is over 200 times the other, which no
            patch grid can hold.
    """

    missing: Policy = "error"
    corrupt: Policy = "error"
    huge: Policy = "error"
    elongated: Policy = "error"

    def __post_init__(self) -> None:
        for field in fields(self):
            check_choice(field.name, getattr(self, field.name), get_args(Policy))

    @classmethod
    def skipped(cls) -> BadImages:
        """Return the policy that skips bad images for all reasons."""
        return cls(missing="skip", corrupt="skip", huge="skip", elongated="skip")

    def skips(self, reason: str) -> bool:
        """Return whether a sample is skipped for this reason, the name of a field."""
        return bool(getattr(self, reason) == "skip")


def resized_shape(
    height: int, width: int, *, multiple: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the (height, width) of the resized image: Qwen2-VL's `smart_resize`.

    Args:
        height: height of the image, in pixels.
        width: width of the image, in pixels.
        multiple: both sides become multiples of this number of pixels: patch size times merge size.
        min_pixels: fewest pixels of the result.
        max_pixels: most pixels of the result; an elongated image may exceed it.

    Raises:
        ImageError: there is no pixel, or the longer side is over 200 times the other.
    """
    if min(height, width) < 1:
        raise ImageError("corrupt", f"it has no pixels: {width} x {height}")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ImageError(
            "elongated",
            f"the longer side must be at most {MAX_ASPECT_RATIO} times the other, but the image "
            f"has {width} x {height} pixels",
        )
    rows, columns = round(height / multiple), round(width / multiple)
    if rows * columns * multiple**2 > max_pixels:  # rounded bitwise as in transformers
        shrink = math.sqrt((height * width) / max_pixels)
        rows = max(1, math.floor(height / shrink / multiple))
        columns = max(1, math.floor(width / shrink / multiple))
    elif rows * columns * multiple**2 < min_pixels:
        enlarge = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * enlarge / multiple)
        columns = math.ceil(width * enlarge / multiple)
    return rows * multiple, columns * multiple


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """Decodes an image and resizes it to the shape that a patch grid needs.

    A large JPEG is decoded at a fraction of its size, at least twice the size of the result, so a
    photograph of 12 megapixels takes a few megabytes. Orientation tags are applied. Transparent
    pixels become white, as in image processors of transformers.

    Args:
        multiple: height and width become multiples of this number of pixels: patch size times merge
            size.
        min_pixels: fewest pixels of the result.
        max_pixels: most pixels of the result.
        max_image_pixels: most pixels of an image before it is resized. Formats other than JPEG are
            decoded whole, at 3 bytes a pixel or more. Pillow warns above the default, and refuses
            twice as much; raise its `PIL.Image.MAX_IMAGE_PIXELS` for larger images.
        resample: number of a Pillow filter, `PIL.Image.Resampling`, in 0..5; 3 is bicubic.
    """

    multiple: int = 28
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    max_image_pixels: int = 89_478_485
    resample: int = 3

    def __post_init__(self) -> None:
        for name in ("multiple", "min_pixels", "max_pixels", "max_image_pixels"):
            keep_count(self, name)
        keep_count(self, "resample", 0, _LAST_FILTER)
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"`min_pixels` must be at most `max_pixels` ({self.max_pixels}), but is "
                f"{self.min_pixels} instead."
            )

    def __call__(self, source: ImageSource) -> Image:
        """Return the image, RGB, at its final size."""
        pillow = import_extra("PIL.Image", "vision")
        url = isinstance(source, str) and _URL.match(source)
        if url or not isinstance(source, (str, os.PathLike, bytes, pillow.Image)):
            described = f"the URL {source!r:.60}" if url else f"`{type(source).__name__}`"
            raise SampleError(
                "an image must be a path, the bytes of a file, or a `PIL.Image.Image`, but is "
                f"{described} instead. Fetch it first, or convert an array by `Image.fromarray`."
            )
        try:
            if isinstance(source, pillow.Image):
                return self._decode(source, owned=False)
            with pillow.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                return self._decode(image, owned=True)
        except (ImageError, MemoryError):
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ImageError("missing", "there is no such file") from error
        except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
            raise ImageError("huge", str(error)) from error
        except pillow.UnidentifiedImageError:  # Its message has a memory address.
            message = "it is empty, or in no format that Pillow knows"
            raise ImageError("corrupt", message) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the file system
            raise ImageError("corrupt", f"{type(error).__name__}: {error}") from error

    def _decode(self, image: Image, *, owned: bool) -> Image:
        width, height = image.size
        if width * height > self.max_image_pixels:
            raise ImageError(
                "huge",
                f"it must have at most {self.max_image_pixels} pixels (`max_image_pixels`), but "
                f"has {width} x {height}",
            )
        # Before decoding. Rotating an image later swaps the sides of its final shape.
        rows, columns = resized_shape(
            height,
            width,
            multiple=self.multiple,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )
        if owned:
            image.draft(None, (int(_DRAFT_GAP * columns), int(_DRAFT_GAP * rows)))
        image.load()  # It also rotates a TIFF, whose `size` was upright already.
        orientation = _orientation_of(image)
        if orientation in range(5, 9):
            rows, columns = columns, rows
        turn: Any = _TURNS.get(orientation)
        _check_range(image)
        upright = _opaque(image if turn is None else image.transpose(turn))
        # Palettes cannot be interpolated; RGB and grey are exact.
        if upright.mode not in ("RGB", "L"):
            upright = upright.convert("RGB")
        if upright.size != (columns, rows):
            upright = upright.resize((columns, rows), self.resample)
        if upright is image or upright.mode != "RGB":
            upright = upright.convert("RGB")
        return upright


def _orientation_of(image: Image) -> Any:
    try:
        return image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # Damaged tags: the image itself may be good.
        return 1


def _check_range(image: Image) -> None:
    """Reject pixels that Pillow would cut to 0..255 on the way to RGB."""
    if image.mode[0] not in "IF":
        return
    pixels = np.asarray(image)
    if not (pixels.min() >= 0 and pixels.max() <= _MOST_VALUE):  # false for NaN
        raise ImageError(
            "corrupt",
            f"its pixels (mode {image.mode}) must be in 0..{_MOST_VALUE}, where Pillow cuts them: "
            "scale them",
        )


def _opaque(image: Image) -> Image:
    """Return an image with white in place of transparency, by alpha or by a transparent colour."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image
    pillow = import_extra("PIL.Image", "vision")
    white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
    blended: Image = pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return blended


_NEEDED = ("patch_size", "merge_size", "temporal_patch_size", "size", "resample")
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
"""The settings that decide the patches of an image at its final size."""


def check_image_processor(value: Any, remedy: str) -> None:
    """Raise an error if `value` cannot cut images into patches."""
    if isinstance(value, type) or not all(hasattr(value, name) for name in ("__call__", *_NEEDED)):
        raise TypeError(
            "`image_processor` must be an image processor with "
            f"{', '.join(f'`{name}`' for name in _NEEDED)}, but is {describe(value)} instead. "
            f"{remedy}"
        )
    try:
        bounded = None not in (value.size["shortest_edge"], value.size["longest_edge"])
    except (KeyError, TypeError):
        bounded = False
    if not bounded:
        raise ValueError(
            "the `size` of `image_processor` must have `shortest_edge` and `longest_edge`, the "
            f"bounds of an image's pixels, but is {value.size!r} instead. Pass `min_pixels` and "
            "`max_pixels` to the image processor."
        )


def make_patches(image_processor: Any, images: Sequence[Any]) -> dict[str, Any]:
    """Return `pixel_values` and `image_grid_thw` of RGB images that need no resizing."""
    arrays = image_processor(images=list(images), do_resize=False, return_tensors="np")
    return {
        "pixel_values": np.ascontiguousarray(arrays["pixel_values"], dtype=np.float32),
        "image_grid_thw": np.asarray(arrays["image_grid_thw"], dtype=np.int64),
    }


def settings_of(image_processor: Any) -> dict[str, str]:
    """Return the settings of an image processor that decide its patches, by name."""
    values = {name: getattr(image_processor, name, None) for name in _SETTINGS}
    plain = {name: str(np.asarray(value).tolist()) for name, value in values.items()}
    return {"type": type(image_processor).__name__, **plain}


def check_settings(image_processor: Any, expected: Mapping[str, str]) -> None:
    """Raise a `SampleError` unless an image processor has the expected settings."""
    actual = settings_of(image_processor)
    if differing := [name for name in actual if actual[name] != expected.get(name)]:
        shown = (f"`{name}` ({actual[name]} instead of {expected.get(name)})" for name in differing)
        raise SampleError(
            "`image_processor` of the collate function must be the one that processed the "
            f"samples, but differs in {', '.join(shown)}. Pass the same: "
            "`VisionLanguageCollate(..., image_processor=processor.image_processor)`."
        )
