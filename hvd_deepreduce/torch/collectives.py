"""The engine's collectives over Horovod, on PyTorch's tensors."""

from __future__ import annotations

import logging
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
from hvd_deepreduce.horovod import NOBODY_CAME, WARN_SECONDS, HorovodCollectives, handshake_seconds
from hvd_deepreduce.torch.tensors import TorchTensors

_log = logging.getLogger("hvd_deepreduce")


@dataclass
class _Started:
    """An allgather, or with ``splits`` an alltoall; ``handle`` is None until this step's meeting is over."""

    tensor: torch.Tensor
    name: str
    process_set: Any
    splits: torch.Tensor | None = None
    handle: int | None = None


class TorchCollectives(HorovodCollectives):
    """Allgathers of ``horovod.torch``, on the GPU where Horovod was built with NCCL.

    Horovod breaks down if a rank starts an allgather while another one has joined. So allgathers wait for the meeting
    at the beginning of their step. It is over long before the backward pass is, and nothing waits for it before then.

    Args:
        tensors: converts arrays to tensors and back.
        process_set: of the ranks that take part; None: all.
    """

    def __init__(self, tensors: TorchTensors, process_set: Any = None) -> None:
        super().__init__(hvd, hvd.global_process_set if process_set is None else process_set)
        self._tensors = tensors
        self._meeting: int | None = None
        # Of all that concerns the meeting: a bucket may be sent by the thread that encodes it.
        self._lock = RLock()
        self._hear: Callable[[Floats], object] = lambda total: None
        self._held: list[_Started] = []
        self._flying: set[int] = set()  # handles of what was started, and not waited for
        self._last: dict[tuple[str, int], int] = {}  # the last handle of each name, by name and process set
        self._total: Floats | None = None
        self._failure: Exception | None = None
        self.enroll()

    def start_meeting(self, word: Floats, name: str, hear: Callable[[Floats], object]) -> None:
        """Starts the meeting of a step.

        Args:
            word: this rank's.
            name: of this kind of meeting.
            hear: called with the sum of all ranks' words.
        """
        if self._meeting is not None:  # of a step that was forgotten: other ranks may wait for what it holds back
            with suppress(Exception):
                self.wait_meeting()
        self._held.clear()
        self._total = self._failure = None
        self._hear = hear
        tensor = torch.from_numpy(word)
        self._meeting = hvd.allreduce_async(
            tensor, name=f"{self.prefix}.meeting.{name}", op=hvd.Sum, process_set=self.process_set
        )

    def await_all(self, dense_name: str | None) -> None:
        """Waits for the first meeting. Ranks that do not come at all are reported.

        Args:
            dense_name: under which a rank without DeepReduce reduces a gradient. This rank reduces something else under
                that name, so that Horovod finds the difference. None: do not try.

        Raises:
            MismatchError: a rank has no DeepReduce.
            TimeoutError: a rank did not come in time (``handshake_seconds``).
        """
        began, warned, limit = time.monotonic(), False, handshake_seconds()
        probe = None if dense_name is None else self._start_probe(dense_name)
        assert self._meeting is not None
        while not hvd.poll(self._meeting):
            if probe is not None and hvd.poll(probe):
                _check_probe(probe)
                probe = None
            waited = time.monotonic() - began
            if limit and waited > limit:
                raise TimeoutError(NOBODY_CAME.format(seconds=round(waited)))
            if waited > WARN_SECONDS and not warned:
                _log.warning(NOBODY_CAME.format(seconds=round(waited)))
                warned = True
            time.sleep(0.0005)
        try:
            self.wait_meeting()
        except MismatchError:  # on all ranks, before any gradient of the step
            self._failure = None
            if dense_name is not None:
                self._end_probes(probe, dense_name)
            raise
        except Exception:
            if probe is not None:
                hvd.synchronize(probe)
            raise
        if probe is not None:
            _check_probe(probe)

    def _start_probe(self, name: str) -> int:
        one = torch.ones(1, dtype=torch.float64)
        handle: int = hvd.allreduce_async(one, name=name, op=hvd.Sum, process_set=self.process_set)
        if self.stats is not None:
            self.stats.add(wire=traffic.allreduce(one.element_size(), self.size()))
        return handle

    def _end_probes(self, probe: int | None, name: str) -> None:
        """Takes part in the probes of all ranks, whose names differ if the models do. A probe that stayed in flight
        would stall, and ``hvd.join()`` with it."""
        own = np.frombuffer(bytearray(name.encode() + b"\n"), np.uint8)
        names = sorted(set(self.allgather(own, "probes").tobytes().decode(errors="replace").splitlines()) - {"", name})
        for one in [self._start_probe(other) for other in names] + ([] if probe is None else [probe]):
            hvd.synchronize(one)

    def wait_meeting(self) -> None:
        """Waits for the meeting, and starts the allgathers that were held back. Its error is raised again until the
        next meeting is started."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._meeting is None:
                return
            handle, self._meeting = self._meeting, None
            total, self._total = self._total, None
            try:
                total = _synchronize(handle).numpy() if total is None else total
                self._hear(total)
            except Exception as error:
                self._failure = error
                raise
            held, self._held = self._held, []
            for one in held:
                self._start(one)

    def complete(self) -> None:
        """As ``Collectives.complete``."""
        with suppress(Exception):
            self.wait_meeting()
        while self._flying:
            with suppress(Exception):
                hvd.synchronize(self._flying.pop())

    def start_allgather(self, data: U8, name: str) -> _Started:
        """Starts Horovod's asynchronous allgather, as soon as the meeting is over."""
        return self.start_soon(data, name, self.process_set)

    def start_alltoall(self, data: U8, splits: Sequence[int], name: str) -> _Started:
        """As ``start_allgather``."""
        return self.start_soon(data, name, self.process_set, torch.tensor(splits, dtype=torch.int32))

    def start_soon(self, data: U8, name: str, process_set: Any, splits: torch.Tensor | None = None) -> _Started:
        """Starts a collective, or holds it back until the meeting is over.

        A meeting that found anything is left to ``wait_meeting``, after the backward pass. Here, this rank would wait
        for the others or raise an error before it has started all gradients of the step, for which the others wait.
        """
        if isinstance(data, np.ndarray):
            tensor = torch.from_numpy(data)
        else:
            tensor = self._tensors.tensor(data)
            tensor = tensor.to(wire_device(tensor))
        started = _Started(tensor, f"{self.prefix}.{name}", process_set, splits)
        with self._lock:
            if self._meeting is not None:
                if self._total is None and hvd.poll(self._meeting):
                    self._total = hvd.synchronize(self._meeting).numpy()
                nothing = step_check.Outcome(0, 0, True)
                if self._total is not None and step_check.outcome(self._total, self.size()) == nothing:
                    self.wait_meeting()
            if self._meeting is None and self._failure is None:
                self._start(started)
            else:
                self._held.append(started)
        return started

    def wait_allgather(self, pending: _Started) -> U8:
        """Waits for it."""
        if self._meeting is not None or self._failure is not None:
            self.wait_meeting()
        tensor = self._result(pending.handle)
        received: U8 = self._received(tensor) if tensor.is_cuda else tensor.numpy()
        return received

    def wait_alltoall(self, pending: _Started) -> tuple[U8, list[int]]:
        """Waits for it."""
        self.wait_meeting()
        received, splits = self._result(pending.handle)
        return self._received(received), splits.tolist()

    def _received(self, tensor: torch.Tensor) -> U8:
        if tensor.is_cuda:  # Horovod allocates it on a stream of its own
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        array: U8 = self._tensors.array(tensor)
        return array

    def start_sum(self, data: Floats, name: str) -> int:
        """As ``Collectives.start_sum``."""
        name, tensor = f"{self.prefix}.{name}", self._tensors.tensor(data)
        key = name, self.process_set.process_set_id
        self._wait_for_forgotten(key)
        handle: int = hvd.allreduce_async_(
            tensor.to(wire_device(tensor)), name=name, op=hvd.Sum, process_set=self.process_set
        )
        self._note(key, handle)
        return handle

    def wait_sum(self, pending: int) -> Floats:
        """As ``Collectives.wait_sum``; where Horovod takes tensors."""
        total: Floats = self._tensors.array(self._result(pending))
        return total

    def included(self) -> bool:
        """Whether this rank takes part."""
        return bool(self.process_set.included())

    def _wait_for_forgotten(self, key: tuple[str, int]) -> None:
        """Horovod takes a name again when it is in flight nowhere. That of a step that was forgotten, because a state
        was loaded, may still be: every rank has started it by the next meeting."""
        handle = self._last.get(key)
        if handle in self._flying:
            self._flying.discard(handle)
            with suppress(Exception):
                hvd.synchronize(handle)

    def _note(self, key: tuple[str, int], handle: int) -> None:
        self._last[key] = handle
        self._flying.add(handle)

    def _start(self, one: _Started) -> None:
        key = one.name, one.process_set.process_set_id
        if self._last.get(key) in self._flying:
            self._wait_for_forgotten(key)
        if one.splits is None:
            one.handle = hvd.allgather_async(one.tensor, one.name, one.process_set)
        else:
            one.handle = hvd.alltoall_async(one.tensor, one.splits, one.name, one.process_set)
        self._note(key, one.handle)

    def _result(self, handle: int | None) -> Any:
        assert handle is not None
        self._flying.discard(handle)
        return _synchronize(handle)

    def _subset(self, process_set: Any) -> HorovodCollectives:
        return _Subset(self, process_set)


class _Subset(HorovodCollectives):
    """Collectives of some of the ranks, which wait for the meeting of all.

    Args:
        all_ranks: the collectives of all.
        process_set: of these ranks.
    """

    def __init__(self, all_ranks: TorchCollectives, process_set: Any) -> None:
        super().__init__(hvd, process_set)
        self._all = all_ranks

    def start_allgather(self, data: U8, name: str) -> _Started:
        return self._all.start_soon(data, name, self.process_set)

    def start_alltoall(self, data: U8, splits: Sequence[int], name: str) -> _Started:
        return self._all.start_soon(data, name, self.process_set, torch.tensor(splits, dtype=torch.int32))

    def wait_allgather(self, pending: _Started) -> U8:
        return self._all.wait_allgather(pending)

    def wait_alltoall(self, pending: _Started) -> tuple[U8, list[int]]:
        return self._all.wait_alltoall(pending)

    def _subset(self, process_set: Any) -> HorovodCollectives:
        return _Subset(self._all, process_set)


def _synchronize(handle: int | None) -> Any:
    """``hvd.synchronize``, which looks once a millisecond: that is longer than many a step waits."""
    began = time.perf_counter()
    while not hvd.poll(handle):
        waited = time.perf_counter() - began
        if waited > 0.01:
            break
        time.sleep(2e-5 + waited / 8)
    return hvd.synchronize(handle)


def _check_probe(probe: int) -> None:
    """
    Raises:
        MismatchError: another rank has reduced a gradient under the probe's name.
    """
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


def as_it_is(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A gradient that is not compressed, where and as Horovod takes it; if that is a copy, the gradient too.

    Horovod reduces neither bfloat16 nor strided tensors.
    """
    if tensor.is_contiguous() and tensor.dtype != torch.bfloat16 and not tensor.is_cuda:  # nearly always: in least time
        return tensor, None
    sent = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().to(wire_device(tensor))
    return sent, None if sent is tensor else tensor
