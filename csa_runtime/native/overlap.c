// SPDX-License-Identifier: Apache-2.0
#include "overlap.h"

/* Differences of any two addresses, times nothing: 128 bits hold them all. */
__extension__ typedef __int128 wide;

static wide floor_div(wide a, wide b) {
  wide q = a / b;
  return q * b > a ? q - 1 : q;
}

/* Whether some k in [low, high] has lower < k * stride < upper. */
static bool multiple_between(wide lower, wide upper, wide stride, wide low, wide high) {
  if (stride == 0) return low <= 0 && 0 <= high && lower < 0 && 0 < upper;
  wide k = floor_div(lower, stride) + 1;
  if (k < low) k = low;
  return k <= high && k * stride < upper;
}

bool csa_regions_overlap(const struct csa_region *a, const struct csa_region *b) {
  uint64_t a_end = csa_region_end(a), b_end = csa_region_end(b);
  if (a_end == a->base || b_end == b->base) return false;
  if (a->base >= b_end || b->base >= a_end) return false;
  if (a->rows > b->rows) {
    const struct csa_region *swap = a;
    a = b;
    b = swap;
  }
  /* Row i of a and row j of b meet where -b.width < b.base - a.base + j*tb - i*ta < a.width. */
  wide delta = (wide)b->base - (wide)a->base;
  if (a->stride == b->stride)
    return multiple_between(-b->width - delta, a->width - delta, b->stride, 1 - (wide)a->rows,
                            (wide)b->rows - 1);
  for (int64_t i = 0; i < a->rows; i++) {
    wide offset = delta - (wide)i * a->stride;
    if (multiple_between(-b->width - offset, a->width - offset, b->stride, 0, (wide)b->rows - 1))
      return true;
  }
  return false;
}
