"""Whole images and volumes, in any number and size per sample, as the tensors of a batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from aligned_ranks import TIMEOUT_S, on_ranks
from hypothesis import given
from hypothesis import strategies as st
from images import step
from PIL import Image
from refusals import refuses
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    Observation,
    ODBDataLoader,
    RankAligner,
    SampleError,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.training.vision import MultiImageCollate
from odb_nodes.training.vision.multi_image_collate import resized


def sample(number, *shapes, **more):
    images = [
        np.full((3, *shape), 4 * number + place + 1, np.uint8) for place, shape in enumerate(shapes)
    ]
    image_fields = {"pixel_values": images} if shapes else {}
    return {
        "id": f"s{number}",
        "task": f"task {number % 2}",
        "input_ids": [1] * 5,
        **image_fields,
        **more,
    }


def volumes(number):
    """Samples of 0 to 2 volumes of odd shapes."""
    return [
        sample(n, *[(1 + n % 4, 3 + n % 3, 2 + (n + place) % 5) for place in range(n % 3)])
        for n in range(number)
    ]


SIZES = [[(4, 6)], [], [(5, 2), (1, 1), (2, 7)]]


@pytest.mark.parametrize("depth", [(), (3,)])
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.uint16, np.float16])
def test_images_are_padded_in_number_and_size(dtype, depth):
    rng = np.random.default_rng(0)
    images = [
        [(rng.random((2, *size, *depth)) * 200).astype(dtype) for size in sizes] for sizes in SIZES
    ]
    group = [
        sample(number, pixel_values=sample_images or None)
        for number, sample_images in enumerate(images)
    ]
    batch = MultiImageCollate()(group)
    assert batch["id"] == ["s0", "s1", "s2"] and batch["task"] == ["task 0", "task 1", "task 0"]
    pixels = batch["pixel_values"].numpy()
    assert pixels.shape == (3, 3, 2, 5, 7, *depth) and pixels.dtype == dtype
    assert batch["image_mask"].tolist() == [[True, False, False], [False] * 3, [True] * 3]
    assert batch["image_sizes"].shape == (3, 3, 2 + len(depth))
    assert batch["image_sizes"].dtype == torch.int64
    for row, sample_images in enumerate(images):
        for place, image in enumerate(sample_images):
            assert tuple(batch["image_sizes"][row, place].tolist()) == image.shape[1:]
            assert np.array_equal(pixels[row, place][tuple(map(slice, image.shape))], image)
    assert np.count_nonzero(pixels) == sum(
        np.count_nonzero(image) for sample_images in images for image in sample_images
    )
    assert not batch["image_sizes"][~batch["image_mask"]].any()


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 3, 4, 5)])
def test_an_array_of_images_is_taken_as_they_are(shape):
    images = np.random.default_rng(0).random(shape, np.float32)
    for value in (images, torch.from_numpy(images)):
        batch = MultiImageCollate()([sample(0, pixel_values=value)])
        assert np.array_equal(batch["pixel_values"][0], images)


@pytest.mark.parametrize("size", [(8, 8), (8, 8, 4)])
@pytest.mark.parametrize("shapes", [(), ((4, 16),)])
def test_without_images_there_are_none_unless_other_ranks_have_some(shapes, size):
    collate, axes = MultiImageCollate(dummy_shape=(3, *size), shapes=shapes), len(size)
    rows = 4 if shapes else 2
    text, images = [sample(0), sample(1)], [sample(0, size[::-1]), sample(1)]
    for batch in (collate(text), collate.collate_step(text, step())):
        assert "pixel_values" not in batch and batch["image_mask"].shape == (rows, 0)
        assert batch["image_sizes"].shape == (rows, 0, axes)
    dummy = collate.collate_step(text, step("image"))
    assert dummy["pixel_values"].shape == (rows, 1, 3, *size) and not dummy["pixel_values"].any()
    assert dummy["image_mask"].tolist() == [[False]] * rows
    assert dummy["image_sizes"].shape == (rows, 1, axes)
    filler = collate.collate_step(images, step(is_filler=True))
    assert "pixel_values" not in filler and filler["image_mask"].shape == (rows, 0)
    for batch in (collate(images), collate.collate_step(images, step("image", is_filler=True))):
        assert batch["pixel_values"].shape == (rows, 1, 3, *size[::-1])
        assert batch["image_mask"].flatten().tolist() == [True] + [False] * (rows - 1)


def test_images_that_the_step_does_not_know_of_are_an_error():
    collate, group = MultiImageCollate(dummy_shape=(3, 8, 8)), [sample(0, (4, 4))]
    with pytest.raises(ValueError, match="'image' must be among its `modalities`, but they are"):
        collate.collate_step(group, replace(step("audio"), all_samples_this_step=2))
    assert "pixel_values" in collate.collate_step(group, step("audio"))


def test_ranks_agree_on_the_steps_that_have_volumes():
    def observe(sample):
        task = "scans" if "pixel_values" in sample else "text"
        return Observation(len(sample["input_ids"]), task=task)

    def batches(exchange):
        data = volumes(4) if exchange.rank else [sample(index) for index in range(40)]
        node = WindowBucketer(LengthObserver(IterableWrapper(data), observe), 20, 8)
        aligned = RankAligner(node, exchange, timeout_s=TIMEOUT_S)
        collate = MultiImageCollate(dummy_shape=(3, 2, 2, 2))
        return list(Loader(GroupCollator(aligned, collate)))

    text, scans = on_ranks(2, batches)
    fillers = 0
    for text_batch, scan_batch in zip(text, scans, strict=True):
        assert not text_batch["image_mask"].any()
        assert ("pixel_values" in text_batch) == ("pixel_values" in scan_batch)
        fillers += pop_step_info(scan_batch).is_filler
    assert fillers and any("pixel_values" in text_batch for text_batch in text)


def test_keys_that_this_collate_function_does_not_make_are_kept():
    group = [sample(number, (2, 2), id=2**63 - 1 - number, task_id=7) for number in range(2)]
    batch = MultiImageCollate()(group)
    assert batch["task_id"].tolist() == [7, 7]
    assert batch["id"].tolist() == [2**63 - 1, 2**63 - 2]


# --- resizing -----------------------------------------------------------------------------------

DTYPES = [bool, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.float16, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(7, 3), (2, 9), (7, 3, 1), (2, 9, 11)])
def test_an_image_is_resized_in_its_own_dtype(dtype, size):
    shape = (2, *(5, 4, 6)[: len(size)])
    image = (np.random.default_rng(0).random(shape) * 250).astype(dtype)
    image.flags.writeable = False
    actual = resized(image, size)
    assert actual.shape == (2, *size) and actual.dtype == dtype
    assert image.min() <= actual.min() and actual.max() <= image.max()
    assert resized(image, shape[1:]) is image


def test_how_an_image_is_resized():
    value = 2**30 + 1  # which float32 does not have
    assert (resized(np.full((1, 3, 3), value, np.int64), (5, 5)) == value).all()
    row = np.array([[[0, 3]]], np.uint8)  # halfway: a quarter and three quarters of 3
    assert resized(row, (1, 4)).tolist() == [[[0, 1, 2, 3]]]
    assert resized(row[..., None], (1, 4, 1))[..., 0].tolist() == [[[0, 1, 2, 3]]]
    stripes = np.tile(np.array([0, 0, 0, 1], np.float32), (1, 8, 8))
    assert np.allclose(resized(stripes, (8, 8))[0, :, 1:-1], 0.25, atol=0.05)  # smoothed


def test_a_batch_has_images_of_one_size_and_their_sizes_before():
    group = [sample(0, (4, 6)), sample(1), sample(2, (5, 2), (1, 1), (8, 8))]
    batch, padded = MultiImageCollate(resize=(8, 8))(group), MultiImageCollate()(group)
    assert batch["pixel_values"].shape == (3, 3, 3, 8, 8)
    for key in ("image_mask", "image_sizes"):
        assert torch.equal(batch[key], padded[key])
    for row, item in enumerate(group):
        for place, image in enumerate(item.get("pixel_values", [])):
            assert (batch["pixel_values"][row, place] == int(image.flat[0])).all()
    assert not batch["pixel_values"][~batch["image_mask"]].any()


# --- patches and tasks --------------------------------------------------------------------------

COUNT = MultiImageCollate().count_patches
sides = st.integers(1, 9)


@given(st.integers(2, 3).flatmap(lambda axes: st.tuples(*[st.tuples(sides, sides)] * axes)))
def test_patches_cover_the_images(pairs):
    size, patch = zip(*pairs, strict=True)
    whole = torch.ones(size)
    for axis, side in enumerate(patch):  # one pixel of each patch
        whole = whole.index_select(axis, torch.arange(0, size[axis], side))
    for images in range(3):
        assert COUNT(sample(0, *[size] * images), patch) == images * whole.numel()


@pytest.mark.parametrize("resize", [None, (5, 3, 4)])
def test_max_patches_bounds_those_of_the_images_in_a_batch(resize):
    collate, data, side = MultiImageCollate(resize=resize), volumes(30), 2

    def observe(sample):
        return Observation(len(sample["input_ids"]), patches=collate.count_patches(sample, side))

    budget = TokenBudget(1000, max_patches=60)
    node = WindowBucketer(LengthObserver(IterableWrapper(data), observe), budget, 12)
    counts = []
    for batch in GroupCollator(node, collate):
        sizes = batch["image_sizes"][batch["image_mask"]]
        if resize is not None:
            sizes = torch.tensor([batch["pixel_values"].shape[3:]] * len(sizes))
        counts.append(int((-(-sizes // side)).prod(1).sum()))
    assert sum(counts) == sum(observe(sample).patches for sample in data)
    assert 45 < max(counts) <= 60


def test_the_number_of_images_counts_as_patches():
    data = [sample(n, *[(2 + n % 3, 3)] * (n % 4)) for n in range(40)]
    budget = TokenBudget(1000, max_patches=6)
    node = WindowBucketer(LengthObserver(IterableWrapper(data)), budget, 12)
    batches = list(Loader(GroupCollator(node, MultiImageCollate())))
    assert sorted(key for batch in batches for key in batch["id"]) == sorted(s["id"] for s in data)
    assert max(int(batch["image_mask"].sum()) for batch in batches) == 6


# --- what is refused ------------------------------------------------------------------------------

GRAPH = torch.ones(1, 2, 2, requires_grad=True)
MADE = ("image_mask", "image_sizes")
SHAPE = "must be .C, H, W. or .C, H, W, D., with pixels that are real numbers"
MISFITS = [
    *(({key: 1}, f"`MultiImageCollate` adds '{key}' to the batch") for key in MADE),
    ({"pixel_values": np.ones((2, 4, 4))}, r"missing channel axis by `image\[None\]`"),
    ({"pixel_values": [np.ones((1, 2, 2), object)]}, SHAPE + ", but is .1, 2, 2. of object"),
    ({"pixel_values": [np.zeros((3, 0, 4))]}, SHAPE),
    ({"pixel_values": [np.zeros((1, 1, 2, 2, 2))]}, SHAPE),
    ({"pixel_values": [Image.new("RGB", (4, 4))]}, "is a Pillow image, whose channels"),
    ({"pixel_values": [GRAPH]}, "cannot become an array: .* requires grad"),
    ({"pixel_values": [[[[1.0], [1.0, 2.0]]]]}, "cannot become an array"),
    ({"pixel_values": [np.zeros((1, 4, 4), np.uint8)]}, "is .1, 4, 4. of uint8, and an earlier"),
    ({"pixel_values": [np.zeros((3, 4, 4), np.int16)]}, "the same dimensions, channels and dty"),
    ({"pixel_values": [np.zeros((3, 2, 2, 2), np.uint8)]}, "the same dimensions, channels and"),
    ({"id": 2**63}, "`id` must be a number .* but is 9223372036854775808"),
]


@pytest.mark.parametrize(("more", "message"), MISFITS)
def test_what_a_batch_cannot_hold_is_an_error_that_names_the_sample(more, message):
    group = [sample(0, (2, 2), id=1), sample(1, **{"id": 1, **more})]
    with pytest.raises(SampleError, match=f"sample 1 of the group: .*{message}"):
        MultiImageCollate()(group)


MIXED = LengthObserver(IterableWrapper([sample(0, (4, 4)), sample(1, (4, 4, 2))]))
VOLUME = sample(0, (5, 4, 2))
OPTIONS = [
    ({"resize": (4,)}, "`resize` must be .H, W.*is .4,."),
    ({"resize": (4, 0)}, "`W of resize` must be in 1"),
    ({"dummy_shape": (4, 4)}, "`dummy_shape` must be .C, H, W."),
    ({"dummy_shape": ()}, "`dummy_shape` must be .C, H, W."),
    ({"dummy_shape": 3}, "`dummy_shape` must be .C, H, W.*is 3"),
    ({"resize": (4, 4), "dummy_shape": (3, 4, 5)}, "`dummy_shape` must be .C, .resize."),
]
REFUSALS = [
    *(
        (lambda options=options: MultiImageCollate(**options), ValueError, says)
        for options, says in OPTIONS
    ),
    (lambda: COUNT(VOLUME, (8, 0, 1)), ValueError, "patch_size"),
    (lambda: COUNT(VOLUME, (2, 4)), ValueError, "3 sides for images of .5, 4, 2., but"),
    (lambda: MultiImageCollate(resize=(2, 2))([VOLUME]), SampleError, r"must be \(C, H, W\), with"),
    (
        lambda: MultiImageCollate(dummy_shape=(3, 2, 2, 2))([sample(0, (4, 4))]),
        SampleError,
        r"must be \(C, H, W, D\), with pixels",
    ),
    (
        lambda: ODBDataLoader(
            volumes(3),
            token_budget=TokenBudget(60, layout="packed"),
            collate_fn=MultiImageCollate(),
        ),
        ValueError,
        '`MultiImageCollate` .* `layout="padded"`',
    ),
    (
        lambda: list(GroupCollator(WindowBucketer(MIXED, 100, 2), MultiImageCollate())),
        SampleError,
        "`id` 's1'.*the same dimensions",
    ),
]
test_what_is_not_valid_is_refused = refuses(REFUSALS)
