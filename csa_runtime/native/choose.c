// SPDX-License-Identifier: Apache-2.0
#include "choose.h"

#include <stdbool.h>
#include <string.h>

#include "error.h"
#include "names.h"
#include "tensors.h"

/* Where an address or a byte distance has low bits set, no variant of that alignment serves it. */
struct alignment {
  uintptr_t elements; /* bases, row strides and head_dim of the tensors of `dtype`, in bytes */
  uintptr_t ape;      /* base of ape */
};

static uintptr_t bits(const void *base, int64_t stride, int64_t rows, int64_t element) {
  return (uintptr_t)base | (rows > 1 ? (uintptr_t)(stride * element) : 0);
}

static struct alignment alignment_of(enum csa_operation operation, const csa_args *a) {
  int64_t e = csa_element_bytes(a->dtype);
  struct alignment result = {(uintptr_t)(a->head_dim * e), (uintptr_t)a->ape};
  result.elements |= bits(a->kv, a->kv_stride, a->tokens, e);
  result.elements |= bits(a->score, a->score_stride, a->tokens, e);
  if (operation == CSA_FORWARD) {
    result.elements |= bits(a->out, a->out_stride, a->rows, e);
  } else {
    result.elements |= bits(a->grad_out, a->grad_out_stride, a->rows, e);
    result.elements |= bits(a->grad_kv, a->grad_kv_stride, a->tokens, e);
    result.elements |= bits(a->grad_score, a->grad_score_stride, a->tokens, e);
  }
  return result;
}

/* Bytes: of as many fp32 as the elements that other tensors are aligned to, 16 bytes at most. */
static int32_t ape_alignment(const struct csa_variant *v) {
  return v->alignment < 4 ? 4 * v->alignment : 16;
}

static bool aligned(const struct alignment *alignment, const struct csa_variant *v,
                    int64_t element) {
  return (alignment->elements & (uintptr_t)(v->alignment * element - 1)) == 0 &&
         (alignment->ape & (uintptr_t)(ape_alignment(v) - 1)) == 0;
}

/* Where warps lie along the columns, or as many lanes as a thread has rows, narrower heads leave
 * lanes idle, and early rows that share a warp are not presumed: fewer columns or rows a thread
 * serve them better. Forced, a variant serves them all the same. */
static bool fills_warps(const struct csa_variant *v, const csa_args *a) {
  if (v->kind == CSA_SHORT) return v->rows == 1 || a->head_dim >= v->rows * v->columns;
  if (v->kind == CSA_EARLY) return a->head_dim > 16 * v->columns;
  return v->columns == 1 || a->head_dim >= 32 * v->columns;
}

static bool of_family(const struct csa_variant *v, const struct csa_family *f) {
  return v->operation == f->operation && v->ratio == f->ratio && v->coff == f->coff &&
         v->dtype == f->dtype;
}

/* The next row of a family from `*cursor` on that the target has an image for, or NULL. */
static const struct csa_schedule *next_row(const struct csa_bundle *bundle,
                                           const struct csa_target *target, int32_t family,
                                           int32_t *cursor) {
  while (*cursor < target->end_row[family]) {
    const struct csa_schedule *row = &bundle->schedules[(*cursor)++];
    if (row->arch == target->arch && target->images[row->variant] >= 0 &&
        of_family(&bundle->variants[row->variant], &bundle->families[family]))
      return row;
  }
  return NULL;
}

static bool within(const struct csa_schedule *row, int64_t elements) {
  return row->max_elements < 0 || elements <= row->max_elements;
}

/* Whether the pack's segments are as short, on average, as a row asks. Both factors fit 31 bits. */
static bool dense(const struct csa_schedule *row, const csa_args *a) {
  return row->max_rows_per_segment < 0 || a->rows <= row->max_rows_per_segment * a->segments;
}

static bool suits(const struct csa_schedule *row, const csa_args *a) {
  return within(row, a->rows * a->head_dim) && dense(row, a);
}

/* The row that launches a variant forced by name: its first for such a pack, else its first of all,
 * or NULL. */
static const struct csa_schedule *row_of(const struct csa_bundle *bundle,
                                         const struct csa_target *target, int32_t family,
                                         int32_t variant, const csa_args *a) {
  const struct csa_schedule *row, *first = NULL;
  int32_t cursor = target->first_row[family];
  while ((row = next_row(bundle, target, family, &cursor)) != NULL) {
    if (row->variant != variant) continue;
    if (suits(row, a)) return row;
    if (first == NULL) first = row;
  }
  return first;
}

/* Whether the device and the pack's sizes let a row serve the problem, whatever its alignment. */
static bool fits(const struct csa_bundle *bundle, const struct csa_target *target,
                 const struct csa_schedule *row, const csa_args *a) {
  const struct csa_variant *v = &bundle->variants[row->variant];
  return suits(row, a) && fills_warps(v, a) &&
         csa_target_shared_bytes(bundle, target, row->variant) <= target->shared_limit;
}

/* Of the variants that fit, the one that asks for the least alignment, or NULL. */
static const struct csa_variant *least_aligned(const struct csa_bundle *bundle,
                                               const struct csa_target *target, int32_t family,
                                               const csa_args *a) {
  const struct csa_variant *least = NULL;
  const struct csa_schedule *row;
  int32_t cursor = target->first_row[family];
  while ((row = next_row(bundle, target, family, &cursor)) != NULL) {
    const struct csa_variant *v = &bundle->variants[row->variant];
    if (fits(bundle, target, row, a) && (least == NULL || v->alignment < least->alignment))
      least = v;
  }
  return least;
}

static int nothing_fits(const struct csa_bundle *bundle, const struct csa_target *target,
                        int32_t family, const csa_args *a) {
  const struct csa_family *f = &bundle->families[family];
  bool here = false;
  for (int32_t i = 0; i < bundle->variant_count; i++)
    here |= of_family(&bundle->variants[i], f) && target->images[i] >= 0;
  if (!here)
    return csa_fail(CSA_ERROR_ARCH,
                    "the bundle (%s) has no %s image of ratio %d, coff %d for sm_%d, which serves "
                    "compute capability %d.%d; aot/variants.py of a source checkout says which "
                    "variants are built for which architectures, and tools/build_cubins builds "
                    "them",
                    bundle->source, csa_operation_name(f->operation), a->ratio, a->coff,
                    target->arch, target->capability / 10, target->capability % 10);
  const struct csa_variant *least = least_aligned(bundle, target, family, a);
  if (least == NULL)
    return csa_fail(CSA_ERROR_VALUE,
                    "no %s variant of ratio %d, coff %d on sm_%d serves head_dim %lld on a device "
                    "with %d bytes of shared memory a block; pass a smaller one",
                    csa_operation_name(f->operation), a->ratio, a->coff, target->arch,
                    (long long)a->head_dim, target->shared_limit);
  return csa_fail(CSA_ERROR_VALUE,
                  "no %s variant of ratio %d, coff %d on sm_%d serves head_dim %lld with these "
                  "base addresses and row strides; the one that asks for least needs head_dim and "
                  "row strides that are multiples of %d elements, and bases aligned alike (ape: to "
                  "%d bytes)",
                  csa_operation_name(f->operation), a->ratio, a->coff, target->arch,
                  (long long)a->head_dim, least->alignment, ape_alignment(least));
}

static int force(const struct csa_bundle *bundle, const struct csa_target *target, int32_t family,
                 const csa_args *a, const struct alignment *alignment, const char *name,
                 const struct csa_schedule **row, struct csa_layout *layout) {
  const struct csa_family *f = &bundle->families[family];
  int32_t variant = csa_bundle_variant(bundle, name);
  if (variant < 0 || !of_family(&bundle->variants[variant], f))
    return csa_fail(CSA_ERROR_VALUE,
                    "variant=\"%s\" is no %s variant of ratio %d, coff %d in %s in the bundle; "
                    "csa_runtime.info() lists them",
                    name, csa_operation_name(f->operation), a->ratio, a->coff,
                    csa_dtype_name(a->dtype));
  const struct csa_variant *v = &bundle->variants[variant];
  *row = row_of(bundle, target, family, variant, a);
  if (*row == NULL)
    return csa_fail(CSA_ERROR_VALUE,
                    "variant=\"%s\" is not scheduled for sm_%d, whose images compute capability "
                    "%d.%d runs",
                    name, target->arch, target->capability / 10, target->capability % 10);
  if (!aligned(alignment, v, csa_element_bytes(a->dtype)))
    return csa_fail(CSA_ERROR_VALUE,
                    "variant=\"%s\" needs head_dim (%lld) and row strides that are multiples of %d "
                    "elements, and bases aligned alike (ape: to %d bytes)",
                    name, (long long)a->head_dim, v->alignment, ape_alignment(v));
  int32_t shared = csa_target_shared_bytes(bundle, target, variant);
  if (shared > target->shared_limit)
    return csa_fail(CSA_ERROR_VALUE,
                    "variant=\"%s\" needs %d bytes of shared memory; a block of this device has %d",
                    name, shared, target->shared_limit);
  csa_lay_out(v, *row, a, layout);
  return CSA_OK;
}

int csa_choose(const struct csa_bundle *bundle, const struct csa_target *target,
               enum csa_operation operation, const csa_args *a, const char *variant,
               const struct csa_schedule **row, struct csa_layout *layout) {
  struct alignment alignment = alignment_of(operation, a);
  int32_t family = csa_bundle_family(bundle, (int32_t)operation, a->ratio, a->coff, a->dtype);
  if (variant != NULL) return force(bundle, target, family, a, &alignment, variant, row, layout);
  int64_t element = csa_element_bytes(a->dtype);
  int32_t cursor = target->first_row[family];
  while ((*row = next_row(bundle, target, family, &cursor)) != NULL)
    if (aligned(&alignment, &bundle->variants[(*row)->variant], element) &&
        fits(bundle, target, *row, a)) {
      csa_lay_out(&bundle->variants[(*row)->variant], *row, a, layout);
      return CSA_OK;
    }
  return nothing_fits(bundle, target, family, a);
}

int csa_choose_finish(const struct csa_bundle *bundle, const struct csa_target *target,
                      int64_t plane_elements, const struct csa_schedule **row) {
  int32_t family = csa_bundle_family(bundle, CSA_FINISH, 0, 0, 0);
  int32_t cursor = family >= 0 ? target->first_row[family] : 0;
  while (family >= 0 && (*row = next_row(bundle, target, family, &cursor)) != NULL)
    if (within(*row, plane_elements) &&
        csa_target_shared_bytes(bundle, target, (*row)->variant) <= target->shared_limit)
      return CSA_OK;
  return csa_fail(
      CSA_ERROR_ARCH,
      "the bundle (%s) has nothing for sm_%d that finishes a backward with planes of %lld elements",
      bundle->source, target->arch, (long long)plane_elements);
}
