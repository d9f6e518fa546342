"""The checkpoint contract as one assertion, for graphs of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torchdata.nodes import BaseNode

from odb_nodes._support.checks import check_count
from odb_nodes._support.content import explain_unreadable, from_bytes, to_bytes
from odb_nodes._support.difference import difference
from odb_nodes.core.contract import StatefulNode, copy_state
from odb_nodes.core.contract.graph import walk
from odb_nodes.core.contract.state import source_fields
from odb_nodes.core.loader.loader import Loader

_END = "end of epoch"


@dataclass(frozen=True, kw_only=True)
class ResumeReport:
    """The resumes that `assert_resumes_exactly` compared.

    Attributes:
        steps: items of the uninterrupted run.
        resumes: number of fresh graphs that resumed.
        state_bytes: size of the largest saved state, in bytes.
    """

    steps: int
    resumes: int
    state_bytes: int


def assert_resumes_exactly(
    make_graph: Callable[[], Any],
    *,
    epochs: int = 2,
    every: int = 1,
    horizon: int | None = None,
    chain: int = 3,
) -> ResumeReport:
    """Assert that a graph resumed from any step continues exactly like the uninterrupted run.

    Runs the graph once for `epochs` epochs and keeps its state, through `torch.save` and
    `torch.load(weights_only=True)`, before the first item, after each item, and after each end of
    an epoch. Then a fresh graph loads each state, and must yield the same items and ends of epochs
    as the uninterrupted run. Every second graph first loads the state twice, and must return an
    equal state; so must each `StatefulNode` in it. Last come chains of resumes: resume, take a few
    steps, save, and resume from that state in a fresh graph.

    Args:
        make_graph: returns a new graph in its initial state: a `Loader`, a node, an
            `ODBDataLoader`, or any object with `__iter__`, `state_dict` and `load_state_dict`.
            Called once per resume. If the graph has a `close`, it is called.
        epochs: epochs of the uninterrupted run, at least 1.
        every: resume from every n-th state only.
        horizon: items and ends of epochs to compare after each resume, except within a chain;
            `None` for all that follow.
        chain: resumes in a chain; 0 for none.

    Returns:
        The number of resumes and the size of the states.

    Raises:
        AssertionError: a resumed graph differs: the error names the state, the item and both
            values. Or a state holds values that cannot be loaded, or the run yielded no item.
        TypeError, ValueError: an argument is not valid, or `make_graph` returned the same graph
            twice.
    """
    epochs, every = check_count("epochs", epochs), check_count("every", every)
    chain = check_count("chain", chain, 0)
    if horizon is not None:
        horizon = check_count("horizon", horizon)
    if not callable(make_graph):
        raise TypeError(
            f"`make_graph` must be a function that returns a new graph, but is {make_graph!r} "
            "instead. Pass the function itself, not its result."
        )
    first = make_graph()
    graph = _as_loader(first)
    reference, states = [], [copy_state(graph.state_dict())]
    for event in _events(graph, epochs):
        reference.append(event)
        states.append(copy_state(graph.state_dict()))
    _close(graph)
    steps = sum(event is not _END for event in reference)
    if not steps:
        raise AssertionError("the graph yields no items: there is nothing to resume.")
    run = _Resumes(make_graph, first, reference)
    for start in range(0, len(states), every):
        run.resume(states[start], start, horizon, thorough=run.count % 2 == 1)
    for start in range(0, len(states) if chain else 0, max(1, len(states) // 8)):
        state = states[start]
        position = start
        for link in range(chain):
            items = min(1 + (start + link) % 5, len(reference) - position)
            state = run.resume(state, position, items)
            position += items
        run.resume(state, position, horizon)
    return ResumeReport(steps=steps, resumes=run.count, state_bytes=run.largest_bytes)


class _Resumes:
    """Resumes fresh graphs, and compares them with the events of the uninterrupted run."""

    def __init__(self, make_graph: Callable[[], Any], first: Any, reference: list[Any]) -> None:
        self._make_graph, self._first, self._reference = make_graph, first, reference
        self.count = self.largest_bytes = 0

    def resume(self, state: Any, start: int, items: int | None, *, thorough: bool = False) -> Any:
        """Compare `items` items of a graph resumed from `state`; return its state after them."""
        self.count += 1
        data = _saved(state)
        reference = self._reference
        stop = len(reference) if items is None else start + items
        self.largest_bytes = max(self.largest_bytes, len(data))
        graph = self._make_graph()
        if graph is self._first:  # It has run already, and would hide a bad resume.
            raise ValueError(
                f"`make_graph` must return a new graph each time, but returned the same "
                f"`{type(graph).__name__}` twice. Build the graph and its nodes in `make_graph`."
            )
        graph = _as_loader(graph)
        try:
            if thorough:
                _load_thoroughly(graph, data)
            else:
                graph.load_state_dict(from_bytes(data))
            _compare(graph, reference, start, stop)
            return copy_state(graph.state_dict())
        except Exception as error:
            raise AssertionError(f"resumed {_name_of_event(reference, start)}: {error}") from error
        finally:
            _close(graph)


def _events(graph: Any, epochs: int) -> Iterator[Any]:
    for _ in range(epochs):
        yield from graph
        yield _END


def _name_of_event(reference: list[Any], index: int) -> str:
    past = reference[:index]
    epoch = sum(event is _END for event in past)
    step = next((back for back, event in enumerate(reversed(past)) if event is _END), index)
    return f"after {step} items of epoch {epoch}"


def _compare(graph: Any, reference: list[Any], start: int, stop: int) -> None:
    events = _events(graph, epochs=sum(event is _END for event in reference[start:]) + 1)
    for index, expected in enumerate(reference[start:stop], start):
        if differs := difference(expected, next(events, "nothing")):
            raise AssertionError(f"the item {_name_of_event(reference, index)}{differs}")


def _as_loader(graph: Any) -> Any:
    if isinstance(graph, BaseNode):
        return Loader(graph)
    if not hasattr(graph, "load_state_dict"):
        raise TypeError(
            f"`make_graph` must return a node or a loader, but returned {graph!r:.80} instead. "
            "Return the object that yields the items."
        )
    return graph


def _close(graph: Any) -> None:
    if callable(close := getattr(graph, "close", None)):
        close()


def _saved(state: Any) -> bytes:
    try:
        from_bytes(data := to_bytes(state))
    except Exception as error:  # torch and pickle raise errors of many types
        raise AssertionError(explain_unreadable(state)) from error
    return data


def _load_thoroughly(graph: Any, data: bytes) -> None:
    """Load a state, save it, and load it again, both before and after `iter`."""
    with _watched_resets(graph) as errors:
        graph.load_state_dict(from_bytes(data))
        saved = graph.state_dict()
        if differs := difference(from_bytes(data), saved):
            raise AssertionError(f"the state saved right after loading it{differs}")
        graph.load_state_dict(saved)
        iter(graph)
        graph.state_dict()
        graph.load_state_dict(from_bytes(data))
    if errors:
        raise AssertionError(errors[0])


@contextmanager
def _watched_resets(graph: Any) -> Iterator[list[str]]:
    """Yield a list that gets an error for each node that, after a reset, saves another state."""
    # The state of the whole graph cannot show this: a node that replays returns the loaded state.
    errors: list[str] = []
    root = getattr(getattr(graph, "_loader", graph), "root", None)
    nodes = walk(root) if isinstance(root, BaseNode) else ()
    watched = [node for node in nodes if isinstance(node, StatefulNode)]

    def reset_and_compare(
        node: StatefulNode[Any, Any], reset: Callable[[Any], None], state: Any = None
    ) -> None:
        # Not compared: sources of torchdata may save another state than they were reset to.
        hidden = {*source_fields(cast(Any, node.STATE)), "digest"}
        before = copy_state(state)
        reset(state)
        if before is None:
            return
        expected, saved = (
            {key: value for key, value in fields.items() if key not in hidden}
            for fields in (before, node.state_dict())
        )
        if differs := difference(expected, saved):
            errors.append(
                f"`{type(node).__name__}` was reset to a state, but then saved another: state"
                f"{differs}. Let `restore` set all fields that `save` returns."
            )

    for node in watched:
        vars(node)["reset"] = partial(reset_and_compare, node, node.reset)
    try:
        yield errors
    finally:
        for node in watched:  # breaks the reference cycle, which would keep the graph alive
            del vars(node)["reset"]
