// Programmatic dependent launch: in a graph a kernel may begin while the one before ends. What it reads of that one, and
// what it writes, waits; weights do not.

#pragma once

// Until all kernels before have ended, and what they wrote is seen.
__device__ static inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel behind may begin once all blocks have said so.
__device__ static inline void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
