// SPDX-License-Identifier: Apache-2.0
/* The recording fake driver with what the examples need of a driver besides: streams, and device
 * memory that is the host's, zeroed. Nothing is computed.
 */
#include "fake_driver.c"

int cuStreamCreate(struct stream **out, unsigned flags) {
  BEGIN("cuStreamCreate")
  DETAILS("\"flags\": %u", flags);
  if (!current()) FAIL(INVALID_CONTEXT);
  *out = fake_stream(current());
  END
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  BEGIN("cuMemAlloc")
  DETAILS("\"bytes\": %zu", bytes);
  if (!current()) FAIL(INVALID_CONTEXT);
  if (!bytes) FAIL(INVALID_VALUE);
  *address = (uint64_t)(uintptr_t)calloc((bytes + 255) / 256, 256);
  END
}

int cuMemFree_v2(uint64_t address) {
  BEGIN("cuMemFree")
  free((void *)(uintptr_t)address);
  END
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
  BEGIN("cuMemcpyHtoD")
  memcpy((void *)(uintptr_t)to, from, bytes);
  END
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
  BEGIN("cuMemcpyDtoH")
  memcpy(to, (const void *)(uintptr_t)from, bytes);
  END
}
