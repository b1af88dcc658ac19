"""Operations in place in the graph of a function, which is translated as if each made a tensor of its own.

That is right for a tensor that is used under one name. Where a view of it, or what it is a view of, is used after it
was written, that one would have to change as well: such a write is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

Refuse = Callable[[torch.fx.Node, str], NoReturn]
_COPIES = ("lift_fresh", "lift_fresh_copy")
"""Operations on a number of the function's code, which nothing else refers to."""


def is_in_place(node: torch.fx.Node) -> bool:
    """Whether a node writes to its operand."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def resolve(graph: torch.fx.Graph, refuse: Refuse) -> None:
    """Let nodes that use a tensor after it was written refer to the node that wrote it.

    Args:
        graph: the graph, which is changed.
        refuse: raises an error that names a node and gives a reason.
    """
    memory = _Memory()
    written = [node for node in graph.nodes if memory.add(node, refuse)]
    if not written:
        return
    for node in written:
        before = [other for other in memory.of(node) if memory.is_same(node, other) and memory.follows(node, other)]
        for other in before:
            for user in list(other.users):
                if memory.follows(user, node):
                    user.replace_input_with(other, node)
    live = with_operands(node for node in graph.nodes if node.op == "output")
    for node in written:
        for other in memory.of(node):
            later = any(user in live and memory.follows(user, node) for user in other.users)
            if later and not memory.is_same(node, other) and memory.follows(node, other):
                refuse(node, f"{other.name} shares the memory that it writes, and is used afterwards")


class _Memory:
    """Which nodes of a graph share memory, and which of them are one tensor."""

    def __init__(self) -> None:
        self.place = dict[torch.fx.Node, int]()
        self.owner = dict[torch.fx.Node, torch.fx.Node]()
        """The first node that has the memory of a node."""
        self.tensor = dict[torch.fx.Node, torch.fx.Node]()
        """The first node that is the same tensor as a node."""
        self.captured = dict[str, torch.fx.Node]()

    def add(self, node: torch.fx.Node, refuse: Refuse) -> bool:
        """Note the next node of the graph; whether it writes to its operand."""
        self.place[node] = len(self.place)
        written, viewed = _aliases(node)
        source = next(iter((*written, *viewed)), node)
        if node.op == "get_attr":
            source = self.captured.setdefault(str(node.target), node)
        self.owner[node] = self.owner.get(source, source)
        self.tensor[node] = self.tensor.get(source, source) if written or node.op == "get_attr" else node
        if not written:
            return False
        if written != [node.args[0]]:
            refuse(node, "it writes to another operand than its first one")
        if self.owner[node].op == "get_attr":
            refuse(node, "it writes to a tensor that the function captures")
        return True

    def of(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The nodes that have the memory of a node."""
        return [other for other, owner in self.owner.items() if owner is self.owner[node]]

    def is_same(self, a: torch.fx.Node, b: torch.fx.Node) -> bool:
        return self.tensor[a] is self.tensor[b]

    def follows(self, a: torch.fx.Node, b: torch.fx.Node) -> bool:
        return self.place[a] > self.place[b]


def _aliases(node: torch.fx.Node) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The operands that a node writes, and those of which its result is a view."""
    if node.target is operator.getitem:  # of the views that an operation such as unbind returns
        return [], node.all_input_nodes[:1]
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.name.removeprefix("aten::") in _COPIES:
        return [], []
    written, viewed = [], []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        (written if argument.alias_info.is_write else viewed).extend(_nodes_in(given))
    return written, viewed


def _nodes_in(given: Any) -> Iterator[torch.fx.Node]:
    if isinstance(given, torch.fx.Node):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _nodes_in(each)


def with_operands(nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """These nodes, and all that they are computed from."""
    waiting = list(nodes)
    found = set(waiting)
    while waiting:
        fresh = [operand for operand in waiting.pop().all_input_nodes if operand not in found]
        found.update(fresh)
        waiting += fresh
    return found
