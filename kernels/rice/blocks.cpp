// Golomb-Rice code of gaps with a parameter for each block of 64 of them, for supports whose density changes: rice.cpp
// has the code with one parameter, and the gaps and their two strings are as there.
//
//     section:  | parameters: a field of 5 bits for each block, to a whole byte | lows | highs, to a whole byte |
//     lows:     for each block a field of b bits for each gap, to a whole byte, where b is the block's parameter
//
// The lows of a block of 64 gaps are 8 b bytes, so every block begins at a byte. The highs are one string.
#include "bits/avx512.h"
#include "rice/gap_writer.h"
#include "rice/rice.h"

// The parameters, and the bytes of the section.
// Writes the parameters of count >= 1 indices, a byte for each block. Returns the bytes of the section.
DR_API DR_CLONES u64 dr_rice_blocks_plan(const u32* indices, u64 count, u8* parameters) {
    u64 low_bytes = 0, bits = count;
    u32 next = 0;
    for (u64 at = 0, j = 0; at < count; at += RICE_BLOCK, ++j) {
        const u32 size = rice_block_size(count, j);
        const u32* block = indices + at;
        u32 gaps[RICE_BLOCK] = {block[0] - next};
        for (u32 i = 1; i < size; ++i) gaps[i] = block[i] - block[i - 1] - 1;
        const u64 span = (u64)block[size - 1] + 1 - next;
        next = block[size - 1] + 1;
        u64 highs = 0;
        const u32 b = rice_downhill(rice_block_first(size, span), size, [&](u32 b, u64* sums) {
            const u32 less = b ? b - 1 : 0, more = b < 31 ? b + 1 : 31;
            u32 sum_less = 0, sum = 0, sum_more = 0;  // below numel
            for (u32 i = 0; i < RICE_BLOCK; ++i) {
                sum_less += gaps[i] >> less;
                sum += gaps[i] >> b;
                sum_more += gaps[i] >> more;
            }
            sums[0] = sum_less, sums[1] = sum, sums[2] = sum_more;
            highs = sum;
        });
        parameters[j] = (u8)b;
        low_bytes += field_bytes(size, b);
        bits += highs;
    }
    return rice_block_fields(count) + low_bytes + (bits + 7) / 8;
}

DR_API u64 dr_rice_blocks_bound(u64 count, u64 numel) { return rice_blocks_bound(count, numel); }

#ifdef DR_X86
// Writes one whole block; pack16 stores up to 16 bytes after its lows.
DR_AVX512 static void encode_block(const u32* block, u32 next, u32 b, u8* lows, BitWriter& highs) {
    const __m512i one = _mm512_set1_epi32(1), lanes = lane_numbers();
    const __m512i mask = _mm512_set1_epi32((int)((1u << b) - 1));
    const __m128i shift = _mm_cvtsi32_si128((int)b);
    __m512i previous = _mm512_set1_epi32((int)(next - 1));
    for (u32 i = 0; i < RICE_BLOCK; i += 16) {
        const __m512i index = _mm512_loadu_si512(block + i);
        const __m512i before = _mm512_add_epi32(_mm512_alignr_epi32(index, previous, 15), one);
        const __m512i gap = _mm512_sub_epi32(index, before);
        previous = index;
        if (b) pack16(_mm512_and_si512(gap, mask), b, lows + i / 8 * b);
        put_ones(highs, _mm512_add_epi32(prefix_sums(_mm512_srl_epi32(gap, shift)), lanes));
    }
}

// Reads whole blocks and returns the number of their indices. lows: the place of the next block's lows. *position
// becomes the next bit of the highs, *next the index after the last one.
DR_AVX512 static u64 decode_avx512(const u8* in, u64 bytes, const u8* parameters, u64* lows, u64 low_end, u64 count,
                                   u64 numel, u32* indices, u64* position, u64* next, bool* bad) {
    Ones ones(in + low_end, bytes - low_end);
    const __m512i one = _mm512_set1_epi32(1), most = _mm512_set1_epi32((int)(u32)(numel - 1));
    __m512i previous = _mm512_set1_epi32(-1), places = previous, last_place = previous;
    __mmask16 wrong = 0;
    u64 i = 0;
    for (; i + RICE_BLOCK <= count; i += RICE_BLOCK) {
        const u32 b = parameters[i / RICE_BLOCK];
        if (*lows + 6 * b + 64 > bytes) break;
        const Fields fields = fields_of(b);
        const __m128i shift = _mm_cvtsi32_si128((int)b);
        const __m512i most_high = _mm512_srl_epi32(most, shift);
        for (u32 k = 0; k < RICE_BLOCK; k += 16) {
            if (!next_ones(ones, places)) {
                *bad = wrong != 0;
                return i;
            }
            const __m512i before = _mm512_alignr_epi32(places, last_place, 15);
            const __m512i high = _mm512_sub_epi32(_mm512_sub_epi32(places, before), one);
            const __m512i low = unpack16(in + *lows + k / 8 * b, fields);
            const __m512i gap = _mm512_or_si512(_mm512_sll_epi32(high, shift), low);
            const __m512i index = _mm512_add_epi32(last_lane(previous), prefix_sums(_mm512_add_epi32(gap, one)));
            wrong |= _mm512_cmpgt_epu32_mask(high, most_high) | _mm512_cmpgt_epu32_mask(gap, most) |
                     not_increasing(index, previous);
            previous = index, last_place = places;
            _mm512_storeu_si512(indices + i + k, index);
        }
        *lows += field_bytes(RICE_BLOCK, b);
        *position = last_of(last_place) + 1ull;
        *next = last_of(previous) + 1ull;
    }
    *bad = wrong || (i && *next > numel);
    return i;
}

// As decode_avx512. Within a block the number of zeros before a place is known without the places before it; only the
// lows are summed up. If the index after a block is not above numel, no index in it is, and no lane has overflowed.
__attribute__((target("avx2,bmi"))) static u64 decode_avx2(const u8* in, u64 bytes, const u8* parameters, u64* lows,
                                                           u64 low_end, u64 count, u64 numel, u32* indices,
                                                           u64* position, u64* next, bool* bad) {
    const u32 most = 25;  // bits of a field that is in four bytes, wherever it begins
    const u8* highs = in + low_end;
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), zero = _mm256_setzero_si256();
    u64 i = 0, at = 0, word = 0;  // the bytes of the highs that have been read, and what is left of the last eight
    for (; i + RICE_BLOCK <= count; i += RICE_BLOCK) {
        const u32 b = parameters[i / RICE_BLOCK], half = b / 2;  // a byte with the fifth of eight fields
        if (b > most || *lows + 7 * b + half + 16 > bytes) break;
        u32 places[RICE_BLOCK];
        for (u32 k = 0; k < RICE_BLOCK; word &= word - 1) {
            for (; !word; at += 8) {
                if (at + 8 > bytes - low_end) return i;
                word = load64(highs + at);
            }
            places[k++] = (u32)(at * 8 - 64) + (u32)__builtin_ctzll(word);
        }
        // Where each lane finds its field: eight fields begin with a byte, and so do four of them after `half` bytes.
        const __m256i bit = _mm256_mullo_epi32(lanes, _mm256_set1_epi32((int)b));
        const __m256i halves = _mm256_setr_epi32(0, 0, 0, 0, (int)half, (int)half, (int)half, (int)half);
        const __m256i byte = _mm256_sub_epi32(_mm256_srli_epi32(bit, 3), halves);
        const __m256i bytes_of = _mm256_add_epi32(_mm256_mullo_epi32(byte, _mm256_set1_epi32(0x01010101)),
                                                  _mm256_set1_epi32(0x03020100));
        const __m256i down = _mm256_and_si256(bit, _mm256_set1_epi32(7));
        const __m256i mask = _mm256_set1_epi32((int)((1u << b) - 1));
        const __m128i up = _mm_cvtsi32_si128((int)b);
        // What the places are before the block if no gap has a high bit, and what the indices are.
        __m256i least_place = _mm256_add_epi32(lanes, _mm256_set1_epi32((int)(u32)*position));
        __m256i least = _mm256_add_epi32(lanes, _mm256_set1_epi32((int)(u32)*next)), sum = zero;
        for (u32 k = 0; k < RICE_BLOCK; k += 8) {
            const u8* of_lows = in + *lows + k / 8 * b;
            const __m256i fields = _mm256_loadu2_m128i((const __m128i*)(of_lows + half), (const __m128i*)of_lows);
            __m256i low = _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(fields, bytes_of), down), mask);
            low = _mm256_add_epi32(low, _mm256_slli_si256(low, 4));
            low = _mm256_add_epi32(low, _mm256_slli_si256(low, 8));
            // The sum of the lower four lanes is added to the upper ones.
            const __m256i lower = _mm256_shuffle_epi32(_mm256_permute2x128_si256(low, low, 0x08), 0xFF);
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(low, lower));
            const __m256i high = _mm256_sub_epi32(_mm256_loadu_si256((const __m256i*)(places + k)), least_place);
            _mm256_storeu_si256((__m256i*)(indices + i + k),
                                _mm256_add_epi32(_mm256_add_epi32(least, sum), _mm256_sll_epi32(high, up)));
            sum = _mm256_permutevar8x32_epi32(sum, _mm256_set1_epi32(7));
            least_place = _mm256_add_epi32(least_place, _mm256_set1_epi32(8));
            least = _mm256_add_epi32(least, _mm256_set1_epi32(8));
        }
        const u64 end = places[RICE_BLOCK - 1] + 1ull;
        *next += ((end - *position - RICE_BLOCK) << b) + (u32)_mm256_cvtsi256_si32(sum) + RICE_BLOCK;
        if ((*bad = *next > numel)) return i;
        *lows += field_bytes(RICE_BLOCK, b);
        *position = end;
    }
    return i;
}
#endif

// Writes the section for the parameters of dr_rice_blocks_plan.
DR_API void dr_rice_blocks_encode(const u32* indices, u64 count, const u8* parameters, u8* out) {
    const u64 blocks = rice_block_count(count);
    dr_pack8(parameters, blocks, RICE_FIELD, out);
    u8* lows = out + rice_block_fields(count);
    u8* low_end = lows;
    for (u64 j = 0; j < blocks; ++j) low_end += field_bytes(rice_block_size(count, j), parameters[j]);
    GapWriter gaps{lows, low_end};
    for (u64 j = 0; j < blocks; ++j) {
        const u32 size = rice_block_size(count, j), b = parameters[j];
        const u32* block = indices + j * RICE_BLOCK;
#ifdef DR_X86
        // The stores of BitWriter reach eight bytes beyond the bits, which the later gaps have, at a bit or more each.
        if (dr_vector_level() == 2 && b <= 16 && j + 2 < blocks && gaps.lows + 8 * b + 16 <= low_end) {
            BitWriter writer{gaps.highs, gaps.high_word, (u32)gaps.position};
            encode_block(block, gaps.next, b, gaps.lows, writer);
            gaps.highs = writer.out, gaps.high_word = writer.word, gaps.position = writer.filled;
            gaps.lows += 8 * b;
            gaps.next = block[size - 1] + 1;
            continue;
        }
#endif
        for (u32 i = 0; i < size; ++i) gaps.put(block[i], b);
        gaps.end_lows();
        while (gaps.position >= 8) {  // whole bytes only, as BitWriter wants it
            *gaps.highs++ = (u8)gaps.high_word;
            gaps.high_word >>= 8;
            gaps.position -= 8;
        }
    }
    if (gaps.position) *gaps.highs = (u8)gaps.high_word;
}

// Reads a section of count >= 1 indices. Returns 0; ERR_TRUNCATED if it has fewer gaps; ERR_INDEX if an index is not
// below numel; ERR_VALUE if the section continues after the last one, or bits after the parameters, the lows or the
// highs are not zeros. parameters: room for a byte for each block.
DR_API i64 dr_rice_blocks_decode(const u8* in, u64 bytes, u64 count, u64 numel, u8* parameters, u32* indices) {
    const u64 blocks = rice_block_count(count), fields = rice_block_fields(count);
    if (bytes < fields) return ERR_TRUNCATED;
    if (dr_unpack8(in, fields, blocks, RICE_FIELD, parameters)) return ERR_VALUE;
    u64 lows = fields, low_end = fields;
    for (u64 j = 0; j < blocks; ++j) low_end += field_bytes(rice_block_size(count, j), parameters[j]);
    if (bytes < low_end) return ERR_TRUNCATED;
    const u8 *highs = in + low_end, *end = in + bytes;
    const u64 high_bytes = bytes - low_end;
    u64 i = 0, position = 0, next = 0;
#ifdef DR_X86
    if (dr_vector_level() >= 1 && count >= 2 * RICE_BLOCK && high_bytes < (1ull << 32) / 8 - 8) {
        bool bad = false;
        const auto decode = dr_vector_level() == 2 ? decode_avx512 : decode_avx2;
        i = decode(in, bytes, parameters, &lows, low_end, count, numel, indices, &position, &next, &bad);
        if (bad) return ERR_INDEX;
    }
#endif
    u64 base = position / 64 * 8, before = position, word = 0;
    if (base < high_bytes)
        word = (base + 8 <= high_bytes ? load64(highs + base) : load64_tail(highs + base, end)) & ~0ull
               << (position & 63);
    while (i < count) {
        const u32 b = parameters[i / RICE_BLOCK], size = rice_block_size(count, i / RICE_BLOCK);
        const u64 mask = (1ull << b) - 1;
        for (u64 bit = 0, of_block = i + size; i < of_block; bit += b, ++i) {
            while (!word) {
                base += 8;
                if (base >= high_bytes) return ERR_TRUNCATED;
                word = base + 8 <= high_bytes ? load64(highs + base) : load64_tail(highs + base, end);
            }
            const u64 place = base * 8 + (u64)__builtin_ctzll(word), high = place - before;
            word &= word - 1;
            before = place + 1;
            const u8* at = in + lows + (bit >> 3);
            const u64 low = (at + 8 <= end ? load64(at) : load64_tail(at, end)) >> (bit & 7) & mask;
            if (high > numel >> b) return ERR_INDEX;
            next += (high << b) + low + 1;
            if (next > numel) return ERR_INDEX;
            indices[i] = (u32)(next - 1);
        }
        if (!zeros_follow(in + lows, (u64)size * b)) return ERR_VALUE;
        lows += field_bytes(size, b);
    }
    return ends_at(highs, high_bytes, before) ? 0 : (i64)ERR_VALUE;
}
