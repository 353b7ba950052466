"""The operations that codecs call, one module per concept.

An operation is one public function with one signature and one docstring. It has two implementations, which stand next
to each other: one for NumPy arrays (``kernels/<concept>/*.cpp`` through a plain C ABI) and one for arrays on a GPU
(``kernels/<concept>/*.cu`` through CuPy). The type of the array argument selects the implementation, and both return
the same bytes. ``dispatch`` says how; a test enumerates all operations and compares the two.

Three modules are not operations but what they stand on:

- ``library`` loads the compiled CPU kernels.
- ``device`` compiles CUDA kernels with NVRTC and launches them.
- ``deferred`` keeps the host from waiting for the device: it collects sizes and error flags and reads them together.
"""
