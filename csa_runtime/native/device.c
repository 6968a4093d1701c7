// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "error.h"

static struct csa_device *devices;
static int device_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The first driver that loads a generation's images. */
static const struct {
  int32_t major;
  int version;
  const char *release;
} DRIVERS[] = {{10, 12080, "R570"}, {11, 13000, "R580"}, {12, 12080, "R570"}};

void csa_contexts_add(struct csa_contexts *set, uint64_t id, int primary) {
  static unsigned forgotten;
  int at = 0;
  if (!primary) {
    if (csa_contexts_hold(set, id)) return;
    for (at = 1; at < CSA_CONTEXTS; at++)
      if (atomic_load_explicit(&set->ids[at], memory_order_relaxed) == 0) break;
    if (at == CSA_CONTEXTS) at = 1 + (int)(forgotten++ % (CSA_CONTEXTS - 1));
  }
  atomic_store_explicit(&set->ids[at], id + 1, memory_order_release);
}

int csa_devices_init(void) {
  int count = 0;
  int status =
      csa_driver_check(csa_cuda.device_count(&count), "cuDeviceGetCount", "counting the devices");
  if (status != CSA_OK) return status;
  struct csa_device *table = calloc((size_t)count + 1, sizeof *table);
  if (table == NULL) return csa_fail(CSA_ERROR_MEMORY, "no host memory");
  devices = table;
  device_count = count;
  return CSA_OK;
}

int csa_device_count(void) { return device_count; }

int csa_device_facts(cu_device handle, int32_t *capability, int32_t *shared_limit) {
  int major = 0, minor = 0, shared = 0;
  cu_result result = csa_cuda.device_attribute(&major, CU_DEVICE_MAJOR, handle);
  if (result == CU_SUCCESS) result = csa_cuda.device_attribute(&minor, CU_DEVICE_MINOR, handle);
  if (result == CU_SUCCESS)
    result = csa_cuda.device_attribute(&shared, CU_DEVICE_SHARED_OPTIN, handle);
  *capability = 10 * major + minor;
  *shared_limit = shared;
  return csa_driver_check(result, "cuDeviceGetAttribute", "asking what the device is");
}

static int check_driver_age(int32_t capability) {
  for (size_t i = 0; i < sizeof DRIVERS / sizeof DRIVERS[0]; i++) {
    if (capability / 10 != DRIVERS[i].major || csa_cuda.version >= DRIVERS[i].version) continue;
    return csa_fail_driver(
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", CU_ERROR_SYSTEM_DRIVER_MISMATCH, "cuDriverGetVersion",
        "compute capability %d.%d needs a CUDA %d.%d driver (%s) or newer; this "
        "one is CUDA %d.%d",
        capability / 10, capability % 10, DRIVERS[i].version / 1000, DRIVERS[i].version % 1000 / 10,
        DRIVERS[i].release, csa_cuda.version / 1000, csa_cuda.version % 1000 / 10);
  }
  return CSA_OK;
}

static int set_up(const struct csa_bundle *bundle, int32_t ordinal, struct csa_device *device) {
  int status = csa_driver_check(csa_cuda.device_get(&device->handle, ordinal), "cuDeviceGet",
                                "finding the device");
  int32_t capability = 0, shared_limit = 0;
  if (status == CSA_OK) status = csa_device_facts(device->handle, &capability, &shared_limit);
  if (status != CSA_OK) return status;
  char who[32];
  snprintf(who, sizeof who, "device %d", ordinal);
  status = csa_target_init(bundle, who, capability, shared_limit, &device->target);
  if (status != CSA_OK) return status;
  status = check_driver_age(capability);
  if (status == CSA_OK) {
    device->kernels = calloc((size_t)bundle->variant_count + 1, sizeof *device->kernels);
    if (device->kernels == NULL) status = csa_fail(CSA_ERROR_MEMORY, "no host memory");
  }
  if (status != CSA_OK) {
    free(device->target.images);
    return status;
  }
  device->ordinal = ordinal;
  atomic_store_explicit(&device->ready, 1, memory_order_release);
  return CSA_OK;
}

int csa_device_get(const struct csa_bundle *bundle, int32_t ordinal, struct csa_device **device) {
  int status = csa_driver_start();
  if (__builtin_expect(status != CSA_OK, 0)) return status;
  if (__builtin_expect(ordinal < 0 || ordinal >= device_count, 0))
    return csa_fail(CSA_ERROR_VALUE, "device is %d; pass 0 to %d, a CUDA ordinal of this process",
                    ordinal, device_count - 1);
  *device = &devices[ordinal];
  if (__builtin_expect(atomic_load_explicit(&(*device)->ready, memory_order_acquire), 1))
    return CSA_OK;
  pthread_mutex_lock(&lock);
  if (!atomic_load_explicit(&(*device)->ready, memory_order_relaxed))
    status = set_up(bundle, ordinal, *device);
  pthread_mutex_unlock(&lock);
  return status;
}
