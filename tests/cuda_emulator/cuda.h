// The part of CUDA that the .cu files use, for g++. It is included before each .cu file.
//
// The threads of a kernel are coroutines of one system thread (runtime.cpp). Every memory access is checked: g++
// compiles the kernels with -fsanitize=thread, and the inserted calls go to runtime.cpp, not to a sanitizer.
//
// Shared memory is the only writable static memory of a kernel, so it is the .bss section of the module.
#ifndef HVD_DEEPREDUCE_EMULATOR_CUDA_H
#define HVD_DEEPREDUCE_EMULATOR_CUDA_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__
#define __align__(n) alignas(n)

struct Index3 {
    unsigned x, y, z;
};

// `const`: these do not change for a thread while its kernel runs.
extern "C" {
Index3 emulated_thread() __attribute__((const));
Index3 emulated_block() __attribute__((const));
Index3 emulated_block_size() __attribute__((const));
Index3 emulated_grid_size() __attribute__((const));
void emulated_barrier();
unsigned emulated_barrier_or(unsigned value);
void emulated_warp_barrier(unsigned mask);
// Passes `value` to the warp and returns the values of all 32 lanes. All lanes must have the same `operation`.
const unsigned long long* emulated_exchange(unsigned mask, int operation, unsigned long long value);
void emulated_atomic(void* address, unsigned size);  // before each atomic operation
void emulated_fail(const char* message);
}

#define threadIdx emulated_thread()
#define blockIdx emulated_block()
#define blockDim emulated_block_size()
#define gridDim emulated_grid_size()

static inline void __syncthreads() { emulated_barrier(); }
static inline int __syncthreads_or(int value) { return (int)emulated_barrier_or(value != 0); }
static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { emulated_warp_barrier(mask); }
static inline void __threadfence() {}

template <class T>
inline unsigned long long emulated_pack(T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a warp exchanges words of 32 or 64 bits");
    unsigned long long word = 0;
    __builtin_memcpy(&word, &value, sizeof value);
    return word;
}
template <class T>
inline T emulated_unpack(unsigned long long word) {
    T value;
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
}
// Accesses of the emulator itself are not checked.
#define UNSEEN __attribute__((no_sanitize("thread")))
#define EMULATED_LANE (emulated_thread().x & 31)

enum { OP_SHFL = 1, OP_UP, OP_DOWN, OP_XOR, OP_BALLOT, OP_ANY, OP_ALL, OP_MATCH };

template <class T>
UNSEEN inline T __shfl_sync(unsigned mask, T value, int from) {
    return emulated_unpack<T>(emulated_exchange(mask, OP_SHFL, emulated_pack(value))[from & 31]);
}
template <class T>
UNSEEN inline T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
    const unsigned lane = EMULATED_LANE;
    return emulated_unpack<T>(emulated_exchange(mask, OP_UP, emulated_pack(value))[lane < delta ? lane : lane - delta]);
}
template <class T>
UNSEEN inline T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
    const unsigned lane = EMULATED_LANE, from = lane + delta < 32 ? lane + delta : lane;
    return emulated_unpack<T>(emulated_exchange(mask, OP_DOWN, emulated_pack(value))[from]);
}
template <class T>
UNSEEN inline T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return emulated_unpack<T>(emulated_exchange(mask, OP_XOR, emulated_pack(value))[(EMULATED_LANE ^ lanes) & 31]);
}
UNSEEN static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const unsigned long long* all = emulated_exchange(mask, OP_BALLOT, predicate != 0);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= (unsigned)all[lane] << lane;
    return bits;
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == 0xFFFFFFFFu; }
template <class T>
UNSEEN inline unsigned __match_any_sync(unsigned mask, T value) {
    const unsigned long long own = emulated_pack(value);
    const unsigned long long* all = emulated_exchange(mask, OP_MATCH, own);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= (unsigned)(all[lane] == own) << lane;
    return bits;
}

// No other thread runs while a thread is inside one of these.
template <class T, class F>
UNSEEN inline T emulated_update(T* address, F f) {
    emulated_atomic(address, sizeof(T));
    const T old = *address;
    *address = f(old);
    return old;
}
#define EMULATED_ATOMIC(name, T, expression)                                         \
    UNSEEN static inline T name(T* address, T value) {                               \
        return emulated_update(address, [value](T old) { return (T)(expression); }); \
    }
EMULATED_ATOMIC(atomicAdd, unsigned, old + value)
EMULATED_ATOMIC(atomicAdd, int, old + value)
EMULATED_ATOMIC(atomicAdd, unsigned long long, old + value)
EMULATED_ATOMIC(atomicMin, unsigned, value < old ? value : old)
EMULATED_ATOMIC(atomicMin, int, value < old ? value : old)
EMULATED_ATOMIC(atomicMin, unsigned long long, value < old ? value : old)
EMULATED_ATOMIC(atomicMax, unsigned, value > old ? value : old)
EMULATED_ATOMIC(atomicMax, int, value > old ? value : old)
EMULATED_ATOMIC(atomicMax, unsigned long long, value > old ? value : old)
EMULATED_ATOMIC(atomicOr, unsigned, old | value)
EMULATED_ATOMIC(atomicOr, unsigned long long, old | value)
EMULATED_ATOMIC(atomicAnd, unsigned, old & value)
EMULATED_ATOMIC(atomicExch, unsigned, value)
EMULATED_ATOMIC(atomicExch, unsigned long long, value)
template <class T>
UNSEEN inline T atomicCAS(T* address, T compare, T value) {
    return emulated_update(address, [=](T old) { return old == compare ? value : old; });
}

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
template <class T>
inline T __ldg(const T* address) {
    return *address;
}
template <class To, class From>
inline To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
static inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
static inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return emulated_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return emulated_bits<double>(x); }

// ---- Python starts kernels through these functions.

extern "C" void emulated_launch(void (*entry)(void*), void* context, const unsigned* sizes, char* shared,
                                char* shared_end, const char* read_only, const char* read_only_end);

template <class T>
constexpr char emulated_letter() {
    if (std::is_pointer<T>::value) return std::is_const<std::remove_pointer_t<T>>::value ? 'C' : 'P';
    if (std::is_same<T, float>::value) return 'f';
    if (std::is_same<T, double>::value) return 'd';
    return std::is_signed<T>::value ? (sizeof(T) == 4 ? 'i' : sizeof(T) == 8 ? 'q' : '?')
                                    : (sizeof(T) == 4 ? 'I' : sizeof(T) == 8 ? 'Q' : '?');
}

template <class... A>
struct EmulatedKernel {
    void (*kernel)(A...);
    void* const* arguments;
    static const char* letters() {
        static const char text[] = {emulated_letter<A>()..., 0};
        return text;
    }
    template <std::size_t... I>
    UNSEEN void call(std::index_sequence<I...>) const {
        kernel(*(std::remove_const_t<A>*)arguments[I]...);
    }
    UNSEEN static void entry(void* self) { ((const EmulatedKernel*)self)->call(std::index_sequence_for<A...>()); }
};
template <class... A>
EmulatedKernel<A...> emulated_kernel(void (*kernel)(A...), void* const* arguments = nullptr) {
    return {kernel, arguments};
}

extern "C" __attribute__((visibility("hidden"))) char __bss_start, _end, __ehdr_start, _edata;

// NAME_types(): for each parameter, the letter of its type in Python's struct module ('P' for a pointer, 'C' for one that
// is only read).
// NAME_launch(): `sizes` are the number of blocks and the number of threads per block.
#define EMULATED_KERNEL(name)                                                                       \
    extern "C" __global__ const char* name##_types() { return decltype(emulated_kernel(name))::letters(); } \
    extern "C" __global__ void name##_launch(void* const* arguments, const unsigned* sizes) {       \
        auto kernel = emulated_kernel(name, arguments);                                             \
        emulated_launch(kernel.entry, &kernel, sizes, &__bss_start, &_end, &__ehdr_start, &_edata); \
    }

#endif
