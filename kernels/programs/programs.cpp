// Makes the launches of a recorded program (ops/program.py) in one call, without Python and without its lock.
//
// The library is built without CUDA: the driver's functions come as addresses. Their result is 0, or the driver's error.
#include <vector>

#include "common/cpu.h"

// The addresses of the driver's functions, in this order.
struct Driver {
    int (*launch)(u64 function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared, u64 stream,
                  void** arguments, void** extra);
    int (*set)(u64 to, u8 value, size_t bytes, u64 stream);
    int (*to_device)(u64 to, const void* from, size_t bytes, u64 stream);
    int (*to_host)(void* to, u64 from, size_t bytes, u64 stream);
    int (*wait)(u64 stream);
};

// A kernel: `arguments` words from the word `first` on are its arguments. The same in ops/program.py.
struct Launch {
    u64 function;
    u32 blocks, threads, first, arguments;
};

// What is added to a word before the launches: the base `base`, an address or a number of this run.
struct Patch {
    u32 word, base;
};

// A run. bases[0] is the address of the program's memory.
struct Run {
    u64 stream;
    u64 zeros;                  // bytes at its begin that are cleared first
    u64 given, given_bytes;     // on the host, copied behind these
    u64 given_at;
    u64 result, result_bytes;   // on the host, copied from `result_at` when all is done
    u64 result_at;
};

// Makes the launches, and waits for the result. Returns 0 or the driver's error; `*done`: how many launches were made.
DR_API int dr_program_run(const Driver* driver, const Run* run, const Launch* launches, u64 count, const u64* words,
                          u64 word_count, const Patch* patches, u64 patch_count, const u64* bases, u64* done) {
    std::vector<u64> argument(words, words + word_count);
    std::vector<void*> place(word_count);
    for (u64 i = 0; i < patch_count; ++i) argument[patches[i].word] += bases[patches[i].base];
    for (u64 i = 0; i < word_count; ++i) place[i] = &argument[i];
    *done = 0;
    int failed = run->zeros ? driver->set(bases[0], 0, run->zeros, run->stream) : 0;
    if (!failed && run->given_bytes)
        failed = driver->to_device(bases[0] + run->given_at, (const void*)run->given, run->given_bytes, run->stream);
    for (; !failed && *done < count; ++*done) {
        const Launch& one = launches[*done];
        failed = driver->launch(one.function, one.blocks, 1, 1, one.threads, 1, 1, 0, run->stream, &place[one.first],
                                nullptr);
        if (failed) return failed;
    }
    if (!failed) failed = driver->to_host((void*)run->result, bases[0] + run->result_at, run->result_bytes, run->stream);
    return failed ? failed : driver->wait(run->stream);
}
