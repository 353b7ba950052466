"""The kernels as nvcc and NVRTC see them; what registers and shared memory they take: build/nvcc."""

import ctypes
import re
import shutil
import site
import subprocess
from pathlib import Path

import pytest

from hvd_deepreduce.ops import device
from tests.selection import thorough

BUILD = Path(__file__).parent.parent.parent / "build" / "nvcc"
FRAMES = {
    "fit_poly_project", "fit_poly_plan", "huffman_write", "rle_read", "rle_walk", "check_padding",
    "groups_write_coded", "join",
}  # fmt: skip
"""The kernels that keep arrays in each thread's own memory: short ones, and those of codecs that take long by nature.
Elsewhere that costs more than the kernel itself, as it did in the sums of all ranks."""
FILES = sorted(path.relative_to(device.KERNELS).with_suffix("").as_posix() for path in device.KERNELS.glob("*/*.cu"))


@thorough
@pytest.mark.parametrize("file", FILES)
def test_compiles(file, tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not on the PATH: the CUDA toolkit compiles the kernels without a GPU")
    BUILD.mkdir(parents=True, exist_ok=True)
    text = tmp_path / f"{Path(file).name}.cu"
    text.write_text(device.source(f"{file}.cu"))  # as CuPy gets it
    architecture = "-gencode=arch=compute_90,code=sm_90"  # that of 8.0 doubles the time; NVRTC has it, below
    # nvcc and NVRTC spell OPTIONS alike. A file need not use every constant that device.cuh has: no warning 177.
    strict = ["-Werror", "all-warnings", "-diag-suppress", "177"]
    command = ["nvcc", *device.OPTIONS, architecture, "-fatbin", "-Xptxas", "-v", *strict]
    done = subprocess.run([*command, str(text), "-o", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (BUILD / f"{Path(file).name}.txt").write_text(done.stderr)
    spilled = [int(bytes) for bytes in re.findall(r"(\d+) bytes spill", done.stderr)]
    assert not any(spilled), "registers are spilled to memory; see build/nvcc"
    frames = re.findall(r"Function properties for (\w+)\n\s+(\d+) bytes stack frame", done.stderr)
    assert frames
    assert {kernel for kernel, size in frames if int(size)} <= FRAMES, "arrays are in each thread's memory"
    assert "'sm_90'" in done.stderr
    # Blocks of 256 threads: more than 128 registers would leave one block a processor's quarter of what it can hold.
    assert max(int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)) <= 128


def nvrtc() -> ctypes.CDLL | None:
    """The run-time compiler that CuPy uses, where its wheel (nvidia-cuda-nvrtc) or the toolkit has it."""
    wheels = [Path(folder) / "nvidia" for folder in site.getsitepackages()]
    found = sorted(path for wheel in wheels for path in wheel.glob("*/lib/libnvrtc-builtins.so.1*"))
    try:
        for path in found[-1:]:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # NVRTC asks for it by its name alone
        library = sorted(found[-1].parent.glob("libnvrtc.so*"))[-1] if found else "libnvrtc.so"
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None


@thorough
@pytest.mark.parametrize("file", FILES)
def test_compiles_at_run_time(file):
    """By NVRTC as CuPy calls it: it has no standard headers, and needs no GPU. It ends at PTX; the assembler is the one
    that nvcc runs above, for the other architecture. No code of a kernel depends on the architecture."""
    library = nvrtc()
    if library is None:
        pytest.skip("libnvrtc is not here: the wheel nvidia-cuda-nvrtc has it")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = device.source(f"{file}.cu")
    assert "__CUDA_ARCH__" not in text
    assert library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), file.encode(), 0, None, None) == 0
    options = [option.encode() for option in (*device.OPTIONS, "-arch=compute_80")]
    given = (ctypes.c_char_p * len(options))(*options)
    result = library.nvrtcCompileProgram(program, len(options), given)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert result == 0, log.value.decode()


def test_every_kernel_is_launched():
    """A name in a launch that no file has would show on a GPU alone."""
    launched = "".join(path.read_text() for path in Path(device.__file__).parent.glob("*.py"))
    for file in FILES:
        named = r"^\s*(?:KERNEL |(?:FLOAT|CODE)_KERNEL\()(\w+?)(?:_##suffix)?[(,]"
        kernels = re.findall(named, device.source(f"{file}.cu"), re.MULTILINE)
        assert kernels, file
        for kernel in kernels:
            assert re.search(rf'"{re.sub("(8|16|32|_f32|_f64)$", "", kernel)}', launched), kernel
