"""Rice: Golomb-Rice code of the gaps between indices.

Golomb, "Run-length encodings", IEEE Trans. Inf. Theory 1966; Rice and Plaunt, IEEE Trans. Commun. 1971.
"""

from hvd_deepreduce.codecs.interfaces import LosslessIndexCodec, index_codecs
from hvd_deepreduce.ops import rice


@index_codecs.register
class Rice(LosslessIndexCodec):
    """Each gap g as g >> b in unary and its b low bits plain, with the b of the fewest bits for each tensor; lossless.

    b + 1 + (mean of g >> b) bits per kept element: within 1.5% of the entropy log2 C(d, r) / r of random subsets.
    kernels/rice/rice.cpp draws the section.
    """

    name = "rice"
    id = 4
    no_bytes_for_none = True
    sections_of, read_many = staticmethod(rice.encode_many), staticmethod(rice.decode_many)
    section_of, read = staticmethod(rice.encode), staticmethod(rice.decode)
    measured = staticmethod(rice.measured)
