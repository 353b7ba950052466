"""Runs several scripts in one process, one after the other: `python tests/run_scripts.py SCRIPT ...`.

For scripts whose imports take longer than what they do.
"""

import runpy
import sys

if __name__ == "__main__":
    for script in sys.argv[1:]:
        print(f"running {script}", flush=True)
        runpy.run_path(script, run_name="__main__")
