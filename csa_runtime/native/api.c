// SPDX-License-Identifier: Apache-2.0
/* The public functions. */
#include "context.h"
#include "load.h"
#include "private.h"
#include "validate.h"

int csa_forward(const csa_args *args, void *stream) {
  return csa_private_run(CSA_FORWARD, args, stream, NULL);
}

int csa_backward(const csa_args *args, void *stream) {
  return csa_private_run(CSA_BACKWARD, args, stream, NULL);
}

int csa_backward_workspace_bytes(const csa_args *given, int64_t *bytes) {
  csa_args copy;
  const csa_args *args;
  const struct csa_bundle *bundle;
  if (bytes == NULL) return csa_fail(CSA_ERROR_VALUE, "bytes is NULL; pass where to write them");
  int status = csa_args_accept(given, &copy, &args);
  if (status == CSA_OK) status = csa_bundle_get(&bundle);
  if (status == CSA_OK) status = csa_validate_sizes(bundle, CSA_BACKWARD, args);
  if (status == CSA_OK) *bytes = csa_plan_workspace_bound(bundle, args);
  return status;
}

/* The current context's device, or 0 without a context. */
static int current_device(int32_t *ordinal) {
  *ordinal = 0;
  cu_context context = NULL;
  int status = csa_driver_start();
  if (status == CSA_OK)
    status = csa_driver_check(csa_cuda.context_current(&context), "cuCtxGetCurrent",
                              "looking for the device to load for");
  if (status != CSA_OK || context == NULL) return status;
  return csa_driver_check(csa_cuda.context_device(ordinal), "cuCtxGetDevice",
                          "looking for the device to load for");
}

int csa_load(int32_t ordinal, const char *path) {
  const struct csa_bundle *bundle;
  struct csa_device *device;
  if (ordinal < -1)
    return csa_fail(CSA_ERROR_VALUE,
                    "device is %d; pass a CUDA ordinal, or -1 for the current context's", ordinal);
  int status = path != NULL ? csa_bundle_choose(path) : CSA_OK;
  if (status == CSA_OK) status = csa_bundle_get(&bundle);
  if (status == CSA_OK && ordinal == -1) status = current_device(&ordinal);
  if (status == CSA_OK) status = csa_device_get(bundle, ordinal, &device);
  return status == CSA_OK ? csa_load_all(bundle, device) : status;
}

const char *csa_last_error(void) { return csa_failure_get()->message; }

int csa_abi_version(void) { return CSA_ABI_VERSION; }
