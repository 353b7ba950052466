// Indices, and codes of values, by an adaptive coder: the elements of the tensor are divided into windows of 128. The
// number of kept elements of a window is coded in the context of those before it; where they are in the window, in the
// shares that they have if all places are alike. The codes of values follow, window by window.
//
//     section:  | words, a varint | parts u32 [2 (N - 1)] | states u32 [N] | words of 16 bits ... |
//               | bits, to a whole byte |
//
// From 4096 indices on there are N = 4 parts, otherwise N is 1. Part p > 0 begins with a window, and after a number of
// indices, which `parts` has. The parts are coded in turn, a step of each, since a processor then works on four at
// once. Each has a rANS coder (Duda, arXiv:1311.2540; Giesen, arXiv:1402.3392) for its symbols, of sixteen each. All
// share the words, the bits, which no model describes, and the models. These adapt: an encoder goes forward through
// them and keeps each symbol's share, and then encodes the symbols backward.
#include "context/context.h"

#include <memory>
#include <new>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

Halves::Halves() {
    typedef unsigned __int128 u128;
    u64 choose[WINDOW / 2 + 1][WINDOW / 2 + 1] = {};
    for (u32 n = 0; n <= WINDOW / 2; ++n)
        for (u32 k = 0; k <= n; ++k) choose[n][k] = k == 0 || k == n ? 1 : choose[n - 1][k - 1] + choose[n - 1][k];
    std::memset(starts, 0, sizeof starts);
    for (u32 level = 1; level < 8; ++level)
        for (u32 n = 1, half = 1u << (level - 1); n < 2 * half; ++n) {
            const u32 least = least_first(n, half), most = most_first(n, half);
            u128 weight[SYMBOLS] = {}, total = 0;
            for (u32 k = least; k <= most; ++k) {
                const u128 ways = (u128)choose[half][k] * choose[half][n - k];
                i32 symbol = (i32)(k - least);
                if (is_wide(n, half)) {
                    symbol = (i32)k - (i32)(n / 2) + 7;
                    symbol = symbol < 0 ? 0 : symbol > 15 ? 15 : symbol;
                }
                weight[symbol] += ways;
                total += ways;
            }
            u32 shift = 0;
            while (total >> shift >> 112) ++shift;
            u32 share[SYMBOLS], sum = 0, largest = 0;
            for (u32 s = 0; s < SYMBOLS; ++s) {
                share[s] = weight[s] ? 1 + (u32)((weight[s] >> shift) * (4096 - SYMBOLS) / (total >> shift)) : 0;
                sum += share[s];
                if (share[s] > share[largest]) largest = s;
            }
            share[largest] += 4096 - sum;
            for (u32 s = 0, start = 0; s < SYMBOLS; ++s) {
                starts[level][n][s] = (u16)start;
                start += share[s];
            }
            starts[level][n][SYMBOLS] = 4096;
        }
}

namespace {

const Halves& halves() {
    static const Halves tables;
    return tables;
}

// As they are before the first symbol, but for those of values.
const Models& first_models() {
    static const Models models;
    return models;
}

u32 parts_of(u64 count) { return count < PARTED ? 1 : 4; }

struct Part {
    u64 window, index, end;  // the next window and index, and the first index of the next part
    Density density;
    u32 before = 7;
};

// The densities with which all parts begin.
Density first_density(u64 count, u64 windows) {
    const u32 mean = (u32)((count << 16) / windows);
    return {mean, mean};
}

// Two different places of 2^level: the first, and the distance to the second less 1, going round.
u32 pair_code(u32 low, u32 high, u32 level) {
    const u32 half = 1u << (level - 1);
    return high - low <= half ? low | (high - low - 1) << level : high | (low + 2 * half - high - 1) << level;
}

// Keeps the shares of the symbols, and writes the bits.
struct Encoder {
    std::vector<u32> shares;  // | part << 28 | share << 12 | start |
    u64 symbols = 0;
    BitWriter bits;
    u32 part = 0;

    Encoder(u8* out, u64 symbols_expected) : shares(symbols_expected), bits{out} {}
    // Makes room for the symbols of a step.
    void reserve(u64 more) {
        if (shares.size() - symbols < more) shares.resize(2 * shares.size() + more);
    }
    void put(const u16* start) { shares[symbols++] = part << 28 | (u32)(start[1] - start[0]) << 12 | start[0]; }
    void symbol(Model& model, u32 symbol) {
        put(model.start + symbol);
        model.saw(symbol);
    }
    void number(Model& model, const Numbers& numbers, u32 number) {
        const u32 found = numbers.symbol_of(number);
        symbol(model, found);
        bits.put(number - numbers.ranges[found].begin, numbers.ranges[found].bits);
    }
};

// One half of a window's bits: `length` elements at the lowest bits of low (and of high, for 128).
void put_part(Encoder& to, const Halves& tables, u64 low, u64 high, u32 level, u32 n) {
    const auto place = [&] { return low ? (u32)__builtin_ctzll(low) : 64 + (u32)__builtin_ctzll(high); };
    while (n && n >> level == 0) {
        const u32 half = 1u << (level - 1);
        if (n == 1) return to.bits.put(place(), level);
        if (n == 2 && level >= PAIRS_FROM) {
            const u32 first = place();
            (low ? low : high) &= (low ? low : high) - 1;
            return to.bits.put(pair_code(first, place(), level), 2 * level - 1);
        }
        const u64 first = level == 7 ? low : low & ((1ull << half) - 1), second = level == 7 ? high : low >> half;
        const u32 k = (u32)__builtin_popcountll(first);
        u32 symbol = k - least_first(n, half);
        if (is_wide(n, half)) {
            const i32 centered = (i32)k - (i32)(n / 2) + 7;
            symbol = centered <= 0 ? 0 : centered >= 15 ? 15 : (u32)centered;
            if (symbol == 0 || symbol == 15) to.bits.put(k, 7);
        }
        to.put(tables.starts[level][n] + symbol);
        put_part(to, tables, first, 0, --level, k);
        low = second, high = 0, n -= k;
    }
}

// The number of starts up to the slot. They do not decrease, and the first is 0.
inline u32 starts_to(const u16* starts, u32 slot) {
#ifdef __SSE2__
    const __m128i x = _mm_set1_epi16((short)slot);
    const __m128i low = _mm_cmpgt_epi16(_mm_loadu_si128((const __m128i*)starts), x);
    const __m128i high = _mm_cmpgt_epi16(_mm_loadu_si128((const __m128i*)(starts + 8)), x);
    return (u32)__builtin_ctz((u32)_mm_movemask_epi8(_mm_packs_epi16(low, high)) | 1u << SYMBOLS);
#else
    u32 below = 0;
    for (u32 i = 0; i < SYMBOLS; ++i) below += starts[i] <= slot;
    return below;
#endif
}

struct Decoder {
    const u8 *at, *end;
    u32 state[4];
    u32 part = 0;
    BitReader bits;
    bool cut = false;

    u32 next(const u16* starts) {
        u32 x = state[part];
        const u32 slot = x & 4095, symbol = starts_to(starts, slot) - 1;
        x = (u32)(starts[symbol + 1] - starts[symbol]) * (x >> SHARE_BITS) + slot - starts[symbol];
        if (end - at >= 2) {
            u16 word;
            std::memcpy(&word, at, 2);
            const u32 low = x < LOWEST_STATE;
            at += 2 * low;
            x = x << 16 * low | (word & (0u - low));
        } else if (x < LOWEST_STATE) {
            cut = true;
            x = LOWEST_STATE;
        }
        state[part] = x;
        return symbol;
    }
    u32 symbol(Model& model) {
        const u32 found = next(model.start);
        model.saw(found);
        return found;
    }
    u64 number(Model& model, const Range* ranges) {
        const Range range = ranges[symbol(model)];
        return range.begin + bits.get(range.bits);
    }
};

// Sets the bits of a part. Returns false if a number of kept elements is impossible.
bool take_part(Decoder& from, const Halves& tables, u64* words, u32 shift, u32 level, u32 n) {
    const auto set = [&](u32 place) { words[place >> 6] |= 1ull << (place & 63); };
    while (n) {
        if (n >> level) {  // all of them
            for (u32 i = 0; i < 1u << level; ++i) set(shift + i);
            return true;
        }
        if (n == 1) {
            set(shift + (u32)from.bits.get(level));
            return true;
        }
        if (n == 2 && level >= PAIRS_FROM) {
            const u32 pair = (u32)from.bits.get(2 * level - 1), mask = (1u << level) - 1;
            set(shift + (pair & mask));
            set(shift + ((pair + (pair >> level) + 1) & mask));
            return true;
        }
        const u32 half = 1u << (level - 1), symbol = from.next(tables.starts[level][n]);
        u32 k = least_first(n, half) + symbol;
        if (is_wide(n, half)) {
            k = n / 2 + symbol - 7;
            if (symbol == 0 || symbol == 15) k = (u32)from.bits.get(7);
        }
        if (k < least_first(n, half) || k > most_first(n, half)) return false;
        if (!take_part(from, tables, words, shift, --level, k)) return false;
        shift += half, n -= k;
    }
    return true;
}

}  // namespace

// Bytes of the bits beside the symbols, and for the stores of BitWriter: a window with n elements has at most 31 bits
// for its two numbers, 7 for each element that is alone in its part, and 7 for each of at most 7 wide parts.
static u64 bits_bound(u64 count, u32 code_bits) { return 6 * count + count * code_bits / 8 + 16; }

// The most bytes of a section: a symbol takes at most 12 bits. A window with n elements has two symbols and those of
// its parts, at most 7 n or 127; an empty one has at most one.
DR_API u64 dr_context_bound(u64 count, u64 numel, u32 code_bits) {
    const u64 windows = (numel + WINDOW - 1) / WINDOW;
    const u64 symbols = 9 * count < 129 * windows ? 9 * count : 129 * windows;
    return 2 * (symbols + windows + (code_bits ? count : 0)) + bits_bound(count, code_bits) + 64;
}

// codes: those of the values, of code_bits bits each, or null if code_bits is 0. Returns the bytes of the section, or
// -1 if memory is short.
DR_API DR_CLONES i64 dr_context_encode(const u32* indices, u64 count, u64 numel, const u8* codes, u32 code_bits,
                                       u8* out) {
    try {
        static const Numbers runs(RUNS), counts(COUNTS);
        const Halves& tables = halves();
        const std::unique_ptr<Models> models(new Models(first_models()));
        if (code_bits) models->begin_values(code_bits);
        const std::unique_ptr<u8[]> raw(new u8[bits_bound(count, code_bits)]);
        Encoder to(raw.get(), (code_bits ? 2 : 1) * count + count / 4);
        const u32 parts = parts_of(count), low_bits = code_bits > 4 ? code_bits - 4 : 0;
        const Density density = first_density(count, (numel + WINDOW - 1) / WINDOW);
        Part part[4];
        part[0] = {0, 0, count, density};
        for (u32 p = 1; p < parts; ++p) {
            u64 first = count * p / parts;
            const u64 window = indices[first] / WINDOW;
            while (indices[first - 1] / WINDOW == window) --first;
            part[p] = {window, first, count, density};
            part[p - 1].end = first;
        }
        u8 heads[24];
        for (u32 p = 1; p < parts; ++p) {
            const u32 head[2] = {(u32)part[p].window, (u32)part[p].index};
            std::memcpy(heads + 8 * (p - 1), head, 8);
        }
        u64 remake = 8;
        for (u64 round = 0, more = 1; more; ++round) {
            if (round == remake) {
                models->remake();
                remake = next_remake(round);
            }
            more = 0;
            for (u32 p = 0; p < parts; ++p) {
                Part& one = part[p];
                if (one.index == one.end) continue;
                more = 1;
                to.part = p;
                to.reserve(2 * WINDOW + 2);
                const u64 i = one.index, here = indices[i] / WINDOW;
                const u32 octave = one.density.octave();
                u32 context = one.density.context(octave);
                if (octave < CROWDED) {
                    const u32 run = (u32)(here - one.window);
                    to.number(models->run[context], runs, run);
                    one.density.add_empty(run, models->fade);
                    one.window = here;
                }
                u32 n = 0;
                const u64 last = one.end - i;
                const u64 limit = (one.window + 1) * WINDOW;
                while (n < last && indices[i + n] < limit) ++n;
                if (octave < CROWDED) {
                    context = one.density.context(one.density.octave());
                    to.number(models->first[context], counts, n - 1);
                } else {
                    to.number(models->count[context], counts, n);
                }
                one.density.add(n);
                ++one.window;
                one.index += n;
                if (n == 2) {
                    to.bits.put(pair_code(indices[i] % WINDOW, indices[i + 1] % WINDOW, 7), 13);
                } else if (n == 1) {
                    to.bits.put(indices[i] % WINDOW, 7);
                } else if (n) {
                    u64 low = 0, high = 0;
                    for (u32 j = 0; j < n; ++j) (indices[i + j] & 64 ? high : low) |= 1ull << (indices[i + j] & 63);
                    put_part(to, tables, low, high, 7, n);
                }
                for (u64 j = i; code_bits && j < i + n; ++j) {
                    const u32 top = codes[j] >> low_bits;
                    to.symbol(models->value[value_context(n, one.before)], top);
                    if (low_bits) to.bits.put(codes[j] & ((1u << low_bits) - 1), low_bits);
                    one.before = top;
                }
            }
        }
        const u64 raw_bytes = (u64)(to.bits.finish() - raw.get());
        const std::unique_ptr<u16[]> words(new u16[to.symbols + 1]);
        u64 written = 0;
        u32 state[4] = {LOWEST_STATE, LOWEST_STATE, LOWEST_STATE, LOWEST_STATE};
        for (u64 i = to.symbols; i--;) {
            const u32 start = to.shares[i] & 4095, share = to.shares[i] >> 12 & 0xFFFF, lane = to.shares[i] >> 28;
            u32 x = state[lane];
            const u32 emit = (x >> 20) >= share;
            words[written] = (u16)x;
            written += emit;
            x >>= 16 * emit;
            state[lane] = (x / share << SHARE_BITS) + x % share + start;
        }
        u8* at = out;
        u64 number = written;
        for (; number > 127; number >>= 7) *at++ = (u8)((number & 127) | 128);
        *at++ = (u8)number;
        std::memcpy(at, heads, 8 * (parts - 1));
        at += 8 * (parts - 1);
        std::memcpy(at, state, 4 * parts);
        at += 4 * parts;
        for (u64 i = written; i--; at += 2) std::memcpy(at, &words[i], 2);
        std::memcpy(at, raw.get(), raw_bytes);
        return at + raw_bytes - out;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

// Returns 0; ERR_TRUNCATED, ERR_INDEX or ERR_VALUE if it has not `count` indices below numel. Several sections may
// decode to the same indices, of which dr_context_encode writes one.
DR_API DR_CLONES i64 dr_context_decode(const u8* in, u64 bytes, u64 count, u64 numel, u32 code_bits, u32* indices,
                                       u8* codes) {
    u64 words = 0, begin = 0;
    for (u32 place = 0;; place += 7) {
        if (begin >= bytes || place > 56) return ERR_TRUNCATED;
        const u8 byte = in[begin++];
        words |= (u64)(byte & 127) << place;
        if (byte < 128) {
            if (!byte && place) return ERR_VALUE;
            break;
        }
    }
    const u32 parts = parts_of(count), low_bits = code_bits > 4 ? code_bits - 4 : 0;
    const u64 fixed = 4 * parts + 8 * (parts - 1), windows = (numel + WINDOW - 1) / WINDOW;
    if (count > numel) return ERR_INDEX;
    if (bytes - begin < fixed || words > (bytes - begin - fixed) / 2) return ERR_TRUNCATED;
    const Density density = first_density(count, windows);
    Part part[4];
    u64 limit[4];  // the first window of the next part
    part[0] = {0, 0, count, density};
    limit[parts - 1] = windows;
    for (u32 p = 1; p < parts; ++p, begin += 8) {
        u32 head[2];
        std::memcpy(head, in + begin, 8);
        part[p] = {head[0], head[1], count, density};
        part[p - 1].end = head[1];
        limit[p - 1] = head[0];
        if (head[0] < part[p - 1].window || head[0] >= windows) return ERR_INDEX;
        if (head[1] < part[p - 1].index || head[1] > count) return ERR_VALUE;
    }
    Decoder from;
    std::memcpy(from.state, in + begin, 4 * parts);
    from.at = in + begin + 4 * parts, from.end = from.at + 2 * words;
    from.bits = BitReader{from.end, (u64)(in + bytes - from.end)};
    for (u32 p = 0; p < parts; ++p)
        if (from.state[p] < LOWEST_STATE) return ERR_VALUE;
    std::unique_ptr<Models> models(new (std::nothrow) Models(first_models()));
    if (!models) return ERR_TRUNCATED;
    if (code_bits) models->begin_values(code_bits);
    const Halves& tables = halves();
    u64 remake = 8;
    for (u64 round = 0, more = 1; more; ++round) {
        if (from.cut || from.bits.overrun()) return ERR_TRUNCATED;
        if (round == remake) {
            models->remake();
            remake = next_remake(round);
        }
        more = 0;
        for (u32 p = 0; p < parts; ++p) {
            Part& one = part[p];
            if (one.index == one.end) continue;
            more = 1;
            from.part = p;
            u64 n;
            const u32 octave = one.density.octave();
            u32 context = one.density.context(octave);
            if (octave < CROWDED) {
                const u64 run = from.number(models->run[context], RUNS);
                if (run >= limit[p] - one.window) return ERR_INDEX;
                one.density.add_empty((u32)run, models->fade);
                one.window += run;
                context = one.density.context(one.density.octave());
                n = from.number(models->first[context], COUNTS) + 1;
            } else {
                if (one.window >= limit[p]) return ERR_INDEX;
                n = from.number(models->count[context], COUNTS);
            }
            const u64 i = one.index;
            if (n > WINDOW || n > one.end - i) return ERR_VALUE;
            one.density.add((u32)n);
            const u64 base = one.window++ * WINDOW;
            one.index += n;
            if (n <= 2 && one.end - i >= 2) {  // without a branch; the next window writes over what is too much
                const u32 pair = (u32)from.bits.get(n * 7 - (n >> 1));
                const u32 x = pair & 127, y = (pair + (pair >> 7) + 1) & 127;
                const u32 first = n < 2 || x < y ? x : y;
                indices[i] = (u32)base + first;
                indices[i + 1] = (u32)base + (x ^ y ^ first);
            } else {
                u64 half[2] = {0, 0};
                if (!take_part(from, tables, half, 0, 7, (u32)n)) return ERR_VALUE;
                u32* to = indices + i;
                for (u32 h = 0; h < 2; ++h)
                    for (u64 rest = half[h]; rest; rest &= rest - 1)
                        *to++ = (u32)(base + 64 * h) + (u32)__builtin_ctzll(rest);
            }
            for (u64 j = i; code_bits && j < i + n; ++j) {
                const u32 top = from.symbol(models->value[value_context((u32)n, one.before)]);
                const u32 code = top << low_bits | (low_bits ? (u32)from.bits.get(low_bits) : 0);
                if (code >> code_bits) return ERR_VALUE;
                codes[j] = (u8)code;
                one.before = top;
            }
        }
    }
    if (from.cut || from.bits.overrun()) return ERR_TRUNCATED;
    for (u32 p = 0; p < parts; ++p)
        if (from.state[p] != LOWEST_STATE) return ERR_VALUE;
    if (indices[count - 1] >= numel) return ERR_INDEX;
    return from.at == from.end && from.bits.ended() ? 0 : (i64)ERR_VALUE;
}
