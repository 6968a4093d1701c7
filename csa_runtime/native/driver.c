// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#include "bundle.h"
#include "device.h"
#include "error.h"

enum { OLDEST = 12000 };
enum { IDLE, STARTING, STARTED, READY, FORKED };

struct csa_driver csa_cuda;
static atomic_int state = IDLE;
static int initialised; /* cuInit succeeded */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Versions name the signature: a newer one of the same name may take other arguments. */
static const struct symbol {
  const char *name;
  int version;
  int optional;
  size_t offset;
} SYMBOLS[] = {
#define S(name, version, field) {name, version, 0, offsetof(struct csa_driver, field)}
#define OPTIONAL(name, version, field) {name, version, 1, offsetof(struct csa_driver, field)}
    S("cuInit", 2000, init),
    S("cuGetErrorName", 6000, error_name),
    S("cuDeviceGetCount", 2000, device_count),
    S("cuDeviceGet", 2000, device_get),
    S("cuDeviceGetName", 2000, device_name),
    S("cuDeviceGetAttribute", 2000, device_attribute),
    S("cuDevicePrimaryCtxRetain", 7000, primary_retain),
    S("cuDevicePrimaryCtxRelease", 11000, primary_release),
    S("cuCtxGetCurrent", 4000, context_current),
    S("cuCtxGetDevice", 2000, context_device),
    S("cuCtxGetId", 12000, context_id),
    S("cuCtxPushCurrent", 4000, context_push),
    S("cuCtxPopCurrent", 4000, context_pop),
    S("cuStreamGetCtx", 9020, stream_context), /* a green context's stream gives that context */
    S("cuStreamIsCapturing", 10000, stream_capturing),
    S("cuThreadExchangeStreamCaptureMode", 10010, exchange_capture_mode),
    S("cuModuleGetLoadingMode", 11070, loading_mode),
    S("cuLibraryLoadData", 12000, library_load),
    S("cuLibraryGetKernel", 12000, library_kernel),
    S("cuKernelSetAttribute", 12000, kernel_set_attribute),
    S("cuKernelGetFunction", 12000, kernel_function),
    OPTIONAL("cuFuncLoad", 12040, function_load),
    S("cuLaunchKernelEx", 11060, launch),
#undef S
#undef OPTIONAL
};

typedef cu_result get_proc_address(const char *, void **, int, uint64_t, int *);

/* Function pointers travel through memcpy: ISO C has no cast from void *. */
static void set_pointer(size_t offset, void *function) {
  memcpy((char *)&csa_cuda + offset, &function, sizeof function);
}

static void after_fork_in_child(void) {
  int seen = atomic_load(&state);
  atomic_store(&state, seen == IDLE ? IDLE : FORKED);
  lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  csa_bundle_after_fork();
}

static void register_fork_handler(void) { pthread_atfork(NULL, NULL, after_fork_in_child); }

void csa_watch_forks(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, register_fork_handler);
}

int csa_driver_check(cu_result result, const char *call, const char *what) {
  if (__builtin_expect(result == CU_SUCCESS, 1)) return CSA_OK;
  const char *name = NULL;
  if (csa_cuda.error_name == NULL || csa_cuda.error_name(result, &name) != CU_SUCCESS ||
      name == NULL)
    name = "CUDA_ERROR_UNKNOWN_CODE";
  return csa_fail_driver(name, result, call, "%s", what);
}

static int too_old(int version) {
  return csa_fail_driver("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", CU_ERROR_SYSTEM_DRIVER_MISMATCH,
                         "cuDriverGetVersion",
                         "the driver supports CUDA %d.%d; csa_runtime needs 12.0 (R525) or newer",
                         version / 1000, version % 1000 / 10);
}

static int open_driver(void) {
  void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    const char *why = dlerror();
    return csa_fail_driver(
        "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", CU_ERROR_SHARED_OBJECT_INIT_FAILED, "dlopen",
        "no CUDA driver (%s); install the NVIDIA driver, or pass tensors in host "
        "memory to the operations of csa_runtime that take tensors",
        why != NULL ? why : "libcuda.so.1");
  }
  void *version = dlsym(handle, "cuDriverGetVersion");
  set_pointer(offsetof(struct csa_driver, driver_version), version);
  csa_cuda.version = 0;
  if (version == NULL || csa_cuda.driver_version(&csa_cuda.version) != CU_SUCCESS ||
      csa_cuda.version < OLDEST)
    return too_old(csa_cuda.version);
  get_proc_address *resolve = NULL;
  void *pointer = dlsym(handle, "cuGetProcAddress_v2");
  memcpy(&resolve, &pointer, sizeof pointer);
  if (resolve == NULL) return too_old(csa_cuda.version);
  for (size_t i = 0; i < sizeof SYMBOLS / sizeof SYMBOLS[0]; i++) {
    const struct symbol *s = &SYMBOLS[i];
    void *function = NULL;
    int found = 0;
    cu_result result = resolve(s->name, &function, s->version, 0, &found);
    if (result != CU_SUCCESS || found != 0) function = NULL;
    if (function == NULL && !s->optional)
      return csa_fail_driver("CUDA_ERROR_NOT_FOUND", CU_ERROR_NOT_FOUND, "cuGetProcAddress",
                             "the driver (CUDA %d.%d) has no %s", csa_cuda.version / 1000,
                             csa_cuda.version % 1000 / 10, s->name);
    set_pointer(s->offset, function);
  }
  int status = csa_driver_check(csa_cuda.init(0), "cuInit", "starting the driver");
  initialised |= status == CSA_OK;
  return status;
}

static int forked(void) {
  return csa_fail_driver("CUDA_ERROR_NOT_INITIALIZED", CU_ERROR_NOT_INITIALIZED, "fork",
                         "this process was forked after its parent had started the CUDA driver, "
                         "which does not survive a fork; start it with `spawn`, or fork before "
                         "the first GPU call");
}

int csa_driver_start(void) {
  int seen = atomic_load_explicit(&state, memory_order_acquire);
  if (__builtin_expect(seen == READY, 1)) return CSA_OK;
  if (seen == FORKED) return forked();
  csa_watch_forks();
  pthread_mutex_lock(&lock);
  int status = CSA_OK;
  if (atomic_load(&state) < READY) {
    atomic_store(&state, STARTING);
    status = open_driver();
    if (status == CSA_OK) status = csa_devices_init();
    /* Once cuInit succeeded, a child forked from here on has a dead driver, whatever failed after.
     */
    int failed = initialised ? STARTED : IDLE;
    atomic_store_explicit(&state, status == CSA_OK ? READY : failed, memory_order_release);
  }
  pthread_mutex_unlock(&lock);
  return status;
}
