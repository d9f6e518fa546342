import io

import numpy as np
import pytest
from images import as_bytes, noise, smooth
from PIL import Image, ImageOps
from refusals import refuses

from odb_nodes.errors import SampleError
from odb_nodes.training.vision import ImageError, ImageReader

read = ImageReader(max_pixels=28 * 28 * 16)


def turned_by(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_pixels_that_pillow_would_cut_are_an_error():
    bright = np.linspace(0, 65_535, 30 * 30).reshape(30, 30)
    transparent = as_bytes(Image.fromarray(bright.astype(np.uint16)), transparency=3)
    assert Image.open(io.BytesIO(transparent)).info["transparency"] == 3
    with_nan = np.where(bright == 0, np.nan, bright / 257)
    for image in (
        Image.fromarray(bright.astype(np.uint16)),
        Image.fromarray(bright.astype(np.float32)),
        transparent,
        Image.fromarray((bright / 257 - 1).astype(np.float32)),
        Image.fromarray((bright / 257 - 9).astype(np.int32)),
        Image.fromarray(with_nan.astype(np.float32)),
    ):
        with pytest.raises(ImageError, match=r"must be in 0..255"):
            read(image)
    assert read(Image.fromarray((bright / 257).astype(np.float32))).mode == "RGB"


def test_an_image_is_read_from_paths_bytes_and_images(tmp_path, monkeypatch):
    image, path = noise(90, 61), tmp_path / "data.png"  # as a URL may begin
    image.save(path)
    monkeypatch.chdir(tmp_path)
    expected = image.resize((84, 56), Image.Resampling.BICUBIC)
    for source in (path, str(path), "data.png", path.read_bytes(), image):
        assert np.array_equal(read(source), expected)
    assert image.size == (90, 61)
    assert read(fitting := noise(84, 56)) is not fitting  # which is the user's


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size(turned, monkeypatch):
    decoded, resize = [], Image.Image.resize

    def noted(self, *args, **options):
        decoded.append(self.size)
        return resize(self, *args, **options)

    monkeypatch.setattr(Image.Image, "resize", noted)
    image, exif = smooth(2400, 1600), turned_by(6 if turned else 1)
    files = [as_bytes(image, kind, exif=exif) for kind in ("PNG", "JPEG")]
    whole, drafted = (np.asarray(read(file), int) for file in files)
    step = -1 if turned else 1
    assert decoded == [(2400, 1600)[::step], (300, 200)[::step]]
    assert np.abs(whole - drafted).mean() < 2


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_applied_once_in_every_format(orientation, format):
    image, options = smooth(280, 84), {"lossless": True} if format == "WEBP" else {}
    file = as_bytes(image, format, exif=turned_by(orientation), **options)
    expected = read(ImageOps.exif_transpose(Image.open(io.BytesIO(file))))
    assert expected.size == ((56, 196) if orientation > 4 else (196, 56))
    if orientation == 6:
        assert np.array_equal(expected, read(image.rotate(-90, expand=True)))
    for source in (file, opened := Image.open(io.BytesIO(file))):
        assert np.array_equal(read(source), expected)
    assert opened.size in ((280, 84), (84, 280) if format == "TIFF" else (280, 84))


def test_a_good_image_with_damaged_tags_is_read():
    image = smooth(90, 60)
    file = as_bytes(image, exif=b"Exif\0\0damaged")
    with pytest.raises(SyntaxError):
        Image.open(io.BytesIO(file)).getexif()
    assert np.array_equal(read(file), read(image))


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(format):
    frames = [Image.new("RGB", (60, 40), color) for color in ("white", "black")]
    file = as_bytes(frames[0], format, save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(file)).n_frames == 2
    assert np.array_equal(read(file), read(frames[0]))


def reason_of(source, reader=read):
    with pytest.raises(ImageError) as caught:
        reader(source)
    return caught.value.reason


def test_why_an_image_cannot_be_used(tmp_path):
    good = as_bytes(noise(90, 60), "JPEG")
    assert reason_of(tmp_path / "nothing.jpg") == "missing"
    (tmp_path / "empty.png").write_bytes(b"")
    assert reason_of(tmp_path / "empty.png") == "corrupt"
    for source in [b"", b"no image at all", *(good[:n] for n in range(0, len(good) - 2, 211))]:
        assert reason_of(source) == "corrupt"
    for size in ((0, 5), (5, 0), (0, 0)):
        assert reason_of(Image.new("RGB", size)) == "corrupt"
    (tmp_path / "cut.png").write_bytes(as_bytes(noise(90, 60))[:-2000])
    with Image.open(tmp_path / "cut.png") as lazy:
        assert reason_of(lazy) == "corrupt"
    assert reason_of(good, ImageReader(max_image_pixels=90 * 60 - 1)) == "huge"
    ImageReader(max_image_pixels=90 * 60)(good)
    assert reason_of(as_bytes(noise(1, 201))) == "elongated"
    with pytest.raises(IsADirectoryError):  # which is no bad image
        read(tmp_path)


def test_a_decompression_bomb_is_refused_before_it_is_decoded(monkeypatch):
    bomb = as_bytes(Image.new("1", (8000, 8000)))
    assert len(bomb) < 20_000
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    assert reason_of(bomb, ImageReader(max_image_pixels=10_000_000)) == "huge"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8000 * 8000 // 3)  # Pillow's own limit is twice
    assert reason_of(bomb) == "huge"


URL = "data:image/png;base64," + "A" * 5000
REFUSALS = [
    (lambda: ImageReader(min_pixels=2, max_pixels=1), ValueError, "`min_pixels` .*`max_pixels`"),
    (lambda: ImageReader(resample=6), ValueError, "`resample` must be in 0..5, but is 6"),
    (lambda: read(7), SampleError, "must be a path.* is `int` instead"),
    (lambda: read(np.zeros((9, 9, 3), np.uint8)), SampleError, "`ndarray`.*`Image.fromarray`"),
    (lambda: read("https://example.org/a.png"), SampleError, "the URL 'https.*png' .*Fetch"),
    (lambda: read(URL), SampleError, "URL 'data:image/png;base64,A{1,60} instead"),
]
test_arguments_and_what_cannot_be_an_image_are_errors = refuses(REFUSALS)
