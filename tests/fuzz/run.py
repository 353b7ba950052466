"""Fuzzes `unpack` and every registered decoder with arbitrary bytes: `make fuzz`.

A target must return a valid result or raise a ValueError (ContainerError is one). Anything else is a failure: another
exception, a crash, a hang of ten seconds, two gigabytes of memory, or an invalid result. The input of a failure is kept
in build/fuzz. libFuzzer (through atheris) follows the branches of the Python code. It cannot follow those of the
kernels, so half of its inputs are modified sections of an encoder. Each target runs in its own process.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT))
if "--target" in sys.argv:  # atheris instruments the package while it is imported
    import atheris

    with atheris.instrument_imports(include=["hvd_deepreduce"]):
        import hvd_deepreduce.pipeline  # noqa: F401

import numpy as np  # noqa: E402

from hvd_deepreduce import container as wire  # noqa: E402
from hvd_deepreduce.codec import (  # noqa: E402
    RngKey,
    index_codecs,
    joint_codecs,
    sparsifiers,
    value_codecs,
)
from hvd_deepreduce.config import Config  # noqa: E402
from hvd_deepreduce.container import Container  # noqa: E402
from hvd_deepreduce.pipeline import Pipeline, decode_part  # noqa: E402
from tests import cases  # noqa: E402
from tests.oracle.container import repaired  # noqa: E402

marked = atheris.instrument_func if "--target" in sys.argv else lambda function: function
KEY = RngKey(1, 2, 3)
F32 = np.dtype(np.float32)
MOST = 2000  # elements


def targets() -> list[str]:
    names = ["container"]
    for registry in (index_codecs, value_codecs, joint_codecs):
        names += [f"{registry.kind}-{name}" for name in sorted(registry.by_name)]
    shared = (name for name, codec in sorted(sparsifiers.by_name.items()) if codec.shared_randomness)
    return names + [f"sparsifier-{name}" for name in shared]


@marked
def checked(container: Container) -> None:
    """Decodes a container, and checks that the result is valid."""
    support, values = decode_part(container, container.numel, 1)
    assert values.size == container.count and values.dtype in (np.float32, np.float64)
    if container.joint or container.value != value_codecs.by_name["raw"].id:
        assert np.isfinite(values).all()
    if support is None:
        assert container.count == container.numel
        return
    assert support.dtype == np.uint32 and support.size == container.count
    assert np.all(support[1:] > support[:-1]) and (not support.size or support[-1] < container.numel)


def exact(data: bytes) -> np.ndarray:
    """A new allocation of exactly this size, aligned to words."""
    out = np.empty(len(data), np.uint8)
    out[:] = np.frombuffer(data, np.uint8)
    return out


def container_of(target: str, head: bytes, section: bytes) -> Container:
    """A container with the fuzzed section in the place where the codec of the target reads it."""
    kind, _, name = target.partition("-")
    numel = int.from_bytes(head[:4], "little") % (MOST + 1)
    count = int.from_bytes(head[4:7], "little") % (numel + 1)
    dense, dtype = head[7] & 1, np.dtype(np.float64) if head[7] & 2 else F32
    data, none = exact(section), exact(b"")
    if kind == "joint":
        number = joint_codecs.by_name[name].id
        count = numel if dense else count
        return Container(0 if dense else 1, 0, number, dtype, numel, count, KEY, 0, none, data, none, joint=True)
    if kind == "value":
        number, count = value_codecs.by_name[name].id, numel if dense else count
        # Without an index section, the support is that of random-k.
        return Container(0 if dense else 2, 0, number, dtype, numel, count, KEY, 0, none, data, none)
    values = exact(bytes(4 * count))
    if kind == "index":
        number = index_codecs.by_name[name].id
        return Container(1, number, 1, F32, numel, count, KEY, 0, data, values, none)
    key = RngKey(*(int.from_bytes(section[at : at + 4], "little") for at in (0, 4, 8)))
    return Container(sparsifiers.by_name[name].id, 0, 1, F32, numel, count, key, 0, none, values, none)


def changed(data: bytes, right: list[bytes]) -> bytes:
    """The input that libFuzzer's bytes describe.

    If the first byte is even, the input is the bytes after it. If it is odd, the input is one of the valid inputs in
    ``right``, modified by the bytes that follow. Each three bytes set one byte of the input or truncate it.
    """
    if not data or not data[0] & 1:
        return data[1:]
    out = bytearray(right[(data[0] >> 1) % len(right)])
    for at in range(1, len(data) - 2, 3):
        where = data[at] + 256 * data[at + 1]
        if where & 0x8000:
            del out[8 + (where & 0x7FFF) % (len(out) + 1) :]
        elif out:
            out[where % len(out)] = data[at + 2]
    return bytes(out)


def one_input(target: str) -> Callable[[bytes], None]:
    right = seeds(target)

    def run(data: bytes) -> None:
        data = changed(data, right)
        try:
            if target == "container":
                # Correct the checksum: otherwise it would reject almost all inputs.
                fixed = repaired(data.ljust(64, b"\0"))
                numel = int.from_bytes(fixed[16:20], "little") % (MOST + 1)
                checked(wire.unpack(exact(fixed), 1, numel))
            else:
                # The first 8 bytes are numel, count and flags.
                checked(container_of(target, data[:8].ljust(8, b"\0"), data[8:]))
        except ValueError as error:
            assert "rank 1 cannot be read: " in str(error), f"this error does not name the rank: {error}"

    return run


def seeds(target: str) -> list[bytes]:
    """Valid inputs: containers, or sections of containers."""
    kind, _, name = target.partition("-")
    found = []
    for density, numel, dense in itertools.product((0.05, 0.5), (17, 400), (False, True)):
        sparsifier = {"name": "none"} if dense else {"name": "topk", "density": density}
        if target == "container":
            configs = [{"index": "rice", "value": value} for value in cases.VALUE] + [{"joint": j} for j in cases.JOINT]
        elif kind == "joint":
            configs = [{"joint": cases.JOINT[name]}]
        elif kind == "value":
            configs = [{"index": "raw", "value": cases.VALUE[name]}]
        elif kind == "index":
            configs = [] if dense else [{"index": cases.INDEX[name], "value": "raw"}]
        else:
            return [bytes([100, 0, 0, 0, 10]) + bytes(range(3, 18))]
        for config in configs:
            pipeline = Pipeline(Config.load(sparsifier=sparsifier, **config))
            data = pipeline.encode(cases.random(numel, seed=numel), None, KEY)
            if target == "container":
                found.append(data.tobytes())
                continue
            container = wire.unpack(data)
            head = numel.to_bytes(4, "little") + container.count.to_bytes(3, "little") + bytes([int(dense)])
            found.append(head + (container.indices if kind == "index" else container.values).tobytes())
    return found


def fuzz(target: str, seconds: int) -> None:
    """Fuzzes one target in this process. Does not return."""
    folder = ROOT / "build" / "fuzz"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds(target)):
            (Path(corpus) / f"whole{number}").write_bytes(b"\0" + seed)
            (Path(corpus) / f"changed{number}").write_bytes(bytes([2 * number % 256 + 1, *range(9)]))
        options = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048", "-seed=1",
                   f"-artifact_prefix={folder}/{target}-", "-print_final_stats=1", corpus]  # fmt: skip
        atheris.Setup([sys.argv[0], *options], one_input(target))
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzes the decoders.")
    parser.add_argument("--seconds", type=int, default=15, help="seconds for each target")
    parser.add_argument("--total-seconds", type=int, help="seconds for all targets together, in place of --seconds")
    parser.add_argument("--jobs", type=int, default=1, help="targets that run at the same time")
    parser.add_argument("--only", nargs="*", help="targets to run, such as index-rice; default: all")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"), help="run one input, and show its traceback")
    asked = parser.parse_args()
    if asked.replay:
        one_input(asked.replay[0])(Path(asked.replay[1]).read_bytes())
        return 0
    if asked.target:
        fuzz(asked.target, asked.seconds)
    names = asked.only or targets()
    unknown = sorted(set(names) - set(targets()))
    if unknown:
        parser.error(f"unknown targets {', '.join(unknown)}; choose from {', '.join(targets())}")
    seconds = asked.seconds
    if asked.total_seconds:
        seconds = max(1, asked.total_seconds * asked.jobs // len(names))
    running: dict[str, tuple[subprocess.Popen[str], float]] = {}
    waiting, failed = list(names), []
    while waiting or running:
        while waiting and len(running) < asked.jobs:
            name = waiting.pop(0)
            command = [sys.executable, __file__, "--target", name, "--seconds", str(seconds)]
            log = tempfile.TemporaryFile("w+")
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
            process.log = log  # type: ignore[attr-defined]
            running[name] = process, time.monotonic()
        time.sleep(0.1)
        for name, (process, began) in list(running.items()):
            if process.poll() is None:
                if time.monotonic() - began < seconds + 120:
                    continue
                process.kill()
                process.wait()
            del running[name]
            process.log.seek(0)  # type: ignore[attr-defined]
            log = process.log.read()  # type: ignore[attr-defined]
            print(f"{name}: {'ok' if process.returncode == 0 else 'FAILED'}, {runs_of(log)}", flush=True)
            if process.returncode:
                failed.append(name)
                print(log[-4000:], flush=True)
    print(f"fuzz: {len(names) - len(failed)} of {len(names)} targets ok, {seconds} s each")
    if failed:
        print(f"fuzz: failed: {', '.join(failed)}; the inputs are in build/fuzz; "
              "python tests/fuzz/run.py --replay TARGET FILE shows the traceback of one")  # fmt: skip
    return 1 if failed else 0


def runs_of(log: str) -> str:
    """The number of inputs that libFuzzer reports at the end of its log."""
    done = [line for line in log.splitlines() if line.startswith("Done ")]
    return done[-1].split(" in ")[0].removeprefix("Done ") if done else "it did not finish"


if __name__ == "__main__":
    sys.exit(main())
