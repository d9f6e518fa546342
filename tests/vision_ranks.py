"""The program of ranks with images: a tiny Qwen2-VL under FSDP2, with images on some ranks."""

from datetime import timedelta

import rank_jobs
import torch.distributed as dist
from pictures import model, processor, record
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    RankAligner,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.training.vision import VisionLanguageCollate

WARM = ("transformers.models.qwen2_vl.modeling_qwen2_vl", "odb_nodes.training.vision")
TEXTS = list(range(0, 48, 3))
INDICES = {
    "some": ([0, 1, 2, 4, 5, 7, 3, 8], TEXTS[:8]),
    "few": ([1, 2, 4], TEXTS),  # the first rank fills with what has an image
}
"""By name: the records of each rank, of which the multiples of 3 have no image."""


def sharded_model(timeout_s):
    # The vision blocks have separate connections: a rank that is alone there waits, as with
    # NCCL, while gloo would take the next message for the one that it waits for.
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=timeout_s)), "cpu")
    network = model()
    for block in network.model.visual.blocks:
        fully_shard(block, mesh=mesh)
    for layer in network.model.language_model.layers:
        fully_shard(layer)
    fully_shard(network)
    return network


def loader_over(indices, *, dummy, layout="padded"):
    budget = TokenBudget(160, layout=layout)
    dummy_image = processor().dummy_image() if dummy else None
    collate = VisionLanguageCollate.of(budget, dummy=dummy_image, model=model())
    observed = LengthObserver(IterableWrapper([processor()(record(index)) for index in indices]))
    bucketer = WindowBucketer(observed, budget, 4)
    return Loader(GroupCollator(RankAligner(bucketer, timeout_s=30), collate))


def gradients_of(network):
    gradients = {}
    for name, parameter in network.named_parameters():
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        gradients[name] = gradient
    return gradients


def train(name, *, dummy, timeout_s=60.0):
    """Each step: what this rank had, and the gradients that all ranks share."""
    network = sharded_model(timeout_s)
    kind, _, layout = name.partition(" ")
    indices = INDICES[kind][dist.get_rank()]
    for batch in loader_over(indices, dummy=dummy, layout=layout or "padded"):
        info = pop_step_info(batch)
        ids = batch.pop("id").tolist()
        (network(**batch).loss * info.loss_scale).backward()
        yield ids, info, batch, gradients_of(network)
        network.zero_grad()


def compare(name):
    """The dummies of this rank in an epoch, and the largest error of a gradient."""
    alone = model()
    counts = {"steps": 0, "dummies": 0, "without": 0, "fillers": 0, "error": 0.0, "ids": []}
    for ids, info, batch, gradients in train(name, dummy=True):
        groups = rank_jobs.gathered([] if info.is_filler else ids)
        whole = [index for group in groups for index in group]
        samples = [processor()(record(index)) for index in whole]
        alone.zero_grad()
        alone(**_without_id(VisionLanguageCollate(dummy=None)(samples))).loss.backward()
        for name, parameter in alone.named_parameters():
            gradient = gradients[name]
            assert (gradient is None) == (parameter.grad is None), (name, info)
            if gradient is not None:
                error = (gradient - parameter.grad).abs().max().item()
                counts["error"] = max(counts["error"], error)
        images = [index for index in ids if index % 3]
        counts["steps"] += 1
        counts["dummies"] += "pixel_values" in batch and not images
        counts["without"] += "pixel_values" not in batch
        counts["fillers"] += info.is_filler
        counts["ids"] += [] if info.is_filler else ids
    return counts


def _without_id(batch):
    return {key: value for key, value in batch.items() if key != "id"}
