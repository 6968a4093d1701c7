// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <stdbool.h>
#include <string.h>

#include "error.h"

/* How a variant runs when forced although no schedule names it. */
enum { FORCED_LANES_LOG2 = 5, FORCED_CTAS = 396, FORCED_FILL_CTAS = 132 };
enum { GRID_Y_MAX = 65535, REDUCE_COLUMNS = 32 };

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int log2_of(int32_t power) { return __builtin_ctz((unsigned)power); }

static int ceil_log2(int64_t x) {
  return x <= 1 ? 0 : 64 - __builtin_clzll((unsigned long long)(x - 1));
}

/* What alignment allows, as bits: a variant of v columns fits where the low bits are clear. */
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

static bool aligned(const struct alignment *alignment, int64_t columns, int64_t element) {
  uintptr_t ape = (uintptr_t)least(16, 4 * columns);
  return (alignment->elements & (uintptr_t)(columns * element - 1)) == 0 &&
         (alignment->ape & (ape - 1)) == 0;
}

static bool fits_shared(const struct csa_bundle *bundle, const struct csa_target *target,
                        int32_t variant) {
  const struct csa_image *image = &bundle->images[target->images[variant]];
  return image->static_shared + bundle->variants[variant].dynamic_shared <= target->shared_limit;
}

static bool of_family(const struct csa_variant *v, enum csa_operation operation,
                      const csa_args *a) {
  return v->operation == (int32_t)operation && v->ratio == a->ratio && v->coff == a->coff &&
         v->dtype == a->dtype;
}

/* How one schedule row lays one problem out. */
struct layout {
  int32_t lanes_log2;
  int64_t column_tiles, row_blocks, groups, fill_ctas;
};

static struct layout lay_out(const struct csa_variant *v, const struct csa_schedule *s,
                             const csa_args *a) {
  int64_t column_threads = (a->head_dim + v->columns - 1) >> log2_of(v->columns);
  int threads_log2 = log2_of(v->threads);
  struct layout l = {.lanes_log2 = (int32_t)least(s->lanes_log2, ceil_log2(column_threads))};
  for (;; l.lanes_log2++) {
    l.column_tiles = (column_threads + ((int64_t)1 << l.lanes_log2) - 1) >> l.lanes_log2;
    if (l.column_tiles <= GRID_Y_MAX || l.lanes_log2 >= threads_log2) break;
  }
  int row_lanes_log2 = threads_log2 - l.lanes_log2;
  l.row_blocks = (a->rows + ((int64_t)1 << row_lanes_log2) - 1) >> row_lanes_log2;
  if (s->ctas == 0) return l; /* forward: one pass */
  l.groups = least(ceil_div(s->ctas, l.column_tiles), l.row_blocks);
  l.fill_ctas = least(s->fill_ctas, (a->tokens + v->threads - 1) >> threads_log2);
  return l;
}

static int64_t plane_elements(const csa_args *a) {
  return (int64_t)a->ratio * a->coff * a->head_dim;
}

static void pack(const struct csa_variant *v, const int64_t values[CSA_PARAMETER_COUNT],
                 struct csa_launch *launch) {
  uint32_t end = 0;
  for (uint32_t i = 0; i < v->parameter_count; i++) {
    uint8_t id = v->parameters[i];
    uint32_t width = csa_parameter_bytes(id);
    while (end % width != 0) launch->parameters[end++] = 0;
    int32_t narrow = (int32_t)values[id];
    if (width == 8)
      memcpy(launch->parameters + end, &values[id], 8);
    else
      memcpy(launch->parameters + end, &narrow, 4);
    end += width;
  }
  launch->parameter_bytes = end;
}

static void add_launch(const struct csa_bundle *bundle, const struct csa_target *target,
                       int32_t variant, uint32_t grid_x, uint32_t grid_y,
                       const int64_t values[CSA_PARAMETER_COUNT], struct csa_plan *plan) {
  const struct csa_variant *v = &bundle->variants[variant];
  struct csa_launch *launch = &plan->launches[plan->launch_count++];
  launch->variant = variant;
  launch->image = target->images[variant];
  launch->grid_x = grid_x;
  launch->grid_y = grid_y;
  launch->threads = (uint32_t)v->threads;
  launch->shared = (uint32_t)v->dynamic_shared;
  pack(v, values, launch);
}

static void fill_values(const csa_args *a, const struct csa_plan *plan,
                        int64_t values[CSA_PARAMETER_COUNT]) {
  values[CSA_KV] = (int64_t)(uintptr_t)a->kv;
  values[CSA_SCORE] = (int64_t)(uintptr_t)a->score;
  values[CSA_APE] = (int64_t)(uintptr_t)a->ape;
  values[CSA_CU_SEQLENS] = (int64_t)(uintptr_t)a->cu_seqlens;
  values[CSA_CU_SEQLENS_COMP] = (int64_t)(uintptr_t)a->cu_seqlens_comp;
  values[CSA_OUT] = (int64_t)(uintptr_t)a->out;
  values[CSA_GRAD_OUT] = (int64_t)(uintptr_t)a->grad_out;
  values[CSA_GRAD_KV] = (int64_t)(uintptr_t)a->grad_kv;
  values[CSA_GRAD_SCORE] = (int64_t)(uintptr_t)a->grad_score;
  values[CSA_GRAD_APE] = (int64_t)(uintptr_t)a->grad_ape;
  /* A NULL workspace tells the kernel that no grad_ape is wanted. */
  values[CSA_WORKSPACE] = a->grad_ape != NULL ? (int64_t)(uintptr_t)a->workspace : 0;
  values[CSA_KV_STRIDE] = a->kv_stride;
  values[CSA_SCORE_STRIDE] = a->score_stride;
  values[CSA_OUT_STRIDE] = a->out_stride;
  values[CSA_GRAD_OUT_STRIDE] = a->grad_out_stride;
  values[CSA_GRAD_KV_STRIDE] = a->grad_kv_stride;
  values[CSA_GRAD_SCORE_STRIDE] = a->grad_score_stride;
  values[CSA_PLANE_ELEMENTS] = plan->plane_elements;
  values[CSA_TOKENS] = a->tokens;
  values[CSA_SEGMENTS] = a->segments;
  values[CSA_ROWS] = a->rows;
  values[CSA_HEAD_DIM] = a->head_dim;
  values[CSA_LANES_LOG2] = plan->lanes_log2;
  values[CSA_COLUMN_TILES] = plan->column_tiles;
  values[CSA_GROUPS] = plan->groups;
  values[CSA_FILL_CTAS] = plan->fill_ctas;
  values[CSA_ACCUMULATE] = a->flags & CSA_FLAG_ACCUMULATE;
}

static void build(const struct csa_bundle *bundle, const struct csa_target *target,
                  enum csa_operation operation, const csa_args *a, int32_t variant,
                  const struct csa_schedule *s, struct csa_plan *plan) {
  struct layout l = lay_out(&bundle->variants[variant], s, a);
  plan->variant = variant;
  plan->image = target->images[variant];
  plan->lanes_log2 = l.lanes_log2;
  plan->column_tiles = l.column_tiles;
  plan->groups = plan->fill_ctas = plan->plane_elements = plan->workspace_bytes = 0;
  plan->launch_count = 0;
  plan->grid_y = 1;
  if (operation == CSA_FORWARD) {
    plan->grid_x = (uint32_t)l.row_blocks;
    plan->grid_y = (uint32_t)l.column_tiles;
  } else {
    plan->groups = l.groups;
    plan->fill_ctas = l.fill_ctas;
    plan->plane_elements = plane_elements(a);
    if (a->grad_ape != NULL) plan->workspace_bytes = l.groups * plan->plane_elements * 4;
    plan->grid_x = (uint32_t)(l.groups * l.column_tiles + l.fill_ctas);
  }
  int64_t values[CSA_PARAMETER_COUNT];
  fill_values(a, plan, values);
  if (plan->grid_x > 0)
    add_launch(bundle, target, variant, plan->grid_x, plan->grid_y, values, plan);
  if (operation == CSA_BACKWARD && a->grad_ape != NULL)
    add_launch(bundle, target, target->reduce,
               (uint32_t)ceil_div(plan->plane_elements, REDUCE_COLUMNS), 1, values, plan);
}

static const char *name_of(enum csa_operation operation) {
  return operation == CSA_FORWARD ? "forward" : "backward";
}

static int nothing_fits(const struct csa_bundle *bundle, const struct csa_target *target,
                        enum csa_operation operation, const csa_args *a) {
  bool here = false;
  for (int32_t i = 0; i < bundle->variant_count; i++)
    here |= of_family(&bundle->variants[i], operation, a) && target->images[i] >= 0;
  if (!here)
    return csa_fail(CSA_ERROR_ARCH,
                    "the bundle (%s) has no %s image of ratio %d, coff %d for sm_%d, which serves "
                    "compute capability %d.%d; build one with `tools/build_cubins --arch %d`",
                    bundle->source, name_of(operation), a->ratio, a->coff, target->arch,
                    target->capability / 10, target->capability % 10, target->arch);
  return csa_fail(CSA_ERROR_VALUE,
                  "no %s variant of ratio %d, coff %d on sm_%d serves head_dim %lld with these "
                  "base addresses and row strides; align them to 16 bytes",
                  name_of(operation), a->ratio, a->coff, target->arch, (long long)a->head_dim);
}

static int force(const struct csa_bundle *bundle, const struct csa_target *target,
                 enum csa_operation operation, const csa_args *a, const char *name,
                 const struct alignment *alignment, struct csa_plan *plan) {
  int32_t variant = csa_bundle_variant(bundle, name);
  if (variant < 0 || !of_family(&bundle->variants[variant], operation, a))
    return csa_fail(CSA_ERROR_VALUE,
                    "variant=\"%s\" is no %s variant of ratio %d, coff %d, dtype %d in the bundle; "
                    "bundle_info() lists them",
                    name, name_of(operation), a->ratio, a->coff, a->dtype);
  const struct csa_variant *v = &bundle->variants[variant];
  if (target->images[variant] < 0)
    return csa_fail(CSA_ERROR_VALUE, "variant=\"%s\" has no image for sm_%d", name, target->arch);
  if (!aligned(alignment, v->columns, csa_element_bytes(a->dtype)))
    return csa_fail(CSA_ERROR_VALUE,
                    "variant=\"%s\" takes %d columns at once: head_dim (%lld) and row strides must "
                    "be multiples of %d elements and bases aligned alike (ape: to %lld bytes)",
                    name, v->columns, (long long)a->head_dim, v->columns,
                    (long long)least(16, 4 * (int64_t)v->columns));
  if (!fits_shared(bundle, target, variant))
    return csa_fail(CSA_ERROR_VALUE,
                    "variant=\"%s\" needs %d bytes of shared memory; a block of this device has %d",
                    name, bundle->images[target->images[variant]].static_shared + v->dynamic_shared,
                    target->shared_limit);
  struct csa_schedule schedule = {
      .lanes_log2 = FORCED_LANES_LOG2, .ctas = FORCED_CTAS, .fill_ctas = FORCED_FILL_CTAS};
  int32_t family = csa_bundle_family(bundle, (int32_t)operation, a->ratio, a->coff, a->dtype);
  for (int32_t i = target->end_row[family] - 1; i >= target->first_row[family]; i--)
    if (bundle->schedules[i].variant == variant && bundle->schedules[i].arch == target->arch)
      schedule = bundle->schedules[i];
  build(bundle, target, operation, a, variant, &schedule, plan);
  return CSA_OK;
}

int csa_plan_make(const struct csa_bundle *bundle, const struct csa_target *target,
                  enum csa_operation operation, const csa_args *a, const char *variant,
                  struct csa_plan *plan) {
  struct alignment alignment = alignment_of(operation, a);
  if (operation == CSA_BACKWARD && a->grad_ape != NULL && target->reduce < 0)
    return csa_fail(CSA_ERROR_ARCH, "the bundle (%s) has no reduction image for sm_%d",
                    bundle->source, target->arch);
  if (variant != NULL) return force(bundle, target, operation, a, variant, &alignment, plan);
  int64_t element = csa_element_bytes(a->dtype), elements = a->rows * a->head_dim;
  int32_t family = csa_bundle_family(bundle, (int32_t)operation, a->ratio, a->coff, a->dtype);
  for (int32_t i = target->first_row[family]; i < target->end_row[family]; i++) {
    const struct csa_schedule *s = &bundle->schedules[i];
    if (!of_family(&bundle->variants[s->variant], operation, a) || s->arch != target->arch ||
        target->images[s->variant] < 0)
      continue;
    if (s->max_elements >= 0 && elements > s->max_elements) continue;
    if (!aligned(&alignment, bundle->variants[s->variant].columns, element)) continue;
    if (!fits_shared(bundle, target, s->variant)) continue;
    build(bundle, target, operation, a, s->variant, s, plan);
    return CSA_OK;
  }
  return nothing_fits(bundle, target, operation, a);
}

int64_t csa_plan_workspace_bound(const struct csa_bundle *bundle, const csa_args *a) {
  int64_t groups = 0;
  for (int32_t i = 0; i < bundle->schedule_count; i++) {
    const struct csa_schedule *s = &bundle->schedules[i];
    const struct csa_variant *v = &bundle->variants[s->variant];
    if (!of_family(v, CSA_BACKWARD, a)) continue;
    struct layout l = lay_out(v, s, a);
    if (l.groups > groups) groups = l.groups;
  }
  return ceil_div(groups * plane_elements(a) * 4, 256) * 256;
}
