// SPDX-License-Identifier: Apache-2.0
/* A call from arguments to cuLaunchKernelEx. Once its kernels are ready it takes no lock, allocates
 * nothing and reads no environment. */
#include <stdio.h>

#include "context.h"
#include "load.h"
#include "private.h"
#include "validate.h"

static int launch_one(const struct csa_bundle *bundle, struct csa_device *device,
                      struct csa_plan *plan, int32_t index, cu_stream stream) {
  struct csa_launch *launch = &plan->launches[index];
  cu_kernel kernel = device->kernels[launch->variant].kernel;
  size_t bytes = launch->parameter_bytes;
  void *extra[] = {CU_PARAM_BUFFER_POINTER, launch->parameters, CU_PARAM_BUFFER_SIZE, &bytes,
                   CU_PARAM_END};
  cu_launch_config config = {.grid_x = launch->grid[0],
                             .grid_y = launch->grid[1],
                             .grid_z = launch->grid[2],
                             .block_x = launch->threads,
                             .block_y = 1,
                             .block_z = 1,
                             .shared_bytes = launch->shared,
                             .stream = stream};
  /* The driver takes a context-free CUkernel wherever it takes a CUfunction. */
  cu_result result = csa_cuda.launch(&config, (cu_function)(void *)kernel, NULL, extra);
  if (__builtin_expect(result == CU_SUCCESS, 1)) {
    atomic_fetch_add_explicit(&bundle->states[launch->image].launches, 1, memory_order_relaxed);
    return CSA_OK;
  }
  char what[160];
  snprintf(what, sizeof what, "launching %s (kernel %d of the call's %d) on %u x %u x %u blocks",
           bundle->variants[launch->variant].name, index + 1, plan->launch_count, launch->grid[0],
           launch->grid[1], launch->grid[2]);
  return csa_driver_check(result, "cuLaunchKernelEx", what);
}

/* Every kernel is ready in the context before the first launch, so that no launch loads, and a
 * failure to load leaves the stream, and a capture on it, untouched. */
static int launch_all(const struct csa_bundle *bundle, struct csa_device *device,
                      struct csa_plan *plan, uint64_t context, cu_stream stream) {
  int status = CSA_OK;
  for (int32_t i = 0; i < plan->launch_count && status == CSA_OK; i++) {
    int32_t variant = plan->launches[i].variant;
    if (__builtin_expect(!csa_contexts_hold(&device->kernels[variant].contexts, context), 0))
      status = csa_load_variant(bundle, device, variant, context, stream);
  }
  for (int32_t i = 0; i < plan->launch_count && status == CSA_OK; i++)
    status = launch_one(bundle, device, plan, i, stream);
  return status;
}

int csa_private_run(enum csa_operation operation, const csa_args *given, void *stream,
                    const char *variant) {
  csa_args copy;
  const csa_args *args;
  const struct csa_bundle *bundle;
  struct csa_device *device;
  struct csa_plan plan;
  struct csa_scope scope;
  int status = csa_args_accept(given, &copy, &args);
  if (status != CSA_OK || (status = csa_bundle_get(&bundle)) != CSA_OK ||
      (status = csa_validate(bundle, operation, args)) != CSA_OK ||
      (status = csa_device_get(bundle, args->device, &device)) != CSA_OK ||
      (status = csa_plan_make(bundle, &device->target, operation, args, variant, &plan)) !=
          CSA_OK ||
      (status = csa_validate_workspace(args, plan.workspace_bytes)) != CSA_OK ||
      (status = csa_context_enter(device, stream, &scope)) != CSA_OK)
    return status;
  return csa_context_leave(&scope, launch_all(bundle, device, &plan, scope.context, stream));
}

int csa_private_capturing(void *stream) {
  int capturing = CU_CAPTURE_STATUS_NONE;
  return csa_driver_start() != CSA_OK ||
         csa_cuda.stream_capturing(stream, &capturing) != CU_SUCCESS ||
         capturing != CU_CAPTURE_STATUS_NONE;
}
