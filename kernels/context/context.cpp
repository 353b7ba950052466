// Indices, and codes of values, by an adaptive coder: the elements of the tensor are divided into windows of 128. The
// number of kept elements of a window is coded in the context of those before it; where they are in the window, by
// halving it, in the shares that they have if all places are alike. The codes of values follow, window by window.
//
//     section:  | words, a varint | states u32 [N] | words of 16 bits ... | bits, to a whole byte |
//
// The symbols, of sixteen each, are coded by N interleaved rANS coders (Duda, arXiv:1311.2540; Giesen,
// arXiv:1402.3392), of which symbol i uses number i % N; N is 1 below 512 indices, else 4. Bits that no model describes
// are in a string of their own. The models adapt symbol by symbol, as AV1's do: an encoder goes forward through them
// and keeps each symbol's share, and then encodes the symbols backward.
#include "context/context.h"

#include <memory>
#include <new>
#include <vector>

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

u32 lanes_of(u64 count) { return count < 512 ? 1 : 4; }

struct Models {
    Model run[CONTEXTS], window[CONTEXTS], value[VALUE_CONTEXTS];

    Models() {
        for (Model& model : run) begin_model(model);
        for (Model& model : window) begin_model(model);
        for (Model& model : value) begin_model(model);
    }
};

// Keeps the shares of the symbols, and writes the bits.
struct Encoder {
    std::vector<u32> shares;  // | share << 16 | start |
    BitWriter bits;

    explicit Encoder(u8* out) : bits{out} {}
    void put(u32 start, u32 end) { shares.push_back(start | (end - start) << 16); }
    void symbol(Model& model, u32 symbol) {
        put(slot_of(model.start[symbol], symbol), symbol < 15 ? slot_of(model.start[symbol + 1], symbol + 1) : 4096);
        adapt(model, symbol);
    }
    void number(Model& model, const Range* ranges, u32 symbols, u32 number) {
        const u32 found = symbol_of(ranges, symbols, number);
        symbol(model, found);
        bits.put(number - ranges[found].begin, ranges[found].bits);
    }
};

// One half of a window's bits: `length` elements at the lowest bits of low (and of high, for 128).
void put_part(Encoder& to, const Halves& tables, u64 low, u64 high, u32 level, u32 n) {
    while (n && level && n >> level == 0) {
        const u32 half = 1u << (level - 1);
        if (n == 1) {
            const u32 place = low ? (u32)__builtin_ctzll(low) : 64 + (u32)__builtin_ctzll(high);
            return to.bits.put(place, level);
        }
        const u64 first = level == 7 ? low : low & ((1ull << half) - 1), second = level == 7 ? high : low >> half;
        const u32 k = (u32)__builtin_popcountll(first);
        const u16* starts = tables.starts[level][n];
        u32 symbol = k - least_first(n, half);
        if (is_wide(n, half)) {
            const i32 centered = (i32)k - (i32)(n / 2) + 7;
            symbol = centered <= 0 ? 0 : centered >= 15 ? 15 : (u32)centered;
            if (symbol == 0 || symbol == 15) to.bits.put(k, 7);
        }
        to.put(starts[symbol], starts[symbol + 1]);
        put_part(to, tables, first, 0, --level, k);
        low = second, high = 0, n -= k;
    }
}

struct Decoder {
    const u8 *at, *end;
    u32 lanes, lane = 0, state[4];
    BitReader bits;
    bool cut = false;

    template <class Find>
    u32 next(Find find) {
        u32& x = state[lane];
        lane = lane + 1 == lanes ? 0 : lane + 1;
        u32 start, share;
        const u32 slot = x & 4095, symbol = find(slot, start, share);
        x = share * (x >> SHARE_BITS) + slot - start;
        if (x < LOWEST_STATE) {
            if (end - at < 2) {
                cut = true;
                x = LOWEST_STATE;
            } else {
                u16 word;
                std::memcpy(&word, at, 2);
                at += 2;
                x = x << 16 | word;
            }
        }
        return symbol;
    }
    u32 symbol(Model& model) {
        const u32 found = next([&](u32 slot, u32& start, u32& share) {
            u16 slots[SYMBOLS + 1], below = 0;
            for (u32 i = 0; i < SYMBOLS; ++i) slots[i] = (u16)slot_of(model.start[i], i);
            slots[SYMBOLS] = 4096;
            for (u32 i = 0; i < SYMBOLS; ++i) below = (u16)(below + (slots[i] <= slot ? 1 : 0));
            const u32 symbol = below - 1u;
            start = slots[symbol], share = slots[symbol + 1u] - start;
            return symbol;
        });
        adapt(model, found);
        return found;
    }
    u64 number(Model& model, const Range* ranges) {
        const Range range = ranges[symbol(model)];
        return range.begin + bits.get(range.bits);
    }
    u32 of_table(const u16* starts) {
        return next([&](u32 slot, u32& start, u32& share) {
            u16 below = 0;
            for (u32 i = 0; i < SYMBOLS; ++i) below = (u16)(below + (u16)(starts[i] <= slot));
            u32 symbol = below - 1u;
            start = starts[symbol], share = starts[symbol + 1] - start;
            return symbol;
        });
    }
};

// Sets the bits of a part. Returns false if a number of kept elements is impossible.
bool take_part(Decoder& from, const Halves& tables, u64* low, u64* high, u32 shift, u32 level, u32 n) {
    const auto set = [&](u32 place) { (place < 64 ? *low : *high) |= 1ull << (place & 63); };
    while (n) {
        if (n >> level) {  // all of them
            for (u32 i = 0; i < 1u << level; ++i) set(shift + i);
            return true;
        }
        if (n == 1) {
            set(shift + (u32)from.bits.get(level));
            return true;
        }
        const u32 half = 1u << (level - 1), symbol = from.of_table(tables.starts[level][n]);
        u32 k = least_first(n, half) + symbol;
        if (is_wide(n, half)) {
            k = n / 2 + symbol - 7;
            if (symbol == 0 || symbol == 15) k = (u32)from.bits.get(7);
        }
        if (k < least_first(n, half) || k > most_first(n, half)) return false;
        if (!take_part(from, tables, low, high, shift, --level, k)) return false;
        shift += half, n -= k;
    }
    return true;
}

}  // namespace

// Bytes of the bits beside the symbols, and for the stores of BitWriter: a window with n elements has at most 31 bits
// for its two numbers, 7 for each element that is alone in its part, and 7 for each of at most 7 wide parts.
static u64 bits_bound(u64 count, u32 code_bits) { return 6 * count + count * code_bits / 8 + 16; }

// The most bytes of a section: a symbol takes at most 12 bits. A window with n elements has two symbols and those of
// its parts, at most 7 n or 127.
DR_API u64 dr_context_bound(u64 count, u64 numel, u32 code_bits) {
    const u64 windows = (numel + WINDOW - 1) / WINDOW;
    const u64 symbols = 9 * count < 129 * windows ? 9 * count : 129 * windows;
    return 2 * (symbols + (code_bits ? count : 0)) + bits_bound(count, code_bits) + 64;
}

// codes: those of the values, of code_bits bits each, or null if code_bits is 0. Returns the bytes of the section, or
// -1 if memory is short.
DR_API i64 dr_context_encode(const u32* indices, u64 count, const u8* codes, u32 code_bits, u8* out) {
    try {
        const Halves& tables = halves();
        const std::unique_ptr<Models> models(new Models);
        std::vector<u8> raw(bits_bound(count, code_bits));
        Encoder to(raw.data());
        to.shares.reserve(3 * count + 64);
        Density density;
        u64 window = 0;
        const u32 low_bits = code_bits > 4 ? code_bits - 4 : 0;
        u32 before = 7;
        for (u64 i = 0; i < count;) {
            const u64 here = indices[i] / WINDOW;
            const u32 run = (u32)(here - window);
            to.number(models->run[density.context()], RUNS, SYMBOLS, run);
            density.add_empty(run);
            window = here + 1;
            u64 low = 0, high = 0, first = i;
            for (; i < count && indices[i] / WINDOW == here; ++i)
                (indices[i] & 64 ? high : low) |= 1ull << (indices[i] & 63);
            const u32 n = (u32)(i - first);
            to.number(models->window[density.context()], COUNTS, COUNT_SYMBOLS, n - 1);
            density.add(n);
            put_part(to, tables, low, high, 7, n);
            for (u64 j = first; code_bits && j < i; ++j) {
                const u32 top = codes[j] >> low_bits;
                to.symbol(models->value[value_context(n, before)], top);
                if (low_bits) to.bits.put(codes[j] & ((1u << low_bits) - 1), low_bits);
                before = top;
            }
        }
        const u64 raw_bytes = (u64)(to.bits.finish() - raw.data());
        const u32 lanes = lanes_of(count);
        const u64 symbols = to.shares.size();
        std::vector<u16> words(symbols + 1);
        u64 written = 0;
        u32 state[4] = {LOWEST_STATE, LOWEST_STATE, LOWEST_STATE, LOWEST_STATE};
        for (u64 i = symbols; i--;) {
            const u32 start = to.shares[i] & 0xFFFF, share = to.shares[i] >> 16;
            u32 x = state[i % lanes];
            const u32 emit = (x >> 20) >= share;
            words[written] = (u16)x;
            written += emit;
            x >>= 16 * emit;
            state[i % lanes] = (x / share << SHARE_BITS) + x % share + start;
        }
        u8* at = out;
        u64 number = written;
        for (; number > 127; number >>= 7) *at++ = (u8)((number & 127) | 128);
        *at++ = (u8)number;
        std::memcpy(at, state, 4 * lanes);
        at += 4 * lanes;
        for (u64 i = written; i--; at += 2) std::memcpy(at, &words[i], 2);
        std::memcpy(at, raw.data(), raw_bytes);
        return at + raw_bytes - out;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

// Returns 0; ERR_TRUNCATED, ERR_INDEX or ERR_VALUE if dr_context_encode cannot have written the section for `count`
// elements of numel.
DR_API i64 dr_context_decode(const u8* in, u64 bytes, u64 count, u64 numel, u32 code_bits, u32* indices, u8* codes) {
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
    const u32 lanes = lanes_of(count);
    if (bytes - begin < 4 * lanes || words > (bytes - begin - 4 * lanes) / 2) return ERR_TRUNCATED;
    Decoder from;
    std::memcpy(from.state, in + begin, 4 * lanes);
    from.lanes = lanes;
    from.at = in + begin + 4 * lanes, from.end = from.at + 2 * words;
    from.bits = BitReader{from.end, (u64)(in + bytes - from.end)};
    for (u32 lane = 0; lane < lanes; ++lane)
        if (from.state[lane] < LOWEST_STATE) return ERR_VALUE;
    std::unique_ptr<Models> models(new (std::nothrow) Models);
    if (!models) return ERR_TRUNCATED;
    const Halves& tables = halves();
    Density density;
    const u64 windows = (numel + WINDOW - 1) / WINDOW;
    const u32 low_bits = code_bits > 4 ? code_bits - 4 : 0;
    u32 before = 7;
    u64 window = 0;
    for (u64 i = 0; i < count;) {
        if (window >= windows) return ERR_INDEX;
        const u64 run = from.number(models->run[density.context()], RUNS);
        if (from.cut || from.bits.overrun()) return ERR_TRUNCATED;
        if (run >= windows - window) return ERR_INDEX;
        density.add_empty((u32)run);
        window += run;
        const u64 n = from.number(models->window[density.context()], COUNTS) + 1;
        if (n > WINDOW || n > count - i) return ERR_VALUE;
        density.add((u32)n);
        u64 half[2] = {0, 0};
        if (!take_part(from, tables, &half[0], &half[1], 0, 7, (u32)n)) return ERR_VALUE;
        const u64 first = i;
        for (u32 h = 0; h < 2; ++h)
            for (u64 rest = half[h]; rest; rest &= rest - 1) {
                const u64 index = window * WINDOW + 64 * h + (u64)__builtin_ctzll(rest);
                if (index >= numel) return ERR_INDEX;
                indices[i++] = (u32)index;
            }
        ++window;
        for (u64 j = first; code_bits && j < i; ++j) {
            const u32 top = from.symbol(models->value[value_context((u32)n, before)]);
            const u32 code = top << low_bits | (low_bits ? (u32)from.bits.get(low_bits) : 0);
            if (code >> code_bits) return ERR_VALUE;
            codes[j] = (u8)code;
            before = top;
        }
    }
    if (from.cut || from.bits.overrun()) return ERR_TRUNCATED;
    for (u32 lane = 0; lane < lanes; ++lane)
        if (from.state[lane] != LOWEST_STATE) return ERR_VALUE;
    return from.at == from.end && from.bits.ended() ? 0 : (i64)ERR_VALUE;
}
