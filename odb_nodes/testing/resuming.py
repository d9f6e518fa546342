"""The checkpoint contract as one assertion, for graphs of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_count
from odb_nodes._core.content import difference, explain_unreadable, from_bytes, to_bytes
from odb_nodes.contract import StatefulNode, copy_state
from odb_nodes.contract.graph import walk
from odb_nodes.contract.state import source_fields
from odb_nodes.loader.loader import Loader

_END = "end of epoch"


@dataclass(frozen=True, kw_only=True)
class ResumeReport:
    """The resumes that `assert_resumes_exactly` has compared.

    Attributes:
        steps: items of the uninterrupted run.
        resumes: fresh graphs that were resumed and compared.
        state_bytes: size of the largest state that was saved, in bytes.
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
    an epoch. Then, for each state, a fresh graph loads it and must yield what followed: items, ends
    of epochs, and the items of the epochs after. Every second one first calls `state_dict()`, loads
    the state twice, and must give the same state back before it goes on; so must each
    `StatefulNode` in the graph, for its own fields. Last, chains of resumes: resume, take a few
    steps, save, resume from that in a fresh graph.

    Args:
        make_graph: returns a new graph in its initial state: a `Loader`, a node, an
            `ODBDataLoader`, or anything else with `__iter__`, `state_dict` and `load_state_dict`.
            Called once per resume; what has a `close` is closed.
        epochs: epochs of the uninterrupted run, at least 1.
        every: resume from every n-th state only.
        horizon: items and ends to compare after each resume, but up to 5 between those of a chain;
            `None` for all that are left.
        chain: resumes in a chain; 0 for none.

    Returns:
        The resumes that were compared.

    Raises:
        AssertionError: names the state, the item that differs, and both values; or what a state
            holds that cannot be loaded; or the run yielded no item at all.
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
            "instead. Pass the function itself, not what it returns."
        )
    graph = _as_loader(first := make_graph())
    reference, states = [], [copy_state(graph.state_dict())]
    for event in _events(graph, epochs):
        reference.append(event)
        states.append(copy_state(graph.state_dict()))
    _close(graph)
    steps = sum(event is not _END for event in reference)
    if not steps:
        raise AssertionError("the graph yields no items: there is nothing to resume.")
    resumes = largest_bytes = 0

    def resume(state: Any, start: int, items: int | None, *, thorough: bool = False) -> Any:
        nonlocal resumes, largest_bytes
        resumes += 1
        data, stop = _saved(state), len(reference) if items is None else start + items
        largest_bytes = max(largest_bytes, len(data))
        if (graph := make_graph()) is first:  # which has run, and could not show a bad resume
            raise ValueError(
                f"`make_graph` must return a new graph each time, but returned the same "
                f"`{type(graph).__name__}` twice. Build graph and nodes within it."
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
            raise AssertionError(f"resumed {_place(reference, start)}: {error}") from error
        finally:
            _close(graph)

    for start in range(0, len(states), every):
        resume(states[start], start, horizon, thorough=resumes % 2 == 1)
    for start in range(0, len(states) if chain else 0, max(1, len(states) // 8)):
        state, at = states[start], start
        for link in range(chain):
            items = min(1 + (start + link) % 5, len(reference) - at)
            state = resume(state, at, items)
            at += items
        resume(state, at, horizon)
    return ResumeReport(steps=steps, resumes=resumes, state_bytes=largest_bytes)


def _events(graph: Any, epochs: int) -> Iterator[Any]:
    for _ in range(epochs):
        yield from graph
        yield _END


def _place(reference: list[Any], index: int) -> str:
    past = reference[:index]
    epoch = sum(event is _END for event in past)
    step = next((i for i, event in enumerate(reversed(past)) if event is _END), index)
    return f"after {step} items of epoch {epoch}"


def _compare(graph: Any, reference: list[Any], start: int, stop: int) -> None:
    events = _events(graph, epochs=sum(event is _END for event in reference[start:]) + 1)
    for index, expected in enumerate(reference[start:stop], start):
        if differs := difference(expected, next(events, "nothing")):
            raise AssertionError(f"what follows {_place(reference, index)}{differs}")


def _as_loader(graph: Any) -> Any:
    if isinstance(graph, BaseNode):
        return Loader(graph)
    if not hasattr(graph, "load_state_dict"):
        raise TypeError(
            f"`make_graph` must return a node or a loader, but returned {graph!r:.80} instead. "
            "Return what is iterated."
        )
    return graph


def _close(graph: Any) -> None:
    if callable(close := getattr(graph, "close", None)):
        close()


def _saved(state: Any) -> bytes:
    try:
        from_bytes(data := to_bytes(state))
    except Exception as error:  # of any kind: torch and pickle raise what they like
        raise AssertionError(explain_unreadable(state)) from error
    return data


def _load_thoroughly(graph: Any, data: bytes) -> None:
    """Load a state, give it back, and load it again, also over an iterator that exists already."""
    with _watched_resets(graph) as lost:
        graph.load_state_dict(from_bytes(data))
        again = graph.state_dict()
        if differs := difference(from_bytes(data), again):
            raise AssertionError(f"the state saved right after loading it{differs}")
        graph.load_state_dict(again)
        iter(graph)
        graph.state_dict()
        graph.load_state_dict(from_bytes(data))
    if lost:
        raise AssertionError(lost[0])


@contextmanager
def _watched_resets(graph: Any) -> Iterator[list[str]]:
    """Give a list that gets a text for each node that is reset and then saves another state."""
    # The state of a graph does not show it: a node that replays gives back what it was given.
    found: list[str] = []
    root = getattr(getattr(graph, "_loader", graph), "root", None)
    nodes = walk(root) if isinstance(root, BaseNode) else ()
    watched = [node for node in nodes if isinstance(node, StatefulNode)]

    def reset_and_compare(node: StatefulNode[Any, Any], reset: Any, state: Any = None) -> None:
        # Some sources of torchdata rightly save another state than they were reset to.
        hidden = {*source_fields(cast(Any, node.STATE)), "digest"}
        before = copy_state(state)
        reset(state)
        if before is None:
            return
        own, saved = (
            {key: value for key, value in one.items() if key not in hidden}
            for one in (before, node.state_dict())
        )
        if differs := difference(own, saved):
            found.append(
                f"`{type(node).__name__}` was reset to a state, but then saved another: state"
                f"{differs}. Let `restore` set all that `save` returns."
            )

    for node in watched:
        vars(node)["reset"] = partial(reset_and_compare, node, node.reset)
    try:
        yield found
    finally:
        for node in watched:  # Else a graph that is gone would be left to the garbage collector.
            del vars(node)["reset"]
