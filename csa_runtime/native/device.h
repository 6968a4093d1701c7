// SPDX-License-Identifier: Apache-2.0
/* The devices of this process: facts, the images each runs, the kernels that are ready. */
#ifndef CSA_DEVICE_H
#define CSA_DEVICE_H

#include <stdatomic.h>

#include "driver.h"
#include "target.h"

struct csa_device {
  int32_t ordinal;
  cu_device handle;
  struct csa_target target;
  /* For each variant: its context-free kernel handle once it may be launched on this device. */
  _Atomic(cu_kernel) *kernels;
  atomic_int ready;        /* everything above is set */
  atomic_int primary_held; /* the primary context is retained once and for all */
};

/* Count the devices; part of starting the driver, called once. */
int csa_devices_init(void);

/* How many there are; the driver must be started. */
int csa_device_count(void);

/* The device of that CUDA ordinal, starting the driver if need be; CSA_ERROR_VALUE where there is
 * none, CSA_ERROR_ARCH where the bundle has no images for it. */
int csa_device_get(const struct csa_bundle *bundle, int32_t ordinal, struct csa_device **device);

/* Its compute capability as 10 * major + minor, and the shared memory one block may opt into. */
int csa_device_facts(cu_device handle, int32_t *capability, int32_t *shared_limit);

#endif
