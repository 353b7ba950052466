"""Exchanges among the replicas that a Manager of torchft finds to be there; torchft itself is not imported."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions

from hvd_deepreduce.engine.peers import Quorum
from hvd_deepreduce.exchange.messages import Message

_log = logging.getLogger("hvd_deepreduce")
MAX_BYTES = 1 << 33
"""Of a message: a larger one is taken as broken."""


class ManagedQuorum(Quorum):
    """For ``LocalSGD`` and ``PeerOptimizer``, as ``store``: their exchanges go over the process group of a
    ``torchft.Manager``, among the replicas in its quorum.

    An exchange is a step of the manager: its quorum begins in ``zero_grad()`` (``LocalSGD``: when the exchange begins),
    and ends in ``should_commit()``, both of which are called here. So take the plain optimizer and model, and neither
    torchft's optimizer wrapper, nor its DistributedDataParallel, nor its LocalSGD. What the manager's functions save
    and load must have the model's and the optimizer's ``state_dict()``.

    Args:
        manager: the ``torchft.Manager`` of this rank.
        process_group: that of the manager, as ``torchft.ProcessGroupGloo()``; or torchft's ``ManagedProcessGroup``.
        peer: the number of this replica group, 0 to ``peers - 1``; no other one has it.
        peers: the largest number of replica groups.
        device: on which ``process_group`` gathers: under NCCL this rank's GPU.

    Raises:
        ValueError: ``peer`` is outside its range.

    Example::
        >>> store = ManagedQuorum(manager, process_group, peer=int(os.environ["REPLICA_GROUP_ID"]), peers=4)
        >>> optimizer = PeerOptimizer(SignMomentum(model.parameters(), 0.008), model, "sign_momentum", store=store)
    """

    def __init__(
        self, manager: Any, process_group: Any, *, peer: int, peers: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(peer, peers)
        managed = type(process_group).__name__ == "ManagedProcessGroup"  # whose size is that of the replicas that count
        self.manager, self.group = manager, process_group.parent if managed else process_group
        self.device, self._begun = device, False

    def begin(self) -> None:
        if not self._begun:
            self.manager.start_quorum()
            self._begun = True

    def takes_part(self) -> bool:
        self.manager.wait_quorum()
        return self.manager.errored() is None and bool(self.manager.is_participating())

    def messages(self, message: Message) -> dict[int, Message | str]:
        self.manager.wait_quorum()
        if self.manager.errored() is not None:
            return {}
        try:
            return self._all(message)
        except Exception as error:  # whatever the process group's kind raises: the step does not count then
            _log.warning("peer %d could not gather the replicas' messages: %s", self.peer, error)
            self.manager.report_error(error)
            return {}

    def _all(self, own: Message) -> dict[int, Message | str]:
        packed = bytearray(own.pack())
        sizes = [one.tolist() for one in self._allgather(torch.tensor([self.peer, len(packed)]))]
        right = [size for _, size in sizes if 0 <= size <= MAX_BYTES]
        padded = torch.zeros(max(right, default=0), dtype=torch.uint8)
        if len(packed) <= padded.numel():
            padded[: len(packed)] = torch.frombuffer(packed, dtype=torch.uint8)
        found: dict[int, Message | str] = {}
        for (peer, size), one in zip(sizes, self._allgather(padded), strict=True):
            found[peer] = "two replicas have this number" if peer in found else self._unpacked(peer, size, one)
        return found

    def _unpacked(self, peer: int, size: int, data: torch.Tensor) -> Message | str:
        """One of another number of peers is a message: whose number is right, most of them decide."""
        if not 0 <= size <= data.numel():
            return f"its message has {size} bytes, and at most {MAX_BYTES} are allowed"
        try:
            message = Message.unpack(data[:size].numpy().tobytes())
        except ValueError as error:
            return str(error)
        if message.said.get("number of peers") == str(self.peers) and not 0 <= peer < self.peers:
            return f"its number is {peer}, and there are {self.peers} peers"
        return message

    def _allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Of all ranks of the quorum, on the host."""
        tensor = tensor.to(self.device)
        found = [torch.empty_like(tensor) for _ in range(self.group.size())]
        self.group.allgather([found], [tensor], AllgatherOptions()).wait()
        return [one.cpu() for one in found]

    def commit(self, failure: Exception | None) -> bool:
        if failure is not None:
            self.manager.report_error(failure)
        return bool(self.manager.should_commit())

    def end(self) -> None:
        self._begun = False
