// SPDX-License-Identifier: Apache-2.0
/* Problem + device facts + bundle -> launches. Pure: no driver, no allocation, no state. */
#ifndef CSA_PLAN_H
#define CSA_PLAN_H

#include "bundle.h"
#include "csa_runtime.h"
#include "target.h"

struct csa_launch {
  int32_t variant, image;
  uint32_t grid[3], threads, shared;
  uint32_t parameter_bytes;
  _Alignas(8) uint8_t parameters[CSA_MAX_PARAMETERS * 8];
};

struct csa_plan {
  int32_t variant, image;  /* of the operation itself, launched or not */
  int32_t lanes_log2;      /* 2**lanes_log2 threads of a block lie along the columns */
  uint32_t grid[3];        /* of the operation itself; of no block: not launched */
  int64_t column_tiles;    /* blocks along the columns */
  int64_t groups;          /* backward: row groups, each with a partial APE plane */
  int64_t fill_ctas;       /* backward: blocks of its finish that write zeros */
  int64_t plane_elements;  /* backward: fp32 elements of one plane */
  int64_t workspace_bytes; /* backward with grad_ape: what this plan uses */
  int32_t launch_count;
  struct csa_launch launches[2];
};

/* The launches of validated `args`. `variant` forces one by name (NULL: the first schedule that
 * fits). Fails as csa_choose does. */
int csa_plan_make(const struct csa_bundle *bundle, const struct csa_target *target,
                  enum csa_operation operation, const csa_args *args, const char *variant,
                  struct csa_plan *plan);

/* Upper bound of workspace_bytes over every schedule of the family, whatever the device, the
 * alignment, the tokens and the rows; 0 where there is no schedule. */
int64_t csa_plan_workspace_bound(const struct csa_bundle *bundle, const csa_args *args);

#endif
