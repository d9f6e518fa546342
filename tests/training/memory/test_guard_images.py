"""Batches with images are computed in parts, too: each part is collated with its patches."""

import pytest
import torch
from gradients import gradient_of, mean_loss, relative_error
from memory_faults import FailingModel, at_call, never
from pictures import make_loader, processor
from torch import nn

from odb_nodes.training.memory import OomGuard

PIXELS = 3 * 2 * 14 * 14  # of a patch
MERGED = 4  # patches of an image token
IMAGE = processor().tokenizer.convert_tokens_to_ids("<|image_pad|>")


class ImageModel(FailingModel):
    """A language model in fp64 that adds an image's patches to its tokens."""

    def __init__(self, fails, place):
        super().__init__(fails, place, vocabulary=len(processor().tokenizer))
        self.patches = nn.Linear(PIXELS, 10, dtype=torch.float64)

    def loss(self, batch):
        hook = self.embedding.register_forward_hook(
            lambda _, ids, hidden: self._seen(ids[0], hidden, batch)
        )
        try:
            return mean_loss(self, batch)
        finally:
            hook.remove()

    def _seen(self, ids, hidden, batch):
        if "pixel_values" not in batch:
            return hidden
        images = self.patches(batch["pixel_values"].double()).unflatten(0, (-1, MERGED)).mean(1)
        return hidden.masked_scatter((ids == IMAGE)[..., None], images)


def epoch(fails, place="forward"):
    model = ImageModel(fails, place)
    guard, gradients = OomGuard(make_loader(24, damaged_every=0)), []
    for step in guard:
        step.backward(model, model.loss)
        gradients.append(gradient_of(model))
        model.zero_grad()
    return model, guard, gradients


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_gradients_are_those_of_the_whole(place, sampled):
    model, _, expected = epoch(never)
    failing_calls = [number for number, (rows, _) in enumerate(model.calls) if rows > 1]
    for number in failing_calls[:: sampled(every=5).get("every", 1)]:
        _, guard, gradients = epoch(at_call({number}), place)
        assert guard.ooms == 1
        for gradient, whole in zip(gradients, expected, strict=True):
            assert relative_error(gradient, whole) < 1e-12
