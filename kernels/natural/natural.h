// Natural compression: values rounded to powers of two. A value becomes its float32 exponent field, one byte; signs are
// sent apart (kernels/sign). common.h has the rounding of one value, natural_exponent.
#ifndef HVD_DEEPREDUCE_NATURAL_H
#define HVD_DEEPREDUCE_NATURAL_H

#include "sign/sign.h"

const u32 LARGEST_EXPONENT = 254;  // of a finite float32; 255 is infinity's

#endif
