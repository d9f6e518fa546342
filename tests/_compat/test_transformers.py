"""Canaries: what we rely on inside of transformers."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from canary import relies_on

from odb_nodes._compat import transformers as compat

pytest.importorskip("transformers")

import transformers
from transformers import Trainer, TrainerControl, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, TrainerState
from transformers.training_args import OptimizerNames

pytestmark = pytest.mark.slow  # importing it takes seconds


def canary(behaviour, used_in):
    file = f"_compat/transformers.py (`integrations/huggingface/{used_in}.py`)"
    return relies_on("transformers", behaviour, file)


class Plain(torch.nn.Module):
    """A loss whose gradient is 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x, labels=None):
        return {"loss": self.weight * 1.0}


class Told(Plain):
    """The same, of a model that can be told `num_items_in_batch`."""

    def forward(self, x, labels=None, **kwargs):
        return super().forward(x)


def arguments(folder, **options):
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), **{**quiet, **options})


def trainer_of(folder, *callbacks, kind=Trainer, model=None, **options):
    return kind(model or Plain(), arguments(folder, **options), callbacks=[*callbacks])


# --- the loop -------------------------------------------------------------------------------------


def llama():
    sizes = {"vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(**sizes, intermediate_size=4)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("step", [7, 8])
@pytest.mark.parametrize(("strategy", "delay"), [("steps", 0), ("steps", 50), ("epoch", 0)])
@canary("the end of a run in DefaultFlowCallback.on_step_end", "trainer")
def test_a_late_end_is_the_end_of_the_default_flow(tmp_path, step, delay, strategy):
    def flags(max_steps, finish):
        state = TrainerState(global_step=step, max_steps=max_steps, eval_steps=4, save_steps=4)
        finish(args, state, control := TrainerControl())
        return control.should_evaluate, control.should_save

    args = arguments(tmp_path)
    args.eval_strategy = args.save_strategy = strategy
    args.eval_delay = delay
    flow = DefaultFlowCallback().on_step_end
    done, wanted = flags(100, flow), flags(step, flow)
    expected = tuple(new and not old for old, new in zip(done, wanted, strict=True))
    assert flags(100, compat.finish_at_this_step) == expected


METHODS = {
    "train": ["resume_from_checkpoint"],
    "_load_from_checkpoint": ["resume_from_checkpoint"],
    "_load_best_model": [],
    "_issue_warnings_after_load": ["load_result"],
    "get_train_dataloader": [],
    "_get_dataloader": ["dataset"],
    "get_batch_samples": ["epoch_iterator", "num_batches", "device"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
    "create_scheduler": ["num_training_steps", "optimizer"],
    "evaluate": [],
    "log": ["logs"],
}


@canary("the parameters of a method of Trainer", "trainer")
def test_the_methods_that_we_override_take_what_they_took():
    for name, parameters in METHODS.items():
        names = [*inspect.signature(getattr(Trainer, name)).parameters]
        assert names[1 : len(parameters) + 1] == parameters, (name, names)


# --- arguments and columns ------------------------------------------------------------------------


@canary("train_sampling_strategy, the sizes of parallelism, or OptimizerNames", "config")
def test_arguments_that_versions_have_added(tmp_path):
    trainer = trainer_of(tmp_path)
    assert compat.sampling_strategy(trainer.args) == "random"
    old = SimpleNamespace(group_by_length=True)  # before version 5
    assert compat.sampling_strategy(old) == "group_by_length"
    if hasattr(trainer.args, "train_sampling_strategy"):
        sequential = arguments(tmp_path, train_sampling_strategy="sequential")
        assert compat.sampling_strategy(sequential) == "sequential"
    sizes = compat.parallel_sizes(trainer)
    assert "get_tp_size" in sizes
    assert {*sizes.values()} == {1}
    assert {"lomo", "adalomo", "galore_adamw_layerwise"} < {name.value for name in OptimizerNames}
    for name, steps in (("adalomo", True), ("galore_adamw_layerwise", True), ("sgd", False)):
        assert compat.steps_within_backward(arguments(tmp_path, optim=name)) is steps


@canary("Trainer._prepare_for_training, which tells DeepSpeed max_steps", "config")
def test_a_schedule_of_deepspeed_is_made_of_the_bound(tmp_path):
    assert not compat.deepspeed_has_scheduler(trainer_of(tmp_path))
    before_5 = Trainer._inner_training_loop
    source = inspect.getsource(getattr(Trainer, "_prepare_for_training", before_5))
    assert "deepspeed_init(self, num_training_steps=max_steps)" in source


@canary("Trainer._set_signature_columns_if_needed", "samples")
def test_the_columns_are_those_of_the_trainer(tmp_path):
    class Own(Trainer):
        def _set_signature_columns_if_needed(self):
            self._signature_columns = ["y"]

    assert compat.sample_columns(trainer_of(tmp_path, kind=Own)) == {"y"}
    trainer = trainer_of(tmp_path, label_names=["goal"])
    columns = compat.sample_columns(trainer)
    assert columns == {*trainer._signature_columns} > {"x", "goal", "label", "label_ids"}
    trainer.model = None  # as between the trials of a search
    assert compat.sample_columns(trainer) == columns
    trainer.args.remove_unused_columns = False
    assert compat.sample_columns(trainer) is None
    assert trainer.label_names == ["goal"]


# --- models and losses ----------------------------------------------------------------------------


@canary("PreTrainedModel.loss_type, LOSS_MAPPING or Trainer._loss_shifts_labels", "loss")
def test_labels_are_shifted_where_the_trainer_counts_them_shifted(tmp_path):
    sizes = {"d_model": 4, "d_kv": 4, "d_ff": 4, "num_layers": 1, "num_heads": 1, "vocab_size": 9}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    for model, shifts in ((llama(), True), (t5, False)):
        assert compat.shifts_labels(model) is shifts
        trainer = Trainer(model, arguments(tmp_path))
        assert getattr(trainer, "_loss_shifts_labels", shifts) is shifts
        assert compat.is_encoder_decoder(model) is not shifts
    assert compat.shifts_labels(Plain())


@canary("PreTrainedModel.loss_function, which is causal for names it does not know", "loss")
def test_models_that_the_table_of_losses_lacks_shift_as_their_own_loss_does():
    gpt = transformers.GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=9)
    xl = transformers.XLNetConfig(d_model=4, n_layer=1, n_head=1, d_inner=4, vocab_size=9)
    bart = transformers.BartConfig(
        d_model=4, decoder_layers=1, decoder_attention_heads=1, decoder_ffn_dim=4, vocab_size=9
    )
    ids = torch.tensor([[1, 2, 3]])
    first_alone = torch.tensor([[1, -100, -100]])
    for model, shifts in (
        (transformers.GPT2LMHeadModel(gpt), True),
        (transformers.GPT2DoubleHeadsModel(gpt), True),
        (transformers.XLNetLMHeadModel(xl), False),
        (transformers.BartForCausalLM(bart), False),
    ):
        loss = model(input_ids=ids, labels=first_alone).loss
        assert loss.isfinite() == (not shifts)
        assert compat.shifts_labels(model) is shifts


@canary("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, which a `label_smoother` shifts labels for", "loss")
def test_labels_are_shifted_where_the_label_smoother_shifts_them(tmp_path):
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    ids = torch.tensor([[1, 2, 3]])
    first_alone = {"input_ids": ids, "labels": torch.tensor([[1, -100, -100]])}
    gpt = transformers.GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=9)
    for model, shifts in ((llama(), True), (transformers.GPT2DoubleHeadsModel(gpt), False)):
        trainer = Trainer(model, args)
        assert trainer.compute_loss(model, {**first_alone}).isfinite() == (not shifts)
        assert compat.smoother_shifts(trainer) is shifts
    assert compat.smoother_shifts(Trainer(model, arguments(tmp_path))) is None


def gradient_of(trainer, items):
    """Of a loss whose own gradient is 1."""
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.training_step(trainer.model, {"x": torch.zeros(1), "labels": torch.zeros(1)}, items)
    return trainer.model.weight.grad.item()


@pytest.mark.parametrize("is_scaled", [None, False, True])
@pytest.mark.parametrize("function", [None, lambda outputs, labels, **_: outputs["loss"]])
@pytest.mark.parametrize("model, items", [(Plain, None), (Told, None), (Told, torch.tensor(7))])
@canary("the scale of a loss in Trainer.compute_loss and training_step", "loss")
def test_the_trainer_scales_a_loss_by_ranks_and_batches(
    tmp_path, monkeypatch, model, items, function, is_scaled
):
    trainer = trainer_of(tmp_path, model=model(), gradient_accumulation_steps=3)
    trainer.compute_loss_func = function
    if hasattr(trainer, "loss_is_scaled_for_ga"):
        trainer.loss_is_scaled_for_ga = is_scaled
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", property(lambda _: 4))
    for averages_tokens in (True, False):
        trainer.args.average_tokens_across_devices = averages_tokens
        scale = compat.loss_scale(trainer, has_items=items is not None)
        assert gradient_of(trainer, items) == pytest.approx(scale)
    assert compat.takes_num_items(trainer) is (model is Told or function is not None)


@relies_on("transformers", "BatchRebalanceSampler", "_compat/transformers.py")
def test_a_sampler_tells_the_batches_of_all_ranks_at_once():
    lengths, options = [n % 17 + 1 for n in range(50)], {"seed": 3, "drop_last": False}
    sampler = compat.sampler_class("BatchRebalanceSampler")
    ranks = [[*sampler(lengths, 24, 3, 2, rank=rank, **options)] for rank in range(3)]
    batches = compat.rebalanced_batches(lengths, 4, world_size=3, accumulate=2, seed=3)
    assert batches == [*zip(*ranks, strict=True)]
