// Programmatic dependent launch: in a graph a kernel may begin while the one before ends, ours and FlashInfer's. What it
// reads of that one, and what it writes, waits; weights do not.
//
// Two rules. Each kernel that begins early waits, in some thread of its grid: so the end of one is the end of all before
// it. And FlashInfer's attention looks at where pages begin before it waits: between what writes those arrays in a graph
// and the first kernel that lets the next begin there has to be one that does not, as the embedding's is.

#pragma once

// Until all kernels before have ended, and what they wrote is seen. Nothing where a kernel was launched as usual.
__device__ static inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel behind may begin once all blocks have said so, if it was launched to.
__device__ static inline void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
