"""Node: attaches to each processed sample what it costs."""

from __future__ import annotations

from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_callable, check_node
from odb_nodes._core.fingerprints import stable_name
from odb_nodes.contract.graph import length_of
from odb_nodes.contract.state import seal, unseal
from odb_nodes.errors import SampleError, StateError
from odb_nodes.processing.observation import observe_sample
from odb_nodes.sample import Observe, Sample, Skipped


class LengthObserver(BaseNode[Sample | Skipped]):
    """Yields a `Sample` for each item: the item with its tokens, targets and patches.

    What processing has `Skipped` comes out as it is, and the `WindowBucketer` counts it.

    State: the source's, and the position for errors.

    Args:
        source: node that yields processed samples.
        observe: item -> tokens, or -> `Observation`; by default `input_ids`, `labels` and the image
            fields are looked at, see `observe_sample`.
    """

    SOURCE_KEY = "source"
    POSITION_KEY = "position"

    def __init__(self, source: BaseNode[Any], observe: Observe | None = None) -> None:
        super().__init__()
        check_node("source", source)
        check_callable("observe", observe)
        self.source = source
        self._observe = observe
        self._name = None if observe is None else stable_name(observe)
        self._position = 0
        self._failure: SampleError | None = None

    def __len__(self) -> int:
        """Return how many samples an epoch has.

        Raises:
            TypeError: the source does not know its length.
        """
        return length_of(self.source)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state` stands.

        Raises:
            StateError: the state was saved with another `observe`.
        """
        super().reset(initial_state)
        self._failure = None
        if initial_state is None:
            self.source.reset(None)
            self._position = 0
            return
        keys = (self.SOURCE_KEY, self.POSITION_KEY)
        state = unseal(initial_state, type(self).__name__, self.fingerprint(), keys)
        self.source.reset(state[self.SOURCE_KEY])
        self._position = state[self.POSITION_KEY]

    def next(self) -> Sample | Skipped:
        """Return the next sample.

        Raises:
            SampleError: it has no valid length. Raised again until the next reset, so that the
                sample cannot pass unseen.
        """
        if self._failure is not None:
            raise self._failure
        data = next(self.source)
        try:
            sample = observe_sample(data, self._observe)
        except Exception as error:
            what = error if isinstance(error, SampleError) else f"`observe` raised {error!r}"
            self._failure = SampleError(f"sample {self._position} of the epoch: {what}")
            raise self._failure from error
        self._position += 1
        return sample

    def get_state(self) -> dict[str, Any]:
        """Return the source's state.

        Raises:
            StateError: the last sample was not valid. The source is past it, so no state here would
                bring it back; the `Loader` uses the one before.
        """
        if self._failure is not None:
            raise StateError(
                f"there is no state after sample {self._position} of the epoch failed: it would be "
                "lost. Load the last state saved before."
            )
        return seal(
            type(self).__name__,
            self.fingerprint(),
            source=self.source.state_dict(),
            position=self._position,
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only where it is equal."""
        return {"observe": self._name}
