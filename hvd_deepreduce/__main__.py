"""``python -m hvd_deepreduce``: the command ``hvd-deepreduce``."""

from hvd_deepreduce.tools.app import main

main()
