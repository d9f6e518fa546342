from dataclasses import replace

import numpy as np
import pytest
import torch
from pictures import step
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    SampleError,
    TokenBudget,
    WindowBucketer,
)
from odb_nodes.vision import MultiImageCollate


def sample(number, *shapes, **more):
    images = [
        np.full((3, *shape), 4 * number + place + 1, np.uint8) for place, shape in enumerate(shapes)
    ]
    given = {"pixel_values": images} if shapes else {}
    return {"id": f"s{number}", "task": f"task {number % 2}", "input_ids": [1] * 5, **given, **more}


def test_images_are_padded_in_number_and_size():
    group = [sample(0, (4, 6)), sample(1), sample(2, (5, 2), (1, 1), (2, 7))]
    batch = MultiImageCollate()(group)
    assert batch["pixel_values"].shape == (3, 3, 3, 5, 7)
    assert batch["pixel_values"].dtype == torch.uint8
    assert batch["image_mask"].tolist() == [[True, False, False], [False] * 3, [True] * 3]
    none = [0, 0]
    assert batch["image_sizes"].tolist() == [
        [[4, 6], none, none],
        [none] * 3,
        [[5, 2], [1, 1], [2, 7]],
    ]
    assert batch["task"] == ["task 0", "task 1", "task 0"]
    assert batch["id"] == ["s0", "s1", "s2"]
    for row, one in enumerate(group):
        for place, image in enumerate(one.get("pixel_values", [])):
            _, height, width = image.shape
            padded = batch["pixel_values"][row, place]
            assert (padded[:, :height, :width] == torch.from_numpy(image)).all()
            assert padded.sum() == image.sum()
    assert batch["pixel_values"].sum() == sum(
        int(image.sum()) for one in group for image in one.get("pixel_values", [])
    )


def test_an_array_of_images_is_taken_as_they_are():
    images = np.random.default_rng(0).random((2, 3, 4, 5), np.float32)
    batch = MultiImageCollate()([sample(0, pixel_values=images)])
    assert np.array_equal(batch["pixel_values"][0], images)
    assert torch.equal(
        MultiImageCollate()([sample(0, pixel_values=torch.from_numpy(images))])["pixel_values"],
        batch["pixel_values"],
    )


def test_without_images_there_are_none_unless_other_ranks_have_some():
    collate = MultiImageCollate(dummy_shape=(3, 8, 8))
    for batch in (collate([sample(0)]), collate.collate_step([sample(0)], step())):
        assert "pixel_values" not in batch and batch["image_mask"].shape == (1, 0)
    batch = collate.collate_step([sample(0), sample(1)], step("image"))
    assert batch["pixel_values"].shape == (2, 1, 3, 8, 8)
    assert batch["image_mask"].tolist() == [[False], [False]]
    filler = collate.collate_step([sample(0, (4, 4))], step(is_filler=True))
    assert "pixel_values" not in filler


def test_a_batch_of_a_known_shape_has_rows_without_images():
    collate = MultiImageCollate(shapes=((4, 16),), dummy_shape=(3, 8, 8))
    batch = collate([sample(0, (4, 6)), sample(1)])
    assert batch["input_ids"].shape == (4, 16)
    assert batch["pixel_values"].shape == (4, 1, 3, 4, 6)
    assert batch["image_mask"].tolist() == [[True], [False], [False], [False]]
    assert batch["image_sizes"].shape == (4, 1, 2)
    dummy = collate.collate_step([sample(0)], step("image"))
    assert dummy["pixel_values"].shape == (4, 1, 3, 8, 8)


def test_images_that_the_step_does_not_know_of_are_an_error():
    collate, group = MultiImageCollate(dummy_shape=(3, 8, 8)), [sample(0, (4, 4))]
    with pytest.raises(ValueError, match="'image' must be among its `modalities`, but they are"):
        collate.collate_step(group, replace(step("audio"), all_samples_this_step=2))
    assert "pixel_values" in collate.collate_step(group, step("audio"))


def test_images_that_do_not_fit_together_are_an_error():
    grey = sample(1, pixel_values=[np.zeros((1, 4, 4), np.uint8)])
    with pytest.raises(SampleError, match="must have the same channels and dtype, but have"):
        MultiImageCollate()([sample(0, (4, 4)), grey])
    named = "sample 1 of the group: .* must be .C, H, W., but has shape .4, 4. instead"
    with pytest.raises(SampleError, match=named):
        MultiImageCollate()([sample(0), sample(1, pixel_values=[np.zeros((4, 4))])])
    with pytest.raises(TypeError, match="`MultiImageCollate` takes mappings with `input_ids`"):
        MultiImageCollate().collate_step(["text"], step("image", is_filler=True))


def test_the_number_of_images_counts_as_patches():
    data = [sample(n, *[(2 + n % 3, 3)] * (n % 4)) for n in range(40)]
    budget = TokenBudget(1000, max_patches=6)
    node = WindowBucketer(LengthObserver(IterableWrapper(data)), budget, 12)
    batches = list(Loader(GroupCollator(node, MultiImageCollate())))
    assert sorted(one for batch in batches for one in batch["id"]) == sorted(s["id"] for s in data)
    assert max(int(batch["image_mask"].sum()) for batch in batches) == 6
