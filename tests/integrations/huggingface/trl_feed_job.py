"""A job that trains by TRL's `AsyncGRPOTrainer` on the items of a `FeedSource`, on a CPU.

python trl_feed_job.py FOLDER [STEP]  # resumes; is killed after STEP
"""

import os
import queue
import signal
import sys
import threading
from collections import deque
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers.trainer_utils import get_last_checkpoint
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from odb_nodes import FeedSource, ShardedSampler

PROMPTS, ANSWERS, PROMPTS_PER_STEP, VOCABULARY = 24, 4, 2, 32
ROWS_PER_STEP = PROMPTS_PER_STEP * ANSWERS


class FeedWorker(TrainerCallback):
    """A `rollout_worker`: hands out the rows of a feed, whose state is saved with the trainer's.

    The number of a step tells which rows were trained, since each step has as many rows: with
    `token_budget=-1`, and a `max_staleness` above all steps.
    """

    def __init__(self, feed):
        self.feed = feed
        self.rollout_buffer = self  # for `get` and `qsize`
        self.metrics_queue = queue.Queue()
        self._rows = deque()
        self._taken = 0  # rows that the trainer has taken
        self._states = {0: None}  # step -> the feed's state after the rows of the step

    def on_train_begin(self, args, state, _, **__):
        if state.global_step:
            self._states = {state.global_step: torch.load(state_file(args, state))}
        self._taken = state.global_step * ROWS_PER_STEP

    def on_save(self, args, state, _, **__):
        torch.save(self._states[state.global_step], state_file(args, state))

    def start(self):
        (state,) = self._states.values()
        self.feed.reset(state)

    def stop(self):
        self.feed.close()

    def update_model_version(self, model_version):
        pass

    def check_health(self, stale_after_s):
        pass  # `next` raises after the `timeout_s` of the feed.

    def qsize(self):
        return len(self._rows)

    def get(self, timeout):
        if not self._rows:
            try:
                items = next(self.feed)
            except StopIteration:  # The trainer reads on after the last step.
                self.feed.reset()
                items = next(self.feed)
            key = self.feed.item_key().key
            rows = [RolloutSample([], [], group_id=key, metrics={}, **row) for row in items]
            self._rows.extend(rows)
        self._taken += 1
        row = self._rows.popleft()
        if self._taken % ROWS_PER_STEP == 0:
            self._states[self._taken // ROWS_PER_STEP] = self.feed.state_dict()
        return row


def state_file(args, state):
    return Path(args.output_dir, f"checkpoint-{state.global_step}", "feed.pt")


class NoTransfer:
    """A `weight_transfer` to nobody: the answers are random."""

    def send_weights(self, iterator):
        assert len([*iterator]) > 5

    def init_weight_transfer(self):
        pass

    pause = resume = destroy = init_weight_transfer


def generate(feed):
    """Put four answers to each prompt, which is one token; the advantage is that of even tokens."""
    generator = np.random.default_rng()
    for request in feed.requests():
        answers = [
            generator.integers(VOCABULARY, size=3 + request.item % 7) for _ in range(ANSWERS)
        ]
        rewards = np.array([(answer % 2 == 0).mean() for answer in answers])
        rows = [
            {
                "input_ids": np.array([request.item, *answer]),
                "completion_mask": np.array([0, *np.ones_like(answer)]),
                "old_log_probs": np.array([0, *np.full(len(answer), -np.log(VOCABULARY))]),
                "advantage": float(reward - rewards.mean()),
                "model_version": 0,
            }
            for answer, reward in zip(answers, rewards, strict=True)
        ]
        feed.put(request.key, rows)


class RecordingTrainer(AsyncGRPOTrainer):
    """Writes step, prompts and number of answers of each batch to a file."""

    kill_after = None

    def compute_loss(self, model, inputs, *arguments, **options):
        loss = super().compute_loss(model, inputs, *arguments, **options)
        prompts = sorted({*inputs["input_ids"][inputs["position_ids"] == 0].tolist()})
        answers = int(inputs["segment_id"].max()) + 1
        with Path(self.args.output_dir, "trained").open("a") as file:
            file.write(f"{self.state.global_step} {answers} {' '.join(map(str, prompts))}\n")
        if self.state.global_step == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


def attend(_, query, key, value, __, *, scaling, **tree):
    """TRL's attention for CPUs: each segment of the tree of prefixes sees its path."""
    outputs = []
    segments = pairwise(tree["tree_cu_seqlens_q"].tolist())
    paths = pairwise(tree["tree_cu_seqlens_k"].tolist())
    for segment, path in zip(segments, paths, strict=True):
        seen = tree["tree_kv_index"][slice(*path)]
        rows = query[:, :, slice(*segment)]
        mask = torch.ones(rows.shape[2], len(seen), dtype=torch.bool)
        mask = mask.tril(len(seen) - rows.shape[2])
        kept = key[:, :, seen], value[:, :, seen]
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(rows, *kept, mask, scale=scaling)
        )
    return torch.cat(outputs, 2).transpose(1, 2), None


def save_model(folder):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0").save_pretrained(folder)


def main():
    folder = Path(sys.argv[1])
    if not (folder / "model").exists():
        save_model(folder / "model")
    torch.cuda.get_device_name = lambda *_: "CPU"  # The trainer of TRL 1.16.0 asks for it.
    args = AsyncGRPOConfig(
        str(folder),
        per_device_train_batch_size=ROWS_PER_STEP,
        max_steps=PROMPTS // PROMPTS_PER_STEP,
        save_steps=4,
        token_budget=-1,
        max_staleness=10**6,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    )
    feed = FeedSource(ShardedSampler(PROMPTS, rank=0, world_size=1), max_ahead=6, timeout_s=60)
    worker = FeedWorker(feed)
    trainer = RecordingTrainer(
        model=str(folder / "model"),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["0"] * PROMPTS}),
        callbacks=[worker],
        rollout_worker=worker,
        weight_transfer=NoTransfer(),
    )
    AttentionInterface.register("tree_fa3", attend)  # after the trainer has registered its own
    if len(sys.argv) > 2:
        trainer.kill_after = int(sys.argv[2])
    for _ in range(2):
        threading.Thread(target=generate, args=(feed,), daemon=True).start()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))


if __name__ == "__main__":
    main()
