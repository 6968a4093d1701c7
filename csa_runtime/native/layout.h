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
 * behind `rows`. One for as many tokens as it has threads, up to `fill_ctas` blocks. Of long
 * windows, where zeros may be much of what is written, more with smaller shares, up to eight times
 * `fill_ctas`:
 *   - where some tokens have no row, `fill_ctas` blocks, or one for each 4,096 elements of either
 *     gradient that those tokens have, but at most one for each 32 tokens of the pack;
 *   - with coff 2, four for each segment that may have rows, to write its last block's first half,
 *     or for each 32 segments, if that is more, to look them up. */
int64_t csa_zero_blocks(const struct csa_variant *rows, const struct csa_variant *finish,
                        const struct csa_schedule *row, const csa_args *args);

static inline int64_t csa_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* fp32 elements of one partial plane of grad_ape. */
static inline int64_t csa_plane_elements(const csa_args *args) {
  return (int64_t)args->ratio * args->coff * args->head_dim;
}

#endif
