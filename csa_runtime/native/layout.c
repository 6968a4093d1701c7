// SPDX-License-Identifier: Apache-2.0
#include "layout.h"

enum {
  WARP = 32,
  LAST_BLOCK_PARTS = 4, /* of a segment's last block, each a block's: aot/kernels/zeros.py */
  ZERO_ELEMENTS = 4096, /* of each gradient, of tokens that no row pools, a block */
  ZERO_BLOCKS_MOST = 8  /* times `fill_ctas` */
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int log2_of(int32_t power) { return __builtin_ctz((unsigned)power); }

static int64_t ceil_shift(int64_t a, int log2) { return (a + ((int64_t)1 << log2) - 1) >> log2; }

static int ceil_log2(int64_t x) {
  return x <= 1 ? 0 : 64 - __builtin_clzll((unsigned long long)(x - 1));
}

/* At most `groups` to share `row_blocks`. If more than half of them work in the last round, those
 * that would not are left out: as many rounds, fewer partial sums. */
static int64_t balanced(int64_t row_blocks, int64_t groups) {
  if (row_blocks <= groups) return row_blocks;
  int64_t rounds = (row_blocks + groups - 1) / groups, idle = rounds * groups - row_blocks;
  return 2 * idle < groups ? (row_blocks + rounds - 1) / rounds : groups;
}

void csa_lay_out(const struct csa_variant *v, const struct csa_schedule *row, const csa_args *a,
                 struct csa_layout *layout) {
  int64_t column_threads = ceil_shift(a->head_dim, log2_of(v->columns));
  int threads_log2 = log2_of(v->threads);
  struct csa_layout l = {.lanes_log2 = row->lanes_log2};
  if (v->kind == CSA_LONG) { /* a warp along the columns; the warps share each row's window */
    l.column_tiles = ceil_shift(column_threads, l.lanes_log2);
    l.row_blocks = a->rows;
  } else if (v->kind == CSA_BUFFERED) { /* a warp along the columns; each takes a row */
    l.column_tiles = ceil_shift(column_threads, l.lanes_log2);
    l.row_blocks = ceil_shift(a->rows, threads_log2 - l.lanes_log2);
  } else {
    l.lanes_log2 = (int32_t)least(l.lanes_log2, ceil_log2(column_threads));
    l.lanes_log2 = (int32_t)most(l.lanes_log2, log2_of(v->rows)); /* a warp has 32 rows at most */
    l.column_tiles = ceil_shift(column_threads, l.lanes_log2);
    l.row_blocks = ceil_shift(a->rows, threads_log2 - l.lanes_log2 + log2_of(v->rows));
  }
  if (row->ctas > 0) /* backward */
    l.groups = balanced(l.row_blocks, most(row->ctas / l.column_tiles, 1));
  *layout = l;
}

int64_t csa_zero_blocks(const struct csa_variant *rows, const struct csa_variant *finish,
                        const struct csa_schedule *row, const csa_args *a) {
  int64_t limit = row->fill_ctas, look = least(limit, csa_ceil_div(a->tokens, finish->threads));
  if (rows->kind != CSA_LONG) return look;
  int64_t unpooled = most(a->tokens - a->rows * a->ratio, 0);
  int64_t each = most(ZERO_ELEMENTS / (a->coff * a->head_dim), 1);
  int64_t tails = unpooled > 0 ? most(limit, csa_ceil_div(unpooled, each)) : 0;
  int64_t last = most(least(a->rows, a->segments), csa_ceil_div(a->segments, WARP));
  int64_t parts = a->coff == 2 && a->rows > 0 ? last * LAST_BLOCK_PARTS : 0;
  int64_t write = most(least(tails, csa_ceil_div(a->tokens, WARP)), parts);
  return most(look, least(limit * ZERO_BLOCKS_MOST, write));
}
