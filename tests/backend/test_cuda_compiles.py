"""The kernels as nvcc sees them, for two architectures; what registers and shared memory they take: build/nvcc."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hvd_deepreduce.backend import cuda

BUILD = Path(__file__).parent.parent.parent / "build" / "nvcc"
FILES = sorted(path.stem for path in cuda.KERNELS.glob("*.cu"))


@pytest.mark.parametrize("file", FILES)
def test_compiles(file, tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not on the PATH: the CUDA toolkit compiles the kernels without a GPU")
    BUILD.mkdir(parents=True, exist_ok=True)
    text = tmp_path / f"{file}.cu"
    text.write_text(cuda.source(f"{file}.cu"))  # as CuPy gets it
    architectures = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in (80, 90)]
    # nvcc and NVRTC spell OPTIONS alike. A file need not use every constant that device.cuh has: no warning 177.
    strict = ["-Werror", "all-warnings", "-diag-suppress", "177"]
    command = ["nvcc", *cuda.OPTIONS, *architectures, "-fatbin", "-Xptxas", "-v", *strict]
    done = subprocess.run([*command, str(text), "-o", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (BUILD / f"{file}.txt").write_text(done.stderr)
    spilled = [int(bytes) for bytes in re.findall(r"(\d+) bytes spill", done.stderr)]
    assert not any(spilled), "registers are spilled to memory; see build/nvcc"
    for target in ("sm_80", "sm_90"):
        assert f"'{target}'" in done.stderr
    # Blocks of 256 threads: more than 128 registers would leave one block a processor's quarter of what it can hold.
    assert max(int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)) <= 128


def test_every_kernel_is_launched():
    """A name in a launch that no file has would show on a GPU alone."""
    launched = (Path(cuda.__file__)).read_text()
    for file in FILES:
        kernels = re.findall(r"^\s*KERNEL (\w+?)(?:_##suffix)?\(", cuda.source(f"{file}.cu"), re.MULTILINE)
        assert kernels, file
        for kernel in kernels:
            assert re.search(rf'"{re.sub("(8|16|32|_f32|_f64)$", "", kernel)}', launched), kernel
