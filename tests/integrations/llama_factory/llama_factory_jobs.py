"""Runs LLaMA-Factory on tiny data, in an environment that has it; says what happened as JSON.

    python llama_factory_jobs.py FOLDER

Each run writes to its own folder in FOLDER, and all results to `result.json`.
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from odb_nodes._compat import llama_factory as compat
from odb_nodes.integrations.llama_factory import DynamicBatches, main

SAMPLES, CUTOFF, ROWS = 60, 64, 4
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
ERRORS = {
    "unknown": {"odb": {"windw": 4}},
    "no mapping": {"odb": 5},
    "ray": {},
}


def words(first, count):
    return " ".join(f"w{(first + 7 * place) % SAMPLES}" for place in range(count))


def make_inputs(folder):
    """Write a model, its tokenizer and two datasets."""
    names = [*SPECIAL.values(), *(f"w{n}" for n in range(SAMPLES))]
    vocabulary = {name: n for n, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(names), num_hidden_layers=1, pad_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    wrapped.save_pretrained(folder / "model")
    chats = [
        {"instruction": words(n, n % 9 + 2), "input": "", "output": words(n + 3, n % 11 + 2)}
        for n in range(SAMPLES)
    ]
    texts = [{"text": words(n, n % 17 + 2)} for n in range(SAMPLES)]
    (folder / "chats.json").write_text(json.dumps(chats))
    (folder / "texts.json").write_text(json.dumps(texts))
    datasets = {
        "chats": {"file_name": "chats.json"},
        "texts": {"file_name": "texts.json", "columns": {"prompt": "text"}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(datasets))


def arguments(folder, output, **changed):
    return {
        "model_name_or_path": str(folder / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "chats",
        "dataset_dir": str(folder),
        "template": "default",
        "cutoff_len": CUTOFF,
        "output_dir": str(folder / output),
        "overwrite_cache": True,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "odb": {"window": 16},
        **changed,
    }


def documents(batch):
    """Return the samples of a batch, which differ, as text."""
    ids, positions = batch["input_ids"], batch.get("position_ids")
    if positions is None:
        rows = [row[mask.bool()] for row, mask in zip(ids, batch["attention_mask"], strict=True)]
    else:
        starts = [*(positions[0] == 0).nonzero().flatten().tolist(), ids.shape[1]]
        sizes = [end - start for start, end in pairwise(starts)]
        rows = list(ids[0].split(sizes))
    return [" ".join(map(str, row.tolist())) for row in rows]


def train(folder, output, **changed):
    """Train, and return the batches; one that is repeated to fill a step counts once."""
    seen, trainers = {}, []
    configure = DynamicBatches.configure

    def recording(self, trainer, **options):
        def note(module, args, batch):
            if module.training:
                key = str(batch["input_ids"].tolist())
                seen[key] = ([*batch["input_ids"].shape], documents(batch))

        trainer.model.register_forward_pre_hook(note, with_kwargs=True)
        trainers.append(configure(self, trainer, **options))
        return trainers[-1]

    with mock.patch.object(DynamicBatches, "configure", recording):
        main(arguments(folder, output, **changed))
    state = trainers[0].state
    shapes, documents = [shape for shape, _ in seen.values()], [d for _, d in seen.values()]
    return {
        "steps": state.global_step,
        "epoch": state.epoch,
        "shapes": shapes,
        "documents": sum(documents, []),
        "eval_loss": [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry],
    }


def train_and_resume(folder, name, **changed):
    """Train, then again from the first, a middle and the last checkpoint but one."""
    result = train(folder, name, **changed)
    steps = result["steps"]
    result["resumed"] = sorted({1, steps // 2, steps - 1})
    for step in result["resumed"]:
        checkpoint = str(folder / name / f"checkpoint-{step}")
        train(folder, f"{name}-{step}", resume_from_checkpoint=checkpoint, **changed)
    return result


def error_of(folder, name):
    try:
        with mock.patch.dict(os.environ, {"USE_RAY": str(int(name == "ray"))}):
            main(arguments(folder, "never", **ERRORS[name]))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def error_of_another_version(folder):
    """Train where no trainer is made as we expect."""
    try:
        with mock.patch.dict(compat.TRAINERS, clear=True):
            main(arguments(folder, "fixed"))
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "none"


def run(folder):
    make_inputs(folder)
    (folder / "arguments.json").write_text(json.dumps(arguments(folder, "command")))
    evaluated = {"do_eval": True, "eval_dataset": "chats", "per_device_eval_batch_size": 3}
    stream = {"streaming": True, "dataloader_num_workers": 1, "buffer_size": 8, "max_steps": 4}
    return {
        "errors": {name: error_of(folder, name) for name in ERRORS},
        "another version": error_of_another_version(folder),
        "padded": train_and_resume(folder, "padded", **evaluated),
        "packed": train_and_resume(folder, "packed", neat_packing=True, **evaluated),
        "adapter": train_and_resume(folder, "adapter", finetuning_type="lora", lora_rank=2),
        "streamed": train_and_resume(folder, "streamed", **stream),
        "texts": train_and_resume(folder, "texts", stage="pt", packing=False, dataset="texts"),
    }


if __name__ == "__main__":
    result = run(Path(sys.argv[1]))
    Path(sys.argv[1], "result.json").write_text(json.dumps(result))
