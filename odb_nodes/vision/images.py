"""Decode images of any size in little memory, and say why one cannot be used."""

from __future__ import annotations

import functools
import io
import math
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias

from odb_nodes._core.checks import check_count, import_extra
from odb_nodes.errors import SampleError

if TYPE_CHECKING:
    from PIL.Image import Image

Reason = Literal["missing", "corrupt", "huge", "elongated"]
ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Image"

MAX_ASPECT_RATIO = 200
_ORIENTATION_TAG = 0x0112
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # orientation -> `PIL.Image.Transpose`
_LAST_FILTER = 5  # of `PIL.Image.Resampling`
_URL = re.compile(r"(data:|[a-z][a-z0-9+.-]+://)", re.IGNORECASE)
_DRAFT_GAP = 2.0  # a JPEG is decoded at this many times its final size or more, as Pillow does


class ImageError(ValueError):
    """An image cannot be used.

    Attributes:
        reason: `"missing"`, `"corrupt"`, `"huge"` or `"elongated"`; see `BadImages`.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def resized_shape(
    height: int, width: int, *, multiple: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the (height, width) that an image is resized to: Qwen2-VL's `smart_resize`.

    Both become multiples of `multiple`, their product comes to lie between the bounds, and their
    ratio changes as little as that allows.

    Args:
        height: height of the image, in pixels.
        width: width of the image, in pixels.
        multiple: pixels; patch size times merge size.
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
    if rows * columns * multiple**2 > max_pixels:  # in the order of transformers, to the last bit
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

    A large JPEG is decoded at a fraction of its size, at least twice that of the result, so a
    photograph of 12 megapixels takes megabytes, not dozens of them. Orientation tags are applied.
    What is transparent is put on white, as image processors of transformers do.

    Args:
        multiple: pixels; height and width become multiples of it: patch size times merge size.
        min_pixels: fewest pixels of the result.
        max_pixels: most pixels of the result.
        max_image_pixels: most pixels of an image before it is resized. Other formats than JPEG are
            decoded whole, at 3 bytes a pixel or more. The default is that of Pillow, which refuses
            twice its own `PIL.Image.MAX_IMAGE_PIXELS` in any case. Pillow's warning below that is
            switched off for the process, unless a filter of yours asks for it.
        resample: number of a Pillow filter, `PIL.Image.Resampling`, in 0..5; 3 is bicubic.
    """

    multiple: int = 28
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    max_image_pixels: int = 89_478_485
    resample: int = 3

    def __post_init__(self) -> None:
        for name in ("multiple", "min_pixels", "max_pixels", "max_image_pixels"):
            check_count(name, getattr(self, name))
        if check_count("resample", self.resample, 0) > _LAST_FILTER:  # else no image would do
            raise ValueError(f"`resample` must be in 0..{_LAST_FILTER}, but is {self.resample}.")
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"`min_pixels` must be at most `max_pixels` ({self.max_pixels}), but is "
                f"{self.min_pixels} instead."
            )

    def __call__(self, source: ImageSource) -> Image:
        """Return the image, RGB, in its final size."""
        pillow = import_extra("PIL.Image", "vision")
        url = isinstance(source, str) and _URL.match(source)
        if url or not isinstance(source, (str, os.PathLike, bytes, pillow.Image)):
            what = f"the URL {source!r:.60}" if url else f"`{type(source).__name__}`"
            raise SampleError(
                "an image must be a path, the bytes of a file, or a `PIL.Image.Image`, but is "
                f"{what} instead. Fetch or convert it before, an array with `Image.fromarray`."
            )
        try:
            if isinstance(source, pillow.Image):
                return self._decode(source, owned=False)
            with _open(source) as file, _identify(file) as image:
                return self._decode(image, owned=True)
        except (ImageError, MemoryError):
            raise
        except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
            raise ImageError("huge", str(error)) from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the file system, and not of the decoder
            raise ImageError("corrupt", f"{type(error).__name__}: {error}") from error

    def _decode(self, image: Image, *, owned: bool) -> Image:
        width, height = image.size
        if width * height > self.max_image_pixels:
            raise ImageError(
                "huge",
                f"it must have at most {self.max_image_pixels} pixels (`max_image_pixels`), but "
                f"has {width} x {height}",
            )
        # Before anything is decoded. Turning an image turns its final shape, and no more.
        rows, columns = resized_shape(
            height,
            width,
            multiple=self.multiple,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )
        if owned:
            image.draft(None, (int(_DRAFT_GAP * columns), int(_DRAFT_GAP * rows)))
        image.load()  # which turns a TIFF upright, whose size was that from the start
        orientation = _orientation_of(image)
        if orientation in range(5, 9):
            rows, columns = columns, rows
        upright = _opaque(_turned(image, orientation))
        # Palettes cannot be interpolated; RGB and grey are exact.
        if upright.mode not in ("RGB", "L"):
            upright = upright.convert("RGB")
        if upright.size != (columns, rows):
            upright = upright.resize((columns, rows), self.resample)
        if upright is image or upright.mode != "RGB":
            upright = upright.convert("RGB")
        return upright


def _open(source: str | os.PathLike[str] | bytes) -> IO[bytes]:
    """Return the file of an image."""
    if isinstance(source, bytes):
        return io.BytesIO(source)
    try:
        return Path(source).open("rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ImageError("missing", "there is no such file") from error


def _identify(file: IO[bytes]) -> Image:
    """Return the image that a file has, not yet decoded."""
    pillow = import_extra("PIL.Image", "vision")
    _leave_warnings_to_errors()
    try:
        image: Image = pillow.open(file)
        return image
    except pillow.UnidentifiedImageError:  # which says no more than where the file is in memory
        size = file.seek(0, os.SEEK_END)
        what = "is in no format that Pillow knows" if size else "is empty: it has 0 bytes"
        raise ImageError("corrupt", f"it {what}") from None


@functools.cache
def _leave_warnings_to_errors() -> None:
    """Keep Pillow from warning of large images, unless a filter asks for that: we count pixels.

    Once for the process, behind all filters: `warnings.catch_warnings` is not for threads.
    """
    pillow = import_extra("PIL.Image", "vision")
    warnings.filterwarnings("ignore", category=pillow.DecompressionBombWarning, append=True)


def _orientation_of(image: Image) -> Any:
    """Return the orientation tag of an image; 1 is upright."""
    try:
        return image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # tags that are damaged say nothing; the image may be good
        return 1


def _turned(image: Image, orientation: Any) -> Image:
    """Return an image turned upright by its orientation tag."""
    if orientation not in _TURNS:
        return image
    return image.transpose(import_extra("PIL.Image", "vision").Transpose(_TURNS[orientation]))


def _opaque(image: Image) -> Image:
    """Return an image with white in place of transparency, by alpha or by a transparent colour."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image
    pillow = import_extra("PIL.Image", "vision")
    white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
    blended: Image = pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return blended
