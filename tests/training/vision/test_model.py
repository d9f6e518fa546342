"""Tiny models like Qwen2-VL: what a sample adds to the loss does not depend on its group."""

import pytest
from images import step
from pictures import loss_and_gradient, make_loader, model, network_of, processor, samples

from odb_nodes import TokenBudget, pop_step_info
from odb_nodes.training.vision import VisionLanguageCollate

TOLERANCE = 1e-5
KINDS = ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"]
GROUPS = [[0, 3, 6], [1, 4, 7], [2, 0, 1, 5, 3, 4]]
OPTIONS = [{"pad_to_multiple_of": 16}, {"side": "left"}, {"shapes": ((8, 256),)}]
collate = VisionLanguageCollate(dummy=processor().dummy_image())


def alone(network, group):
    """Loss and gradient of the samples of a group one by one, weighed by their targets."""
    batches = [collate([sample]) for sample in group]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    loss, gradient = 0.0, {}
    for batch, count in zip(batches, counts, strict=True):
        own_loss, gradient_of_sample = loss_and_gradient(network, batch)
        loss += own_loss * count / sum(counts)
        for name, value in gradient_of_sample.items():
            if value is not None:
                gradient[name] = gradient.get(name, 0) + value * count / sum(counts)
    return loss, gradient


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("indices", "options"), [*zip(GROUPS, OPTIONS, strict=True)], ids=str)
def test_loss_and_gradient_of_a_group_are_those_of_its_samples(kind, indices, options):
    network, group = network_of(kind), samples(indices)
    loss, gradient = loss_and_gradient(network, VisionLanguageCollate(dummy=None, **options)(group))
    expected_loss, expected = alone(network, group)
    assert abs(loss - expected_loss) < TOLERANCE
    for name, value in gradient.items():
        if name not in expected:
            assert value is None or not value.any(), name
        else:
            scale = expected[name].abs().max().clamp(min=1e-3)
            assert (value - expected[name]).abs().max() / scale < TOLERANCE, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("indices", "side"), [([0, 3], "right"), ([0, 0], "left"), ([9], "left")])
def test_a_dummy_reaches_the_vision_tower_and_changes_nothing(kind, indices, side):
    network, group = network_of(kind), samples(indices)
    collate = VisionLanguageCollate(dummy=processor().dummy_image(), side=side)
    loss, gradient = loss_and_gradient(network, collate(group))
    loss_with_dummy, with_dummy = loss_and_gradient(
        network, collate.collate_step(group, step("image"))
    )
    assert abs(loss_with_dummy - loss) < TOLERANCE
    assert any(".visual." in name for name in gradient)
    for name, value in with_dummy.items():
        if ".visual." in name:
            assert gradient[name] is None and value is not None and not value.any(), name
        elif gradient[name] is not None:
            assert (value - gradient[name]).abs().max() < TOLERANCE, name


def test_a_filler_without_its_images_passes_through_the_model():
    batch = collate.collate_step(samples([5]), step(is_filler=True))
    loss, gradient = loss_and_gradient(model(), batch)
    assert loss.isfinite()
    assert all(value is None for name, value in gradient.items() if ".visual." in name)


@pytest.mark.slow
def test_max_patches_caps_a_group_beside_tokens():
    def most_patches(budget):
        loader, ids, most = make_loader(token_budget=budget, damaged_every=0), [], 0
        for batch in loader:
            info, patches = pop_step_info(batch), len(batch.get("pixel_values", ()))
            if patches:
                assert patches == int(batch["image_grid_thw"].prod(-1).sum())
            assert batch["input_ids"].numel() <= 1024
            assert info.modalities == (("image",) if patches else ())
            ids += batch["id"].tolist()
            most = max(most, patches)
        assert sorted(ids) == list(range(60))
        return most

    assert 200 < most_patches(TokenBudget(1024, max_patches=300)) <= 300
    assert most_patches(TokenBudget(1024)) > 300
