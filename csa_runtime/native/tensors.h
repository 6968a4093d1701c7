// SPDX-License-Identifier: Apache-2.0
/* The memory that one call names, as regions: pointer, alignment and stride checks, and overlap. */
#ifndef CSA_TENSORS_H
#define CSA_TENSORS_H

#include "bundle.h"
#include "csa_runtime.h"
#include "overlap.h"

enum { CSA_TENSORS_MAX = 10 };

struct csa_tensors {
  int count, output_count; /* outputs and workspace come first */
  const char *names[CSA_TENSORS_MAX];
  struct csa_region regions[CSA_TENSORS_MAX];
  uint64_t ends[CSA_TENSORS_MAX];
};

/* The regions of size-checked `args`, each checked by itself. */
int csa_tensors_collect(enum csa_operation operation, const csa_args *args,
                        struct csa_tensors *tensors);

/* Outputs and workspace against every input and against one another. */
int csa_tensors_check_overlap(const struct csa_tensors *tensors);

/* Bytes of an element of csa_args.dtype. */
static inline int64_t csa_element_bytes(int32_t dtype) { return dtype == CSA_DTYPE_FP32 ? 4 : 2; }

#endif
