// SPDX-License-Identifier: Apache-2.0
/* Which schedule row serves a problem on a target. */
#ifndef CSA_CHOOSE_H
#define CSA_CHOOSE_H

#include "csa_runtime.h"
#include "layout.h"
#include "target.h"

/* The first row of forward or backward that size, alignment and shared memory allow, and its
 * layout. Where `variant` is not NULL, of the rows that name it the first for the size, or the
 * first if none is. CSA_ERROR_VALUE where nothing can serve the call; CSA_ERROR_ARCH where only
 * another architecture's images could. */
int csa_choose(const struct csa_bundle *bundle, const struct csa_target *target,
               enum csa_operation operation, const csa_args *args, const char *variant,
               const struct csa_schedule **row, struct csa_layout *layout);

/* The first row that finishes a backward with planes of so many elements, or CSA_ERROR_ARCH. */
int csa_choose_finish(const struct csa_bundle *bundle, const struct csa_target *target,
                      int64_t plane_elements, const struct csa_schedule **row);

#endif
