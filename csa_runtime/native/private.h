// SPDX-License-Identifier: Apache-2.0
/* What the Python module beside the library uses besides the public header. Not an ABI. */
#ifndef CSA_PRIVATE_H
#define CSA_PRIVATE_H

#include "bundle.h"
#include "csa_runtime.h"
#include "error.h"
#include "plan.h"

/* csa_forward and csa_backward, with an optional variant forced by name. */
CSA_API int csa_private_run(enum csa_operation operation, const csa_args *args, void *stream,
                            const char *variant);

/* Whether the stream is under capture, or may be as far as the driver tells. */
CSA_API int csa_private_capturing(void *stream);

struct csa_explanation {
  const struct csa_bundle *bundle;
  int32_t arch, capability, shared_limit;
  struct csa_plan plan;
};

/* What csa_private_run would launch on a device of compute capability `capability` (90 for 9.0)
 * with `shared_limit` bytes (0: usual for it), or on args->device for -1. Pointers may be NULL. */
CSA_API int csa_private_explain(enum csa_operation operation, const csa_args *args,
                                int32_t capability, int32_t shared_limit, const char *variant,
                                struct csa_explanation *explanation);

struct csa_device_info {
  char name[128];
  int32_t capability, shared_limit, multiprocessors, arch; /* arch 0: no image */
};

/* The driver's version, and device `ordinal` of the `count` there are. Both start the driver. */
CSA_API int csa_private_driver(int *version, int *count);
CSA_API int csa_private_device(int32_t ordinal, struct csa_device_info *info);

CSA_API int csa_private_bundle(const struct csa_bundle **bundle);
CSA_API const struct csa_failure *csa_private_failure(void);

#endif
