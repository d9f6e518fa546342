"""Canaries: what we rely on inside of transformers."""

import copy
import inspect
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from canary import relies_on
from torch.utils.data import IterableDataset

from odb_nodes._compat import transformers as compat
from odb_nodes.errors import StateError

pytest.importorskip("transformers")

import transformers
from transformers import Trainer, TrainerCallback, TrainerControl, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, TrainerState
from transformers.training_args import OptimizerNames

pytestmark = pytest.mark.slow  # importing it takes seconds

BATCHES = 3


def canary(what, used_in):
    file = f"_compat/transformers.py (`integrations/huggingface/{used_in}.py`)"
    return relies_on("transformers", what, file)


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


class Batches:
    """Has no length, and counts what was read."""

    epochs = read = 0

    def __iter__(self):
        self.epochs += 1
        for number in range(BATCHES):
            self.read += 1
            yield {"x": torch.tensor([float(number)])}


class Looping(Trainer):
    """Trains on `Batches` as ours does: without a length, and told where it ends."""

    most_epochs = 2
    calls = 0

    def get_train_dataloader(self):
        self.batches = Batches()
        return self.batches

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        self.wanted = num_batches
        self.calls += 1
        taken = list(islice(epoch_iterator, num_batches))
        if not taken:
            compat.stop_epoch(self, ends_training=self.batches.epochs == self.most_epochs)
        self.given = [(batch["x"].item(), 7) for batch in taken]
        return taken, 7

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.asked = []
        loss = super().training_step(model, inputs, num_items_in_batch)
        assert self.asked == [self.given.pop(0)]
        return loss

    def compute_loss(self, model, inputs, num_items_in_batch=None, **kwargs):
        self.asked.append((inputs["x"].item(), num_items_in_batch))
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **kwargs)

    def create_scheduler(self, num_training_steps, optimizer=None):
        compat.plan_steps(self, 10)
        return super().create_scheduler(10, optimizer)


def noting(answers, **asked):
    """A callback that keeps what functions of (args, state, control) return at their hooks."""

    def hook(ask):
        return lambda self, *given, **_: answers.append(ask(*given))

    hooks = {name: hook(ask) for name, ask in asked.items()}
    return type("Notes", (TrainerCallback,), hooks)()


def arguments(folder, **options):
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), **{**quiet, **options})


def trainer_of(folder, *callbacks, kind=Looping, model=None, **options):
    return kind(model or Plain(), arguments(folder, **options), callbacks=[*callbacks])


def train(trainer, most_steps=100, **options):
    with compat.bounded_loop(trainer.args, most_steps):
        return trainer.train(**options)


# --- the loop -------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.zeros(1)}] * 10)


@canary("the check of max_steps in Trainer.__init__", "config")
def test_a_stream_needs_max_steps_only_when_a_trainer_is_made(tmp_path):
    args, holder = arguments(tmp_path), SimpleNamespace()
    with pytest.raises(ValueError, match="max_steps"):
        Trainer(Plain(), args, train_dataset=Stream())
    with compat.constructed_without_length(holder, args):
        holder.args = copy.copy(args)
        Trainer(Plain(), args, train_dataset=Stream())
    assert args.max_steps == holder.args.max_steps == -1


@pytest.mark.parametrize("accumulate", [1, 3])
@canary("the loop of Trainer._inner_training_loop and _run_epoch", "trainer")
def test_a_loader_without_a_length_is_iterated_until_it_is_stopped(tmp_path, accumulate):
    train(trainer := trainer_of(tmp_path, gradient_accumulation_steps=accumulate))
    assert (trainer.batches.epochs, trainer.batches.read) == (2, 2 * BATCHES)
    assert trainer.state.global_step == 2 * BATCHES // accumulate
    assert trainer.wanted == accumulate
    assert trainer.calls == trainer.state.global_step + trainer.batches.epochs
    assert (trainer.args.max_steps, trainer.args.ignore_data_skip) == (-1, False)


@canary("Trainer.set_initial_training_values of a loader without a length", "trainer")
def test_the_loop_ends_by_max_steps_of_the_arguments(tmp_path):
    unplanned = type("Unplanned", (Looping,), {"create_scheduler": Trainer.create_scheduler})
    train(trainer := trainer_of(tmp_path, kind=unplanned), most_steps=2)
    assert trainer.state.global_step == 2


@canary("args.ignore_data_skip", "trainer")
def test_a_resumed_run_skips_no_batches(tmp_path):
    train(trainer_of(tmp_path, save_strategy="steps", save_steps=2))
    resumed = trainer_of(tmp_path)
    resumed.most_epochs = 1
    train(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.batches.read == BATCHES
    assert resumed.state.global_step == 2 + BATCHES


@canary("the end of a run at an empty epoch in Trainer._run_epoch", "run")
def test_the_loop_stops_at_an_epoch_without_batches(tmp_path):
    class Empty(Looping):
        def get_batch_samples(self, *given):
            compat.stop_epoch(self, ends_training=False)
            return [], None

    train(trainer := trainer_of(tmp_path, kind=Empty))
    assert trainer.state.global_step == 0
    assert trainer.control.should_training_stop


@canary("TrainerState.compute_steps, or callback_handler.callbacks, a list", "trainer")
def test_steps_are_planned_by_a_callback_that_is_called_before_the_others(tmp_path):
    answers = []
    last = noting(
        answers, on_train_begin=lambda _, state, __: (state.max_steps, state.logging_steps)
    )
    trainer = trainer_of(tmp_path, last, logging_steps=0.5)
    plan = noting(answers, on_train_begin=lambda *_: compat.plan_steps(trainer, 10))
    trainer.callback_handler.callbacks.insert(0, plan)
    train(trainer)
    assert answers == [None, (10, 5)]


def llama():
    sizes = {"vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(**sizes, intermediate_size=4)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpoints", [False, True])
@canary("what Trainer.train does before training_step", "auto_budget")
def test_a_step_can_be_made_before_training_begins(tmp_path, checkpoints):
    batch = dict.fromkeys(("input_ids", "labels"), torch.ones(1, 3, dtype=torch.int64))
    trainer = Trainer(llama(), arguments(tmp_path, gradient_checkpointing=checkpoints))
    compat.begin_alone(trainer)
    assert trainer.model.is_gradient_checkpointing == checkpoints
    assert trainer.training_step(trainer.model, batch, torch.tensor(2)) > 0
    assert trainer.optimizer is None
    assert isinstance(trainer.create_optimizer(), torch.optim.Optimizer)


@canary("Trainer._save_checkpoint, or _maybe_log_save_evaluate after on_epoch_end", "trainer")
def test_what_an_epoch_ends_with_is_saved_to_the_folder_that_we_name(tmp_path):
    folders = []
    trainer = trainer_of(
        tmp_path,
        noting([], on_epoch_end=compat.finish_at_this_step),
        noting(folders, on_save=lambda args, state, _: compat.checkpoint_folder(args, state)),
        save_strategy="steps",
        save_steps=100,
    )
    trainer.most_epochs = 1
    train(trainer)
    assert folders == [tmp_path / f"checkpoint-{BATCHES}"]
    assert (folders[0] / "trainer_state.json").is_file()
    assert trainer.state.max_steps == BATCHES


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
    rest = tuple(new and not old for old, new in zip(done, wanted, strict=True))
    assert flags(100, compat.finish_at_this_step) == rest


@canary("_issue_warnings_after_load, called by _load_from_checkpoint and others", "trainer")
def test_weights_that_a_trainer_does_not_load_are_known(tmp_path):
    class Strict(Looping):
        def _issue_warnings_after_load(self, load_result):
            compat.load_rest(self.model, str(tmp_path), load_result)

    trainer_of(tmp_path).save_model()
    trainer = trainer_of(tmp_path, kind=Strict)
    trainer.state.best_model_checkpoint = str(tmp_path)
    for load in (
        lambda: trainer._load_from_checkpoint(str(tmp_path)),
        trainer._load_best_model,
    ):
        trainer.model = Plain()
        load()
        trainer.model.new = torch.nn.Parameter(torch.zeros(()))
        with pytest.raises(StateError, match="1 are missing from it, such as `new`"):
            load()


METHODS = {
    "train": ["resume_from_checkpoint"],
    "_load_from_checkpoint": ["resume_from_checkpoint"],
    "_load_best_model": [],
    "_issue_warnings_after_load": ["load_result"],
    "get_train_dataloader": [],
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
        found = [*inspect.signature(getattr(Trainer, name)).parameters]
        assert found[1 : len(parameters) + 1] == parameters, (name, found)


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
    assert {"lomo", "adalomo", "galore_adamw_layerwise"} < {one.value for one in OptimizerNames}
    for name, steps in (("adalomo", True), ("galore_adamw_layerwise", True), ("sgd", False)):
        assert compat.steps_within_backward(arguments(tmp_path, optim=name)) is steps


@canary("Trainer._prepare_for_training, which tells DeepSpeed max_steps", "config")
def test_a_schedule_of_deepspeed_is_made_of_the_bound(tmp_path):
    assert not compat.deepspeed_has_scheduler(trainer_of(tmp_path))
    before_5 = Trainer._inner_training_loop
    source = inspect.getsource(getattr(Trainer, "_prepare_for_training", before_5))
    assert "deepspeed_init(self, num_training_steps=max_steps)" in source


@canary("Trainer.data_collator by default, or PreTrainedModel.main_input_name", "samples")
def test_the_collator_of_a_trainer_without_one_is_known(tmp_path):
    assert compat.is_default_collator(trainer_of(tmp_path).data_collator)
    assert not compat.is_default_collator(list)
    for model, pads in ((llama(), True), (speech("HubertForCTC"), False)):
        for keeps_all in (True, False):
            trainer = trainer_of(tmp_path, model=model, remove_unused_columns=not keeps_all)
            assert compat.pads_by_default(trainer) is pads


@canary("Trainer._set_signature_columns_if_needed", "samples")
def test_the_columns_are_those_of_the_trainer(tmp_path):
    class Own(Looping):
        def _set_signature_columns_if_needed(self):
            self._signature_columns = ["y"]

    assert compat.sample_columns(trainer_of(tmp_path, kind=Own)) == {"y"}
    trainer = trainer_of(tmp_path, label_names=["goal"])
    found = compat.sample_columns(trainer)
    assert found == {*trainer._signature_columns} > {"x", "goal", "label", "label_ids"}
    trainer.model = None  # as between the trials of a search
    assert compat.sample_columns(trainer) == found
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


def speech(kind):
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_conv_pos_embedding_groups": 1}
    sizes |= {"conv_dim": (4,), "conv_kernel": (2,), "conv_stride": (2,), "classifier_proj_size": 4}
    config = transformers.HubertConfig(**sizes, ctc_loss_reduction="mean")
    return getattr(transformers, kind)(config)


@canary("the classes *ForCTC, or config.ctc_loss_reduction", "loss")
def test_a_model_for_ctc_says_how_its_loss_is_reduced(tmp_path):
    trainer = trainer_of(tmp_path, model=speech("HubertForCTC"))
    assert compat.ctc_reduction(trainer) == "mean"
    trainer.compute_loss_func = len
    assert compat.ctc_reduction(trainer) is None
    other = trainer_of(tmp_path, model=speech("HubertForSequenceClassification"))
    assert compat.ctc_reduction(other) is None


@canary("get_base_model of adapters", "run")
def test_an_adapter_tells_its_base_model():
    adapter, base = Plain(), Plain()
    adapter.get_base_model = lambda: base
    assert compat.base_model(adapter) is base
    assert compat.base_model(base) is base


def gradient_of(trainer, items):
    """Of a loss whose own gradient is 1."""
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.training_step(trainer.model, {"x": torch.zeros(1), "labels": torch.zeros(1)}, items)
    return trainer.model.weight.grad.item()


@pytest.mark.parametrize("is_scaled", [None, False, True])
@pytest.mark.parametrize("function", [None, lambda outputs, labels, **_: outputs["loss"]])
@pytest.mark.parametrize("model, items", [(Plain, None), (Told, None), (Told, torch.tensor(7))])
@canary("the division of the loss in Trainer.training_step", "loss")
def test_the_trainer_divides_a_loss_by_the_batches_of_its_step(
    tmp_path, model, items, function, is_scaled
):
    trainer = trainer_of(tmp_path, kind=Trainer, model=model(), gradient_accumulation_steps=3)
    trainer.compute_loss_func = function
    if hasattr(trainer, "loss_is_scaled_for_ga"):
        trainer.loss_is_scaled_for_ga = is_scaled
    divisor = compat.loss_divisor(trainer, is_told=items is not None)
    assert gradient_of(trainer, items) == pytest.approx(1 / divisor)
    assert compat.takes_num_items(trainer) is (model is Told or function is not None)


@pytest.mark.parametrize("is_averaged", [True, False])
@canary("average_tokens_across_devices in Trainer.compute_loss", "loss")
def test_the_trainer_multiplies_by_the_ranks_where_items_are_of_all(
    tmp_path, monkeypatch, is_averaged
):
    options = {"average_tokens_across_devices": is_averaged}
    trainer = trainer_of(tmp_path, kind=Trainer, model=Told(), **options)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", property(lambda _: 4))
    factor = gradient_of(trainer, torch.tensor(7))
    assert factor * compat.num_items_divisor(trainer) == 4


@relies_on("transformers", "BatchRebalanceSampler", "_compat/transformers.py")
def test_a_sampler_tells_the_batches_of_all_ranks_at_once():
    lengths, options = [n % 17 + 1 for n in range(50)], {"seed": 3, "drop_last": False}
    sampler = compat.sampler_class("BatchRebalanceSampler")
    ranks = [[*sampler(lengths, 24, 3, 2, rank=rank, **options)] for rank in range(3)]
    made = compat.rebalanced_batches(lengths, 4, world_size=3, accumulate=2, seed=3)
    assert made == [*zip(*ranks, strict=True)]
