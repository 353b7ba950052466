"""Builds the CPU kernels: every kernels/*/*.cpp into one shared library, hvd_deepreduce/_cpu<suffix>.

The library has a plain C ABI and is loaded with ctypes; it is no Python module. Everything else is in setup.cfg.

HVD_DEEPREDUCE_SANITIZE=address,undefined builds it with those sanitizers.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = "kernels"
SOURCES = sorted(glob(f"{KERNELS}/*/*.cpp"))
if not SOURCES:
    sys.exit(f"setup.py: no C++ sources in {KERNELS}; run it from the root of a whole checkout")

# No -march: vector code is chosen at run time, so that one wheel serves every x86-64 machine. No contraction into fused
# multiply-adds either: the results must be the same bits on every machine, and the same as the CUDA kernels'.
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-pthread"]
# gcc 12 takes its own AVX-512 header for a use of uninitialized variables, a thousand lines long.
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
LINK = ["-pthread"]

sanitizers = os.environ.get("HVD_DEEPREDUCE_SANITIZE", "")
if sanitizers:
    FLAGS += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"]
    LINK += [f"-fsanitize={sanitizers}"]


class BuildKernels(build_ext):
    def get_export_symbols(self, ext):
        return []  # the default asks the linker to export PyInit__cpu, which does not exist

    def build_extension(self, ext):
        """Compiles on all cores, and only the objects that are older than a file they are made of."""
        compile_one, link = self.compiler._compile, self.compiler.link_shared_object
        pool = ThreadPoolExecutor(os.cpu_count() or 1)
        running = []

        def start(obj, src, *args):
            made_of = max(os.path.getmtime(path) for path in [src, *ext.depends])
            if not os.path.exists(obj) or os.path.getmtime(obj) <= made_of:
                running.append(pool.submit(compile_one, obj, src, *args))

        def wait_and_link(*args, **kwargs):
            for job in running:
                job.result()
            return link(*args, **kwargs)

        self.compiler._compile, self.compiler.link_shared_object = start, wait_and_link
        self.force = True  # else setuptools compares the library alone with the sources that there are now
        with pool:
            super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "hvd_deepreduce._cpu",
            sources=SOURCES,
            depends=sorted(glob(f"{KERNELS}/*/*.h")) + ["setup.py"],
            include_dirs=[KERNELS],
            extra_compile_args=FLAGS,
            extra_link_args=LINK,
            language="c++",
        )
    ],
)
