// SPDX-License-Identifier: Apache-2.0
/* What the launcher would do and what it sees, for explain() and info(). */
#include <stdlib.h>

#include "device.h"
#include "private.h"
#include "validate.h"

static int explain_for(const struct csa_target *target, enum csa_operation operation,
                       const csa_args *args, const char *variant,
                       struct csa_explanation *explanation) {
  explanation->arch = target->arch;
  explanation->capability = target->capability;
  explanation->shared_limit = target->shared_limit;
  return csa_plan_make(explanation->bundle, target, operation, args, variant, &explanation->plan);
}

int csa_private_explain(enum csa_operation operation, const csa_args *args, int32_t capability,
                        int32_t shared_limit, const char *variant,
                        struct csa_explanation *explanation) {
  int status = csa_bundle_get(&explanation->bundle);
  if (status == CSA_OK) status = csa_validate_sizes(explanation->bundle, operation, args);
  if (status != CSA_OK) return status;
  if (capability < 0) {
    struct csa_device *device;
    status = csa_device_get(explanation->bundle, args->device, &device);
    if (status != CSA_OK) return status;
    return explain_for(&device->target, operation, args, variant, explanation);
  }
  struct csa_target target;
  status = csa_target_init(explanation->bundle, "the device", capability, shared_limit, &target);
  if (status != CSA_OK) return status;
  status = explain_for(&target, operation, args, variant, explanation);
  free(target.images);
  return status;
}

int csa_private_driver(int *version, int *count) {
  int status = csa_driver_start();
  if (status != CSA_OK) return status;
  *version = csa_cuda.version;
  *count = csa_device_count();
  return CSA_OK;
}

int csa_private_device(int32_t ordinal, struct csa_device_info *info) {
  const struct csa_bundle *bundle;
  cu_device handle = 0;
  int status = csa_bundle_get(&bundle);
  if (status == CSA_OK) status = csa_driver_start();
  if (status == CSA_OK)
    status = csa_driver_check(csa_cuda.device_get(&handle, ordinal), "cuDeviceGet",
                              "finding the device");
  if (status == CSA_OK)
    status = csa_driver_check(csa_cuda.device_name(info->name, (int)sizeof info->name - 1, handle),
                              "cuDeviceGetName", "asking for the device's name");
  if (status == CSA_OK) status = csa_device_facts(handle, &info->capability, &info->shared_limit);
  if (status == CSA_OK)
    status = csa_driver_check(
        csa_cuda.device_attribute(&info->multiprocessors, CU_DEVICE_MULTIPROCESSORS, handle),
        "cuDeviceGetAttribute", "counting multiprocessors");
  if (status == CSA_OK) info->arch = csa_target_arch(bundle, info->capability);
  return status;
}

int csa_private_bundle(const struct csa_bundle **bundle) { return csa_bundle_get(bundle); }

const struct csa_failure *csa_private_failure(void) { return csa_failure_get(); }
