"""Builds the CPU kernels: every kernels/*/*.cpp into one shared library, hvd_deepreduce/_cpu.so.

The library has a plain C ABI and is loaded with ctypes; it is not a Python module. So one wheel, tagged
py3-none-<platform>, serves every Python version. Everything else is in setup.cfg.

kernels/tensorflow has operations of TensorFlow, in C++. Where TensorFlow is installed, they are built with it into a
library of their own, which has its version in its name and serves no other. Without them, Python takes their place.

HVD_DEEPREDUCE_SANITIZE=address,undefined builds the kernels with those sanitizers, without TensorFlow's operations.
HVD_DEEPREDUCE_WITHOUT_TENSORFLOW=1 leaves these operations out, HVD_DEEPREDUCE_WITH_TENSORFLOW=1 makes it an error if
they cannot be built.
"""

import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CCompilerError

KERNELS = "kernels"
OPERATIONS = f"{KERNELS}/tensorflow/operations.cpp"
SOURCES = sorted(set(glob(f"{KERNELS}/*/*.cpp")) - {OPERATIONS})
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


# pip builds in an environment of its own, to which PYTHONPATH points: TensorFlow is in the one that it installs to.
TENSORFLOW = """
import importlib.util, json
found = None
if importlib.util.find_spec("tensorflow"):
    import tensorflow as tf
    found = [tf.__version__, tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()]
print("\\n" + json.dumps(found))
"""


def tensorflow():
    """Version, compiler flags and linker flags of the installed TensorFlow; None: there is none."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", TENSORFLOW]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(ended.stdout.splitlines()[-1]) if ended.returncode == 0 else None


class BuildPackage(build_py):
    def run(self):
        """Without what an earlier build has left there: it would install files that are no longer in the sources."""
        made = os.path.join(self.build_lib, "hvd_deepreduce")
        if os.path.realpath(made) != os.path.realpath("hvd_deepreduce"):
            shutil.rmtree(made, ignore_errors=True)
        super().run()


class BuildKernels(build_ext):
    def run(self):
        super().run()
        required = bool(os.environ.get("HVD_DEEPREDUCE_WITH_TENSORFLOW"))
        if sanitizers or os.environ.get("HVD_DEEPREDUCE_WITHOUT_TENSORFLOW"):
            return
        found = tensorflow()
        if found is None:
            if required:
                sys.exit("setup.py: HVD_DEEPREDUCE_WITH_TENSORFLOW is set, and TensorFlow cannot be imported")
            return
        try:
            self.build_operations(*found)
        except CCompilerError as error:
            if required:
                raise
            self.warn(f"the operations of TensorFlow {found[0]} were not built, and Python takes their place: {error}")

    def build_operations(self, version, compile_flags, link_flags):
        """Builds TensorFlow's operations, unless they are newer than their source."""
        folder = "hvd_deepreduce" if self.inplace else os.path.join(self.build_lib, "hvd_deepreduce")
        library = os.path.join(folder, f"_tensorflow-{version}.so")
        made_of = max(os.path.getmtime(path) for path in (OPERATIONS, *glob(f"{KERNELS}/*/*.h"), "setup.py"))
        if os.path.exists(library) and os.path.getmtime(library) > made_of:
            return
        # Its headers are not ours to warn about.
        flags = [flag.replace("-I", "-isystem", 1) if flag.startswith("-I") else flag for flag in compile_flags]
        flags += [f"-I{KERNELS}", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off"]
        folder = os.path.join(self.build_temp, f"tensorflow-{version}")
        objects = self.compiler.object_filenames([OPERATIONS], output_dir=folder)
        if not os.path.exists(objects[0]) or os.path.getmtime(objects[0]) <= made_of:
            self.compiler.compile([OPERATIONS], folder, extra_postargs=flags)
        self.compiler.link_shared_object(objects, library, extra_postargs=link_flags, target_lang="c++")

    def finalize_options(self):
        # Objects are kept here by editable installs too, which would use a temporary folder. They do not depend on the
        # Python version.
        self.build_temp = self.build_temp or os.path.join("build", "sanitized" if sanitizers else "", "objects")
        super().finalize_options()

    def get_ext_filename(self, fullname):
        return fullname.replace(".", os.sep) + ".so"  # no Python version in the name: hvd_deepreduce/_cpu.so

    def get_export_symbols(self, ext):
        return []  # the default asks the linker to export PyInit__cpu, which does not exist

    def build_extensions(self):
        # What another compiler has made, or other flags, is not taken for today's.
        compilers = [getattr(self.compiler, name, None) for name in ("compiler_so", "compiler_so_cxx")]
        made_by = hashlib.sha256(repr((compilers, FLAGS)).encode()).hexdigest()
        self.build_temp = os.path.join(self.build_temp, f"{sysconfig.get_platform()}-{made_by[:16]}")
        super().build_extensions()

    def build_extension(self, ext):
        """Compiles on all cores, and only those objects that are older than one of their sources."""
        # The library says what it was made of, and hvd_deepreduce/ops/library.py compares.
        digest = runpy.run_path("hvd_deepreduce/resources.py")["digest_of_kernels"](Path(KERNELS))
        os.makedirs(self.build_temp, exist_ok=True)
        sources = os.path.join(self.build_temp, "sources.cpp")
        with open(sources, "w") as file:
            file.write(f'#include "common/cpu.h"\n\nDR_API const char *dr_sources() {{ return "{digest}"; }}\n')
        ext.sources = [*SOURCES, sources]
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
        del self.compiler._compile, self.compiler.link_shared_object


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_py": BuildPackage, "build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
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
