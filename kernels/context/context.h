// The adaptive coder of windows: its models and tables. context.cpp draws the section. Integers only, so that every
// machine makes the same tables.
#ifndef HVD_DEEPREDUCE_CONTEXT_H
#define HVD_DEEPREDUCE_CONTEXT_H

#include "bits/bits_cpu.h"

const u32 WINDOW = 128;              // elements of a window
const u32 SHARE_BITS = 12;           // shares of symbols sum to 4096
const u32 LOWEST_STATE = 1u << 16;   // of a coder, between two symbols
const u32 SYMBOLS = 16;

// ---- The symbols: a number from `begin` on is a symbol, and bits that follow as they are.
struct Range {
    u32 begin, bits;
};
// How many windows without kept elements come before one with some.
const Range RUNS[SYMBOLS] = {{0, 0},  {1, 0},  {2, 0},  {3, 0},  {4, 1},   {6, 1},   {8, 2},    {12, 2},
                             {16, 3}, {24, 3}, {32, 5}, {64, 6}, {128, 7}, {256, 8}, {512, 10}, {1536, 25}};
// How many elements a window has, less 1. The last three symbols are not used, and a reader refuses them.
const u32 COUNT_SYMBOLS = 13;
const Range COUNTS[SYMBOLS] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}, {4, 0},  {5, 0},  {6, 0},
                               {7, 0}, {8, 2}, {12, 3}, {20, 4}, {36, 5}, {68, 6}, {128, 0}, {128, 0},
                               {128, 0}};

inline u32 symbol_of(const Range* ranges, u32 symbols, u32 number) {
    u32 symbol = 0;
    while (symbol + 1 < symbols && ranges[symbol + 1].begin <= number) ++symbol;
    return symbol;
}

// A model of sixteen symbols that adapts: start[i] is 65536 times the estimated probability of a symbol below i. Each
// symbol moves it by 2^-rate of the way; the rate grows from 2 to 7.
struct Model {
    u16 start[SYMBOLS];
    u32 seen;
};

// All symbols alike.
inline void begin_model(Model& model) {
    for (u32 i = 0; i < SYMBOLS; ++i) model.start[i] = (u16)(i * 4096);
    model.seen = 0;
}

// The slot where symbol i begins, of 4096; every symbol has one slot at least.
inline u32 slot_of(u32 start, u32 i) { return (start * (4096 - SYMBOLS) >> 16) + i; }

inline u32 rate_of(u32 seen) {
    return seen < 4 ? 2 : seen < 12 ? 3 : seen < 28 ? 4 : seen < 90 ? 5 : seen < 400 ? 6 : 7;
}

inline void adapt(Model& model, u32 symbol) {
    const u32 rate = rate_of(model.seen);
    model.seen += model.seen < 400;
    for (u32 i = 0; i < SYMBOLS; ++i) {
        // x - (x >> rate) up to the symbol, and x + ((65535 - x) >> rate) after it.
        const u16 x = model.start[i], after = i > symbol ? 65535 : 0;
        model.start[i] = (u16)(((u16)((u16)(x ^ after) - (u16)((u16)(x ^ after) >> rate))) ^ after);
    }
}

// ---- How dense the windows were so far: two means of their numbers of kept elements, in 1/65536, of which one forgets
// faster.
struct Density {
    i32 fast = 0, slow = 0;

    void add(u32 count) {
        const i32 x = (i32)(count << 16);
        fast += (x - fast) >> 1;
        slow += (x - slow) >> 4;
    }
    void add_empty(u32 windows) {
        for (u32 i = 0; i < windows && i < 64; ++i) add(0);
    }
    // Octaves of their mean.
    u32 context() const { return bit_length((u32)(fast + slow)); }
};
const u32 CONTEXTS = 25;

// ---- The parts of a window: a run of `length` elements of which n are kept is halved; k of them are in the first half.
// Where k can have at most 16 values, the symbol is k less its least value. Otherwise it is k - n / 2 + 7; a symbol of
// 0 or 15 then means that k follows in 7 bits.
inline u32 least_first(u32 n, u32 half) { return n > half ? n - half : 0; }
inline u32 most_first(u32 n, u32 half) { return n < half ? n : half; }
inline bool is_wide(u32 n, u32 half) { return most_first(n, half) - least_first(n, half) >= SYMBOLS; }

// Shares of the symbols for log2(length) 1 .. 7 and n, from the hypergeometric distribution, which is that of k if all
// sets of n elements are alike. starts[i]: the slot where symbol i begins; a symbol that cannot occur has none.
struct Halves {
    u16 starts[8][WINDOW + 1][SYMBOLS + 1];
    Halves();
};

// ---- The codes of values: the high four bits are a symbol, the others follow as they are.
inline u32 value_context(u32 count, u32 before) {
    const u32 magnitude = (before > 7 ? before - 8 : 7 - before) >> 1;
    const u32 crowd = count < 2 ? 0 : count < 4 ? 1 : count < 8 ? 2 : 3;
    return crowd * 4 + magnitude;
}
const u32 VALUE_CONTEXTS = 16;

#endif
