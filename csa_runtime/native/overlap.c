// SPDX-License-Identifier: Apache-2.0
#include "overlap.h"

/* Differences of any two addresses, times nothing: 128 bits hold them all. */
__extension__ typedef __int128 wide;

static wide floor_div(wide a, wide b) {
  wide q = a / b;
  return q * b > a ? q - 1 : q;
}

/* The sum of floor((a * i + b) / m) over i in [0, n), by Euclid's steps; a, b >= 0, n, m > 0. */
static wide floor_sum(wide n, wide m, wide a, wide b) {
  wide sum = 0;
  for (;;) {
    sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
    a %= m;
    b %= m;
    wide last = a * n + b;
    if (last < m) return sum;
    n = last / m;
    b = last % m;
    wide swap = m;
    m = a;
    a = swap;
  }
}

/* Whether (start + i * step) mod m < below for some i in [0, n); step >= 0, n, m > 0. */
static bool reaches_below(wide n, wide m, wide step, wide start, wide below) {
  if (below >= m) return true;
  step %= m;
  start += (1 - floor_div(start, m)) * m; /* in [m, 2m) */
  return floor_sum(n, m, step, start) > floor_sum(n, m, step, start - below);
}

bool csa_regions_overlap(const struct csa_region *a, const struct csa_region *b) {
  uint64_t a_end = csa_region_end(a), b_end = csa_region_end(b);
  if (a_end == a->base || b_end == b->base) return false;
  if (a->base >= b_end || b->base >= a_end) return false;
  wide a_step = a->rows > 1 ? a->stride : 1, b_step = b->rows > 1 ? b->stride : 1;
  /* Row i of a and row j of b meet where x - b.width < j * b_step < x + a.width with
   * x = i * a_step - delta. Only rows of a that reach into b's bounds count; for those a multiple
   * of b_step in that interval is a row of b, or the interval holds b's last row as well. */
  wide delta = (wide)b->base - (wide)a->base;
  wide low = -floor_div(a->width - 1 - delta, a_step);
  wide high = floor_div((b->rows - 1) * b_step + delta + b->width - 1, a_step);
  if (low < 0) low = 0;
  if (high > a->rows - 1) high = a->rows - 1;
  if (low > high) return false;
  return reaches_below(high - low + 1, b_step, a_step, low * a_step - delta + a->width - 1,
                       (wide)a->width + b->width - 1);
}
