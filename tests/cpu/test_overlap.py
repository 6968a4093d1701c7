# SPDX-License-Identifier: Apache-2.0
"""Overlap of row-strided memory: exact against brute force, and quick whatever the rows."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.expected import ROOT

pytestmark = pytest.mark.L0

NATIVE = ROOT / "csa_runtime" / "native"
SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "overlap.h"

static int brute(const struct csa_region *a, const struct csa_region *b) {
  for (int64_t i = 0; i < a->rows; i++)
    for (int64_t j = 0; j < b->rows; j++) {
      int64_t p = (int64_t)a->base + i * a->stride, q = (int64_t)b->base + j * b->stride;
      if (a->width > 0 && b->width > 0 && p < q + b->width && q < p + a->width) return 1;
    }
  return 0;
}

static struct csa_region any(void) {
  int64_t rows = rand() % 12, stride = rand() % 40 + (rows > 1);
  int64_t width = rand() % 3 ? 1 + rand() % 4 : rand() % 60;
  return (struct csa_region){1 << 20 | rand() % 200, rows, width, stride};
}

int main(void) {
  int seen[2] = {0, 0};
  for (int n = 0; n < 200000; n++) {
    struct csa_region a = any(), b = any();
    int want = brute(&a, &b);
    seen[want]++;
    if (csa_regions_overlap(&a, &b) == want && csa_regions_overlap(&b, &a) == want) continue;
    printf("%d: %lu %ld %ld %ld, %lu %ld %ld %ld\n", want, a.base, a.rows, a.width, a.stride,
           b.base, b.rows, b.width, b.stride);
    return 1;
  }
  struct csa_region even = {1 << 20, INT32_MAX, 2, 1 << 20};
  struct csa_region odd = {(1 << 20) + 7, INT32_MAX, 2, (1 << 20) + 8}; /* at row 131071 */
  struct csa_region never = {(1 << 20) + 6, INT32_MAX, 2, (1 << 20) + 8};
  struct csa_region top = {UINT64_MAX - ((uint64_t)1 << 52) - 8, 2, 4, (int64_t)1 << 52};
  struct csa_region all = {16, 2, 8, INT64_MAX};
  clock_t start = clock();
  int wide = csa_regions_overlap(&even, &odd);
  int narrow = csa_regions_overlap(&top, &all) + csa_regions_overlap(&even, &never);
  printf("%d %d %d %d %d\n", seen[0] > 20000, seen[1] > 20000, wide, narrow,
         clock() - start < CLOCKS_PER_SEC / 100);
  return 0;
}
"""


def test_overlap_is_that_of_brute_force_and_takes_no_longer_for_more_rows(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    assert compiler is not None
    (tmp_path / "main.c").write_text(SOURCE)
    command = [compiler, "-O1", "-fsanitize=undefined", "-fno-sanitize-recover", f"-I{NATIVE}"]
    files = [tmp_path / "main.c", NATIVE / "overlap.c", "-o", tmp_path / "main"]
    subprocess.run([*command, *map(str, files)], check=True)
    done = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["1", "1", "1", "0", "1"]), done.stdout
