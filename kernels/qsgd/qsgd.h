// QSGD's section (value/qsgd.py), where no entropy coder is used:
//
//     | header, 8 bytes | norms float32 [buckets] | codes, `bits` bits each |
//
// A code is s + sign * level, 0 .. 2 s. common.h has the arithmetic of one value: qsgd_level and qsgd_value.
#ifndef HVD_DEEPREDUCE_QSGD_H
#define HVD_DEEPREDUCE_QSGD_H

#include "common/common.h"

// s: levels of a sign, so that the codes of both signs and zero fit into `bits` bits.
DR_HD u32 qsgd_levels(u32 bits) { return (1u << (bits - 1)) - 1; }

#endif
