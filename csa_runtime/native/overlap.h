// SPDX-License-Identifier: Apache-2.0
/* Exact overlap of row-strided regions of memory. */
#ifndef CSA_OVERLAP_H
#define CSA_OVERLAP_H

#include <stdbool.h>
#include <stdint.h>

/* `rows` runs of `width` bytes, `stride` bytes apart; rows > 1 implies stride > 0, rows == 0 or
 * width == 0 is empty, and nothing wraps around the address space. */
struct csa_region {
  uint64_t base;
  int64_t rows, width, stride;
};

/* One past the last byte; `base` for an empty region. */
static inline uint64_t csa_region_end(const struct csa_region *r) {
  if (r->rows == 0 || r->width == 0) return r->base;
  return r->base + (uint64_t)(r->rows - 1) * (uint64_t)r->stride + (uint64_t)r->width;
}

/* Whether the two share a byte. Next to nothing where their bounds are disjoint, a few operations
 * where the strides are equal, else Euclid's steps on the strides, whatever the number of rows. */
bool csa_regions_overlap(const struct csa_region *a, const struct csa_region *b);

#endif
