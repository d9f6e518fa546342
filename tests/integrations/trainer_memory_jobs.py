"""Trainers whose models run out of memory where a test wants them to."""

import random

import language_models as lm
import torch
import trainer_jobs as t
from memory_faults import at_call, fail, never
from transformers import TrainerCallback


class PerToken(lm.Normalizing):
    """Predicts each token from the one before alone, so samples may share a row."""

    def features(self, input_ids):
        return torch.tanh(self.hidden(self.embedding(input_ids)))


class Events(TrainerCallback):
    """Notes the states of the loader, and the events of a run."""

    def __init__(self, trainer):
        self.trainer, self.states, self.events = trainer, [], []

    def on_substep_end(self, *args, **kwargs):
        self.events.append("substep")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.events.append("step")

    def on_step_end(self, args, state, control, **kwargs):
        self.states.append(self.trainer.odb_run.state_dict())
        self.events.append((state.global_step, state.epoch, state.num_input_tokens_seen))


class Calls:
    """Counts the forwards in training, of which none runs out of memory."""

    def __init__(self):
        self.number = 0

    def __call__(self, rows, width):
        self.number += 1
        return False


def run(
    folder, fails=never, place="forward", model="Normalizing", resume=None, notes=None, **options
):
    """A trainer that has trained, and what it went through.

    Args:
        notes: makes the callback that notes that, of the trainer.
    """
    kind = model if isinstance(model, type) else getattr(lm, model)
    odb = {"on_oom": "split", **options.pop("odb", {})}
    given = {"num_train_epochs": 1, "include_num_input_tokens_seen": "all", "logging_steps": 1}
    model = fail(kind(), "features", fails, place)
    trainer = t.make_trainer(folder, model=model, odb=odb, **given | options)
    trainer.add_callback(events := (notes or Events)(trainer))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, events


def logs_of(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Gathering(t.ODBTrainer):
    """Gathers what it computes, as trainers do that log it for all ranks."""

    def compute_loss(self, model, inputs, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        self.accelerator.gather_for_metrics(loss.detach())
        return loss


class Gradients(TrainerCallback):
    """Notes of each optimizer step the weights before, the gradient, and the keys of this rank."""

    def __init__(self, trainer):
        self.trainer, self.steps = trainer, []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        model, infos = self.trainer.model, self.trainer.odb_run.guard.infos
        keys = [key for info in infos if not info.is_filler for key in info.keys]
        entry = {"before": lm.weights_of(model).tolist(), "keys": keys}
        entry |= {"gradient": lm.gradient_of(model).tolist()}
        self.steps.append(entry | {"samples": self.trainer.odb_run.optimizer_samples})


def sometimes(share, seed):
    """Some batches of several samples run out of memory, drawn by a seed."""
    rng = random.Random(seed)
    return at_call({number for number in range(1000) if rng.random() < share})


def worst_error(of_ranks):
    """How far the gradients of all ranks are off those of one process; and the keys of each step.

    Args:
        of_ranks: what `Gradients` has noted, of each rank.
    """
    worst, seen = 0.0, []
    for step in zip(*of_ranks, strict=True):
        keys = [key for entry in step for key in entry["keys"]]
        before, gradient = (
            torch.tensor(step[0][name], dtype=torch.float64) for name in ("before", "gradient")
        )
        expected = lm.expected_gradient(before, keys) if keys else torch.zeros_like(gradient)
        worst = max(worst, float((gradient - expected).abs().max()))
        assert all(entry["gradient"] == step[0]["gradient"] for entry in step)
        assert step[0]["samples"] == len(keys)
        seen += keys
    return worst, seen
