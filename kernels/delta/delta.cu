// Delta-binary code with an adaptive prefix: the CUDA side of delta.cpp, which draws the section.
#include "delta/delta.cuh"
#include "entropy/chunks.cuh"

// lengths[l]: the number of deltas of l bits, 0 .. 32; zeros before the launch.
KERNEL delta_count(const u32* keys, u64 count, u64* lengths) {
    count_deltas(keys, count, blockIdx.x, gridDim.x, lengths);
}

// One block. *bytes: of the section.
KERNEL delta_plan(const u64* lengths, u64 count, DeltaPlan* plan, u64* bytes) {
    plan_deltas(lengths, count, plan);
    if (threadIdx.x == 0) *bytes = plan->bits / 8;
}

// out: the section, zeros before the launch. Half of the blocks write the prefixes, the others the deltas. status: of
// both, one behind the other.
KERNEL delta_write(const u32* keys, u64 count, const DeltaPlan* plan, u64 tiles, u64* status, u64* end, u32* out) {
    const bool prefixes = blockIdx.x % 2 == 0;
    write_deltas(keys, count, plan, prefixes, blockIdx.x == 0, status + (prefixes ? 0 : tiles), end + prefixes, out, 0);
}

// What a section's head says. ops/delta.py allocates it.
struct DeltaHead {
    u64 prefixes;     // the byte where they begin
    i32 only, error;  // the only prefix, or -1; the error, or 0
    u32 window;       // bits that the table takes
    u32 step;         // bits of an interval
};
static_assert(sizeof(DeltaHead) == 3 * sizeof(u64), "the size that ops/delta.py allocates");

// One block. Reads the head of a section of at least one byte: *head, and the table of the prefixes unless there is
// only one.
KERNEL delta_read(const u8* in, u64 bytes, u16* table, DeltaHead* head, i32* error) {
    __shared__ u8 length[256];
    __shared__ u32 words[256];
    __shared__ i32 only;
    __shared__ i64 taken;
    const u32 log2_m = in[0] & 15, s = threadIdx.x;
    const bool coded = in[0] & 16;
    if (s == 0) {
        only = -1;
        taken = 0;
        if (log2_m < 1 || log2_m > 4 || in[0] > 31) taken = ERR_VALUE;
        else if (coded) taken = read_lengths(BitReader{in + 1, bytes - 1, 0}, length, &only);
    }
    __syncthreads();
    const bool foreign = taken >= 0 && coded && s >= 1u << log2_m && (length[s] || only == (i32)s);
    const i32 wrong = __syncthreads_or(foreign) ? ERR_VALUE : taken < 0 ? (i32)taken : 0;
    if (!wrong && coded) {
        huffman_words(length, words);
        if (only < 0) huffman_table(words, table);
    } else if (!wrong && s < 1u << log2_m) {
        table[s] = (u16)(s | log2_m << 8);
    }
    if (s) return;
    head->prefixes = wrong ? 0 : 1 + (u64)taken;
    head->only = only;
    head->error = wrong;
    head->window = coded ? LONGEST : log2_m;
    head->step = 32u >> (log2_m & 7);
    if (wrong) *error = wrong;
}

KERNEL delta_walk(const u8* in, u64 bytes, const DeltaHead* head, const u16* table, u64 chunks, u64* exits) {
    if (head->error || head->only >= 0) return;
    const u8* prefixes = in + head->prefixes;
    const u64 size = bytes - head->prefixes;
    const u32 window = head->window;
    walk_all(8 * size, LONGEST, 1, chunks, exits, [=](u64& position, u32&) {
        position += table[load_field(prefixes, size, position, window)] >> 8;
    });
}

// bits[i]: the bits of delta i. *at: the byte where the deltas begin; it stays 0 if the section ends within the
// prefixes. Sets *error to ERR_VALUE if the bits after the prefixes are not zeros.
KERNEL delta_lengths(const u8* in, u64 bytes, const DeltaHead* head, const u16* table, u64 chunks, const u64* starts,
                     u64 count, u8* bits, u64* at, i32* error) {
    if (head->error) return;
    const u32 window = head->window, step = head->step;
    if (head->only >= 0) {
        for (u64 i = grid_thread(); i < count; i += grid_threads()) bits[i] = (u8)(step * (u32)(head->only + 1));
        if (grid_thread() == 0) *at = head->prefixes;
        return;
    }
    const u64 first = head->prefixes, size = bytes - first;
    const u8* prefixes = in + first;
    walk_again(
        8 * size, 1, chunks, starts,
        [=](u64& position, u32&) { position += table[load_field(prefixes, size, position, window)] >> 8; },
        [=](u64 number, u64 place, u64 after, u32) {
            if (number >= count) return;
            bits[number] = (u8)(step * ((table[load_field(prefixes, size, place, window)] & 255u) + 1));
            if (number + 1 < count || after > 8 * size) return;
            *at = first + (after + 7) / 8;
            if (!zeros_follow(prefixes, after)) atomicMin(error, ERR_VALUE);
        });
}

// Sets *error to ERR_TRUNCATED if *at is 0, ERR_INDEX if a delta but the first is 0, ERR_VALUE if the section does not
// end with the last delta.
KERNEL delta_values(const u8* in, u64 bytes, const u8* bits, const u64* at, u64 count, u64* status, u64* end,
                    u32* deltas, i32* error) {
    if (*at == 0) {
        if (grid_thread() == 0) atomicMin(error, ERR_TRUNCATED);
        return;
    }
    const u8* string = in + *at;
    const u64 size = bytes - *at;
    each_place(
        count, 0, status, end, [=](u64 i) { return (u64)bits[i]; },
        [=](u64 i, u64 place) {
            deltas[i] = load_field(string, size, place, bits[i]);
            if (i && deltas[i] == 0) atomicMin(error, ERR_INDEX);
            if (i + 1 == count && !ends_at(string, size, place + bits[i])) atomicMin(error, ERR_VALUE);
        });
}

// Adds the deltas up. Sets *error to ERR_INDEX if a key is not below numel.
KERNEL delta_keys(const u32* deltas, u64 count, u64 numel, u64* status, u64* end, u32* keys, i32* error) {
    each_place(
        count, 0, status, end, [=](u64 i) { return (u64)deltas[i]; },
        [=](u64 i, u64 place) {
            keys[i] = (u32)(place + deltas[i]);
            if (place + deltas[i] >= numel) atomicMin(error, ERR_INDEX);
        });
}
