// DenseStream (Li, Chao, Liao, Lv: "DenseStream", section III.A): a sparse vector as dense blocks.
//
//     blocks:  start_0 length_0 | start_1 length_1 | ...      u32 each, start_i + length_i <= start_{i+1}
//     values:  length_0 values, length_1 values, ...          zeros inside a block are written out
//
// More than `gap` zeros in a row end a block. The blocks of two streams' sum are the union of their blocks, joined
// where at most `gap` elements are between: the stream of the union of the supports, without another look inside the
// blocks.
#pragma once

#include "common/common.h"

// Whether so many zeros between two elements end a block.
DR_HD bool ends_block(u32 zeros, u32 gap) { return zeros > gap; }

// For the rice code, starts and lengths become two strictly increasing rows. `covered`: the elements of the blocks
// before block b. In `skips`, the gap before entry b is the number of elements between block b - 1 (or `begin`) and
// block b; in `ends`, it is length_b - 1.
DR_HD u32 skip_of_start(u32 start, u32 begin, u32 covered, u32 b) { return start - begin - covered + b; }
DR_HD u64 start_of_skip(u32 skip, u32 begin, u64 covered, u64 b) { return (u64)skip - b + begin + covered; }

// Whether a block of the decoded start ends beyond 32 bits (a start below 0 wraps around).
DR_HD bool block_overflows(u64 start, u64 length) { return (start + length) >> 32 != 0; }
