"""The engine's collectives over Horovod, on PyTorch's tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import RLock
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_deepreduce.codecs.interfaces import U8, Floats
from hvd_deepreduce.engine import MismatchError, step_check
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.horovod import NOBODY_CAME, HorovodCollectives, Patience
from hvd_deepreduce.torch.tensors import TorchTensors, keep_for_stream

_NOTHING = step_check.Outcome(0, 0, True)
"""The outcome of a step check that has found nothing."""


@dataclass
class _Started:
    """An allgather, or with ``splits`` an alltoall; ``handle`` is None until this step's step check is over.

    Where it is held back on a GPU, ``written`` makes the current stream wait for what has written the tensor: another
    thread may start it, whose stream is another one, and Horovod waits for that stream.
    """

    tensor: torch.Tensor
    name: str
    process_set: Any
    splits: torch.Tensor | None = None
    written: Callable[[], None] | None = None
    handle: int | None = None


class TorchCollectives(HorovodCollectives):
    """On the GPU where Horovod was built with NCCL.

    Horovod breaks down if a rank starts an allgather while another one has joined. So allgathers wait for their step's
    check. It is over long before the backward pass is, and nothing waits for it before then.

    Args:
        process_set: of the ranks that take part; None: all.
        whole: the collectives whose step checks these wait for; None: their own.
    """

    def __init__(self, tensors: TorchTensors, process_set: Any = None, whole: TorchCollectives | None = None) -> None:
        super().__init__(hvd, hvd.global_process_set if process_set is None else process_set)
        self._tensors, self._whole = tensors, whole or self
        self._step_check: int | None = None
        self._vote: Floats = np.empty(0)  # the sum of all ranks', once the step check is over
        # Of all that concerns the step check: a bucket may be sent by the thread that encodes it.
        self._lock = RLock()
        self._tally: Callable[[Floats], object] = lambda total: None
        self._held: list[_Started] = []
        self._flying: set[int] = set()  # handles of what was started, and not waited for
        self._last: dict[tuple[str, int], int] = {}  # the last handle of each name, by name and process set
        self._failure: Exception | None = None
        if whole is None:
            self.enroll()

    def start_step_check(self, vote: Floats, name: str, tally: Callable[[Floats], object]) -> None:
        """Starts a step check of this name's kind: ``tally`` will be called with the sum of all ranks' votes."""
        if self._step_check is not None:  # of a step that was forgotten: other ranks may wait for what it holds back
            with suppress(Exception):
                self.wait_step_check()
        self._held.clear()
        self._failure = None
        self._vote, self._tally = vote, tally
        name = f"{self.prefix}.step_check.{name}"
        self._end_forgotten(name, self.process_set)
        self._step_check = hvd.allreduce_async_(
            torch.from_numpy(vote), name=name, op=hvd.Sum, process_set=self.process_set
        )

    def start_vote(self, vote: Floats, name: str) -> tuple[int, Floats]:
        """Starts a step check of this name's kind for which nothing is held back: ``wait_votes`` comes before what
        depends on it is started."""
        name = f"{self.prefix}.step_check.{name}"
        return self._launch(hvd.allreduce_async_, name, self.process_set, torch.from_numpy(vote), op=hvd.Sum), vote

    def wait_votes(self, spoken: tuple[int, Floats]) -> Floats:
        """The sum of all ranks' votes."""
        self._flying.discard(spoken[0])
        _synchronize(spoken[0])
        return spoken[1]

    def await_all(self, dense_name: str | None) -> None:
        """Waits for the first step check.

        Args:
            dense_name: under which a rank without DeepReduce reduces a gradient. This rank reduces something else under
                that name, so that Horovod finds the difference. None: do not try.

        Raises:
            MismatchError: a rank has no DeepReduce.
            TimeoutError: as ``Patience.wait``.
        """
        probes = [] if dense_name is None else [self._start_probe(dense_name)]

        def over() -> bool:
            if probes and hvd.poll(probes[0]):
                _check_probe(probes.pop())
            return bool(hvd.poll(self._step_check))

        Patience(lambda seconds: NOBODY_CAME.format(seconds=seconds)).wait(over)
        try:
            self.wait_step_check()
        except Exception as error:
            if isinstance(error, MismatchError):  # on all ranks, before any gradient of the step
                self._failure = None
                if dense_name is not None:
                    probes += self._probes_of_others(dense_name)
            for probe in probes:
                hvd.synchronize(probe)
            raise
        for probe in probes:
            _check_probe(probe)

    def _start_probe(self, name: str) -> int:
        one = torch.ones(1, dtype=torch.float64)
        handle: int = hvd.allreduce_async(one, name=name, op=hvd.Sum, process_set=self.process_set)
        if self.stats is not None:
            self.stats.add(wire=traffic.allreduce(one.element_size(), self.size()))
        return handle

    def _probes_of_others(self, name: str) -> list[int]:
        """Takes part in the probes of all ranks, whose names differ if the models do. A probe that stayed in flight
        would stall, and ``hvd.join()`` with it."""
        own = np.frombuffer(bytearray(name.encode() + b"\n"), np.uint8)
        names = set(self.allgather(own, "probes").tobytes().decode(errors="replace").splitlines())
        return list(map(self._start_probe, sorted(names - {"", name})))

    def wait_step_check(self) -> None:
        """Waits for the step check, and starts the allgathers that were held back. Its error is raised again until the
        next step check is started."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._step_check is None:
                return
            handle, self._step_check = self._step_check, None
            try:
                _synchronize(handle)
                self._tally(self._vote)
            except Exception as error:
                self._failure = error
                raise
            held, self._held = self._held, []
            for one in held:
                self._start(one)

    def complete(self) -> None:
        with suppress(Exception):
            self.wait_step_check()
        while self._flying:
            with suppress(Exception):
                hvd.synchronize(self._flying.pop())

    def start_allgather(self, data: U8, name: str) -> _Started:
        return self._whole._start_soon(data, name, self.process_set)

    def start_alltoall(self, data: U8, splits: Sequence[int], name: str) -> _Started:
        return self._whole._start_soon(data, name, self.process_set, torch.tensor(splits, dtype=torch.int32))

    def _start_soon(self, data: U8, name: str, process_set: Any, splits: torch.Tensor | None = None) -> _Started:
        """Starts a collective, or holds it back until the step check is over.

        The error of a step check is left to ``wait_step_check``, after the backward pass. Here, this rank would wait
        for the others or raise an error before it has started all gradients of the step, for which the others wait.
        """
        if isinstance(data, np.ndarray):
            tensor = torch.from_numpy(data)
        else:
            tensor = self._tensors.tensor(data)
            tensor = tensor.to(wire_device(tensor))
        started = _Started(tensor, f"{self.prefix}.{name}", process_set, splits)
        with self._lock:
            over = self._step_check is not None and hvd.poll(self._step_check)
            if over and step_check.outcome(self._vote, self.size()) == _NOTHING:
                self.wait_step_check()
            if self._step_check is None and self._failure is None:
                self._start(started)
            else:
                started.written = self._tensors.record(self._tensors.device(tensor))
                self._held.append(started)
        return started

    def wait_allgather(self, pending: _Started) -> U8:
        tensor = self._whole._result(pending)
        received: U8 = self._received(tensor) if tensor.is_cuda else tensor.numpy()
        return received

    def wait_alltoall(self, pending: _Started) -> tuple[U8, list[int]]:
        received, splits = self._whole._result(pending)
        return self._received(received), splits.tolist()

    def _result(self, pending: _Started) -> Any:
        if self._step_check is not None or self._failure is not None:
            self.wait_step_check()
        assert pending.handle is not None
        self._flying.discard(pending.handle)
        return _synchronize(pending.handle)

    def _received(self, tensor: torch.Tensor) -> U8:
        keep_for_stream(tensor)  # Horovod allocates it on a stream of its own
        array: U8 = self._tensors.array(tensor)
        return array

    def start_sum(self, data: Floats, name: str) -> int:
        """As ``Collectives.start_sum``. Horovod fuses what is in flight together."""
        tensor = self._tensors.tensor(data)
        tensor = tensor.to(wire_device(tensor))
        return self._launch(hvd.allreduce_async_, f"{self.prefix}.{name}", self.process_set, tensor, op=hvd.Sum)

    def wait_sum(self, pending: int) -> Floats:
        """As ``Collectives.wait_sum``; where Horovod takes tensors."""
        self._flying.discard(pending)
        total: Floats = self._tensors.array(_synchronize(pending))
        return total

    def _start(self, one: _Started) -> None:
        if one.written is not None:
            one.written()
        if one.splits is None:
            one.handle = self._launch(hvd.allgather_async, one.name, one.process_set, one.tensor)
        else:
            one.handle = self._launch(hvd.alltoall_async, one.name, one.process_set, one.tensor, splits=one.splits)

    def _launch(
        self, operation: Callable[..., int], name: str, process_set: Any, tensor: torch.Tensor, **settings: Any
    ) -> int:
        self._end_forgotten(name, process_set)
        handle = operation(tensor, name=name, process_set=process_set, **settings)
        self._last[name, process_set.process_set_id] = handle
        self._flying.add(handle)
        return handle

    def _end_forgotten(self, name: str, process_set: Any) -> None:
        """Horovod takes a name again when it is in flight nowhere. That of a step that was forgotten, because a state
        was loaded, may still be: every rank has started it by the next step check."""
        forgotten = self._last.get((name, process_set.process_set_id))
        if forgotten in self._flying:
            self._flying.discard(forgotten)
            with suppress(Exception):
                hvd.synchronize(forgotten)

    def _subset(self, process_set: Any) -> HorovodCollectives:
        return TorchCollectives(self._tensors, process_set, self._whole)


def _synchronize(handle: int) -> Any:
    """``hvd.synchronize``, which looks once a millisecond: that is longer than many a step waits."""
    began = time.perf_counter()
    while not hvd.poll(handle):
        waited = time.perf_counter() - began
        if waited > 0.01:
            break
        time.sleep(2e-5 + waited / 8)
    return hvd.synchronize(handle)


def _check_probe(probe: int) -> None:
    """Raises ``MismatchError`` if another rank has reduced a gradient under the probe's name."""
    try:
        hvd.synchronize(probe)
    except hvd.HorovodInternalError as error:
        if "ismatched" not in str(error):
            raise
        raise MismatchError(
            "some ranks of this job reduce gradients without DeepReduce, and others with it: give "
            "hvd.DistributedOptimizer compression=DeepReduce(...) on every rank, or on none. Horovod found the "
            f"difference in the first parameter: {error}"
        ) from None


def wire_device(tensor: torch.Tensor) -> torch.device:
    """Where Horovod takes what is sent of a tensor: its GPU if Horovod was built with NCCL, else the host."""
    return tensor.device if not tensor.is_cuda or hvd.nccl_built() else torch.device("cpu")


def uncompressed(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A gradient that is not compressed, where and as Horovod takes it; if that is a copy, the gradient too.

    Horovod reduces neither bfloat16 nor strided tensors.
    """
    if tensor.is_contiguous() and tensor.dtype != torch.bfloat16 and not tensor.is_cuda:  # nearly always: in least time
        return tensor, None
    sent = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().to(wire_device(tensor))
    return sent, None if sent is tensor else tensor


def restore(tensor: torch.Tensor, copied: torch.Tensor | None) -> torch.Tensor:
    """The reduced gradient, of what ``uncompressed`` returned."""
    return tensor if copied is None else copied.copy_(tensor)
