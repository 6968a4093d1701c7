// SPDX-License-Identifier: Apache-2.0
/* The devices of this process: facts, the images each runs, the kernels that are ready. */
#ifndef CSA_DEVICE_H
#define CSA_DEVICE_H

#include <stdatomic.h>

#include "driver.h"
#include "target.h"

enum { CSA_CONTEXTS = 8 }; /* remembered at a time; forgetting one costs its next call some calls */

/* Contexts by their ids plus one, which the process never gives twice; 0 is nothing. Read without
 * a lock, each word a fact of its own; written with the loader's lock held. */
struct csa_contexts {
  atomic_uint_fast64_t ids[CSA_CONTEXTS]; /* the first is the primary context's, and stays */
};

static inline int csa_contexts_hold(struct csa_contexts *set, uint64_t id) {
  for (int i = 0; i < CSA_CONTEXTS; i++)
    if (atomic_load_explicit(&set->ids[i], memory_order_acquire) == id + 1) return 1;
  return 0;
}

/* A variant on a device. */
struct csa_ready {
  cu_kernel kernel;             /* context-free; set once, before any context is added */
  struct csa_contexts contexts; /* in which it is finished: a launch there loads nothing */
};

struct csa_device {
  int32_t ordinal;
  cu_device handle;
  struct csa_target target;
  struct csa_contexts contexts; /* known to be this device's */
  struct csa_ready *kernels;    /* one for each variant */
  atomic_int ready;             /* everything above is set */
  atomic_int primary_held;      /* the primary context is retained once and for all */
};

/* Remember a context, in place of one remembered before where the set is full. */
void csa_contexts_add(struct csa_contexts *set, uint64_t id, int primary);

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
