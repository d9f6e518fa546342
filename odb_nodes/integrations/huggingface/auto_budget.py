"""The budget of `token_budget="auto"`: the largest whose steps, of the trainer's own, fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from torchdata.nodes import IterableWrapper

from odb_nodes._compat import transformers as compat
from odb_nodes._compat.torch_distributed import RefusingCollectives
from odb_nodes._core.checks import refuse
from odb_nodes._core.seeds import preserved_rngs
from odb_nodes.alignment.exchange import Channel, resolve_exchange
from odb_nodes.collate.token_rows import TokenRows
from odb_nodes.contract.config import sealed_states
from odb_nodes.errors import StateError
from odb_nodes.integrations.huggingface.config import ODBConfig
from odb_nodes.integrations.huggingface.samples import (
    given_collate,
    given_dataset,
    loader_budget,
    loader_options,
    model_batch,
)
from odb_nodes.memory.calibration import Calibration, find_budget
from odb_nodes.memory.gradients import give_gradients, has_collectives
from odb_nodes.memory.meter import CudaMeter, MemoryMeter, free_memory
from odb_nodes.nodes import GroupCollator
from odb_nodes.planning import TokenBudget
from odb_nodes.processing.observation import sample_of
from odb_nodes.sample import Sample
from odb_nodes.sources import JsonlSource
from odb_nodes.step_info import pop_step_info
from odb_nodes.tools.estimate import check_can_estimate
from odb_nodes.tools.lengths import observe_lengths

logger = logging.getLogger("odb_nodes")

BUDGET = "budget."  # prefix of its fields in the configuration of the node that groups
WHERE = "finding the budget"
GIVE_ONE = "Give a number of tokens, such as one that `odb_nodes.memory.find_budget` finds."


def meter_of(args: Any, config: ODBConfig) -> MemoryMeter | None:
    """Return what measures the memory of a trainer's device; `None` where nothing does."""
    if config.memory_meter is not None:
        return config.memory_meter
    if args.device.type != "cuda":
        return None
    return CudaMeter(args.device, config.memory_share)


def check_auto(trainer: Any, config: ODBConfig) -> None:
    """Reject a trainer whose budget cannot be found."""
    if not config.finds_budget:
        return
    args, model = trainer.args, trainer.model
    shares = args.world_size > 1 and model is not None and has_collectives(model)
    given = given_collate(trainer, config)
    packs = isinstance(given, TokenRows) and (given.layout == "packed" or given.shapes)
    refused = {
        "in a hyperparameter search, which makes its models only later": model is None,
        "with FSDP, DeepSpeed or `SyncBatchNorm`: ranks compute together, and one that runs out of "
        "memory in a step that is tried would leave the others waiting": (
            trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or shares
        ),
        "where a model is on several devices, of which only one would be measured": (
            trainer.is_model_parallel
        ),
        f"with a `{type(given).__name__}` that packs or has `shapes`, which the budget must have, "
        "too, as a `TokenBudget` with `layout` or `shapes` has": packs,
        f"where nothing measures the memory of the device, which is `{args.device}`: `CudaMeter` "
        "needs a GPU that torch sees, and other devices a `memory_meter`, such as "
        "`odb_nodes.testing.SavedTensorMeter(2**30)` on a CPU": meter_of(args, config) is None,
    }
    rule = '`token_budget` must not be "auto"'
    refuse({f"{rule} {where}. {GIVE_ONE}": applies for where, applies in refused.items()})


def saved_budget(state: Any) -> TokenBudget:
    """Return the budget that the state of a loader was saved under."""
    for one in sealed_states(state):
        if f"{BUDGET}tokens" in (config := one["config"]):
            named = [name for name in config if name.startswith(BUDGET)]
            return TokenBudget(**{name.removeprefix(BUDGET): config[name] for name in named})
    raise StateError("the state of the loader has no budget. Use an earlier checkpoint.")


def find_for(trainer: Any) -> TokenBudget:
    """Return the largest budget whose steps, tried by each rank on its own, fit on all ranks."""
    channel = Channel(resolve_exchange(None, trainer.odb.timeout_s), 2)
    channel.begin()
    share = trainer.odb.memory_share
    channel.agree({"ODBConfig": {"token_budget": "auto", "memory_share": share}})
    try:
        found = _calibrate(trainer, channel.world_size)
    except Exception as error:
        channel.fail(error, WHERE)
        raise
    own = found.budget
    rows = channel.gather(np.array([own.tokens, own.attention_tokens or 0]), WHERE)
    tokens, lengths = rows[:, 0].tolist(), rows[:, 1].tolist()
    # The shorter `attention_tokens`, the more a row costs: so what this allows, each rank does.
    budget = replace(
        loader_budget(trainer),
        tokens=min(tokens),
        attention_tokens=min((one for one in lengths if one), default=None),
    )
    if channel.rank == 0:
        logger.info("found %s by %d steps that were tried", budget, len(found.points))
    return budget


def _calibrate(trainer: Any, ranks: int) -> Calibration:
    """Return what steps of this rank alone show."""
    samples = _samples_by_tokens(trainer)
    shortest, *longer = samples
    args, model = trainer.args, trainer.model
    compat.begin_alone(trainer)
    computed = _InPrecision(trainer.accelerator, model) if trainer.accelerator.native_amp else model
    before = trainer.optimizer
    optimizer = trainer.create_optimizer()
    trainer.optimizer = before  # so that training makes one of its own
    scaler = getattr(trainer.accelerator, "scaler", None)
    one = torch.ones((), dtype=torch.int64, device=args.device)
    reason = (
        f"`compute_loss` of `{type(trainer).__name__}` gathers from other ranks, which try other "
        f"steps. {GIVE_ONE}"
    )

    def train_step(batch: dict[str, Any]) -> None:
        if args.gradient_accumulation_steps > 1:  # All batches but the first find gradients.
            give_gradients(model)
        with RefusingCollectives(reason) if ranks > 1 else nullcontext():
            trainer.training_step(computed, batch, one)
        optimizer.step()
        optimizer.zero_grad()

    trained = [one for one in model.parameters() if one.requires_grad]
    buckets = [torch.empty_like(one) for one in trained if ranks > 1]  # of DDP
    found = find_budget(
        train_step,
        _batches_of(trainer, samples, samples[shortest]),
        meter=meter_of(args, trainer.odb),  # type: ignore[arg-type]  # see `check_auto`
        widths=longer or [shortest],
        states=[model, optimizer, *([] if scaler is None else [scaler])],
    )
    del buckets
    free_memory()
    return found


class _InPrecision(nn.Module):
    """A model whose forward has the mixed precision that `Accelerator.prepare` will give it."""

    def __init__(self, accelerator: Any, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self._call = convert_outputs_to_fp32(accelerator.autocast()(model))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the model, in fp32."""
        return self._call(*args, **kwargs)


def _samples_by_tokens(trainer: Any) -> dict[int, Sample]:
    """Return samples by the width of their rows: the shortest, and three of the longer ones."""
    dataset, options = given_dataset(trainer), loader_options(trainer)
    observe = options.observe
    check_can_estimate(dataset, GIVE_ONE, 'a budget can be found (`token_budget="auto"`)')
    process_fn: Any = options.process_fn  # No dict: that goes with a dict of datasets.
    given = {"process_fn": process_fn, "observe": observe, "seed": options.seed}
    table = observe_lengths(dataset, samples=trainer.odb.estimate_samples, **given)
    if table.patches.any():
        raise ValueError(
            '`token_budget` must not be "auto" where samples have images, which take memory of '
            "their own. Give a `TokenBudget` with `max_patches`; "
            "`odb_nodes.memory.find_budget(patches_per_row=...)` finds one."
        )
    width = loader_budget(trainer).width
    lengths = zip(table.tokens.tolist(), table.keys.tolist(), strict=True)
    keys = {width(tokens): key for tokens, key in lengths if tokens}
    shortest, *longer = sorted(keys)
    first, last = (longer[0], longer[-1]) if longer else (shortest, shortest)
    middle = min(keys, key=lambda tokens: abs(2 * log(tokens) - log(first) - log(last)))
    found: dict[int, Sample] = {}
    with preserved_rngs():
        for tokens in (shortest, first, middle, last):
            read = dataset.read if isinstance(dataset, JsonlSource) else dataset.__getitem__
            sample = sample_of(read, keys[tokens], process_fn, observe)
            if isinstance(sample, Sample):  # whose length may be drawn at random
                found[width(sample.tokens)] = sample
    return dict(sorted(found.items()))


def _batches_of(
    trainer: Any, samples: dict[int, Sample], shortest: Sample
) -> Callable[[int, int], dict[str, Any]]:
    """Return what makes a batch of rows of a width, as training does: of one sample, repeated.

    One row of several is the shortest sample, so that the batch is padded as real ones are: without
    padding, attention may go without a mask, and take less.
    """
    options, select = loader_options(trainer), model_batch(trainer)
    collator = GroupCollator(IterableWrapper([]), options.collate_fn, seed=options.seed)
    collator.trust_labels()

    def make_batch(rows: int, width: int) -> dict[str, Any]:
        group = [samples[width]] * rows
        if rows > 1:
            group[-1] = shortest
        batch = collator.collate(group, collator.info_of(group, 0))
        pop_step_info(batch)
        return select(batch)

    return make_batch
