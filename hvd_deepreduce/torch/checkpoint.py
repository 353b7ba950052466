"""States of sharded jobs in ``torch.distributed.checkpoint``: each rank writes its shards, and a checkpoint can be
loaded on another number of replicas or of shards.

A checkpoint has these entries, each below ``hvd_deepreduce/``. Those of a replica have its number and the number of
replicas before them; the others are equal on all replicas, and written once::

    shared                       plain values: step counts, the memory's name, groups of the outer optimizer
    anchors/NAME  means/NAME     of LocalSGD, and of its outer optimizer outer/NAME/KEY
    R_of_N/own                   plain values: groups of the optimizer
    R_of_N/residuals/NAME        and velocities
    R_of_N/parameters/NAME       of LocalSGD, with bases/NAME, starts/NAME, and of its optimizer optimizer/NAME/KEY

That of a peer has those of one replica alone, the peer.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from hvd_deepreduce.engine.parameter import VELOCITY, plain
from hvd_deepreduce.exchange.messages import PeerCollectives
from hvd_deepreduce.torch.fsdp import Replicas
from hvd_deepreduce.torch.local_sgd import LocalSGD
from hvd_deepreduce.torch.owners import with_plain_names
from hvd_deepreduce.torch.peer_optimizer import PeerOptimizer
from hvd_deepreduce.torch.sharding import sharded_as
from hvd_deepreduce.torch.tensors import accumulated_in, own


@dataclass(frozen=True)
class Plain:
    """Values without tensors, as one entry: ``torch.distributed.checkpoint`` makes one of each value of a dict."""

    values: dict[str, Any]


Entries = dict[str, Any]
Nested = Mapping[str, Any]
_MARK = "hvd_deepreduce/"
_KEY = re.compile(rf"(.*){_MARK}(?:(\d+)_of_(\d+)/)?(.*)")
_BY_NAME = ("anchors", "means", "residuals", "parameters", "bases", "starts", "unsent")
_OF_OPTIMIZERS = ("outer", "optimizer")


def checkpointed(
    compression: Replicas | LocalSGD,
    saved: str | os.PathLike[str] | StorageReader | None = None,
    *,
    name: str | None = None,
) -> Stateful:
    """The state of ``compress_replicas``' result, of ``LocalSGD``, or of ``PeerOptimizer``, as an entry of
    ``torch.distributed.checkpoint``'s ``state_dict``. Every rank, with a store every rank of a peer, saves or loads at
    the same step.

    That of LocalSGD has the trained parameters and the wrapped optimizer's state too, which differ from replica to
    replica within a period; that of PeerOptimizer has the latter. ``dcp.load`` goes by the order of the
    keys: give it a key after that of the model.

    Args:
        compression: what is saved, or loaded into.
        saved: None: to save. To load: the ``checkpoint_id`` of a checkpoint in files, or its reader. It may be of
            another number of shards; and of another number of replicas: then the sum of the residuals over the replicas
            is preserved (LocalSGD: their mean), and replica r takes parameters and optimizer of the saved one with the
            number r modulo theirs. A peer can load that of another one, and keeps its own residual.
        name: to load from a checkpoint with several such entries: the key of this one in the ``state_dict`` that was
            saved.

    Raises:
        TypeError: ``compression`` is something else.
        ValueError: when it is loaded: there is no such state, or it is of another model.

    Example::
        >>> dcp.save({"model": state, "optimizer": checkpointed(local_sgd)}, checkpoint_id=folder)
        >>> dcp.load({"model": state, "optimizer": checkpointed(local_sgd, folder)}, checkpoint_id=folder)
    """
    if isinstance(compression, PeerOptimizer):
        return _OfPeerOptimizer(compression, saved, name)
    if isinstance(compression, LocalSGD):
        return _OfLocalSGD(compression, saved, name)
    if isinstance(compression, Replicas):
        return _OfReplicas(compression, saved, name)
    raise TypeError(
        f"checkpointed was given {type(compression).__name__}; it takes what compress_replicas has returned, or a "
        "LocalSGD. Any other state is of one rank: save its state_dict() in a file of this rank"
    )


class _Checkpointed(ABC, Stateful):
    """Entries of a state, and a state of entries.

    Args:
        saved, name: as for ``checkpointed``.
        tensors: the trained parameters by name, also those of which this rank holds nothing.
        mates: collectives of this replica's ranks; None: there is one.
    """

    def __init__(
        self, compression: Any, saved: Any, name: str | None, engine: Any, tensors: Mapping[str, Any], mates: Any
    ) -> None:
        self.compression, self.engine, self.tensors, self.mates = compression, engine, tensors, mates
        self.reader = FileSystemReader(saved) if isinstance(saved, str | os.PathLike) else saved
        self.name = name
        self.rank, self.size = engine.collectives.rank(), engine.collectives.size()
        # Of the checkpoint; and the replicas whose residuals are read.
        self.saved_size, self.sources = self.size, [self.rank]

    @abstractmethod
    def told(self) -> tuple[Nested, Nested, Nested, Nested, Nested]:
        """This rank's state: that of the engine; plain values and tensors that are equal on all replicas; and those of
        this replica. Tensors are ``{section: {name: tensor}}``."""

    @abstractmethod
    def load(self, engines: list[dict[str, Any]], shared: Nested, mine: Nested, tensors: Nested) -> None:
        """Loads what ``told`` has told.

        Args:
            engines: the engine's state, or with another number of replicas those of all.
            shared, mine: plain values.
            tensors: of both kinds; this rank's parts.
        """

    @property
    def of_peers(self) -> bool:
        """Whether this is one of peers, each of which has a checkpoint of its own."""
        return isinstance(self.engine.collectives, PeerCollectives)

    @property
    def several(self) -> bool:
        """Whether the checkpoint is of another number of replicas."""
        return bool(self.saved_size != self.size)

    # To save

    def state_dict(self) -> Entries:
        return self._saving() if self.reader is None else self._loading()

    def _saving(self) -> Entries:
        engine, shared, tensors, mine, own_tensors = self.told()
        residuals = engine["residuals"]
        kinds = [prefix + name for prefix in ("", VELOCITY) for name in self.tensors]
        # A rank knows neither of a parameter of which it holds nothing.
        steps = self._largest([engine["steps"].get(name, 0) for name in self.tensors])
        shown = self._of_any(kinds, residuals)
        replica = f"{_MARK}{self.rank}_of_{self.size}/"
        return {
            f"{_MARK}shared": Plain(
                {**shared, "memory": engine["memory"], "steps": dict(zip(self.tensors, steps, strict=True))}
            ),
            f"{replica}own": Plain(dict(mine)),
            **dict(self._entries(_MARK, tensors)),
            **dict(self._entries(replica, {**own_tensors, "residuals": shown})),
        }

    def _largest(self, numbers: list[int]) -> list[int]:
        """At each place, of the ranks of this replica."""
        return numbers if self.mates is None else list(self.mates.largest(numbers))

    def _of_any(self, names: Sequence[str], given: Nested) -> dict[str, torch.Tensor | None]:
        """What a rank of this replica holds; None where this rank holds nothing of it."""
        there = self._largest([name in given for name in names])
        return {name: given.get(name) for name, flag in zip(names, there, strict=True) if flag}

    def _entries(self, prefix: str, sections: Nested) -> Iterator[tuple[str, Any]]:
        for section, values in sections.items():
            for name, one in values.items():
                if section in _OF_OPTIMIZERS:
                    for key, value in one.items():
                        fits = own(value).shape == own(self.tensors[name]).shape and value.dim()
                        if not fits and value.numel() > 1:
                            raise ValueError(
                                f"the optimizer's state has {key} of {name} in the shape {list(value.shape)}, which is "
                                "not the parameter's, so that its shards cannot be saved: save the state_dict() of "
                                "each rank in a file of its own"
                            )
                        yield f"{prefix}{section}/{name}/{key}", self._whole(name, own(value)) if fits else value
                else:
                    yield f"{prefix}{section}/{name}", self._whole(name.removeprefix(VELOCITY), one)

    def _whole(self, name: str, values: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor that is sharded as a parameter, with this rank's values; None: zeros."""
        like = self.tensors[name]
        shape = own(like).shape
        if dtype is None:  # of a residual
            dtype = accumulated_in(like)
        part = torch.zeros(shape, dtype=dtype) if values is None else values.detach().view(shape)
        if not isinstance(like, DTensor):
            return part
        return sharded_as(like, part)

    # To load

    def _loading(self) -> Entries:
        """Entries to be overwritten: those that the checkpoint has, and this rank needs."""
        metadata = self.reader.read_metadata().state_dict_metadata
        found = self._chosen([(match, md) for key, md in metadata.items() if (match := _KEY.fullmatch(key))])
        (size,) = {int(match[3]) for match, _ in found if match[3]}
        there, own = {int(match[2]) for match, _ in found if match[2]}, self.rank % size
        if self.of_peers and len(there) == 1:  # of one peer
            (own,) = there
            size = self.size
        elif len(there) < size and self.rank in there:  # of this replica, in a folder of its own
            own, size = self.rank, self.size
        elif len(there) < size:
            raise ValueError(
                f"this checkpoint has the state of {len(there)} of {size} replicas, with the numbers {sorted(there)}: "
                "give one that dcp.save wrote when all ranks called it, without the process_group of a replica; or "
                "begin with the model alone, without the residuals"
            )
        self.saved_size = size
        self.sources = [own] if size == self.size else list(range(size))
        entries: Entries = {}
        for match, md in found:
            section, _, name = match[4].partition("/")
            wanted = self.sources if section == "residuals" else [own]
            if not match[2] or int(match[2]) in wanted:
                entries[match[0].removeprefix(match[1])] = self._empty(section, name, md)
        return entries

    def _chosen(self, found: list[tuple[re.Match[str], Any]]) -> list[tuple[re.Match[str], Any]]:
        """Of the checkpoint's entries, those of the state that is loaded."""
        names = sorted({match[1].removesuffix(".") for match, _ in found})
        of = "of compress_replicas or LocalSGD"
        if not names:
            raise ValueError(
                f"this checkpoint has no state {of}: give one that dcp.save wrote with checkpointed(...) in its "
                "state_dict"
            )
        if self.name is None and len(names) > 1:
            raise ValueError(
                f"this checkpoint has several states {of}, with the names {', '.join(names)}: give that of the one to "
                f"load, as checkpointed(compression, folder, name={names[0]!r})"
            )
        name = names[0] if self.name is None else self.name
        if name not in names:
            raise ValueError(
                f"this checkpoint has no state {name!r} {of}: the name must be one of {', '.join(names)}, which are "
                "the keys in the state_dict that was saved"
            )
        return [(match, md) for match, md in found if match[1].removesuffix(".") == name]

    def _empty(self, section: str, name: str, md: Any) -> Any:
        if not isinstance(md, TensorStorageMetadata):
            return None
        name = plain(name.rpartition("/")[0] if section in _OF_OPTIMIZERS else name)
        like = self.tensors.get(name.removeprefix(VELOCITY))
        if like is None:
            raise ValueError(
                f"the checkpoint has a parameter {name}, but the model does not, or it is frozen: load that of this "
                "model, and freeze parameters after that"
            )
        if md.size == like.shape and (md.size or section not in _OF_OPTIMIZERS):
            return self._whole(name.removeprefix(VELOCITY), None, md.properties.dtype)
        return torch.zeros(md.size, dtype=md.properties.dtype)

    def load_state_dict(self, state_dict: Entries) -> None:
        if self.reader is None:
            raise ValueError("to load, give the checkpoint to checkpointed: checkpointed(compression, checkpoint_id)")
        values: dict[str, Any] = {}
        tensors: dict[str, dict[str, Any]] = {section: {} for section in (*_BY_NAME, *_OF_OPTIMIZERS)}
        residuals: dict[int, dict[str, torch.Tensor]] = {source: {} for source in self.sources}
        for key, value in state_dict.items():
            match = _KEY.fullmatch(key)
            assert match is not None  # it is one of ``_loading``
            section, _, name = plain(match[4]).partition("/")
            part = own(value) if isinstance(value, torch.Tensor) else value
            if section == "residuals":
                if part.numel() and part.any():  # nothing was kept of others, or this rank holds nothing of them
                    residuals[int(match[2])][name] = part
            elif section in _OF_OPTIMIZERS:
                parameter, _, what = name.rpartition("/")
                of_shards = section == "outer"  # that of the anchors
                tensors[section].setdefault(parameter, {})[what] = part if of_shards else value
            elif name:
                tensors[section][name] = part
            else:
                values[section] = value.values
        shared = with_plain_names(values["shared"], ("steps", "frozen", "resting"))
        steps = {name: shared["steps"].get(name) for name in self.engine.parameters}
        missing = [name for name, step in steps.items() if step is None]
        if missing:
            raise ValueError(
                f"the model has a parameter {missing[0]}, but the checkpoint does not: load that of this model"
            )
        same: dict[str, Any] = {"size": self.saved_size, "steps": steps}
        if "memory" in shared:  # checkpoints of earlier versions do not say it
            same["memory"] = shared["memory"]
        engines = [{"rank": at, **same, "residuals": kept} for at, kept in residuals.items()]
        self.load(engines, shared, values["own"], tensors)


class _OfReplicas(_Checkpointed):
    def __init__(self, replicas: Replicas, saved: Any, name: str | None) -> None:
        super().__init__(replicas, saved, name, replicas._engine, replicas._tensors, replicas._shards)

    def told(self) -> tuple[Nested, Nested, Nested, Nested, Nested]:
        state = self.compression.state_dict()
        return state, {"iteration": state["iteration"]}, {}, {}, {}

    def load(self, engines: list[dict[str, Any]], shared: Nested, mine: Nested, tensors: Nested) -> None:
        states = [{**one, "iteration": shared["iteration"]} for one in engines]
        self.compression.load_state_dict(states if self.several else states[0], reshard=self.several)


class _OfLocalSGD(_Checkpointed):
    def __init__(self, local: LocalSGD, saved: Any, name: str | None) -> None:
        self.updates = updates = local._updates
        self.names = [one.name for one in updates.parameters]
        tensors = dict(zip(self.names, updates.tensors, strict=True))
        super().__init__(local, saved, name, updates.engine, tensors, updates.mates)

    @property
    def _inner(self) -> list[str]:
        """The names of the wrapped optimizer's parameters, in its order; "" of those that are not trained."""
        groups = self.compression.inner.param_groups
        names = {id(one): name for name, one in self.tensors.items()}
        return [names.get(id(one), "") for group in groups for one in group["params"]]

    def told(self) -> tuple[Nested, Nested, Nested, Nested, Nested]:
        state = self.compression.state_dict()
        local = state["local_sgd"]
        counts = {key: local[key] for key in self.updates.counts() if key != "due"}
        outer, outer_rest = _optimizer(local["outer"], self.names)
        inner, inner_rest = _optimizer(state, self._inner)
        shared = {"anchors": local["anchors"], "means": self._of_any(self.names, local["means"]), "outer": outer}
        parameters = {name: own(one) for name, one in self.tensors.items()}
        mine = {
            "parameters": parameters, "bases": local["bases"], "starts": local["starts"], "optimizer": inner,
            "unsent": self._of_any(self.names, local["unsent"]),
        }  # fmt: skip
        plain = {"optimizer": inner_rest, "due": local["due"]}  # with ``times``, replicas have their own
        frozen = {key: local[key] for key in ("frozen", "resting")}
        return local["compression"], {**counts, **frozen, "outer": outer_rest}, shared, plain, mine

    def load(self, engines: list[dict[str, Any]], shared: Nested, mine: Nested, tensors: Nested) -> None:
        updates = self.updates
        local = {key: (mine if key == "due" else shared)[key] for key in updates.counts()}
        local |= {key: shared[key] for key in ("frozen", "resting") if key in shared}  # earlier checkpoints have none
        local |= {what: tensors[what] for what in ("anchors", "bases", "starts")}
        for what in ("means", "unsent"):
            local[what] = {name: one for name, one in tensors[what].items() if one.numel()}
        local["outer"] = _joined(tensors["outer"], shared["outer"], self.names)
        inner = _joined(tensors["optimizer"], mine["optimizer"], self._inner)
        states = [{**inner, "local_sgd": {**local, "compression": one}} for one in engines]
        self.compression.load_state_dict(states if self.several else states[0], reshard=self.several)
        if self.of_peers and engines[0]["rank"] != self.rank:
            return  # another peer's, whose progress beyond the anchor is its own
        for name, tensor in self.tensors.items():
            own(tensor).copy_(tensors["parameters"][name])


class _OfPeerOptimizer(_OfLocalSGD):
    def told(self) -> tuple[Nested, Nested, Nested, Nested, Nested]:
        state = self.compression.state_dict()
        local = state["local_sgd"]
        inner, rest = _optimizer(state, self._inner)
        shared = {key: one for key, one in local.items() if key != "compression"}
        return local["compression"], shared, {}, {"optimizer": rest}, {"optimizer": inner}

    def load(self, engines: list[dict[str, Any]], shared: Nested, mine: Nested, tensors: Nested) -> None:
        inner, (engine,) = _joined(tensors["optimizer"], mine["optimizer"], self._inner), engines
        self.compression.load_state_dict({**inner, "local_sgd": {**shared, "compression": engine}})


def _optimizer(state: Nested, names: list[str]) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Tensors of an optimizer's state, by the names of its parameters, and the rest."""
    kept: dict[str, dict[str, torch.Tensor]] = {}
    rest: dict[str, dict[str, Any]] = {}
    for number, values in state["state"].items():
        for key, value in values.items():
            (kept if isinstance(value, torch.Tensor) else rest).setdefault(names[number], {})[key] = value
    return kept, {"param_groups": state["param_groups"], "state": rest}


def _joined(tensors: Nested, rest: Nested, names: list[str]) -> dict[str, Any]:
    """The opposite of ``_optimizer``."""
    others = {plain(name): one for name, one in rest["state"].items()}
    both = {number: {**tensors.get(name, {}), **others.get(name, {})} for number, name in enumerate(names)}
    return {"state": {number: one for number, one in both.items() if one}, "param_groups": rest["param_groups"]}
