// SPDX-License-Identifier: Apache-2.0
/* How one schedule row lays one problem out on the grid: arithmetic alone. */
#ifndef CSA_LAYOUT_H
#define CSA_LAYOUT_H

#include "bundle.h"
#include "csa_runtime.h"

struct csa_layout {
  int32_t lanes_log2;   /* 2**lanes_log2 threads of a block lie along the columns */
  int64_t column_tiles; /* blocks along the columns */
  int64_t row_blocks;   /* blocks that would take all rows at once */
  int64_t groups;       /* backward: of the row_blocks, how many run; each takes every groups-th */
};

void csa_lay_out(const struct csa_variant *variant, const struct csa_schedule *row,
                 const csa_args *args, struct csa_layout *layout);

/* fp32 elements of one partial plane of grad_ape. */
static inline int64_t csa_plane_elements(const csa_args *args) {
  return (int64_t)args->ratio * args->coff * args->head_dim;
}

#endif
