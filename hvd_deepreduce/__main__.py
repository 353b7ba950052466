"""``python -m hvd_deepreduce``: the command ``hvd-deepreduce``."""

from hvd_deepreduce.command.app import main

main()
