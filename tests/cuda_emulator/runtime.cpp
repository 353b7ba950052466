// The machine under the emulated kernels: coroutines for threads, barriers, and a check of every access to memory.
//
// Threads. The threads of a block run in turn, each until it waits or ends; blocks run one after the other. The order
// of threads and blocks is shuffled where a seed is given. A barrier lets nobody pass before all threads of the block
// (of the warp) have come; where they never do, the kernel is at fault and the launch fails.
//
// Memory. g++ -fsanitize=thread calls __tsan_read4(address) and the like. Each access must lie in one of the arrays
// that the launch was given, in shared memory, in the thread's own stack or (reading) in the module's constants. Two
// accesses to a byte, one of them writing, not both atomic, must have a barrier between them: __syncthreads for threads
// of a block, __syncwarp for lanes of a warp, nothing for threads of different blocks.
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
#error "the emulator switches stacks in x86-64 assembly"
#endif

typedef uint32_t u32;
typedef uint64_t u64;

struct Index3 {
    u32 x, y, z;
};

// Saves the callee's registers and the stack's top in *from, and goes on where `to` was saved.
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
const size_t STACK = 128 << 10;

enum State : uint8_t { READY, AT_BARRIER, AT_WARP, DONE };

struct Thread {
    void* top;
    State state;
    uint8_t round;      // which of the warp's two rows of values is next
    u32 warp_phase;     // __syncwarps so far
};

// Who touched a byte last, in one way (reading, writing or atomically).
struct Access {
    u32 launch = 0, block = 0, phase = 0, warp_phase = 0;
    u32 who = 0;  // a thread, OF_WARP | warp, or MANY
};
struct Cell {
    Access read, write, atomic;
};

struct Array {
    const char* begin;
    const char* end;
    bool writable;
    std::vector<Cell> cells;
};

struct Machine {
    // the launch
    u32 launch = 0, seed = 0, threads = 0, warps = 0;
    Index3 grid{}, size{}, block{}, place{};
    void (*entry)(void*) = nullptr;
    void* context = nullptr;
    char *shared = nullptr, *shared_end = nullptr;
    const char *constants = nullptr, *constants_end = nullptr;
    std::string failure;
    std::map<const char*, Array> arrays;
    Array* last = nullptr;
    std::vector<Cell> shared_cells;
    std::mt19937 random;
    // the block
    u32 block_number = 0, phase = 0, current = 0, at_barrier = 0, done = 0, any = 0, any_result = 0;
    Thread thread[MOST_THREADS];
    u32 at_warp[MOST_THREADS / 32];
    int operation[MOST_THREADS / 32];
    u64 values[MOST_THREADS / 32][2][32];
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
    m.thread[m.current].state = state;
    switch_stack(&m.thread[m.current].top, m.scheduler);
}

// Ends the launch: its threads never go on.
void fail(const std::string& why) {
    if (m.failure.empty())
        m.failure = "thread " + std::to_string(m.current) + " of block " + std::to_string(m.block.x) + ": " + why;
    if (running()) wait_as(DONE);
}

void run_thread() {
    m.entry(m.context);
    ++m.done;
    wait_as(DONE);
    abort();
}

void start_thread(u32 t) {
    void** top = (void**)(m.stacks + (t + 1) * STACK) - 1;
    *top = nullptr;  // as if called: the stack is 8 past a multiple of 16
    *--top = (void*)run_thread;
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    m.thread[t] = {top, READY, 0, 0};
}

void run_block() {
    std::memset(m.shared, 0xA5, (size_t)(m.shared_end - m.shared));  // shared memory begins with anything
    m.phase = m.at_barrier = m.done = m.any = 0;
    std::fill(m.at_warp, m.at_warp + m.warps, 0u);
    std::vector<u32> order(m.threads);
    for (u32 t = 0; t < m.threads; ++t) order[t] = t, start_thread(t);
    ++m.block_number;
    while (m.done < m.threads) {
        if (m.seed) std::shuffle(order.begin(), order.end(), m.random);
        bool ran = false;
        for (const u32 t : order) {
            if (m.thread[t].state != READY) continue;
            ran = true;
            m.current = t;
            m.place = {t, 0, 0};
            switch_stack(&m.scheduler, m.thread[t].top);
            if (!m.failure.empty()) return;
        }
        if (ran) continue;
        m.failure = "block " + std::to_string(m.block.x) + ": " + std::to_string(m.at_barrier) + " of " +
                    std::to_string(m.threads) + " threads wait for the block, " + std::to_string(m.done) +
                    " have ended, the others wait for their warps: for ever";
        return;
    }
}

bool ordered(const Access& a, bool shared) {
    if (a.launch != m.launch) return true;
    if (a.phase == EVER) return false;
    if (a.block != m.block_number) return shared;
    if (a.who == m.current) return true;
    if (a.phase != m.phase) return true;
    const u32 warp = m.current / 32;
    const bool same_warp = a.who != MANY && (a.who & OF_WARP ? (a.who & ~OF_WARP) == warp : a.who / 32 == warp);
    return same_warp && a.warp_phase != m.thread[m.current].warp_phase;
}

void note(Access& a, bool shared) {
    const u32 warp_phase = m.thread[m.current].warp_phase;
    const Access now{m.launch, m.block_number, m.phase, warp_phase, m.current};
    if (ordered(a, shared)) {
        a = now;
        return;
    }
    // Another thread did the same in this phase: both are remembered, as a warp where they are of one, and for the rest
    // of the launch where they are of different blocks.
    const u32 warp = m.current / 32;
    const bool same_block = a.phase != EVER && a.block == m.block_number;
    const bool same_warp =
        same_block && a.who != MANY && (a.who & OF_WARP ? (a.who & ~OF_WARP) == warp : a.who / 32 == warp);
    a = now;
    if (!same_block) a.phase = EVER;
    a.who = same_warp ? OF_WARP | warp : MANY;
}

enum Way { READ, WRITE, ATOMIC, OBSERVE };

bool races(const Cell& cell, Way way, bool shared) {
    if (!ordered(cell.write, shared)) return true;
    if ((way == READ || way == WRITE) && !ordered(cell.atomic, shared)) return true;
    return (way == WRITE || way == ATOMIC) && !ordered(cell.read, shared);
}

void touch(const void* address, size_t size, Way way) {
    if (!running()) return;
    const char* at = (const char*)address;
    if (at >= m.stacks && at < m.stacks + MOST_THREADS * STACK) return;
    const bool writing = way == WRITE || way == ATOMIC;
    const bool shared = at >= m.shared && at + size <= m.shared_end;
    Cell* cells;
    if (shared) {
        cells = m.shared_cells.data() + (at - m.shared);
    } else {
        if (!m.last || at < m.last->begin || at + size > m.last->end) {
            auto next = m.arrays.upper_bound(at);
            m.last = next == m.arrays.begin() ? nullptr : &(--next)->second;
            if (!m.last || at < m.last->begin || at + size > m.last->end) {
                m.last = nullptr;
                if (!writing && at >= m.constants && at + size <= m.constants_end) return;
                return fail(std::string(writing ? "writes " : "reads ") + std::to_string(size) +
                            " bytes outside the arrays that the kernel was given");
            }
        }
        if (writing && !m.last->writable) return fail("writes into an array that is only read elsewhere");
        cells = m.last->cells.data() + (at - m.last->begin);
    }
    if ((uintptr_t)at % (size < 16 ? size : 16)) return fail("an access of " + std::to_string(size) + " bytes is not aligned");
    for (size_t i = 0; i < size; ++i) {
        Cell& cell = cells[i];
        if (races(cell, way, shared))
            return fail(std::string("a race in ") + (shared ? "shared" : "global") + " memory: it " +
                        (way == READ ? "reads" : way == WRITE ? "writes" : "updates") +
                        " what another thread touches, with no barrier between them; byte " +
                        std::to_string(shared ? at + i - m.shared : at + i - m.last->begin));
        note(way == READ ? cell.read : way == WRITE ? cell.write : cell.atomic, shared);
    }
}

}  // namespace

extern "C" {

Index3 emulated_thread() { return m.place; }
Index3 emulated_block() { return m.block; }
Index3 emulated_block_size() { return m.size; }
Index3 emulated_grid_size() { return m.grid; }

unsigned emulated_barrier_or(unsigned value) {
    m.any |= value;
    if (++m.at_barrier == m.threads) {
        m.any_result = m.any;
        m.any = m.at_barrier = 0;
        ++m.phase;
        for (u32 t = 0; t < m.threads; ++t) m.thread[t].state = READY;
        m.thread[m.current].state = READY;
        return m.any_result;
    }
    wait_as(AT_BARRIER);
    return m.any_result;
}
void emulated_barrier() { emulated_barrier_or(0); }

const unsigned long long* emulated_exchange(unsigned mask, int operation, unsigned long long value) {
    static_assert(sizeof(unsigned long long) == sizeof(u64), "64 bits");
    const u32 warp = m.current / 32;
    Thread& self = m.thread[m.current];
    if (mask != ALL) fail("the emulator knows warp operations of whole warps alone");
    if (m.at_warp[warp] && m.operation[warp] != operation) fail("the lanes of a warp meet in different operations");
    m.operation[warp] = operation;
    u64* row = m.values[warp][self.round];
    row[m.current % 32] = value;
    self.round ^= 1;
    if (++m.at_warp[warp] == 32) {
        m.at_warp[warp] = 0;
        for (u32 t = warp * 32; t < warp * 32 + 32; ++t) m.thread[t].state = READY;
    } else {
        wait_as(AT_WARP);
    }
    return (const unsigned long long*)row;
}
void emulated_warp_barrier(unsigned mask) {
    emulated_exchange(mask, 0, 0);
    ++m.thread[m.current].warp_phase;
}
void emulated_atomic(void* address, unsigned size) { touch(address, size, ATOMIC); }
void emulated_fail(const char* message) { fail(message); }

// ---- Python's side.

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
    array.cells.resize(bytes);
}
const char* emulated_failure() { return m.failure.c_str(); }

void emulated_launch(void (*entry)(void*), void* context, const unsigned* sizes, char* shared, char* shared_end,
                     const char* read_only, const char* read_only_end) {
    if (!m.stacks)
        m.stacks = (char*)mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    m.grid = {sizes[0], 1, 1};
    m.size = {sizes[1], 1, 1};
    m.threads = sizes[1];
    m.warps = m.threads / 32;
    if (m.threads % 32 || m.threads == 0 || m.threads > MOST_THREADS) {
        m.failure = "a block of " + std::to_string(m.threads) + " threads is no whole number of warps";
        return;
    }
    m.entry = entry;
    m.context = context;
    m.shared = shared;
    m.shared_end = shared_end;
    m.constants = read_only;
    m.constants_end = read_only_end;
    m.shared_cells.assign((size_t)(shared_end - shared), Cell());
    ++m.launch;
    std::vector<u32> order(m.grid.x);
    for (u32 b = 0; b < m.grid.x; ++b) order[b] = b;
    if (m.seed) std::shuffle(order.begin(), order.end(), m.random);
    static char here;
    m.scheduler = &here;
    for (const u32 b : order) {
        m.block = {b, 0, 0};
        run_block();
        if (!m.failure.empty()) break;
    }
    m.scheduler = nullptr;
}

// ---- What g++ -fsanitize=thread calls.

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
