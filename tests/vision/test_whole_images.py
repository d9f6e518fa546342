import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes.vision.whole_images import count_patches, resized

DTYPES = [bool, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.float16, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(7, 3), (2, 9), (7, 3, 1), (2, 9, 11)])
def test_an_image_is_resized_in_its_own_dtype(dtype, size):
    shape = (2, *(5, 4, 6)[: len(size)])
    image = (np.random.default_rng(0).random(shape) * 250).astype(dtype)
    made = resized(image, size)
    assert made.shape == (2, *size) and made.dtype == dtype
    assert image.min() <= made.min() and made.max() <= image.max()


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_large_integers_keep_their_value(kind):
    value = 2**30 + 1  # which float32 does not have
    assert (resized(np.full((1, 3, 3), value, kind), (5, 5)) == value).all()


def test_integers_are_rounded_to_the_nearest():
    row = np.array([[[0, 3]]], np.uint8)  # halfway: a quarter and three quarters of 3
    assert resized(row, (1, 4)).tolist() == [[[0, 1, 2, 3]]]
    assert resized(row[..., None], (1, 4, 1))[..., 0].tolist() == [[[0, 1, 2, 3]]]


def test_an_image_that_is_made_small_is_smoothed():
    stripes = np.tile(np.array([0, 0, 0, 1], np.float32), (1, 8, 8))
    small = resized(stripes, (8, 8))[0, :, 1:-1]
    assert np.allclose(small, 0.25, atol=0.05)


def test_an_image_of_the_size_is_the_same():
    image = np.random.default_rng(0).random((3, 4, 5))
    assert resized(image, (4, 5)) is image


def test_an_image_that_cannot_be_written_to_is_resized():
    image = np.ones((1, 4, 4), np.float32)
    image.flags.writeable = False
    assert (resized(image[:, ::-1, ::2], (3, 3)) == 1).all()


sides = st.integers(1, 9)


@given(st.integers(2, 3).flatmap(lambda axes: st.tuples(*[st.tuples(sides, sides)] * axes)))
def test_patches_cover_the_image(pairs):
    size, patch = zip(*pairs, strict=True)
    whole = torch.ones(size)
    for axis, side in enumerate(patch):  # one pixel of each patch
        whole = whole.index_select(axis, torch.arange(0, size[axis], side))
    assert count_patches(size, patch) == whole.numel()
