// MinMaxSketch: bucket numbers in fewer bins than numbers (SketchML; SKCompress, section 4.2).
//
//     rows of `columns` bins:   row 0 | . . 3 . . |      insert: in each row, the bin of the key's hash becomes the
//                               row 1 | . 2 . . . |      smaller of its number and the new one; query: the largest of
//                               ...                      the key's bins. A bin begins with the largest number.
//
// A query returns the inserted number or a smaller one. A row's hash depends on the container's seed, parameter and
// step, so that a key that loses its bin in one step may keep it in the next.
#pragma once

#include "common/common.h"

const u32 MAX_ROWS = 8;

// The seed of a row's hash.
DR_HD u32 sketch_row_seed(u32 row, u32 seed, u32 parameter, u32 step) {
    return philox4x32(seed, parameter, row, step, STREAM_SKETCH, 0).x;
}

// The bin of a key in one row of a MinMaxSketch: the hash, scaled from [0, 2^32) to [0, columns).
DR_HD u32 sketch_column(u32 key, u32 row_seed, u32 columns) {
    return (u32)(((u64)fmix32(key ^ row_seed) * columns) >> 32);
}
