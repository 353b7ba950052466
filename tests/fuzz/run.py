"""Fuzzes what reads bytes of other ranks and of checkpoints, under the sanitizers: `make fuzz`.

tests/fuzz/targets.py has the targets. A target must give a valid result or raise the error that its documentation
names. Anything else is a failure: another exception, an access outside an array, undefined behaviour, a crash, a hang
of ten seconds, two gigabytes of memory, or an invalid result. The input of a failure is kept in build/fuzz. libFuzzer
(through atheris) follows the branches of the Python code. It cannot follow those of the kernels, so half of its inputs
are changes of valid ones (tests/fuzz/changes.py). Each target runs in its own process.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT))  # after the sanitized copy of the package, which PYTHONPATH names

if "--target" in sys.argv:  # atheris instruments the package while it is imported
    import atheris

    with atheris.instrument_imports(include=["hvd_deepreduce"]):
        import hvd_deepreduce.engine
        import hvd_deepreduce.pipeline.pipeline  # noqa: F401

from tests.fuzz import changes, targets  # noqa: E402

FOLDER = ROOT / "build" / "fuzz"
COVERAGE = ROOT / "build" / "sanitized" / "coverage.so"


def environment() -> dict[str, str]:
    """Of a target's process. Under the sanitizers (`make fuzz` loads them before all else), libFuzzer gets the coverage
    through tests/fuzz/coverage.c."""
    env = dict(os.environ)
    if "libasan" in env.get("LD_PRELOAD", ""):
        spec = importlib.util.find_spec("atheris")
        assert spec is not None and spec.submodule_search_locations, "the fuzzer needs atheris: make setup"
        (library,) = Path(spec.submodule_search_locations[0]).glob("core_with_libfuzzer*.so")
        env["LIBFUZZER"] = str(library)
        env["LD_PRELOAD"] = f"{COVERAGE} {env['LD_PRELOAD']}"
        env["ASAN_OPTIONS"] = env.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    return env


def fuzz(name: str, seconds: int) -> None:
    """Fuzzes one target in this process, for so many seconds since its start. Does not return."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    target, runs = targets.target(name), itertools.count()

    def run(data: bytes) -> None:
        done, took = next(runs), time.monotonic() - BEGAN
        # libFuzzer reads its whole corpus before it looks at the clock. A slow machine may not come to 300 in time.
        if took > seconds and (done >= 300 or took > seconds + 60):
            print(f"Done {done} runs in {took:.0f} second(s)", flush=True)
            os._exit(0)
        target.run(data)

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.right):
            if len(seed) < 4096:
                (Path(corpus) / f"whole{number}").write_bytes(b"\0" + seed)
            (Path(corpus) / f"changed{number}").write_bytes(b"\1" + number.to_bytes(2, "little") + bytes(range(9)))
        for number, edge in enumerate(changes.edges(target.right, 200 * seconds)):
            (Path(corpus) / f"edge{number}").write_bytes(edge)
        left = max(3, seconds - int(time.monotonic() - BEGAN))
        options = [f"-max_total_time={left}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048", "-seed=1",
                   f"-artifact_prefix={FOLDER}/{name}-", "-print_final_stats=1", "-reload=0", corpus]  # fmt: skip
        atheris.Setup([sys.argv[0], *options], run)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzes what reads bytes of other ranks and of checkpoints.")
    parser.add_argument("--seconds", type=int, default=15, help="seconds for each target, its start included")
    parser.add_argument("--total-seconds", type=int, help="seconds for all targets together, in place of --seconds")
    parser.add_argument("--jobs", type=int, default=1, help="targets that run at the same time")
    parser.add_argument("--only", nargs="*", help="targets to run, such as index-rice; default: all")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"), help="run one input, and show its traceback")
    asked = parser.parse_args()
    if asked.replay:
        targets.target(asked.replay[0]).run(Path(asked.replay[1]).read_bytes())
        return 0
    if asked.target:
        fuzz(asked.target, asked.seconds)
    names = asked.only or targets.names()
    unknown = sorted(set(names) - set(targets.names()))
    if unknown:
        parser.error(f"unknown targets {', '.join(unknown)}; choose from {', '.join(targets.names())}")
    seconds = asked.seconds
    if asked.total_seconds:
        seconds = max(1, asked.total_seconds * asked.jobs // len(names))
    env = environment()
    running: dict[str, tuple[subprocess.Popen[str], float]] = {}
    waiting, failed = list(names), []
    while waiting or running:
        while waiting and len(running) < asked.jobs:
            name = waiting.pop(0)
            command = [sys.executable, "-P", __file__, "--target", name, "--seconds", str(seconds)]
            log = tempfile.TemporaryFile("w+")
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=env)
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
              "make fuzz ARGS='--replay TARGET FILE' shows the traceback of one")  # fmt: skip
    return 1 if failed else 0


def runs_of(log: str) -> str:
    """The number of inputs that libFuzzer reports at the end of its log."""
    done = [line for line in log.splitlines() if line.startswith("Done ")]
    return done[-1].split(" in ")[0].removeprefix("Done ") if done else "it did not finish"


if __name__ == "__main__":
    sys.exit(main())
