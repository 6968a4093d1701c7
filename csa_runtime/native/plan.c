// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <string.h>

#include "choose.h"
#include "error.h"
#include "layout.h"

enum { GRID_HEIGHT_MAX = 65535 };

/* Blocks side by side, and below each other: those that a grid has no height for go behind. */
static void lay_grid(int64_t wide, int64_t high, uint32_t grid[3]) {
  int64_t deep = high > GRID_HEIGHT_MAX ? csa_ceil_div(high, GRID_HEIGHT_MAX) : 1;
  grid[0] = (uint32_t)wide;
  grid[1] = (uint32_t)csa_ceil_div(high, deep);
  grid[2] = (uint32_t)deep;
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
                       int32_t variant, int64_t wide, int64_t high,
                       const int64_t values[CSA_PARAMETER_COUNT], struct csa_plan *plan) {
  const struct csa_variant *v = &bundle->variants[variant];
  struct csa_launch *launch = &plan->launches[plan->launch_count++];
  launch->variant = variant;
  launch->image = target->images[variant];
  lay_grid(wide, high, launch->grid);
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
  values[CSA_RATIO] = a->ratio;
  values[CSA_COFF] = a->coff;
}

int csa_plan_make(const struct csa_bundle *bundle, const struct csa_target *target,
                  enum csa_operation operation, const csa_args *a, const char *variant,
                  struct csa_plan *plan) {
  const struct csa_schedule *row, *finish = NULL;
  struct csa_layout l;
  int status = csa_choose(bundle, target, operation, a, variant, &row, &l);
  if (status == CSA_OK && operation == CSA_BACKWARD)
    status = csa_choose_finish(bundle, target, csa_plane_elements(a), &finish);
  if (status != CSA_OK) return status;

  plan->variant = row->variant;
  plan->image = target->images[row->variant];
  plan->lanes_log2 = l.lanes_log2;
  plan->column_tiles = l.column_tiles;
  plan->groups = plan->fill_ctas = plan->plane_elements = plan->workspace_bytes = 0;
  plan->launch_count = 0;
  int64_t wide = l.column_tiles, high = l.row_blocks;
  if (operation == CSA_BACKWARD) {
    plan->groups = l.groups;
    plan->fill_ctas = csa_zero_blocks(&bundle->variants[row->variant],
                                      &bundle->variants[finish->variant], finish, a);
    plan->plane_elements = csa_plane_elements(a);
    if (a->grad_ape != NULL) plan->workspace_bytes = l.groups * plan->plane_elements * 4;
    wide = l.groups * l.column_tiles;
    high = 1;
  }
  lay_grid(wide, high, plan->grid);
  int64_t values[CSA_PARAMETER_COUNT];
  fill_values(a, plan, values);
  if (wide * high > 0) add_launch(bundle, target, row->variant, wide, high, values, plan);
  if (operation == CSA_BACKWARD) {
    int64_t blocks = plan->fill_ctas;
    if (a->grad_ape != NULL)
      blocks += csa_ceil_div(plan->plane_elements, bundle->variants[finish->variant].columns);
    if (blocks > 0) add_launch(bundle, target, finish->variant, blocks, 1, values, plan);
  }
  return CSA_OK;
}

int64_t csa_plan_workspace_bound(const struct csa_bundle *bundle, const csa_args *args) {
  csa_args a = *args;
  a.rows = INT32_MAX; /* never the limit */
  int64_t groups = 0;
  for (int32_t i = 0; i < bundle->schedule_count; i++) {
    const struct csa_schedule *row = &bundle->schedules[i];
    if (row->operation != CSA_BACKWARD || row->ratio != a.ratio || row->coff != a.coff ||
        row->dtype != a.dtype)
      continue;
    struct csa_layout l;
    csa_lay_out(&bundle->variants[row->variant], row, &a, &l);
    if (l.groups > groups) groups = l.groups;
  }
  return csa_ceil_div(groups * csa_plane_elements(&a) * 4, 256) * 256;
}
