// GCC's sanitizers define the callbacks of coverage, too, and do nothing in them. Loaded before them, this library
// gives the calls to libFuzzer, in the file that LIBFUZZER names, so that it sees the coverage of the Python code.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

static void* find(const char* name) {
    void* const library = dlopen(getenv("LIBFUZZER"), RTLD_LAZY | RTLD_NOLOAD);
    void* const found = library ? dlsym(library, name) : NULL;
    if (!found) abort();
    return found;
}

// The last call is a jump, so that libFuzzer finds the place that called this function.
#define FORWARD(name, parameters, arguments)              \
    void __sanitizer_cov_##name parameters {              \
        static void(*to) parameters;                      \
        if (!to) to = find("__sanitizer_cov_" #name);     \
        to arguments;                                     \
    }

FORWARD(8bit_counters_init, (uint8_t* start, uint8_t* stop), (start, stop))
FORWARD(pcs_init, (const uintptr_t* start, const uintptr_t* stop), (start, stop))
FORWARD(trace_cmp1, (uint8_t a, uint8_t b), (a, b))
FORWARD(trace_cmp2, (uint16_t a, uint16_t b), (a, b))
FORWARD(trace_cmp4, (uint32_t a, uint32_t b), (a, b))
FORWARD(trace_cmp8, (uint64_t a, uint64_t b), (a, b))
FORWARD(trace_const_cmp1, (uint8_t a, uint8_t b), (a, b))
FORWARD(trace_const_cmp2, (uint16_t a, uint16_t b), (a, b))
FORWARD(trace_const_cmp4, (uint32_t a, uint32_t b), (a, b))
FORWARD(trace_const_cmp8, (uint64_t a, uint64_t b), (a, b))
FORWARD(trace_switch, (uint64_t value, uint64_t* cases), (value, cases))
FORWARD(trace_div4, (uint32_t value), (value))
FORWARD(trace_div8, (uint64_t value), (value))
FORWARD(trace_gep, (uintptr_t index), (index))
FORWARD(trace_pc_indir, (uintptr_t callee), (callee))
