// As much of libcuda as compiled_kernels.py calls, for cuda-bindings to load. It says what it is given, and does nothing.
// A launch whose second argument, an int, is 4 fails as a kernel does that reads where it must not.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

__attribute__((constructor)) static void by_lines(void) { setvbuf(stdout, NULL, _IOLBF, 0); }

int cuModuleLoadData(void** module, const void* image) {
  printf("load %s\n", memcmp(image, "\177ELF", 4) ? "no cubin" : "a cubin");
  *module = (void*)7;
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  printf("find %s in %d\n", name, (int)(long)module);
  *function = (void*)9;
  return 0;
}

int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void* stream, void** arguments, void** extra) {
  printf("launch %d: %u %u %u blocks of %u %u %u, %u bytes, stream %d, arguments %d, %d, %d, %s\n", (int)(long)function,
         x, y, z, threads_x, threads_y, threads_z, shared, (int)(long)stream, **(int**)arguments[0],
         *(int*)arguments[1], **(int**)arguments[2], extra ? "more" : "no more");
  return *(int*)arguments[1] == 4 ? 700 : 0;
}

typedef struct {
  unsigned x, y, z, threads_x, threads_y, threads_z, shared;
  void* stream;
  struct {
    int id;
    char pad[4];
    int value;
  }* attributes;
  unsigned count;
} Config;

int cuLaunchKernelEx(const Config* how, void* function, void** arguments, void** extra) {
  printf("with attribute %d: %d, %u in all: ", how->attributes->id, how->attributes->value, how->count);
  return cuLaunchKernel(function, how->x, how->y, how->z, how->threads_x, how->threads_y, how->threads_z, how->shared,
                        how->stream, arguments, extra);
}

static int unknown(void) { return 500; }

int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags, int* status) {
  Dl_info own;
  dladdr((void*)cuGetProcAddress_v2, &own);
  *function = dlsym(dlopen(own.dli_fname, RTLD_NOLOAD | RTLD_LAZY), name);
  if (!*function) *function = (void*)unknown;
  if (status) *status = 0;
  return 0;
}

int cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, 0);
}
