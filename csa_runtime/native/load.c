// SPDX-License-Identifier: Apache-2.0
#include "load.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "context.h"
#include "error.h"
#include "sha256.h"

enum { LOADS_IN_CAPTURE = 12030 }; /* the first driver that loads on a capturing stream */
enum { USUAL_SHARED = 48 << 10 };  /* bytes; more needs an attribute */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int check_digest(const struct csa_bundle *bundle, const struct csa_image *image) {
  uint8_t digest[32];
  csa_sha256(bundle->data + image->offset, (size_t)image->bytes, digest);
  if (memcmp(digest, image->sha256, sizeof digest) == 0) return CSA_OK;
  return csa_fail(
      CSA_ERROR_BUNDLE,
      "bundle %s is damaged: image %s for sm_%d: sha256 differs from its record's; "
      "reinstall it, or pack it again with `python aot/bundle.py pack cubins bundle.bin`",
      bundle->source, bundle->variants[image->variant].name, image->arch);
}

static int load_failed(const struct csa_bundle *bundle, const struct csa_image *image,
                       cu_result result) {
  char what[320];
  int mode = 0;
  const char *hint = "";
  if (result == CU_ERROR_NO_BINARY_FOR_GPU && csa_cuda.loading_mode(&mode) == CU_SUCCESS &&
      mode == CU_LOADING_EAGER)
    hint =
        "; CUDA_MODULE_LOADING=EAGER loads it into the contexts of every device, those of other "
        "majors too: unset it";
  snprintf(what, sizeof what, "loading %s for sm_%d%s", bundle->variants[image->variant].name,
           image->arch, hint);
  return csa_driver_check(result, "cuLibraryLoadData", what);
}

/* With the lock held: the image's context-free kernel handle. */
static int load_image(const struct csa_bundle *bundle, int32_t index) {
  const struct csa_image *image = &bundle->images[index];
  struct csa_image_state *state = &bundle->states[index];
  if (state->kernel != NULL) return CSA_OK;
  if (state->library == NULL) {
    int status = check_digest(bundle, image);
    if (status != CSA_OK) return status;
    int option = CU_LIBRARY_BINARY_PRESERVED;
    void *value = (void *)(uintptr_t)1;
    cu_result result = csa_cuda.library_load(&state->library, bundle->data + image->offset, NULL,
                                             NULL, 0, &option, &value, 1);
    if (result != CU_SUCCESS) {
      state->library = NULL;
      return load_failed(bundle, image, result);
    }
  }
  cu_kernel kernel = NULL;
  int status = csa_driver_check(csa_cuda.library_kernel(&kernel, state->library, image->symbol),
                                "cuLibraryGetKernel", image->symbol);
  if (status == CSA_OK) state->kernel = kernel;
  return status;
}

/* More than a block's usual shared memory is asked for once per device, never per launch. */
static int allow_shared(const struct csa_bundle *bundle, struct csa_device *device,
                        int32_t variant) {
  const struct csa_variant *v = &bundle->variants[variant];
  int32_t index = device->target.images[variant];
  if (csa_target_shared_bytes(bundle, &device->target, variant) <= USUAL_SHARED ||
      device->kernels[variant].kernel != NULL)
    return CSA_OK;
  return csa_driver_check(
      csa_cuda.kernel_set_attribute(CU_FUNC_MAX_DYNAMIC_SHARED, v->dynamic_shared,
                                    bundle->states[index].kernel, device->handle),
      "cuKernelSetAttribute", v->name);
}

/* A lazily loaded kernel's first launch in a context loads it there, and may synchronise the
 * context: finish it in the current one now. Then publish that. */
static int finish(const struct csa_bundle *bundle, struct csa_device *device, int32_t variant,
                  uint64_t context, int primary) {
  const char *name = bundle->variants[variant].name;
  cu_kernel kernel = bundle->states[device->target.images[variant]].kernel;
  cu_function function = NULL;
  int status =
      csa_driver_check(csa_cuda.kernel_function(&function, kernel), "cuKernelGetFunction", name);
  if (status == CSA_OK && csa_cuda.function_load != NULL)
    status = csa_driver_check(csa_cuda.function_load(function), "cuFuncLoad", name);
  if (status != CSA_OK) return status;
  if (device->kernels[variant].kernel == NULL) device->kernels[variant].kernel = kernel;
  csa_contexts_add(&device->kernels[variant].contexts, context, primary);
  csa_contexts_add(&device->contexts, context, primary);
  return CSA_OK;
}

static int refuse_in_capture(cu_stream stream, const char *name) {
  if (csa_cuda.version >= LOADS_IN_CAPTURE) return CSA_OK;
  int capturing = CU_CAPTURE_STATUS_NONE;
  cu_result result = csa_cuda.stream_capturing(stream, &capturing);
  if (result == CU_SUCCESS && capturing == CU_CAPTURE_STATUS_NONE) return CSA_OK;
  if (result != CU_SUCCESS && result != CU_ERROR_STREAM_CAPTURE_IMPLICIT)
    return csa_driver_check(result, "cuStreamIsCapturing", "before loading");
  return csa_fail_driver("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
                         CU_ERROR_STREAM_CAPTURE_UNSUPPORTED, "cuLibraryLoadData",
                         "%s is not loaded yet and this driver (CUDA %d.%d) cannot load while the "
                         "stream is capturing (CUDA 12.3 can); call load() before the capture",
                         name, csa_cuda.version / 1000, csa_cuda.version % 1000 / 10);
}

/* Make the variants [first, end) ready in the current context. Shared memory that the device will
 * not give fails that variant's launches, not the load of several. */
static int load(const struct csa_bundle *bundle, struct csa_device *device, int32_t first,
                int32_t end, uint64_t context, int primary) {
  pthread_mutex_lock(&lock);
  int mode;
  int status = csa_capture_relax(&mode);
  if (status == CSA_OK) {
    for (int32_t v = first; v < end && status == CSA_OK; v++) {
      if (device->target.images[v] < 0) continue;
      if (!primary && csa_contexts_hold(&device->kernels[v].contexts, context)) continue;
      status = load_image(bundle, device->target.images[v]);
      if (status != CSA_OK) break;
      int allowed = allow_shared(bundle, device, v);
      if (allowed == CSA_OK)
        status = finish(bundle, device, v, context, primary);
      else if (end - first == 1)
        status = allowed;
    }
    status = csa_capture_restore(mode, status);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

int csa_load_variant(const struct csa_bundle *bundle, struct csa_device *device, int32_t variant,
                     uint64_t context, cu_stream stream) {
  int status = refuse_in_capture(stream, bundle->variants[variant].name);
  return status == CSA_OK ? load(bundle, device, variant, variant + 1, context, 0) : status;
}

int csa_load_all(const struct csa_bundle *bundle, struct csa_device *device) {
  struct csa_scope scope;
  int status = csa_context_enter_primary(device, &scope);
  if (status != CSA_OK) return status;
  uint64_t primary = scope.context;
  status = csa_context_leave(&scope, load(bundle, device, 0, bundle->variant_count, primary, 1));
  if (status == CSA_OK) status = csa_context_enter(device, NULL, &scope);
  if (status != CSA_OK) return status;
  if (scope.context != primary)
    status = load(bundle, device, 0, bundle->variant_count, scope.context, 0);
  return csa_context_leave(&scope, status);
}
