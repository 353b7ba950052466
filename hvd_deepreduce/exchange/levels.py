"""Finds the nodes of a job for ``hierarchical``: which ranks sum dense, and which exchange a slice."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_deepreduce.config.settings import Hierarchical
from hvd_deepreduce.exchange.collectives import Collectives, NoSubsetsError
from hvd_deepreduce.exchange.statements import gather, refusal
from hvd_deepreduce.exchange.two_levels import RankPosition
from hvd_deepreduce.wire.quoting import quoted

_log = logging.getLogger("hvd_deepreduce")


@dataclass(frozen=True)
class Levels:
    """A rank's two groups.

    Attributes:
        place: where this rank is.
        inside: of the ranks of its node, which are two or more.
        across: of one rank of each node, with the same slice; None: there is one node.
    """

    place: RankPosition
    inside: Collectives
    across: Collectives | None

    def close(self) -> None:
        """Ends the groups' threads, and what else the framework can end."""
        self.inside.close()
        if self.across is not None:
            self.across.close()


def find(collectives: Collectives, hierarchical: Hierarchical, has_velocity: bool = False) -> Levels | None:
    """This rank's groups; None: the exchange is flat. Every rank calls it at the same time.

    Args:
        collectives: of all ranks.
        hierarchical: from the config.
        has_velocity: whether gradients have a momentum, which only compressed ones are given.

    Raises:
        RuntimeError: on all ranks: nodes have different numbers of ranks, or the groups cannot be made, and
            ``hierarchical`` is not ``auto``; or all ranks are on one node and there are velocities.
    """
    rank, size = collectives.rank(), collectives.size()
    if hierarchical is False or size == 1:
        return None
    told = gather(collectives, {"node": collectives.node(), "divides": collectives.divides()}, "nodes")
    for sender, one in enumerate(told):
        if not isinstance(one.get("node"), str):
            raise refusal(sender, f"sent no name of its node, but {quoted(one)}")
    try:
        nodes = nodes_of([one["node"] for one in told], hierarchical)
        if len(nodes[0]) == 1 or (hierarchical == "auto" and len(nodes) == 1):
            return None
        slices = [list(ranks) for ranks in zip(*nodes, strict=True)] if len(nodes) > 1 else []
        if not slices and has_velocity:
            raise RuntimeError(
                "all ranks are on one node, where hierarchical sends gradients uncompressed, and memory is 'dgc', "
                "which gives a momentum to compressed gradients only: set hierarchical to 'auto', or leave it out"
            )
        own = collectives.subsets([*nodes, *slices], all(one.get("divides") is True for one in told))
    except NoSubsetsError as error:
        if hierarchical != "auto":
            raise RuntimeError(f"hierarchical is {hierarchical}, and {error}") from None
        _log.warning("hierarchical is 'auto', and gradients are exchanged by all ranks at one level: %s", error)
        return None
    if not slices:
        _log.warning(
            "hierarchical is %r, and all ranks are on one node, where gradients are sent uncompressed: leave "
            "hierarchical out, or set it to 'auto'",
            hierarchical,
        )
    groups = [tuple(next(group for group in of if rank in group)) for of in (nodes, slices or [[rank]])]
    return Levels(RankPosition(rank, *groups), own[0], own[1] if slices else None)


def nodes_of(names: Sequence[str], hierarchical: Hierarchical) -> list[list[int]]:
    """The ranks of each node, of equal number.

    Args:
        names: of each rank's node, in rank order. Not used where ``hierarchical`` is the number of ranks of a node.

    Raises:
        NoSubsetsError: nodes have different numbers of ranks.
    """
    size = len(names)
    if type(hierarchical) is int:
        if size % hierarchical:
            raise NoSubsetsError(
                f"{size} ranks cannot be divided into nodes of {hierarchical}: give the number of ranks of every node, "
                "or leave hierarchical out"
            )
        return [list(range(first, first + hierarchical)) for first in range(0, size, hierarchical)]
    ranks_of: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks_of.setdefault(name, []).append(rank)
    nodes = list(ranks_of.values())
    if len({len(ranks) for ranks in nodes}) > 1:
        counts = ", ".join(f"{len(ranks)} on {quoted(name)}" for name, ranks in list(ranks_of.items())[:8])
        raise NoSubsetsError(
            f"nodes have different numbers of ranks ({counts}{', ...' if len(nodes) > 8 else ''}): start as many on "
            "each, or leave hierarchical out"
        )
    return nodes
