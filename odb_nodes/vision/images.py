"""Decode images of any size in little memory, and say why one cannot be used."""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, TypeAlias

from odb_nodes.checks import check_count
from odb_nodes.errors import SampleError
from odb_nodes.extras import import_extra

if TYPE_CHECKING:
    from PIL.Image import Image

Reason = Literal["missing", "corrupt", "huge", "elongated"]
ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Image"

MAX_ASPECT_RATIO = 200
_ORIENTATION_TAG = 0x0112
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
        height: of the image, in pixels.
        width: of the image, in pixels.
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
            twice its own `PIL.Image.MAX_IMAGE_PIXELS` in any case.
        resample: filter of Pillow, `PIL.Image.Resampling`; 3 is bicubic.
    """

    multiple: int = 28
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    max_image_pixels: int = 89_478_485
    resample: int = 3

    def __post_init__(self) -> None:
        for name in ("multiple", "min_pixels", "max_pixels", "max_image_pixels"):
            check_count(name, getattr(self, name))
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"`min_pixels` must be at most `max_pixels` ({self.max_pixels}), but is "
                f"{self.min_pixels} instead."
            )

    def __call__(self, source: ImageSource) -> Image:
        """Return the image, RGB, in its final size.

        Args:
            source: a path, the bytes of a file, or a Pillow image, which is left as it is.

        Raises:
            ImageError: it cannot be used; has the reason.
            OSError: the file is there, but cannot be read.
            ImportError: Pillow is not installed.
        """
        pillow = import_extra("PIL.Image", "vision")
        if not isinstance(source, (str, os.PathLike, bytes, pillow.Image)):
            raise SampleError(
                "an image must be a path, the bytes of a file, or a `PIL.Image.Image`, but is "
                f"`{type(source).__name__}` instead."
            )
        try:
            if isinstance(source, pillow.Image):
                return self._decode(source, owned=False)
            with _open(source) as file, pillow.open(file) as image:
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
        turned = image.getexif().get(_ORIENTATION_TAG, 1) in range(5, 9)
        if turned:
            width, height = height, width
        rows, columns = resized_shape(
            height,
            width,
            multiple=self.multiple,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )
        if owned:
            least = (rows, columns) if turned else (columns, rows)
            image.draft(None, (int(_DRAFT_GAP * least[0]), int(_DRAFT_GAP * least[1])))
        upright = _opaque(_upright(image))
        # Palettes cannot be interpolated; RGB and grey are exact.
        if upright.mode not in ("RGB", "L"):
            upright = upright.convert("RGB")
        if upright.size != (columns, rows):
            upright = upright.resize((columns, rows), self.resample)
        if upright is image or upright.mode != "RGB":
            upright = upright.convert("RGB")
        return upright


def _open(source: str | os.PathLike[str] | bytes) -> IO[bytes]:
    """Return the file of an image.

    Raises:
        ImageError: there is none.
    """
    if isinstance(source, bytes):
        return io.BytesIO(source)
    try:
        return Path(source).open("rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ImageError("missing", "there is no such file") from error


def _upright(image: Image) -> Image:
    """Return an image as its orientation tag says it is to be seen."""
    if image.getexif().get(_ORIENTATION_TAG, 1) not in range(2, 9):
        return image
    turned: Image = import_extra("PIL.ImageOps", "vision").exif_transpose(image)
    return turned


def _opaque(image: Image) -> Image:
    """Return an image on white where it is transparent, by alpha or by one colour of its own."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image
    pillow = import_extra("PIL.Image", "vision")
    white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
    blended: Image = pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return blended
