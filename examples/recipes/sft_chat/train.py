"""Fine-tune a chat model on conversations in a JSON Lines file: TRL's SFTTrainer, with LoRA.

    python examples/recipes/sft_chat/train.py

Run it again after a stop: it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from odb_nodes.integrations.huggingface import ODBConfig, ODBTrainerMixin

# 1. Options. `--token-budget` is what to raise first on a real card.
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--token-budget", type=int, default=2048, help="padded tokens of a batch")
parser.add_argument("--steps", type=int, default=-1, help="most steps (default: two epochs)")
parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--output", type=Path, default=Path("runs/sft_chat"))

# The part between `generation` and `endgeneration` is what the model learns to say.
CHAT_TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>
{% if message.role == "assistant" %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}
{% else %}{{ message.content }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
SPECIAL = ["<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


class Trainer(ODBTrainerMixin, SFTTrainer):
    """TRL's trainer in dynamic batches."""


def make_data(path: Path) -> None:
    """Write 600 conversations of one turn to four about sums. Yours replaces the file."""
    rng = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = f"{path}.{os.getpid()}"  # a kill leaves no file that looks complete, nor do other ranks
    with open(part, "w") as file:
        for _ in range(600):
            messages = [{"role": "system", "content": "You add numbers, and show your work."}]
            for _ in range(rng.randint(1, 4)):
                numbers = [rng.randint(1, 9) for _ in range(1 + int(rng.expovariate(0.2)))]
                sums = [sum(numbers[: n + 1]) for n in range(len(numbers))]
                steps = [f"{s - n} + {n} = {s}" for n, s in zip(numbers, sums, strict=True)]
                question = f"What is {' + '.join(map(str, numbers))}?"
                answer = f"{'. '.join(steps)}. The sum is {sums[-1]}."
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": answer})
            file.write(json.dumps({"messages": messages}) + "\n")
    os.replace(part, path)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on the data. Yours: `AutoTokenizer.from_pretrained(...)`."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, 512, special_tokens=SPECIAL, show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a tiny model. Yours: `AutoModelForCausalLM.from_pretrained(..., dtype="bfloat16")`."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    tokens: dict[str, Any] = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, **sizes, **tokens)
    return LlamaForCausalLM(config)


def main() -> None:
    """Train, from the last checkpoint where there is one."""
    options = parser.parse_args()

    # 2. Data, tokenizer, model.
    path = options.output / "data/conversations.jsonl"
    if not path.exists():
        make_data(path)
    records: list[dict[str, Any]] = [json.loads(line) for line in path.open()]
    tokenizer = make_tokenizer([m["content"] for record in records for m in record["messages"]])
    model = make_model(tokenizer)

    # 3. LoRA: here of rank 16 in all linear layers, as for a real model. The embeddings are
    # trained as well only because this model has never learned any: leave `modules_to_save` out.
    lora = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules="all-linear",
        modules_to_save=["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )

    # 4. The trainer. `per_device_train_batch_size` has no effect: the token budget decides.
    args = SFTConfig(
        str(options.output),
        max_steps=options.steps,
        num_train_epochs=2,
        max_length=1024,
        assistant_only_loss=True,
        learning_rate=5e-3,  # of a tiny model; 2e-4 for LoRA of a real one
        gradient_accumulation_steps=2,
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=1,
        disable_tqdm=True,  # print the logs in place of a bar
        report_to=[],
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,  # True where memory is short
        seed=0,
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
        peft_config=lora,
        odb=ODBConfig(token_budget=options.token_budget, window=128),
    )
    # True takes the newest complete checkpoint.
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(options.output)) is not None)
    trainer.save_model(str(options.output / "adapter"))


if __name__ == "__main__":
    main()
