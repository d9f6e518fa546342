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

from transformers import (
    BertConfig,
    BertForMaskedLM,
    HubertConfig,
    HubertForCTC,
    HubertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)
from transformers.trainer_callback import DefaultFlowCallback, TrainerState
from transformers.training_args import OptimizerNames

pytestmark = pytest.mark.slow  # importing it takes seconds

BATCHES = 3
USED_IN = "_compat/transformers.py (`integrations/huggingface/{}.py`)"


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


class Stream(IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.zeros(1)}] * 10)


class Batches:
    """Has no length, and counts what was read."""

    def __init__(self):
        self.epochs = self.read = 0

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


class Notes(TrainerCallback):
    def __init__(self, **asked):
        self.asked, self.answers = asked, []

    def note(self, hook, args, state, control):
        if hook in self.asked:
            self.answers.append(self.asked[hook](args, state, control))

    def on_train_begin(self, args, state, control, **_):
        self.note("on_train_begin", args, state, control)

    def on_step_end(self, args, state, control, **_):
        self.note("on_step_end", args, state, control)

    def on_epoch_end(self, args, state, control, **_):
        self.note("on_epoch_end", args, state, control)

    def on_save(self, args, state, control, **_):
        self.note("on_save", args, state, control)


def arguments(folder, **options):
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), **{**quiet, **options})


def trainer_of(folder, *callbacks, kind=Looping, model=None, **options):
    trainer = kind(model or Plain(), arguments(folder, **options))
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


def train(trainer, most_steps=100, **options):
    with compat.bounded_loop(trainer.args, most_steps):
        return trainer.train(**options)


# --- the loop -------------------------------------------------------------------------------------


def test_a_stream_needs_max_steps_only_when_a_trainer_is_made(tmp_path):
    what = "trainer_utils.has_length, or the check of max_steps in Trainer.__init__"
    with relies_on("transformers", what, USED_IN.format("checks")):
        assert not compat.has_length(Stream())
        assert compat.has_length([1])
        args = arguments(tmp_path)
        with pytest.raises(ValueError, match="max_steps"):
            Trainer(Plain(), args, train_dataset=Stream())
        holder = SimpleNamespace()
        with compat.constructed_without_length(holder, args):
            holder.args = copy.copy(args)
            Trainer(Plain(), args, train_dataset=Stream())
        assert args.max_steps == holder.args.max_steps == -1


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loader_without_a_length_is_iterated_until_it_is_stopped(tmp_path, accumulate):
    what = "the loop of Trainer._inner_training_loop and _run_epoch"
    with relies_on("transformers", what, USED_IN.format("trainer")):
        trainer = trainer_of(tmp_path, gradient_accumulation_steps=accumulate)
        train(trainer)
        assert trainer.batches.epochs == 2
        assert trainer.batches.read == 2 * BATCHES
        assert trainer.state.global_step == 2 * BATCHES // accumulate
        assert trainer.wanted == accumulate
        assert trainer.calls == trainer.state.global_step + trainer.batches.epochs
        assert trainer.args.max_steps == -1
        assert trainer.args.ignore_data_skip is False


def test_the_loop_ends_by_max_steps_of_the_arguments(tmp_path):
    what = "Trainer.set_initial_training_values of a loader without a length"
    with relies_on("transformers", what, USED_IN.format("trainer")):

        class Unplanned(Looping):
            create_scheduler = Trainer.create_scheduler

        trainer = trainer_of(tmp_path, kind=Unplanned)
        train(trainer, most_steps=2)
        assert trainer.state.global_step == 2


def test_a_resumed_run_skips_no_batches(tmp_path):
    with relies_on("transformers", "args.ignore_data_skip", USED_IN.format("trainer")):
        train(trainer_of(tmp_path, save_strategy="steps", save_steps=2))
        resumed = trainer_of(tmp_path)
        resumed.most_epochs = 1
        train(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert resumed.batches.read == BATCHES
        assert resumed.state.global_step == 2 + BATCHES


def test_the_loop_stops_at_an_epoch_without_batches(tmp_path):
    what = "the end of a run at an empty epoch in Trainer._run_epoch"
    with relies_on("transformers", what, USED_IN.format("batches")):

        class Empty(Looping):
            def get_batch_samples(self, *given):
                compat.stop_epoch(self, ends_training=False)
                return [], None

        trainer = trainer_of(tmp_path, kind=Empty)
        train(trainer)
        assert trainer.state.global_step == 0
        assert trainer.control.should_training_stop


def test_steps_are_planned_until_the_run_begins(tmp_path):
    what = "TrainerState.compute_steps, and that on_train_begin follows all that sets max_steps"
    with relies_on("transformers", what, USED_IN.format("callback")):
        notes = Notes(on_train_begin=lambda _, state, __: (state.max_steps, state.logging_steps))
        trainer = trainer_of(tmp_path, notes, logging_steps=0.5)
        plan = Notes(on_train_begin=lambda *_: compat.plan_steps(trainer, 10))
        compat.prepend_callback(trainer, plan)
        train(trainer)
        assert notes.answers == [(10, 5)]


def test_a_step_can_be_made_before_training_begins(tmp_path):
    used_in = USED_IN.format("auto_budget")
    with relies_on("transformers", "what Trainer.train does before training_step", used_in):
        config = LlamaConfig(
            vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
            num_attention_heads=1,
        )  # fmt: skip
        batch = {"input_ids": torch.ones(1, 3, dtype=torch.int64)}
        batch["labels"] = batch["input_ids"]
        for checkpoints in (False, True):
            args = arguments(tmp_path, gradient_checkpointing=checkpoints)
            trainer = Trainer(LlamaForCausalLM(config), args)
            compat.begin_alone(trainer)
            assert trainer.model.is_gradient_checkpointing == checkpoints
            assert trainer.training_step(trainer.model, batch, torch.tensor(2)) > 0
            assert trainer.optimizer is None
            assert isinstance(trainer.create_optimizer(), torch.optim.Optimizer)


def test_a_callback_can_be_called_before_the_others(tmp_path):
    with relies_on("transformers", "callback_handler.callbacks", USED_IN.format("trainer")):
        seen = []
        trainer = trainer_of(tmp_path, Notes(on_train_begin=lambda *_: seen.append("second")))
        compat.prepend_callback(trainer, Notes(on_train_begin=lambda *_: seen.append("first")))
        train(trainer)
        assert seen == ["first", "second"]


def test_what_an_epoch_ends_with_is_saved_to_the_folder_that_we_name(tmp_path):
    what = "Trainer._save_checkpoint, or _maybe_log_save_evaluate after on_epoch_end"
    with relies_on("transformers", what, USED_IN.format("callback")):
        notes = Notes(
            on_epoch_end=compat.finish_at_this_step,
            on_save=lambda args, state, _: compat.checkpoint_folder(args, state),
        )
        trainer = trainer_of(tmp_path, notes, save_strategy="steps", save_steps=100)
        trainer.most_epochs = 1
        train(trainer)
        folders = [answer for answer in notes.answers if answer is not None]
        assert folders == [tmp_path / f"checkpoint-{BATCHES}"]
        assert (folders[0] / "trainer_state.json").is_file()
        assert trainer.state.max_steps == BATCHES


@pytest.mark.parametrize("step", [7, 8])
@pytest.mark.parametrize("delay", [0, 50])
@pytest.mark.parametrize("strategy", ["steps", "epoch", "no"])
def test_a_late_end_is_the_end_of_the_default_flow(tmp_path, step, delay, strategy):
    def flags(max_steps, finish):
        state = TrainerState(global_step=step, max_steps=max_steps, eval_steps=4, save_steps=4)
        control = TrainerControl()
        finish(args, state, control)
        return control.should_evaluate, control.should_save

    what = "the end of a run in DefaultFlowCallback.on_step_end"
    with relies_on("transformers", what, USED_IN.format("callback")):
        args = arguments(tmp_path)
        args.eval_strategy = args.save_strategy = strategy
        args.eval_delay = delay
        flow = DefaultFlowCallback().on_step_end
        done, wanted = flags(100, flow), flags(step, flow)
        rest = tuple(new and not old for old, new in zip(done, wanted, strict=True))
        assert flags(100, compat.finish_at_this_step) == rest


def test_the_last_log_has_the_speed(tmp_path):
    what = "the names in the last log, by trainer_utils.speed_metrics"
    with relies_on("transformers", what, USED_IN.format("trainer")):
        logs = train(trainer_of(tmp_path)).metrics
        logs["train_runtime"] = 2.0
        compat.set_samples_per_second(logs, 10)
        assert logs["train_samples_per_second"] == 5.0
        compat.set_samples_per_second(other := {"loss": 1.0}, 10)
        assert other == {"loss": 1.0}


def test_weights_that_a_trainer_does_not_load_are_known(tmp_path):
    what = "_issue_warnings_after_load, called by _load_from_checkpoint and _load_best_model"
    with relies_on("transformers", what, USED_IN.format("trainer")):
        trainer_of(tmp_path).save_model()
        trainer = trainer_of(tmp_path, model=Told())
        trainer.state.best_model_checkpoint = str(tmp_path)
        for load in (
            lambda: trainer._load_from_checkpoint(str(tmp_path)),
            trainer._load_best_model,
        ):
            trainer.model = Plain()
            with compat.loading_whole(trainer, str(tmp_path)):
                load()
            trainer.model.new = torch.nn.Parameter(torch.zeros(()))
            with compat.loading_whole(trainer, str(tmp_path)):
                with pytest.raises(StateError, match="1 are missing from it, such as `new`"):
                    load()


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("train", ["resume_from_checkpoint"]),
        ("_load_from_checkpoint", ["resume_from_checkpoint"]),
        ("_load_best_model", []),
        ("get_train_dataloader", []),
        ("get_batch_samples", ["epoch_iterator", "num_batches", "device"]),
        ("training_step", ["model", "inputs", "num_items_in_batch"]),
        ("compute_loss", ["model", "inputs", "return_outputs", "num_items_in_batch"]),
        ("create_scheduler", ["num_training_steps", "optimizer"]),
        ("evaluate", []),
        ("log", ["logs"]),
    ],
)
def test_the_methods_that_we_override_take_what_they_took(name, parameters):
    with relies_on("transformers", f"Trainer.{name}", "integrations/huggingface/trainer.py"):
        found = [*inspect.signature(getattr(Trainer, name)).parameters]
        assert found[1 : len(parameters) + 1] == parameters, found


# --- arguments and columns ------------------------------------------------------------------------


def test_arguments_that_versions_have_added(tmp_path):
    what = "train_sampling_strategy, or the sizes of parallelism"
    with relies_on("transformers", what, USED_IN.format("checks")):
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


def test_optimizers_that_step_within_backward_are_known_by_name(tmp_path):
    what = "OptimizerNames of LOMO and of layers"
    with relies_on("transformers", what, USED_IN.format("checks")):
        names = {one.value for one in OptimizerNames}
        assert {"lomo", "adalomo", "galore_adamw_layerwise"} < names
        for name, steps in (("adalomo", True), ("galore_adamw_layerwise", True), ("sgd", False)):
            assert compat.steps_within_backward(arguments(tmp_path, optim=name)) is steps


def test_a_schedule_of_deepspeed_is_made_of_the_bound(tmp_path):
    what = "Trainer._prepare_for_training, which tells DeepSpeed max_steps"
    with relies_on("transformers", what, USED_IN.format("checks")):
        assert not compat.deepspeed_has_scheduler(trainer_of(tmp_path))
        before_5 = Trainer._inner_training_loop
        source = inspect.getsource(getattr(Trainer, "_prepare_for_training", before_5))
        assert "deepspeed_init(self, num_training_steps=max_steps)" in source


def test_the_collator_of_a_trainer_without_one_is_known(tmp_path):
    with relies_on("transformers", "Trainer.data_collator by default", USED_IN.format("checks")):
        assert compat.is_default_collator(trainer_of(tmp_path).data_collator)
        assert not compat.is_default_collator(list)
    with relies_on("transformers", "PreTrainedModel.main_input_name", USED_IN.format("columns")):
        for model, pads in ((next(models())[0], True), (speech(HubertForCTC), False)):
            for keeps_all in (True, False):
                trainer = trainer_of(tmp_path, model=model, remove_unused_columns=not keeps_all)
                assert compat.pads_by_default(trainer) is pads


def test_the_columns_are_those_of_the_trainer(tmp_path):
    what = "Trainer._set_signature_columns_if_needed"
    with relies_on("transformers", what, USED_IN.format("columns")):
        trainer = trainer_of(tmp_path, label_names=["goal"])
        found = compat.sample_columns(trainer)
        assert found == {*trainer._signature_columns} > {"x", "goal", "label", "label_ids"}
        trainer.model = None  # as between the trials of a search
        assert compat.sample_columns(trainer) == found
        trainer.args.remove_unused_columns = False
        assert compat.sample_columns(trainer) is None
        assert compat.label_names(trainer) == ["goal"]


def test_a_trainer_may_say_which_columns_it_needs(tmp_path):
    class Own(Looping):
        def _set_signature_columns_if_needed(self):
            self._signature_columns = ["y"]

    assert compat.sample_columns(trainer_of(tmp_path, kind=Own)) == {"y"}


# --- models and losses ----------------------------------------------------------------------------


def models():
    sizes = {"vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"intermediate_size": 4}
    yield LlamaForCausalLM(LlamaConfig(**sizes)), True
    yield BertForMaskedLM(BertConfig(**sizes)), False
    sizes = {"d_model": 4, "d_kv": 4, "d_ff": 4, "num_layers": 1, "num_heads": 1, "vocab_size": 9}
    yield T5ForConditionalGeneration(T5Config(**sizes)), False


def test_labels_are_shifted_where_the_trainer_counts_them_shifted(tmp_path):
    what = "PreTrainedModel.loss_type, loss_utils.LOSS_MAPPING or Trainer._loss_shifts_labels"
    with relies_on("transformers", what, USED_IN.format("run")):
        for model, shifts in models():
            assert compat.shifts_labels(model) is shifts
            trainer = Trainer(model, arguments(tmp_path))
            assert getattr(trainer, "_loss_shifts_labels", shifts) is shifts
            assert compat.is_encoder_decoder(model) is ("T5" in type(model).__name__)
        assert compat.shifts_labels(Plain())


def speech(kind):
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_conv_pos_embedding_groups": 1}
    sizes |= {"conv_dim": (4,), "conv_kernel": (2,), "conv_stride": (2,)}
    return kind(HubertConfig(**sizes, classifier_proj_size=4, ctc_loss_reduction="mean"))


def test_a_model_for_ctc_says_how_its_loss_is_reduced(tmp_path):
    what = "the classes *ForCTC, or config.ctc_loss_reduction"
    with relies_on("transformers", what, USED_IN.format("weighing")):
        trainer = trainer_of(tmp_path, model=speech(HubertForCTC))
        assert compat.ctc_reduction(trainer) == "mean"
        trainer.compute_loss_func = len
        assert compat.ctc_reduction(trainer) is None
        other = trainer_of(tmp_path, model=speech(HubertForSequenceClassification))
        assert compat.ctc_reduction(other) is None


def test_an_adapter_tells_its_base_model():
    with relies_on("transformers", "get_base_model of adapters", USED_IN.format("run")):
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
def test_the_trainer_divides_a_loss_by_the_batches_of_its_step(
    tmp_path, model, items, function, is_scaled
):
    what = "the division of the loss in Trainer.training_step"
    with relies_on("transformers", what, USED_IN.format("weighing")):
        trainer = trainer_of(tmp_path, kind=Trainer, model=model(), gradient_accumulation_steps=3)
        trainer.compute_loss_func = function
        if hasattr(trainer, "loss_is_scaled_for_ga"):
            trainer.loss_is_scaled_for_ga = is_scaled
        divisor = compat.loss_divisor(trainer, is_told=items is not None)
        assert gradient_of(trainer, items) == pytest.approx(1 / divisor)
        assert compat.takes_num_items(trainer) is (model is Told or function is not None)


@pytest.mark.parametrize("is_averaged", [True, False])
def test_the_trainer_multiplies_by_the_ranks_where_items_are_of_all(
    tmp_path, monkeypatch, is_averaged
):
    what = "average_tokens_across_devices in Trainer.compute_loss"
    with relies_on("transformers", what, USED_IN.format("weighing")):
        trainer = trainer_of(
            tmp_path, kind=Trainer, model=Told(), average_tokens_across_devices=is_averaged
        )
        kind = type(trainer.accelerator)
        monkeypatch.setattr(kind, "num_processes", property(lambda _: 4))
        factor = gradient_of(trainer, torch.tensor(7))
        assert factor * compat.num_items_divisor(trainer) == 4
