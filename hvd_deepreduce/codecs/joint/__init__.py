"""Joint codecs: indices and values in one code. One file each; importing this package registers them all."""

from hvd_deepreduce.codecs.joint import context_qsgd, densestream, skcompress, sketchml, three_lc

__all__ = ["context_qsgd", "densestream", "skcompress", "sketchml", "three_lc"]
