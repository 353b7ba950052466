// Floats without loss, on the host: chunk by chunk, for sections (lossless.cpp) and for whole containers (containers.cpp).
#pragma once

#include "common/cpu.h"
#include "lossless/lossless.h"

// What becomes of a value: it is stored; it is added to 0, or to what is there; it is added to 0 and multiplied.
enum Use { STORED, FIRST, ADDED, SCALED };

// patterns[count], of which *finite says whether they are finite; if not, the chunk is of no use. Returns its bytes.
// Stores up to ROOM bytes past its end.
u32 lossless_encode_chunk(const u32* patterns, u32 count, u8* out, bool* finite);

// Reads a section of form 1, chunk by chunk. All that it returns is 0 or an error. At the end, `at` must be `end`. What it
// `streams` is written past the cache: a stream_fence must follow, before another thread reads it.
struct LosslessReader {
    const u8 *sizes, *at, *end;

    i64 open(const u8* section, u64 bytes, u64 count);
    i64 next(u32 count, Use use, bool streams, float scale, float* out);
};
