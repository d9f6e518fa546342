"""Packed rows under a `Trainer`: images in them, and models that would mix their samples."""

import copy
import itertools

import pytest
import torch
import trainers as t
from pictures import model, samples
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    TrainerCallback,
)

from odb_nodes import Observation, TokenBudget
from odb_nodes.integrations.huggingface import ODBTrainer
from odb_nodes.tasks import TaskWeights
from odb_nodes.vision import VisionLanguageCollate

BUDGET = TokenBudget(300, layout="packed", max_patches=300)
DATA = samples(range(24))


def test_the_gradient_of_packed_images_is_that_of_the_padded_samples(tmp_path):
    network = model().double()
    reference, rows, errors = copy.deepcopy(network), [], []
    known = {tuple(sample["input_ids"].tolist()): sample for sample in DATA}

    class Check(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            reference.load_state_dict(network.state_dict())

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            group, _ = [known[row] for row in rows], rows.clear()
            batch = VisionLanguageCollate(dummy=None)(group)
            reference.zero_grad()
            reference(**{key: batch[key] for key in batch if key != "id"}).loss.backward()
            pairs = zip(network.parameters(), reference.parameters(), strict=True)
            off = [(own.grad - one.grad).norm() / one.grad.norm() for own, one in pairs]
            errors.append(max(off))

    def keep(module, args, given):
        if module.training:
            assert given["position_ids"].shape[:2] == (4, 1)
            row, bounds = given["input_ids"][0].tolist(), given["cu_seq_lens_q"].tolist()
            rows.extend(tuple(row[a:b]) for a, b in itertools.pairwise(bounds))

    network.register_forward_pre_hook(keep, with_kwargs=True)
    collate = VisionLanguageCollate.of(BUDGET, dummy=None, model=network)
    trainer = ODBTrainer(
        network,
        t.arguments(tmp_path, max_steps=4, gradient_accumulation_steps=2),
        train_dataset=DATA,
        odb=t.config(token_budget=BUDGET, collate_fn=collate),
    )
    trainer.add_callback(Check())
    trainer.train()
    assert len(errors) == 4 and max(errors) < 1e-5  # transformers computes the loss in fp32


TEXTS = [{"input_ids": [*range(2, 6 + n % 9)], "labels": [*range(2, 6 + n % 9)]} for n in range(30)]


TASKS = {
    "task_weights": TaskWeights({"a": 1.0}),
    "observe": lambda sample: Observation(len(sample["input_ids"]), task="a"),
}


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes))


def mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))


@pytest.mark.parametrize(
    ("make", "mixing"), [(llama, ""), (mamba, "MambaForC"), (model, "Qwen2VLForC")]
)
@pytest.mark.parametrize("odb", [{}, {"loss_is": "token_mean"}, TASKS])
def test_a_model_that_would_mix_the_samples_of_a_row_does_not_train(make, mixing, odb, tmp_path):
    network = make()
    before = copy.deepcopy(network.state_dict())
    trainer = ODBTrainer(
        network,
        t.arguments(tmp_path, max_steps=1),
        train_dataset=TEXTS,
        odb=t.config(token_budget=TokenBudget(64, layout="packed"), **odb),
    )
    if not mixing:
        trainer.train()
        return
    with pytest.raises(ValueError, match=f"must not see each other, but in a `{mixing}.* they do"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
