"""Where the kernels are: one module of operations a device, with the same functions and the same bytes out.

A codec calls ``backend.cpu.<operation>``; operations take and return arrays and know nothing of containers.
"""
