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

/* Backward's blocks that write zeros, of its second launch: `finish` as its schedule `row` says,
 * behind `rows`. A thread looks at a token, up to `fill_ctas` blocks. Of long windows, where zeros
 * may be much of what is written, more and smaller shares, which start in the order of memory. If
 * some tokens have no row, `fill_ctas` blocks or one for so many of their elements, but none for
 * less than 32 tokens. Four for a segment's last block, of which a warp looks 32 up. */
int64_t csa_zero_blocks(const struct csa_variant *rows, const struct csa_variant *finish,
                        const struct csa_schedule *row, const csa_args *args);

static inline int64_t csa_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* fp32 elements of one partial plane of grad_ape. */
static inline int64_t csa_plane_elements(const csa_args *args) {
  return (int64_t)args->ratio * args->coff * args->head_dim;
}

#endif
