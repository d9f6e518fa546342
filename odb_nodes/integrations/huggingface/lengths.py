"""Explains what a trainer needs whose samples have no `input_ids`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from odb_nodes._compat import transformers as compat
from odb_nodes._core.content import flatten_row
from odb_nodes.errors import SampleError
from odb_nodes.sample import Observation

_COUNTED = {
    "input_features": (
        "the frames of speech (of Whisper, which pads all alike, the labels)",
        'len(s["input_features"])',
    ),
    "input_values": (
        "the frames of speech, such as one per 320 values,",
        'len(s["input_values"]) // 320',
    ),
    "pixel_values": (
        "the patches of an image, such as those of 16 x 16 pixels,",
        's["pixel_values"].shape[-2] * s["pixel_values"].shape[-1] // 16**2',
    ),
}
_OTHER = ("what it takes memory for", 'len(s["..."])')


def observe_of(trainer: Any) -> Any:
    """Return the `observe` for training: the config's, or one that explains what is missing."""
    config = trainer.odb
    if config.observe is not None or "input_ids" in compat.collator_columns(trainer):
        return config.observe
    return ObserveTokens(type(trainer).__name__)


class ObserveTokens:
    """Counts `input_ids`, and says what to do in a trainer whose samples have none."""

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer

    def __call__(self, sample: Any) -> Observation:
        """Return the tokens of a sample."""
        if isinstance(sample, Mapping) and "input_ids" in sample:
            return Observation(len(flatten_row("input_ids", sample["input_ids"])))
        keys = sorted(map(str, sample)) if isinstance(sample, Mapping) else []
        raise SampleError(
            f"a sample of `{self._trainer}` has no `input_ids`, so that its tokens are unknown. "
            f"Its keys are {keys}. Give the `ODBConfig` an `observe`, a function of such a sample "
            f"that returns the padded tokens that it takes in a batch. {_example(keys)}"
        )


def _example(keys: list[str]) -> str:
    """Return what `observe` is for samples of these keys."""
    if "chosen_ids" in keys:
        prompt = 'len(s["prompt_ids"]) + ' if "prompt_ids" in keys else ""
        return (
            f'For pairs, which take two rows each: `observe=lambda s: 2 * ({prompt}max(len(s["'
            'chosen_ids"]), len(s["rejected_ids"])))` and `loss_is="sample_mean"`, since their '
            "loss is the mean over pairs."
        )
    of, example = _COUNTED.get(next((key for key in keys if key in _COUNTED), ""), _OTHER)
    return f"Count {of} as its tokens: `observe=lambda s: {example}`."
