"""Runs a script and prints what this process has sent over TCP: `python tests/count_tcp.py SCRIPT`.

What ``stats()`` says is only what this package sends; a framework may send gradients besides.
"""

import runpy
import sys

import torch.distributed as dist

from tests.adapters.tcp import counted

if __name__ == "__main__":
    destroy = dist.destroy_process_group

    def count(*groups):
        print(f"sent {counted().sent} bytes over TCP", flush=True)
        destroy(*groups)

    dist.destroy_process_group = count
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    if dist.is_initialized():
        count()
