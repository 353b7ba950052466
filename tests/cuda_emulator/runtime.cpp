// The machine that runs the emulated kernels: threads as coroutines, barriers, and a check of every memory access.
//
// Threads. The threads of a block run in turn, each until it waits or ends. Without a seed, the blocks run one after
// the other. With a seed, up to RESIDENT blocks run at the same time: the machine alternates between them after a few
// turns, and the order of threads and blocks is random, so that a block may wait long for another one. No thread passes
// a barrier before all threads of the block (or of the warp) have reached it. If some never reach it, the launch fails.
//
// Memory. g++ -fsanitize=thread inserts calls such as __tsan_read4(address). Each access must be inside one of the
// arrays that were passed to the launch, in shared memory, in the stack of the thread, or (only to read) in the
// constants of the module. Two accesses to a byte, of which at least one writes and which are not both atomic, need a
// barrier between them: __syncthreads for threads of a block, __syncwarp for lanes of a warp. Nothing orders threads of
// different blocks.
//
// Counting, for scripts/bench/gpu_costs.py: the different sectors of 32 bytes that a launch reads and writes, which is what it
// must move between the memory and the GPU's cache; and its longest thread, in loads, shuffles and barriers.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#ifndef __x86_64__
#error "the emulator needs x86-64, because it switches stacks in assembly"
#endif

typedef uint32_t u32;
typedef uint64_t u64;

struct Index3 {
    u32 x, y, z;
};

// Saves the callee-saved registers and the stack pointer in *from, and continues where `to` was saved.
extern "C" void switch_stack(void** from, void* to);
asm(R"(
.text
.globl switch_stack
.hidden switch_stack
switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace {

const u32 MOST_THREADS = 1024, ALL = 0xFFFFFFFFu, MANY = 0xFFFF, OF_WARP = 0x8000, EVER = 0xFFFFFFFF;
const size_t RESIDENT = 4;
// No power of two: the tops of all stacks would share a few sets of the processor's cache.
const size_t STACK = (128 << 10) + 17 * 64;

enum State : uint8_t { READY, AT_BARRIER, AT_WARP, DONE };

struct Thread {
    void* top;
    State state;
    uint8_t round;      // which of the two rows of values of the warp is next
    u32 warp_phase;     // number of __syncwarp so far
    u32 steps;          // loads, shuffles and barriers so far
};

// The last access to a byte, of one kind (read, write or atomic).
struct Access {
    u32 block = 0;  // 0: there was none
    u32 phase = 0, warp_phase = 0;
    u32 who = 0;  // a thread, OF_WARP | warp, or MANY
};
struct Cell {
    Access read, write, atomic;
};
struct Rest {
    Cell cell[3];
};

// Four bytes of memory, in one line of the processor's cache. While only whole words are touched, the cell stands for
// all four bytes; afterwards for the first one.
struct alignas(64) Word {
    u32 stamp = 0;  // of the launch or, in shared memory, of the block; another one's accesses do not count
    u32 rest = 0;   // the number of the cells of the other three bytes; 0: there are none
    Cell cell;
};

struct Array {
    const char* begin = nullptr;
    const char* end = nullptr;
    bool writable = false;
    Word* words = nullptr;  // the first one holds `begin`, and perhaps bytes before it
    uint8_t* sectors = nullptr;  // while counting: READ_SECTOR and WRITTEN_SECTOR of each
};

const char* word_of(const char* at) { return at - (uintptr_t)at % 4; }
const uintptr_t SECTOR = 32;
const uint8_t READ_SECTOR = 1, WRITTEN_SECTOR = 2;
size_t sectors_of(const char* begin, const char* end) {
    return ((uintptr_t)end + SECTOR - 1) / SECTOR - (uintptr_t)begin / SECTOR;
}

size_t words_of(const char* begin, const char* end) { return (size_t)(end + 3 - word_of(begin)) / 4; }

// A block that is under way.
struct Block {
    Index3 index{};
    u32 number = 0, phase = 0, at_barrier = 0, done = 0, any = 0, any_result = 0;
    Thread thread[MOST_THREADS];
    u32 at_warp[MOST_THREADS / 32];
    int operation[MOST_THREADS / 32];
    u64 values[MOST_THREADS / 32][2][32];
    std::vector<char> shared;  // what its shared memory holds while another block runs
    std::vector<Word> shared_words;
    std::vector<u32> order;
    char* stacks = nullptr;
};

struct Machine {
    u32 launch = 0, blocks_begun = 0, seed = 0, threads = 0, warps = 0;
    Index3 grid{}, size{}, place{};
    void (*entry)(void*) = nullptr;
    void* context = nullptr;
    char *shared = nullptr, *shared_end = nullptr;
    const char *constants = nullptr, *constants_end = nullptr;
    std::string failure;
    std::map<const char*, Array> arrays;
    std::vector<Word> words;  // of all arrays
    bool counting = false;
    u64 longest = 0;  // steps of a thread
    std::vector<uint8_t> sectors;  // of all arrays
    std::vector<Rest> rests;  // of the words of which a part was touched in this launch; the first is not used
    Array* last = nullptr;
    std::mt19937 random;
    Block block[RESIDENT];
    Block* b = block;  // the current block
    u32 current = 0;   // the current thread of the block
    void* scheduler = nullptr;
    char* stacks = nullptr;
};

Machine* machine() {
    static Machine* only = new Machine;
    return only;
}
Machine& m = *machine();

bool running() { return m.scheduler != nullptr; }

void wait_as(State state) {
    Thread& self = m.b->thread[m.current];
    self.state = state;
    switch_stack(&self.top, m.scheduler);
}

// Ends the launch with an error. Its threads do not continue.
void fail(const std::string& why) {
    if (m.failure.empty())
        m.failure = "thread " + std::to_string(m.current) + " of block " + std::to_string(m.b->index.x) + ": " + why;
    if (running()) wait_as(DONE);
}

void run_thread() {
    m.entry(m.context);
    ++m.b->done;
    wait_as(DONE);
    abort();
}

void start_thread(Block& block, u32 t) {
    void** top = (void**)(block.stacks + (t + 1) * STACK) - 1;
    *top = nullptr;  // as after a call: the stack pointer is 8 above a multiple of 16
    *--top = (void*)run_thread;
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    block.thread[t] = {top, READY, 0, 0, 0};
}

void start_block(Block& block, u32 index) {
    const size_t shared = (size_t)(m.shared_end - m.shared);
    block.index = {index, 0, 0};
    block.number = ++m.blocks_begun;
    block.phase = block.at_barrier = block.done = block.any = 0;
    std::fill(block.at_warp, block.at_warp + m.warps, 0u);
    block.shared.assign(shared, (char)0xA5);  // shared memory begins with anything
    if (block.shared_words.size() < words_of(m.shared, m.shared_end))
        block.shared_words.resize(words_of(m.shared, m.shared_end));
    block.order.resize(m.threads);
    for (u32 t = 0; t < m.threads; ++t) block.order[t] = t, start_thread(block, t);
}

// Runs every thread that is ready once. Returns false if none is ready.
bool run_turn(Block& block) {
    if (m.seed) std::shuffle(block.order.begin(), block.order.end(), m.random);
    bool ran = false;
    for (const u32 t : block.order) {
        if (block.thread[t].state != READY) continue;
        ran = true;
        m.current = t;
        m.place = {t, 0, 0};
        switch_stack(&m.scheduler, block.thread[t].top);
        if (!m.failure.empty()) return true;
    }
    return ran;
}

void run_grid() {
    std::vector<u32> waiting(m.grid.x);
    for (u32 b = 0; b < m.grid.x; ++b) waiting[b] = m.grid.x - 1 - b;
    if (m.seed) std::shuffle(waiting.begin(), waiting.end(), m.random);
    std::vector<Block*> running, spare;
    for (size_t r = 0; r < (m.seed ? RESIDENT : 1); ++r) spare.push_back(m.block + r);
    while (!waiting.empty() || !running.empty()) {
        while (!waiting.empty() && !spare.empty()) {
            start_block(*spare.back(), waiting.back());
            running.push_back(spare.back());
            spare.pop_back(), waiting.pop_back();
        }
        const size_t which = m.seed ? m.random() % running.size() : 0;
        Block& block = *running[which];
        m.b = &block;
        std::memcpy(m.shared, block.shared.data(), block.shared.size());
        bool ran = true;
        for (u32 turns = m.seed ? 1 + m.random() % 16 : ~0u; turns && ran && block.done < m.threads; --turns) {
            ran = run_turn(block);
            if (!m.failure.empty()) return;
        }
        std::memcpy(block.shared.data(), m.shared, block.shared.size());
        if (block.done == m.threads) {
            running.erase(running.begin() + (long)which);
            spare.push_back(&block);
        } else if (!ran) {
            m.failure = "block " + std::to_string(block.index.x) + ": " + std::to_string(block.at_barrier) + " of " +
                        std::to_string(m.threads) + " threads wait at a block barrier, " + std::to_string(block.done) +
                        " have ended, and the others wait at warp barriers: they would wait for ever";
            return;
        }
    }
}

inline bool ordered(const Access& a, bool shared) {
    if (a.block == 0) return true;
    if (a.phase == EVER) return false;
    if (a.block != m.b->number) return shared;
    if (a.who == m.current) return true;
    if (a.phase != m.b->phase) return true;
    const u32 warp = m.current / 32;
    const bool same_warp = a.who != MANY && (a.who & OF_WARP ? (a.who & ~OF_WARP) == warp : a.who / 32 == warp);
    return same_warp && a.warp_phase != m.b->thread[m.current].warp_phase;
}

inline void note(Access& a, bool shared) {
    const u32 warp_phase = m.b->thread[m.current].warp_phase;
    const Access now{m.b->number, m.b->phase, warp_phase, m.current};
    if (ordered(a, shared)) {
        a = now;
        return;
    }
    // Another thread has made such an access in this phase. Remember both: as their warp if they are of one warp, and
    // for the rest of the launch if they are of different blocks.
    const u32 warp = m.current / 32;
    const bool same_block = a.phase != EVER && a.block == m.b->number;
    const bool same_warp =
        same_block && a.who != MANY && (a.who & OF_WARP ? (a.who & ~OF_WARP) == warp : a.who / 32 == warp);
    a = now;
    if (!same_block) a.phase = EVER;
    a.who = same_warp ? OF_WARP | warp : MANY;
}

enum Way { READ, WRITE, ATOMIC, OBSERVE };

inline bool races(const Cell& cell, Way way, bool shared) {
    if (!ordered(cell.write, shared)) return true;
    if ((way == READ || way == WRITE) && !ordered(cell.atomic, shared)) return true;
    return (way == WRITE || way == ATOMIC) && !ordered(cell.read, shared);
}

// Whether the access is in order; if so, it is remembered.
inline bool passes(Cell& cell, Way way, bool shared) {
    if (races(cell, way, shared)) return false;
    note(way == READ ? cell.read : way == WRITE ? cell.write : cell.atomic, shared);
    return true;
}

// Readies a word for an access to all of it, or to a part.
inline void prepare(Word& word, u32 stamp, bool whole) {
    if (word.stamp != stamp) {
        word.stamp = stamp;
        word.rest = 0;
        word.cell = Cell{};
    }
    if (whole || word.rest) return;
    word.rest = (u32)m.rests.size();
    m.rests.push_back({{word.cell, word.cell, word.cell}});
}

void count_step() { m.longest = std::max<u64>(m.longest, ++m.b->thread[m.current].steps); }

// Looks at each byte. Returns the first that races, or `end`.
inline const char* first_race(const char* at, const char* end, Word* word, u32 stamp, Way way, bool shared) {
    for (; at < end; ++word) {
        const size_t byte = (uintptr_t)at % 4;
        const bool whole = byte == 0 && end - at >= 4;
        prepare(*word, stamp, whole);
        if (!word->rest) {
            if (!passes(word->cell, way, shared)) return at;
            at += 4;
            continue;
        }
        for (size_t i = byte; i < 4 && at < end; ++i, ++at)
            if (!passes(i ? m.rests[word->rest].cell[i - 1] : word->cell, way, shared)) return at;
    }
    return end;
}

// The compiler makes a copy for each size and way.
inline __attribute__((always_inline)) void touch(const void* address, size_t size, Way way) {
    if (!running()) return;
    const char* at = (const char*)address;
    if (at >= m.stacks && at < m.stacks + RESIDENT * MOST_THREADS * STACK) return;
    const bool writing = way == WRITE || way == ATOMIC;
    const bool shared = at >= m.shared && at + size <= m.shared_end;
    if (!shared) {
        if (!m.last || at < m.last->begin || at + size > m.last->end) {
            auto next = m.arrays.upper_bound(at);
            m.last = next == m.arrays.begin() ? nullptr : &(--next)->second;
            if (!m.last || at < m.last->begin || at + size > m.last->end) {
                m.last = nullptr;
                if (!writing && at >= m.constants && at + size <= m.constants_end) return;
                return fail(std::string(writing ? "writes " : "reads ") + std::to_string(size) +
                            " bytes outside the arrays that were passed to the kernel");
            }
        }
        if (writing && !m.last->writable) return fail("writes into an array that is only read elsewhere");
    }
    if ((uintptr_t)at % (size < 16 ? size : 16))
        return fail("an access of " + std::to_string(size) + " bytes is not aligned");
    if (m.counting) {
        if (way != WRITE) count_step();
        if (!shared) {
            const uint8_t mark = way == WRITE ? WRITTEN_SECTOR : way == ATOMIC ? READ_SECTOR | WRITTEN_SECTOR : READ_SECTOR;
            uint8_t* sectors = m.last->sectors - (uintptr_t)m.last->begin / SECTOR;
            sectors[(uintptr_t)at / SECTOR] |= mark;
            sectors[((uintptr_t)at + size - 1) / SECTOR] |= mark;
        }
    }
    const char* begin = shared ? m.shared : m.last->begin;
    Word* words = shared ? m.b->shared_words.data() : m.last->words;
    const char* race = first_race(at, at + size, words + (at - word_of(begin)) / 4, shared ? m.b->number : m.launch,
                                  way, shared);
    if (race != at + size)
        fail(std::string("a race in ") + (shared ? "shared" : "global") + " memory: it " +
             (way == READ ? "reads" : way == WRITE ? "writes" : "updates") +
             " what another thread touches, with no barrier between them; byte " + std::to_string(race - begin));
}

}  // namespace

extern "C" {

Index3 emulated_thread() { return m.place; }
Index3 emulated_block() { return m.b->index; }
Index3 emulated_block_size() { return m.size; }
Index3 emulated_grid_size() { return m.grid; }

unsigned emulated_barrier_or(unsigned value) {
    Block& block = *m.b;
    if (m.counting) count_step();
    block.any |= value;
    if (++block.at_barrier == m.threads) {
        block.any_result = block.any;
        block.any = block.at_barrier = 0;
        ++block.phase;
        for (u32 t = 0; t < m.threads; ++t) block.thread[t].state = READY;
        return block.any_result;
    }
    wait_as(AT_BARRIER);
    return block.any_result;
}
void emulated_barrier() { emulated_barrier_or(0); }

const unsigned long long* emulated_exchange(unsigned mask, int operation, unsigned long long value) {
    static_assert(sizeof(unsigned long long) == sizeof(u64), "64 bits");
    const u32 warp = m.current / 32;
    Thread& self = m.b->thread[m.current];
    if (mask != ALL) fail("a warp operation has a mask of a part of the warp: the emulator supports whole warps only");
    if (m.counting) count_step();
    Block& block = *m.b;
    if (block.at_warp[warp] && block.operation[warp] != operation)
        fail("the lanes of a warp are in different operations");
    block.operation[warp] = operation;
    u64* row = block.values[warp][self.round];
    row[m.current % 32] = value;
    self.round ^= 1;
    if (++block.at_warp[warp] == 32) {
        block.at_warp[warp] = 0;
        for (u32 t = warp * 32; t < warp * 32 + 32; ++t) block.thread[t].state = READY;
    } else {
        wait_as(AT_WARP);
    }
    return (const unsigned long long*)row;
}
void emulated_warp_barrier(unsigned mask) {
    emulated_exchange(mask, 0, 0);
    ++m.b->thread[m.current].warp_phase;
}
void emulated_atomic(void* address, unsigned size) { touch(address, size, ATOMIC); }
void emulated_fail(const char* message) { fail(message); }

// ---- Functions for Python.

void emulated_reset(u32 seed) {
    m.arrays.clear();
    m.last = nullptr;
    m.seed = seed;
    m.random.seed(seed);
    m.failure.clear();
}
void emulated_array(const char* data, u64 bytes, int writable) {
    Array& array = m.arrays[data];
    if (array.begin && (u64)(array.end - array.begin) > bytes) bytes = (u64)(array.end - array.begin);
    array.begin = data;
    array.end = data + bytes;
    array.writable |= writable != 0;
}
void emulated_counting(int on) { m.counting = on != 0; }
// traffic: | bytes of the sectors that the last launch read | that it wrote | steps of its longest thread |
void emulated_traffic(u64* traffic) {
    traffic[0] = traffic[1] = 0;
    for (const uint8_t sector : m.sectors) {
        traffic[0] += sector & READ_SECTOR ? SECTOR : 0;
        traffic[1] += sector & WRITTEN_SECTOR ? SECTOR : 0;
    }
    traffic[2] = m.longest;
}
const char* emulated_failure() { return m.failure.c_str(); }

void emulated_launch(void (*entry)(void*), void* context, const unsigned* sizes, char* shared, char* shared_end,
                     const char* read_only, const char* read_only_end) {
    if (!m.stacks) {
        m.stacks = (char*)mmap(nullptr, RESIDENT * MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        for (size_t r = 0; r < RESIDENT; ++r) m.block[r].stacks = m.stacks + r * MOST_THREADS * STACK;
    }
    m.grid = {sizes[0], 1, 1};
    m.size = {sizes[1], 1, 1};
    m.threads = sizes[1];
    m.warps = m.threads / 32;
    if (m.threads % 32 || m.threads == 0 || m.threads > MOST_THREADS) {
        m.failure = "a block of " + std::to_string(m.threads) + " threads; it must be a multiple of 32, from 32 to 1024";
        return;
    }
    m.entry = entry;
    m.context = context;
    m.shared = shared;
    m.shared_end = shared_end;
    m.constants = read_only;
    m.constants_end = read_only_end;
    ++m.launch;
    size_t words = 0, sectors = 0;
    for (const auto& [data, array] : m.arrays) {
        words += words_of(array.begin, array.end);
        sectors += sectors_of(array.begin, array.end);
    }
    m.longest = 0;
    m.sectors.assign(m.counting ? sectors : 0, 0);
    if (m.words.size() < words) m.words = std::vector<Word>(words);
    m.rests.assign(1, Rest{});
    Word* next = m.words.data();
    uint8_t* next_sector = m.sectors.data();
    for (auto& [data, array] : m.arrays) {
        array.words = next;
        array.sectors = next_sector;
        if (m.counting) next_sector += sectors_of(array.begin, array.end);
        next += words_of(array.begin, array.end);
    }
    static char here;
    m.scheduler = &here;
    run_grid();
    m.scheduler = nullptr;
}

// ---- Functions that g++ -fsanitize=thread calls.

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define TOUCH(bytes)                                                                    \
    void __tsan_read##bytes(void* p) { touch(p, bytes, READ); }                         \
    void __tsan_write##bytes(void* p) { touch(p, bytes, WRITE); }                       \
    void __tsan_unaligned_read##bytes(void* p) { touch(p, bytes, READ); }               \
    void __tsan_unaligned_write##bytes(void* p) { touch(p, bytes, WRITE); }             \
    void __tsan_volatile_read##bytes(void* p) { touch(p, bytes, OBSERVE); }             \
    void __tsan_volatile_write##bytes(void* p) { touch(p, bytes, ATOMIC); }
TOUCH(1)
TOUCH(2)
TOUCH(4)
TOUCH(8)
TOUCH(16)
void __tsan_read_range(void* p, u64 bytes) { touch(p, bytes, READ); }
void __tsan_write_range(void* p, u64 bytes) { touch(p, bytes, WRITE); }
}
