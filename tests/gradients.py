"""Gradients of a small language model in fp64: of ranks that share steps, and of one process."""

import contextlib

import numpy as np
import rank_jobs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from odb_nodes import PaddingCollate, pop_step_info

SIZES = {1: [40], 2: [60, 20], 4: [50, 15, 3, 0]}
"""By number of ranks: samples of each. In the last, two have fewer than there are steps."""
SCALINGS = ("exact", "approx", "none")

_VOCABULARY = 33  # which no number of ranks divides
_HIDDEN = 10


class LanguageModel(nn.Module):
    """Each position sees the mean of all earlier positions. (B, T) -> (B, T, vocabulary).

    In a packed row, where `position_ids` begin anew with each sample, only of the same sample.
    """

    def __init__(self, vocabulary=_VOCABULARY):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, _HIDDEN, dtype=torch.float64)
        self.hidden = nn.Linear(_HIDDEN, _HIDDEN, dtype=torch.float64)
        self.head = nn.Linear(_HIDDEN, vocabulary, dtype=torch.float64)

    def forward(self, input_ids, position_ids=None):
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        positions = places if position_ids is None else position_ids
        sums = nn.functional.pad(self.embedding(input_ids).cumsum(1), (0, 0, 1, 0))
        before = (places - positions)[..., None].expand(-1, -1, sums.shape[-1])
        seen = (sums[:, 1:] - sums.gather(1, before)) / (positions[..., None] + 1)
        return self.head(torch.tanh(self.hidden(seen)))


def mean_loss(model, batch):
    """The mean over supervised tokens; 0 where there are none."""
    inputs = [batch[key] for key in ("input_ids", "position_ids") if key in batch]
    logits = model(*inputs)[:, :-1]
    labels = batch["labels"][:, 1:]
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / max(1, int((labels != -100).sum()))


def samples_of(rank, size):
    """Samples of one rank. 0 to 95% of their labels are masked; all, where they are longest."""
    samples = []
    for number in range(1000 * rank, 1000 * rank + size):
        rng = np.random.default_rng(number)
        tokens = rng.integers(_VOCABULARY, size=rng.integers(2, 25))
        share = 1.0 if len(tokens) > 20 or number % 7 == 0 else rng.uniform(0, 0.95)
        labels = np.where(rng.random(len(tokens)) < share, -100, tokens)
        samples.append({"input_ids": tokens, "labels": labels, "id": number})
    return samples


# --- ranks ----------------------------------------------------------------------------------------


def wrapped(how):
    """The model as all ranks train it together."""
    model = LanguageModel()
    if how == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard  # takes seconds to import

    for layer in (model.embedding, model.hidden, model.head, model):
        fully_shard(layer)
    return model


def without_sync(model, info):
    """A context without communication, for all micro-steps except the last."""
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if info.ends_optimizer_step else model.no_sync()
    model.set_requires_gradient_sync(info.ends_optimizer_step)
    return contextlib.nullcontext()


def train(model, loader):
    """Yield the gradient of each optimizer step, and the (ids, info) of its micro-steps."""
    steps = []
    for batch in loader:
        info = pop_step_info(batch)
        with without_sync(model, info):
            local_mean = mean_loss(model, batch)
            (local_mean * info.loss_scale).backward()
        steps.append((batch["id"].tolist(), info))
        if info.ends_optimizer_step:
            yield gradient_of(model), steps
            model.zero_grad()
            steps = []
    assert not steps


def gradient_of(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in gradients]
    return torch.cat([grad.flatten() for grad in whole])


# --- one process ----------------------------------------------------------------------------------


class OneProcess:
    """Has the samples of all ranks.

    Args:
        sizes: samples of each rank.
    """

    def __init__(self, sizes):
        samples = [sample for rank, size in enumerate(sizes) for sample in samples_of(rank, size)]
        self._samples = {sample["id"]: sample for sample in samples}
        self._model = LanguageModel()

    def gradient(self, groups, scaling):
        """The gradient of the mean over all tokens, or over the groups weighed by their samples."""
        whole = [index for group in groups for index in group]
        self._model.zero_grad()
        if scaling == "approx":
            for group in groups:
                (self._mean_of(group) * len(group) / len(whole)).backward()
        else:
            self._mean_of(whole).backward()
        return gradient_of(self._model)

    def targets(self, ids):
        return sum(int((self._samples[index]["labels"][1:] != -100).sum()) for index in ids)

    def _mean_of(self, ids):
        return mean_loss(self._model, PaddingCollate()([self._samples[index] for index in ids]))


def relative_error(actual, expected):
    """The relative error of a vector; 0 if both vectors are 0."""
    difference = (actual - expected).norm().item()
    return difference / expected.norm().item() if difference else 0.0


# --- both -----------------------------------------------------------------------------------------


def compare(sizes, how, scaling, accumulate):
    """The errors of this rank's optimizer steps in an epoch, and counts of its groups."""
    rank = dist.get_rank()
    samples = samples_of(rank, sizes[rank])
    options = {"loss_scaling": scaling, "accumulate": accumulate}
    one_process, all_ids = OneProcess(sizes), []
    counts = {"errors": [], "groups": 0, "groups_alone": rank_jobs.groups_alone(samples)}
    counts |= {"fillers": 0, "masked_groups": 0, "masked_steps": 0}
    for gradient, steps in train(wrapped(how), rank_jobs.loader_over(samples, **options)):
        rank_groups = [ids for ids, info in steps if not info.is_filler]
        groups = [ids for of_rank in rank_jobs.gathered(rank_groups) for ids in of_rank]
        ids = [index for group in groups for index in group]
        expected = one_process.gradient(groups, scaling)
        if scaling == "none":  # A trainer that knows of no weights takes the mean of the means.
            gradient = gradient / len(steps)
        counts["errors"].append(relative_error(gradient, expected))
        counts["groups"] += len(rank_groups)
        counts["fillers"] += len(steps) - len(rank_groups)
        counts["masked_groups"] += sum(one_process.targets(group) == 0 for group in rank_groups)
        counts["masked_steps"] += one_process.targets(ids) == 0
        for _, info in steps:
            assert info.optimizer_samples == len(ids)
            assert info.optimizer_targets == one_process.targets(ids)
        all_ids += ids
    assert sorted(all_ids) == [
        1000 * of_rank + index for of_rank, size in enumerate(sizes) for index in range(size)
    ]
    return counts
