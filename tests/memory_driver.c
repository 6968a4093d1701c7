// SPDX-License-Identifier: Apache-2.0
/* A libcuda.so.1 whose device memory is the host's: what csa_runtime/_device_memory.py calls, and
 * counts of what was left behind. MEMORY_DRIVER_FAIL names a function that returns 2.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };

int memory_driver_allocations, memory_driver_depth;
static int context;

static int failing(const char *name) {
  const char *wanted = getenv("MEMORY_DRIVER_FAIL");
  return wanted && strcmp(wanted, name) == 0 ? OUT_OF_MEMORY : 0;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : failing("cuInit"); }

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return failing("cuDeviceGet");
}

int cuDevicePrimaryCtxRetain(void **out, int device) {
  *out = &context;
  return device ? INVALID_VALUE : failing("cuDevicePrimaryCtxRetain");
}

int cuCtxPushCurrent_v2(void *pushed) {
  if (pushed != &context) return INVALID_VALUE;
  memory_driver_depth++;
  return 0;
}

int cuCtxPopCurrent_v2(void **out) {
  *out = &context;
  memory_driver_depth--;
  return 0;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  if (bytes == 0 || memory_driver_depth == 0) return INVALID_VALUE;
  if (failing("cuMemAlloc_v2")) return OUT_OF_MEMORY;
  void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  *address = (uint64_t)(uintptr_t)memory;
  memory_driver_allocations++;
  return 0;
}

int cuMemFree_v2(uint64_t address) {
  free((void *)(uintptr_t)address);
  memory_driver_allocations--;
  return 0;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
  memcpy((void *)(uintptr_t)to, from, bytes);
  return failing("cuMemcpyHtoD_v2");
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
  memcpy(to, (const void *)(uintptr_t)from, bytes);
  return failing("cuMemcpyDtoH_v2");
}

int cuGetErrorName(int code, const char **name) {
  if (code != OUT_OF_MEMORY) return INVALID_VALUE;
  *name = "CUDA_ERROR_OUT_OF_MEMORY";
  return 0;
}
