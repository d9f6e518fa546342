"""A tiny Qwen2-VL: what a sample adds to loss and gradient does not depend on its group."""

import pytest
import torch
from pictures import loss_and_gradient, make_loader, model, processor, samples, step

from odb_nodes import TokenBudget, pop_step_info
from odb_nodes.vision import VisionLanguageCollate

TOLERANCE = 1e-5
collate = VisionLanguageCollate(dummy=processor().dummy_image())


def targets(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


def difference(found, expected):
    """The largest one of any gradient, relative to the largest value of that gradient."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, gradient in expected.items():
        own = torch.zeros(()) if found[name] is None else found[name]
        reference = torch.zeros_like(own) if gradient is None else gradient
        scale = reference.abs().max().clamp(min=1e-3)
        worst = max(worst, float((own - reference).abs().max() / scale))
    return worst


@pytest.mark.parametrize("indices", [[0, 3, 6], [1, 4, 7], [5, 8], [2, 0, 1, 5, 3, 4]])
@pytest.mark.parametrize(
    "options",
    [{}, {"pad_to_multiple_of": 16}, {"side": "left"}, {"shapes": ((8, 256),)}],
    ids=["plain", "multiple", "left", "shapes"],
)
def test_loss_and_gradient_of_a_group_are_those_of_its_samples(indices, options):
    network = model()
    group = samples(indices)
    padded = VisionLanguageCollate(dummy=None, **options)
    loss, gradient = loss_and_gradient(network, padded(group))
    alone = [(collate([sample]), targets(collate([sample]))) for sample in group]
    total = sum(count for _, count in alone)
    expected_loss, expected = 0.0, {}
    for batch, count in alone:
        own_loss, own = loss_and_gradient(network, batch)
        expected_loss += own_loss * count / total
        for name, value in own.items():
            if value is not None:
                expected[name] = expected.get(name, 0) + value * count / total
    expected = {name: expected.get(name) for name in gradient}
    assert abs(loss - expected_loss) < TOLERANCE
    assert difference(gradient, expected) < TOLERANCE


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("indices", [[0, 3, 6], [0, 0], [9]])
def test_a_dummy_changes_neither_loss_nor_gradient(indices, side):
    network = model()
    group = samples(indices)
    collate = VisionLanguageCollate(dummy=processor().dummy_image(), side=side)
    loss, gradient = loss_and_gradient(network, collate(group))
    with_dummy = collate.collate_step(group, step("image"))
    assert "pixel_values" in with_dummy
    dummy_loss, dummy_gradient = loss_and_gradient(network, with_dummy)
    assert abs(loss - dummy_loss) < 1e-6
    vision = {name for name in gradient if ".visual." in name}
    assert vision
    for name, expected in gradient.items():
        found = dummy_gradient[name]
        if name in vision:
            assert expected is None
            assert found is not None and not found.any()
        else:
            assert (found - expected).abs().max() < 1e-6, name


def test_a_filler_without_its_images_passes_through_the_model():
    network = model()
    batch = collate.collate_step(samples([5]), step(is_filler=True))
    loss, gradient = loss_and_gradient(network, batch)
    assert loss.isfinite()
    assert all(value is None for name, value in gradient.items() if ".visual." in name)


def test_max_patches_caps_a_group_beside_tokens():
    budget = TokenBudget(1024, max_patches=300)
    network, ids, largest = model(), [], 0
    loader = make_loader(token_budget=budget, damaged_every=0)
    for batch in loader:
        info = pop_step_info(batch)
        patches = len(batch.get("pixel_values", ()))
        assert patches == int(batch["image_grid_thw"].prod(-1).sum()) if patches else True
        assert patches <= 300
        assert batch["input_ids"].numel() <= 1024
        assert info.modalities == (("image",) if patches else ())
        ids += batch.pop("id").tolist()
        largest = max(largest, patches)
        assert network(**batch).loss.isfinite()
    assert sorted(ids) == list(range(60))
    assert largest > 200
    assert loader.oversize_samples == 0
    # Without the cap there are larger ones.
    uncapped = make_loader(token_budget=1024, damaged_every=0)
    assert max(len(batch.get("pixel_values", ())) for batch in uncapped) > 300
