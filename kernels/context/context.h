// The adaptive coder of windows: its models and tables. context.cpp draws the section. Integers only, so that every
// machine makes the same tables.
#pragma once

#include "bits/bits_cpu.h"

const u32 WINDOW = 128;              // elements of a window
const u32 SHARE_BITS = 12;           // shares of symbols sum to 4096
const u32 LOWEST_STATE = 1u << 16;   // of a coder, between two symbols
const u32 SYMBOLS = 16;
const u64 PARTED = 4096;             // a section of so many indices has four parts

// ---- The symbols: a number from `begin` on is a symbol, and bits that follow as they are.
struct Range {
    u32 begin, bits;
};
// How many windows without kept elements come before one with some.
const Range RUNS[SYMBOLS] = {{0, 0},  {1, 0},  {2, 0},  {3, 0},  {4, 1},   {6, 1},   {8, 2},    {12, 2},
                             {16, 3}, {24, 3}, {32, 5}, {64, 6}, {128, 7}, {256, 8}, {512, 10}, {1536, 25}};
// How many elements a window has (less 1 after a run). A reader refuses more than 128.
const Range COUNTS[SYMBOLS] = {{0, 0}, {1, 0},  {2, 0},  {3, 0},  {4, 0},  {5, 0},  {6, 0},  {7, 0},
                               {8, 1}, {10, 1}, {12, 2}, {16, 2}, {20, 3}, {28, 4}, {44, 5}, {76, 6}};

// The symbols of numbers below 128, and those of larger ones by a search.
struct Numbers {
    const Range* ranges;
    u8 symbols[128];

    explicit Numbers(const Range* of) : ranges(of) {
        for (u32 number = 0, symbol = 0; number < 128; ++number)
            symbols[number] = (u8)(symbol = search(symbol, number));
    }
    u32 symbol_of(u32 number) const { return number < 128 ? symbols[number] : search(symbols[127], number); }

  private:
    u32 search(u32 symbol, u32 number) const {
        while (symbol < SYMBOLS - 1 && ranges[symbol + 1].begin <= number) ++symbol;
        return symbol;
    }
};

// ---- A model counts symbols, in 1/16, and gives them shares of 4096. The shares follow the counts only where `remake`
// is called, so that symbols do not wait for one another.
const u32 SEEN = 16;            // one symbol
const u32 BELIEF = 24 * SEEN;   // what the first counts sum to, roughly
const u32 MOST_SEEN = 1 << 15;  // then counts are halved

struct Model {
    u16 start[SYMBOLS + 1];  // symbol s has the slots start[s] .. start[s + 1] - 1
    u16 changed;
    u32 count[SYMBOLS];

    void saw(u32 symbol) {
        count[symbol] += SEEN;
        changed = 1;
    }
    void remake() {
        u32 total = 0;
        for (u32 s = 0; s < SYMBOLS; ++s) total += count[s];
        if (total > MOST_SEEN) {
            total = 0;
            for (u32 s = 0; s < SYMBOLS; ++s) total += count[s] = (count[s] + 1) >> 1;
        }
        const u32 factor = ((4096 - SYMBOLS) << 19) / total;
        for (u32 s = 0, below = 0; s < SYMBOLS; ++s) {
            start[s] = (u16)((below * factor >> 19) + s);
            below += count[s];
        }
        start[SYMBOLS] = 4096;
        changed = 0;
    }
};

// ---- How dense the windows were so far: two means of their numbers of kept elements, in 1/65536, of which one forgets
// faster.
struct Density {
    u32 fast, slow;

    void add(u32 count) {
        fast = (fast + (count << 16)) >> 1;
        slow = (15 * slow + (count << 16)) >> 4;
    }
    void add_empty(u32 windows, const u32* fade) {
        fast >>= windows < 31 ? windows : 31;
        slow = (u32)((u64)slow * fade[windows < LONGEST_FADE ? windows : LONGEST_FADE] >> 16);
    }
    // Octaves of their sum, and whether the density falls, stays or rises.
    u32 octave() const { return bit_length(fast + slow); }
    u32 context(u32 octave) const { return 3 * octave + (2 * fast >= slow) + (fast >= 2 * slow); }

    static const u32 LONGEST_FADE = 64;
};
const u32 OCTAVES = 26;
// From this octave on, where a window has 1/4 element or more, every window has a count, be it 0. Below, the number of
// empty windows before the next comes first.
const u32 CROWDED = 16;

// Means of gamma distributions of shape 2 give the first counts: with the mean m = 3 * 2^(octave - 19), a run has k
// windows or more with chance (2 / (2 + k m))^2, and a window has n elements or more with chance q^n (1 + n (1 - q)),
// where q is m / (m + 2).
inline void believe_run(Model& model, u32 octave) {
    u32 left = BELIEF;
    for (u32 s = 0; s < SYMBOLS; ++s) {
        const u64 end = (1u << 20) + ((u64)(s < SYMBOLS - 1 ? 3 * RUNS[s + 1].begin : 0) << octave);
        const u32 rest = s < SYMBOLS - 1 ? (u32)(((u64)BELIEF << 40) / (end * end)) : 0;
        model.count[s] = left - rest + 1;
        left = rest;
    }
    model.remake();
}
// least: 0, or 1 where a window is known to have an element.
inline void believe_count(Model& model, u32 octave, u32 least) {
    const u64 mean = (u64)3 << (octave < 8 ? 8 : octave), q = (mean << 16) / (mean + (1u << 20));
    u64 power = 65536, all = 0;
    u32 left = BELIEF;
    for (u32 n = 0, s = 0; s < SYMBOLS - 1; ++n, power = power * q >> 16) {
        const u64 chance = power * (65536 + n * (65536 - q));
        if (n == least) all = chance;
        if (n != COUNTS[s + 1].begin + least) continue;
        const u32 rest = (u32)(BELIEF * chance / all);
        model.count[s++] = left - rest + 1;
        left = rest;
    }
    model.count[SYMBOLS - 1] = left + 1;
    model.remake();
}

// ---- The parts of a window: a run of `length` elements of which n are kept is halved; k of them are in the first
// half. Two of 2^5 elements or more are a field: where one is, and how far the other is from there, if the first
// follows the last. Where k can have at most 16 values, the symbol is k less its least value. Otherwise it is
// k - n / 2 + 7; a symbol of 0 or 15 then means that k follows in 7 bits.
inline u32 least_first(u32 n, u32 half) { return n > half ? n - half : 0; }
inline u32 most_first(u32 n, u32 half) { return n < half ? n : half; }
const u32 PAIRS_FROM = 5;
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

struct Models {
    Model run[3 * CROWDED], first[3 * CROWDED], count[3 * OCTAVES], value[VALUE_CONTEXTS];
    u32 fade[Density::LONGEST_FADE + 1];

    Models() {
        for (u32 c = 0; c < 3 * CROWDED; ++c) believe_run(run[c], c / 3), believe_count(first[c], c / 3, 1);
        for (u32 c = 0; c < 3 * OCTAVES; ++c) believe_count(count[c], c / 3, 0);
        fade[0] = 65536;
        for (u32 i = 0; i < Density::LONGEST_FADE; ++i) fade[i + 1] = fade[i] * 15 >> 4;
    }
    void begin_values(u32 code_bits) {
        for (Model& model : value) {
            for (u32 s = 0; s < SYMBOLS; ++s) model.count[s] = s >> code_bits ? 0 : SEEN / 2;
            model.remake();
        }
    }
    void remake() {
        remake_changed(run), remake_changed(first), remake_changed(count), remake_changed(value);
    }

  private:
    template <u32 N>
    static void remake_changed(Model (&models)[N]) {
        for (Model& model : models)
            if (model.changed) model.remake();
    }
};

// The models are remade before round 8, and then before the rounds that this gives.
inline u64 next_remake(u64 round) { return round + (round < 2048 ? round / 4 : 512); }
