"""Value codecs: the kept values in few bits. One file each; importing this package registers them all."""

from hvd_deepreduce.value import half, qsgd, raw

__all__ = ["half", "qsgd", "raw"]
