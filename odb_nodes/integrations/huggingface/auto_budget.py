"""`token_budget="auto"`: the largest budget for which the trainer's own steps fit into memory."""

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

from odb_nodes._compat import transformers as compat
from odb_nodes._compat.torch_distributed import RefusingCollectives
from odb_nodes._support.checks import refuse
from odb_nodes._support.seeds import preserved_rngs
from odb_nodes.core.alignment.exchange import Channel, resolve_exchange
from odb_nodes.core.collate.token_rows import TokenRows
from odb_nodes.core.contract.config import sealed_states
from odb_nodes.core.nodes import GroupCollator
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.processing.observation import sample_of
from odb_nodes.core.sample import Sample
from odb_nodes.core.sources import IterableSource, JsonlSource
from odb_nodes.core.step_info import pop_step_info
from odb_nodes.errors import StateError
from odb_nodes.integrations.huggingface.config import ODBConfig
from odb_nodes.integrations.huggingface.samples import (
    loader_budget,
    loader_options,
    model_batch,
    train_dataset,
    user_collate,
)
from odb_nodes.tools.estimate import ESTIMATE_SAMPLES, check_samples_can_be_drawn
from odb_nodes.tools.lengths import observe_lengths
from odb_nodes.training.memory.calibration import Calibration, find_budget
from odb_nodes.training.memory.gradients import give_gradients, has_collectives
from odb_nodes.training.memory.meter import CudaMeter, MemoryMeter, free_memory

logger = logging.getLogger("odb_nodes")

BUDGET = "budget."  # prefix of its fields in the configuration of the node that groups
WHERE = "finding the budget"
PASS_TOKENS = "Give a number of tokens, such as the one that `odb_nodes.memory.find_budget` finds."


def meter_of(args: Any, config: ODBConfig) -> MemoryMeter | None:
    """Return the meter of the trainer's device; `None` if none can measure it."""
    if config.memory_meter is not None:
        return config.memory_meter
    if args.device.type != "cuda":
        return None
    return CudaMeter(args.device, config.memory_share)


def check_auto(trainer: Any, config: ODBConfig) -> None:
    """Reject a trainer for which `token_budget="auto"` cannot find a budget."""
    if not config.finds_budget:
        return
    args, model = trainer.args, trainer.model
    shares = args.world_size > 1 and model is not None and has_collectives(model)
    collate = user_collate(trainer, config)
    packs = isinstance(collate, TokenRows) and (collate.layout == "packed" or collate.shapes)
    refused = {
        "in a hyperparameter search, which makes its models only later": model is None,
        "with FSDP, DeepSpeed or `SyncBatchNorm`: ranks compute together, and one that runs out of "
        "memory in a trial step would leave the others waiting": (
            trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or shares
        ),
        "if the model is on several devices, of which only one would be measured": (
            trainer.is_model_parallel
        ),
        f"with a `{type(collate).__name__}` that packs or has `shapes`, which need a "
        "`TokenBudget` with the same `layout` and `shapes`": packs,
        f"if nothing measures the memory of the device, which is `{args.device}`: `CudaMeter` "
        "needs a GPU that torch sees, other devices need a `memory_meter`, such as "
        "`odb_nodes.testing.SavedTensorMeter(2**30)` on a CPU": meter_of(args, config) is None,
    }
    rule = '`token_budget` must not be "auto"'
    refuse({f"{rule} {where}. {PASS_TOKENS}": applies for where, applies in refused.items()})


def saved_budget(state: Any) -> TokenBudget:
    """Return the budget that the state of a loader was saved under."""
    for sealed in sealed_states(state):
        config = sealed["config"]
        if f"{BUDGET}tokens" in config:
            names = [name for name in config if name.startswith(BUDGET)]
            return TokenBudget(**{name.removeprefix(BUDGET): config[name] for name in names})
    raise StateError("the state of the loader has no budget. Use an earlier checkpoint.")


def find_for(trainer: Any) -> TokenBudget:
    """Return the largest budget that fits on all ranks; each rank tries steps alone."""
    channel = Channel(resolve_exchange(None, trainer.odb.timeout_s), 2)
    channel.begin()
    share = trainer.odb.memory_share
    channel.agree({"ODBConfig": {"token_budget": "auto", "memory_share": share}})
    try:
        calibration = calibrate_alone(trainer, channel.world_size)
    except Exception as error:
        channel.fail(error, WHERE)
        raise
    largest = calibration.budget
    rows = channel.gather(np.array([largest.tokens, largest.attention_tokens or 0]), WHERE)
    attention_tokens = [length for length in rows[:, 1].tolist() if length]
    # A smaller `attention_tokens` makes rows cost more: the smallest of both fits all ranks.
    budget = replace(
        loader_budget(trainer),
        tokens=min(rows[:, 0].tolist()),
        attention_tokens=min(attention_tokens, default=None),
    )
    if channel.rank == 0:
        logger.info("found %s by %d trial steps", budget, len(calibration.points))
    return budget


def calibrate_alone(trainer: Any, ranks: int) -> Calibration:
    """Find the budget of one of `ranks` ranks, without messages to the others."""
    samples = _samples_by_tokens(trainer)
    shortest, *longer = samples
    args, model = trainer.args, trainer.model
    compat.begin_alone(trainer)
    computed = _InPrecision(trainer.accelerator, model) if trainer.accelerator.native_amp else model
    previous = trainer.optimizer
    optimizer = trainer.create_optimizer()
    trainer.optimizer = previous  # Training creates another optimizer.
    states = [model, optimizer]
    if getattr(trainer.accelerator, "scaler", None) is not None:
        states.append(trainer.accelerator.scaler)
    num_items = torch.ones((), dtype=torch.int64, device=args.device)
    reason = (
        f"`compute_loss` of `{type(trainer).__name__}` gathers from other ranks, which try other "
        f"steps. {PASS_TOKENS}"
    )

    def train_step(batch: dict[str, Any]) -> None:
        if args.gradient_accumulation_steps > 1:  # Later batches of a step find gradients.
            give_gradients(model)
        with RefusingCollectives(reason) if ranks > 1 else nullcontext():
            trainer.training_step(computed, batch, num_items)
        optimizer.step()
        optimizer.zero_grad()

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    ddp_buckets = [torch.empty_like(weight) for weight in trained if ranks > 1]
    calibration = find_budget(
        train_step,
        _batches_of(trainer, samples, samples[shortest]),
        meter=meter_of(args, trainer.odb),  # type: ignore[arg-type]  # see `check_auto`
        widths=longer or [shortest],
        states=states,
    )
    del ddp_buckets
    free_memory()
    return calibration


class _InPrecision(nn.Module):
    """A model in the mixed precision that `Accelerator.prepare` will give its forward."""

    def __init__(self, accelerator: Any, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self._call = convert_outputs_to_fp32(accelerator.autocast()(model))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the model, in fp32."""
        return self._call(*args, **kwargs)


def _samples_by_tokens(trainer: Any) -> dict[int, Sample]:
    """Return four samples by the width of their rows: the shortest, and three longer ones."""
    dataset, options = train_dataset(trainer), loader_options(trainer)
    observe = options.observe
    check_samples_can_be_drawn(
        dataset, PASS_TOKENS, 'a budget can be found (`token_budget="auto"`)'
    )
    process_fn: Any = options.process_fn  # No dict: that goes with a dict of datasets.
    table = observe_lengths(
        dataset, samples=ESTIMATE_SAMPLES, process_fn=process_fn, observe=observe, seed=options.seed
    )
    if table.patches.any():
        raise ValueError(
            '`token_budget` must not be "auto" if samples have images, which also take memory. '
            "Give a `TokenBudget` with `max_patches`; "
            "`odb_nodes.memory.find_budget(patches_per_row=...)` finds one."
        )
    width = loader_budget(trainer).width
    lengths = zip(table.tokens.tolist(), table.keys.tolist(), strict=True)
    keys = {width(tokens): key for tokens, key in lengths if tokens}
    shortest, *longer = sorted(keys)
    first, last = (longer[0], longer[-1]) if longer else (shortest, shortest)
    middle = min(keys, key=lambda tokens: abs(2 * log(tokens) - log(first) - log(last)))
    samples: dict[int, Sample] = {}
    with preserved_rngs():
        for tokens in (shortest, first, middle, last):
            read = dataset.read if isinstance(dataset, JsonlSource) else dataset.__getitem__
            sample = sample_of(read, keys[tokens], process_fn, observe)
            if isinstance(sample, Sample):  # Its length may be random.
                samples[width(sample.tokens)] = sample
    return dict(sorted(samples.items()))


def _batches_of(
    trainer: Any, samples: dict[int, Sample], shortest: Sample
) -> Callable[[int, int], dict[str, Any]]:
    """Return a `make_batch` for `find_budget`: a batch of one sample, repeated.

    If there are several rows, the last is the shortest sample, so that the batch has padding as in
    training: without padding, attention may drop its mask and take less memory.
    """
    options, select = loader_options(trainer), model_batch(trainer)
    collator = GroupCollator(IterableSource([]), options.collate_fn, seed=options.seed)
    collator.trust_labels()

    def make_batch(rows: int, width: int) -> dict[str, Any]:
        group = [samples[width]] * rows
        if rows > 1:
            group[-1] = shortest
        batch = collator.collate(group, collator.info_of(group, 0))
        pop_step_info(batch)
        return select(batch)

    return make_batch
