// SPDX-License-Identifier: Apache-2.0
#include "context.h"

#include "error.h"

static int is_special(cu_stream stream) { return (uintptr_t)stream <= 2; }

int csa_capture_relax(int *mode) {
  *mode = CU_CAPTURE_RELAXED;
  return csa_driver_check(csa_cuda.exchange_capture_mode(mode), "cuThreadExchangeStreamCaptureMode",
                          "allowing this thread to load beside captures");
}

int csa_capture_restore(int mode, int status) {
  cu_result result = csa_cuda.exchange_capture_mode(&mode);
  if (status != CSA_OK) return status;
  return csa_driver_check(result, "cuThreadExchangeStreamCaptureMode",
                          "restoring this thread's capture mode");
}

/* Ask for the id of `context`, or of the current one for NULL. */
static int identify(cu_context context, struct csa_scope *scope) {
  unsigned long long id = 0;
  int status =
      csa_driver_check(csa_cuda.context_id(context, &id), "cuCtxGetId", "identifying the context");
  scope->context = id;
  return status;
}

static int push(cu_context context, struct csa_scope *scope) {
  int status = csa_driver_check(csa_cuda.context_push(context), "cuCtxPushCurrent",
                                "entering the call's context");
  scope->pushed = status == CSA_OK;
  return status;
}

int csa_context_leave(const struct csa_scope *scope, int status) {
  if (__builtin_expect(scope->pushed, 0)) {
    cu_context popped;
    cu_result result = csa_cuda.context_pop(&popped);
    if (status == CSA_OK)
      status = csa_driver_check(result, "cuCtxPopCurrent", "restoring the caller's context");
  }
  if (__builtin_expect(scope->release, 0)) {
    cu_result result = csa_cuda.primary_release(scope->device);
    if (status == CSA_OK)
      status = csa_driver_check(result, "cuDevicePrimaryCtxRelease", "after the call");
  }
  return status;
}

/* Retained on every call, since the application may have reset it; given back after all calls but
 * the first, so that it outlives them. */
int csa_context_enter_primary(struct csa_device *device, struct csa_scope *scope) {
  *scope = (struct csa_scope){.device = device->handle};
  int mode;
  int status = csa_capture_relax(&mode);
  if (status != CSA_OK) return status;
  cu_context primary = NULL;
  status = csa_driver_check(csa_cuda.primary_retain(&primary, device->handle),
                            "cuDevicePrimaryCtxRetain", "entering the device's primary context");
  if (status == CSA_OK) scope->release = atomic_exchange(&device->primary_held, 1);
  status = csa_capture_restore(mode, status);
  if (status == CSA_OK) status = push(primary, scope);
  if (status == CSA_OK) status = identify(primary, scope);
  return status == CSA_OK ? CSA_OK : csa_context_leave(scope, status);
}

static int wrong_device(const struct csa_device *device, cu_device other) {
  return csa_fail(CSA_ERROR_VALUE,
                  "the stream belongs to device %d and device is %d; pass a stream of the tensors' "
                  "device",
                  other, device->ordinal);
}

int csa_context_enter(struct csa_device *device, cu_stream stream, struct csa_scope *scope) {
  *scope = (struct csa_scope){.device = device->handle};
  cu_device owner = -1;
  if (is_special(stream)) {
    unsigned long long id;
    cu_result result = csa_cuda.context_id(NULL, &id);
    if (__builtin_expect(result == CU_SUCCESS && csa_contexts_hold(&device->contexts, id), 1)) {
      scope->context = id;
      return CSA_OK;
    }
    result = csa_cuda.context_device(&owner);
    if (result == CU_SUCCESS && owner == device->handle) return identify(NULL, scope);
    if (result != CU_SUCCESS && result != CU_ERROR_INVALID_CONTEXT) /* none is current */
      return csa_driver_check(result, "cuCtxGetDevice", "asking for the current context's device");
    return csa_context_enter_primary(device, scope);
  }
  cu_context own = NULL, current = NULL;
  int status = csa_driver_check(csa_cuda.stream_context(stream, &own), "cuStreamGetCtx",
                                "asking for the stream's context");
  if (status == CSA_OK)
    status = csa_driver_check(csa_cuda.context_current(&current), "cuCtxGetCurrent",
                              "asking for the current context");
  if (status == CSA_OK && own != current) status = push(own, scope);
  if (status == CSA_OK) status = identify(own, scope);
  if (__builtin_expect(status == CSA_OK && csa_contexts_hold(&device->contexts, scope->context), 1))
    return CSA_OK;
  if (status == CSA_OK)
    status = csa_driver_check(csa_cuda.context_device(&owner), "cuCtxGetDevice",
                              "asking for the stream's device");
  if (status == CSA_OK && owner != device->handle) status = wrong_device(device, owner);
  return status == CSA_OK ? CSA_OK : csa_context_leave(scope, status);
}
