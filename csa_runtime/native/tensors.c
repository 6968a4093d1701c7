// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include <stdbool.h>

#include "error.h"

enum { WORKSPACE_ALIGNMENT = 16 };

static bool add(struct csa_tensors *t, const char *name, const void *base, int64_t rows,
                int64_t width, int64_t stride) {
  struct csa_region region = {(uint64_t)(uintptr_t)base, rows, width, stride};
  if (rows > 1 && stride == 0) region.rows = rows = 1; /* one row, repeated */
  int64_t extent = 0;
  uint64_t end = region.base;
  bool wraps = rows > 0 && (__builtin_mul_overflow(rows > 1 ? stride : 0, rows - 1, &extent) ||
                            __builtin_add_overflow(extent, width, &extent) ||
                            __builtin_add_overflow(region.base, (uint64_t)extent, &end));
  t->names[t->count] = name;
  t->regions[t->count] = region;
  t->ends[t->count] = end;
  t->count++;
  return !wraps;
}

static int outside(const char *name, const void *base) {
  return csa_fail(CSA_ERROR_VALUE,
                  "%s at %p reaches beyond the address space; check its row stride and the counts",
                  name, base);
}

static int check_base(const char *name, const void *base, bool empty, int64_t alignment) {
  if (__builtin_expect(base == NULL && !empty, 0))
    return csa_fail(CSA_ERROR_VALUE, "%s is NULL; pass a device pointer", name);
  if (__builtin_expect(((uintptr_t)base & (uintptr_t)(alignment - 1)) != 0, 0))
    return csa_fail(CSA_ERROR_VALUE,
                    "%s is at %p, which is no multiple of %lld bytes; align it to its element",
                    name, base, (long long)alignment);
  return CSA_OK;
}

/* A (rows, columns) tensor of the call's dtype. */
static int matrix(struct csa_tensors *t, const char *name, const void *base, int64_t rows,
                  int64_t columns, int64_t stride, int64_t element, bool output) {
  int status = check_base(name, base, rows == 0, element);
  if (status != CSA_OK) return status;
  if (__builtin_expect(stride < 0, 0))
    return csa_fail(CSA_ERROR_VALUE,
                    "%s_stride is %lld; negative row strides are not supported: make a contiguous "
                    "copy",
                    name, (long long)stride);
  if (__builtin_expect(output && rows > 1 && stride < columns, 0))
    return csa_fail(CSA_ERROR_VALUE,
                    "%s_stride is %lld; an output's rows are %lld elements wide and must not "
                    "overlap: pass at least that",
                    name, (long long)stride, (long long)columns);
  int64_t bytes;
  if (rows <= 1) stride = columns;
  if (__builtin_mul_overflow(stride, element, &bytes) ||
      !add(t, name, base, rows, columns * element, bytes))
    return outside(name, base);
  return CSA_OK;
}

/* A contiguous array of 4-byte elements. */
static int array(struct csa_tensors *t, const char *name, const void *base, int64_t elements) {
  int status = check_base(name, base, false, 4);
  if (status != CSA_OK) return status;
  return add(t, name, base, 1, elements * 4, elements * 4) ? CSA_OK : outside(name, base);
}

static int workspace(struct csa_tensors *t, const csa_args *a) {
  if (a->workspace_bytes < 0)
    return csa_fail(CSA_ERROR_VALUE, "workspace_bytes is %lld; pass the bytes at workspace",
                    (long long)a->workspace_bytes);
  if (((uintptr_t)a->workspace & (WORKSPACE_ALIGNMENT - 1)) != 0)
    return csa_fail(CSA_ERROR_VALUE, "workspace is at %p; align it to %d bytes", a->workspace,
                    WORKSPACE_ALIGNMENT);
  if (a->workspace == NULL) return CSA_OK; /* whether one is needed depends on the plan */
  return add(t, "workspace", a->workspace, 1, a->workspace_bytes, a->workspace_bytes)
             ? CSA_OK
             : outside("workspace", a->workspace);
}

#define CHECK(call)                        \
  do {                                     \
    int status_ = (call);                  \
    if (status_ != CSA_OK) return status_; \
  } while (0)

int csa_tensors_collect(enum csa_operation operation, const csa_args *a, struct csa_tensors *t) {
  int64_t e = csa_element_bytes(a->dtype), width = a->coff * a->head_dim;
  int64_t ape_elements = a->ratio * width;
  t->count = 0;
  if (operation == CSA_FORWARD) {
    CHECK(matrix(t, "out", a->out, a->rows, a->head_dim, a->out_stride, e, true));
  } else {
    CHECK(matrix(t, "grad_kv", a->grad_kv, a->tokens, width, a->grad_kv_stride, e, true));
    CHECK(matrix(t, "grad_score", a->grad_score, a->tokens, width, a->grad_score_stride, e, true));
    if (a->grad_ape != NULL) {
      CHECK(array(t, "grad_ape", a->grad_ape, ape_elements));
      CHECK(workspace(t, a));
    }
  }
  t->output_count = t->count;
  CHECK(matrix(t, "kv", a->kv, a->tokens, width, a->kv_stride, e, false));
  CHECK(matrix(t, "score", a->score, a->tokens, width, a->score_stride, e, false));
  if (a->ape != NULL) CHECK(array(t, "ape", a->ape, ape_elements));
  CHECK(array(t, "cu_seqlens", a->cu_seqlens, a->segments + 1));
  CHECK(array(t, "cu_seqlens_comp", a->cu_seqlens_comp, a->segments + 1));
  if (operation == CSA_BACKWARD)
    CHECK(matrix(t, "grad_out", a->grad_out, a->rows, a->head_dim, a->grad_out_stride, e, false));
  return CSA_OK;
}

int csa_tensors_check_overlap(const struct csa_tensors *t) {
  for (int i = 0; i < t->output_count; i++) {
    for (int j = i + 1; j < t->count; j++) {
      if (t->regions[i].base >= t->ends[j] || t->regions[j].base >= t->ends[i]) continue;
      if (!csa_regions_overlap(&t->regions[i], &t->regions[j])) continue;
      return csa_fail(CSA_ERROR_VALUE,
                      "%s (%p) and %s (%p) overlap; outputs and workspace must share no element "
                      "with any other tensor: pass separate memory",
                      t->names[i], (void *)(uintptr_t)t->regions[i].base, t->names[j],
                      (void *)(uintptr_t)t->regions[j].base);
    }
  }
  return CSA_OK;
}
