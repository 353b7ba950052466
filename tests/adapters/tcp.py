"""The kernel's own counters of what this process sends and receives over TCP. They need no privileges."""

from __future__ import annotations

import os
import socket
import struct
import time

from hvd_deepreduce.exchange.traffic import Traffic

BYTES_RECEIVED, BYTES_NOT_SENT, BYTES_SENT, BYTES_RETRANS = 128, 144, 200, 208
"""Where they are in ``struct tcp_info`` (linux/tcp.h); the last two are there since Linux 4.19."""


def counted() -> Traffic:
    """The payload of all TCP connections that this process has open, since each was opened."""
    sent = received = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as one:
                if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # closed since it was listed
        # A busy machine sends again what was only late, also over loopback: 64 kB were seen. What a peer has not made
        # room for yet waits in the kernel after the work has ended: 900 kB were seen.
        sent += struct.unpack_from("<Q", info, BYTES_SENT)[0] - struct.unpack_from("<Q", info, BYTES_RETRANS)[0]
        sent += struct.unpack_from("<I", info, BYTES_NOT_SENT)[0]
        received += struct.unpack_from("<Q", info, BYTES_RECEIVED)[0]
    return Traffic(sent, received)


def check_stats(compression, work, headers: int, times: int) -> None:
    """The bytes that ``stats`` counts of six steps are those on the wire, but for headers of the transport.

    Args:
        compression: of the job.
        work: runs the steps.
        headers: the most bytes that these may be.
        times: how much larger than the headers the bytes must be, so that these do not decide.
    """
    meter, before = Meter(), compression.stats()["total"]
    work()
    counted, _ = meter.read()
    after = compression.stats()["total"]
    for real, key in zip(counted, ("bytes_sent", "bytes_received"), strict=True):
        said = after[key] - before[key]
        assert said > times * headers
        assert said <= real < 1.01 * said + headers, (said, real)
    assert after["steps"] - before["steps"] == 6


class Meter:
    """Counts from its creation on.

    Horovod's ranks talk every millisecond, work or not: twice ``idle`` seconds are spent to measure how much, before
    and after, since other programs on the machine come and go.
    """

    def __init__(self, idle: float = 0.1) -> None:
        self._idle = idle
        self._rate = self._talk()
        self._began, self._before = time.monotonic(), counted()

    def _talk(self) -> float:
        """Bytes a second, in the direction that has more."""
        began, before = time.monotonic(), counted()
        time.sleep(self._idle)
        return max(now - then for now, then in zip(counted(), before, strict=True)) / (time.monotonic() - began)

    def read(self) -> tuple[Traffic, float]:
        """Bytes since then, and how many of them in each direction belong to no work, about."""
        now, took = counted(), time.monotonic() - self._began
        rate = max(self._rate, self._talk())
        return Traffic(*(end - begin for end, begin in zip(now, self._before, strict=True))), rate * took
