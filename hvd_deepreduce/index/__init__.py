"""Index codecs: the support in few bits. One file each; importing this package registers them all."""

from hvd_deepreduce.index import bitmap, packed, raw, rice

__all__ = ["bitmap", "packed", "raw", "rice"]
