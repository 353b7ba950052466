"""Builds the CPU kernels: every kernels/*/*.cpp into one shared library, hvd_deepreduce/_cpu.so.

The library has a plain C ABI and is loaded with ctypes; it is not a Python module. So one wheel, tagged
py3-none-<platform>, serves every Python version. Everything else is in setup.cfg.

HVD_DEEPREDUCE_SANITIZE=address,undefined builds the library with those sanitizers.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = "kernels"
SOURCES = sorted(glob(f"{KERNELS}/*/*.cpp"))
if not SOURCES:
    sys.exit(f"setup.py: no C++ sources in {KERNELS}; run it from the root of a complete checkout or sdist")

# No -march: vector code is chosen at run time, so that one wheel serves every x86-64 machine. No contraction into fused
# multiply-adds either: the results must be the same bits on every machine, and the same as the CUDA kernels'.
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-pthread"]
# gcc 12 reports uninitialized variables in its own AVX-512 header, in a thousand lines of warnings.
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
LINK = ["-pthread"]

sanitizers = os.environ.get("HVD_DEEPREDUCE_SANITIZE", "")
if sanitizers:
    FLAGS += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"]
    LINK += [f"-fsanitize={sanitizers}"]


class BuildKernels(build_ext):
    def finalize_options(self):
        # Objects are kept here by editable installs too, which would use a temporary folder. They do not depend on the
        # Python version.
        self.build_temp = self.build_temp or os.path.join("build", "sanitized" if sanitizers else "", "objects")
        super().finalize_options()

    def get_ext_filename(self, fullname):
        return fullname.replace(".", os.sep) + ".so"  # no Python version in the name: hvd_deepreduce/_cpu.so

    def get_export_symbols(self, ext):
        return []  # the default asks the linker to export PyInit__cpu, which does not exist

    def build_extension(self, ext):
        """Compiles on all cores, and only those objects that are older than one of their sources."""
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
        self.force = True  # else setuptools skips the extension if the library is newer than the sources of today
        with pool:
            super().build_extension(ext)


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
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
