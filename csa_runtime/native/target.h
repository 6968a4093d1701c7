// SPDX-License-Identifier: Apache-2.0
/* What a bundle offers one kind of device: facts in, index tables out; no driver. */
#ifndef CSA_TARGET_H
#define CSA_TARGET_H

#include "bundle.h"

struct csa_target {
  int32_t capability;   /* 10 * major + minor */
  int32_t arch;         /* of the images it runs */
  int32_t shared_limit; /* bytes of shared memory that one block may opt into */
  /* For each family: the schedules between which all of this arch lie. */
  int32_t first_row[CSA_MAX_FAMILIES], end_row[CSA_MAX_FAMILIES];
  int32_t *images; /* index of each variant's image, or -1 */
};

/* The images of the same major and the highest minor not above the device's. `who` starts the
 * message of CSA_ERROR_ARCH where there are none. shared_limit 0 means what GPUs of that capability
 * have. Free target->images after use. */
int csa_target_init(const struct csa_bundle *bundle, const char *who, int32_t capability,
                    int32_t shared_limit, struct csa_target *target);

/* The architecture of `bundle` that serves a capability, or 0. */
int32_t csa_target_arch(const struct csa_bundle *bundle, int32_t capability);

/* Shared memory of a block, static and dynamic; the target must have an image of the variant. */
int32_t csa_target_shared_bytes(const struct csa_bundle *bundle, const struct csa_target *target,
                                int32_t variant);

#endif
