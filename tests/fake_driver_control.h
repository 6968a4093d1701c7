// SPDX-License-Identifier: Apache-2.0
/* The end of fake_driver.c: finding symbols, and the functions that tests call through ctypes. */

/* Each symbol with the version that its signature here is of. */
static const struct {
  const char *name;
  int version;
  void *function;
} SYMBOLS[] = {
#define S(name, version) {#name, version, (void *)name}
    S(cuInit, 2000),
    S(cuDriverGetVersion, 2020),
    S(cuGetErrorName, 6000),
    S(cuDeviceGetCount, 2000),
    S(cuDeviceGet, 2000),
    S(cuDeviceGetName, 2000),
    S(cuDeviceGetAttribute, 2000),
    S(cuDevicePrimaryCtxRetain, 7000),
    {"cuDevicePrimaryCtxRelease", 11000, (void *)cuDevicePrimaryCtxRelease_v2},
    S(cuCtxGetCurrent, 4000),
    S(cuCtxSetCurrent, 4000),
    S(cuCtxGetDevice, 2000),
    S(cuCtxGetId, 12000),
    {"cuCtxPushCurrent", 4000, (void *)cuCtxPushCurrent_v2},
    {"cuCtxPopCurrent", 4000, (void *)cuCtxPopCurrent_v2},
    S(cuStreamGetCtx, 9020),
    S(cuStreamIsCapturing, 10000),
    S(cuThreadExchangeStreamCaptureMode, 10010),
    S(cuModuleGetLoadingMode, 11070),
    S(cuLibraryLoadData, 12000),
    S(cuLibraryGetKernel, 12000),
    S(cuKernelSetAttribute, 12000),
    S(cuKernelGetFunction, 12000),
    S(cuFuncLoad, 12040),
    S(cuLaunchKernelEx, 11060),
#undef S
};

/* Newer signatures that asking with too high a version would give. */
static int changed_at(const char *name) {
  return strcmp(name, "cuStreamGetCtx") == 0   ? 12050
         : strcmp(name, "cuCtxGetDevice") == 0 ? 13000
                                               : 1 << 30;
}

int cuGetProcAddress_v2(const char *name, void **out, int asked, uint64_t flags, int *status) {
  char details[160];
  snprintf(details, sizeof details, "\"name\": \"%s\", \"version\": %d, \"flags\": %ld", name,
           asked, (long)flags);
  *out = NULL;
  if (status) *status = 1;
  for (size_t i = 0; i < sizeof SYMBOLS / sizeof SYMBOLS[0]; i++) {
    if (strcmp(name, SYMBOLS[i].name) != 0) continue;
    if (strcmp(name, setting("FAKE_CUDA_MISSING", "")) == 0) break;
    if (SYMBOLS[i].version > version() || asked < SYMBOLS[i].version) break;
    if (asked >= changed_at(name) && version() >= changed_at(name)) break;
    *out = SYMBOLS[i].function;
    if (status) *status = 0;
  }
  if (strcmp(name, "cuGetProcAddress") == 0) {
    *out = (void *)cuGetProcAddress_v2;
    if (status) *status = 0;
  }
  return record("cuGetProcAddress", *out ? 0 : NOT_FOUND, details);
}

struct context *fake_context(int device) { return new_context(device); }

void fake_destroy(struct context *context) { context->references = 0; }

struct stream *fake_stream(struct context *context) {
  streams[stream_count] = (struct stream){context, NOT_CAPTURING, pthread_self(), 0};
  return &streams[stream_count++];
}

/* Begin a capture in the calling thread: 0 global, 1 thread local, 2 relaxed; -1 ends it. */
void fake_capture(struct stream *stream, int capture) {
  stream->capture = capture;
  stream->owner = pthread_self();
}

int fake_invalidated(const struct stream *stream) { return stream->invalidated; }
int fake_context_number(const struct context *context) { return number(context); }
int fake_mode(void) { return mode; }
int fake_depth(void) { return depth; }
int fake_current(void) { return number(current()); }
int fake_primary_references(int device) { return primaries[device].references; }
