// Blocks of elements: the CUDA side of blocks.cpp; the indices of blocks; and the blocks of indices.
#include "arrays/finite.cuh"

// dense += gradient (unless null), then the norm of each block, in the order of summation that blocks.cpp gives. A warp
// takes a block: all of its lanes load, and eight add.
template <class T>
__device__ void block_norms(T* dense, const T* gradient, u64 n, u64 block, u32 l2, double* norms) {
    const u64 blocks = (n + block - 1) / block, stride = grid_threads() / 32;
    for (u64 b = grid_thread() / 32; b < blocks; b += stride) {
        const u64 begin = b * block, end = begin + block < n ? begin + block : n;
        double sum = 0.0;
        for (u64 base = begin; base < end; base += 32) {
            const u64 i = base + lane_number();
            double x = 0.0;
            if (i < end) {
                T value = dense[i];
                if (gradient) dense[i] = value = accumulated(value, gradient[i]);
                x = value < (T)0 ? -(double)value : (double)value;
                if (l2) x = x * x;
            }
            for (u32 part = 0; part < 32; part += 8) sum += __shfl_sync(WHOLE_WARP, x, (lane_number() & 7) + part);
        }
        for (u32 half = 4; half; half /= 2) sum += __shfl_down_sync(WHOLE_WARP, sum, half);
        const double largest = 1.7976931348623157e308;
        if (lane_number() == 0) norms[b] = sum <= largest ? sum : largest;
    }
}
FLOAT_KERNEL(block_norms, (T* dense, const T* gradient, u64 n, const i32* bad, u64 block, u32 l2, double* norms),
    block_norms(dense, unless(bad, gradient), n, block, l2, norms))

// indices: the first `size` indices of the given blocks of `block` elements, block after block.
KERNEL block_indices(const u32* blocks, u64 block, u64 size, u32* indices) {
    for (u64 i = grid_thread(); i < size; i += grid_threads())
        indices[i] = (u32)(blocks[i / block] * block + i % block);
}

// numbers: the block of each index.
KERNEL block_numbers(const u32* indices, u64 count, u64 block, u32* numbers) {
    for (u64 i = grid_thread(); i < count; i += grid_threads()) numbers[i] = (u32)(indices[i] / block);
}
