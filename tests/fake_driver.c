// SPDX-License-Identifier: Apache-2.0
/* A libcuda.so.1 that launches nothing: it records every call and its arguments as JSON lines and
 * keeps the rules of the real one that the launcher must obey. Tests read the environment below;
 * fake_* functions, called through ctypes, make contexts, streams and captures.
 *
 *   FAKE_CUDA_LOG       file that the lines are appended to
 *   FAKE_CUDA_DEVICES   compute capabilities, "90" or "90,120"; default "90"; "none" for no device
 *   FAKE_CUDA_SHARED    shared memory that a block may opt into, for all devices; default by kind
 *   FAKE_CUDA_VERSION   default 12080
 *   FAKE_CUDA_FAIL      "cuLibraryLoadData:2:999": the second call returns 999 and does nothing
 *   FAKE_CUDA_MISSING   symbol that cuGetProcAddress does not know
 *   FAKE_CUDA_REFUSED_SHARED  dynamic shared size that no kernel may ask for
 *   FAKE_CUDA_SLOW_LOAD microseconds that loading takes
 *   CUDA_MODULE_LOADING EAGER: a library loads into the contexts of every device
 */
#define _GNU_SOURCE
#include "fake_state.h"

int cuDriverGetVersion(int *out) {
  *out = version();
  return record("cuDriverGetVersion", 0, "");
}

int cuInit(unsigned flags) {
  (void)flags;
  int result = ordered("cuInit");
  if (!result && strcmp(setting("FAKE_CUDA_DEVICES", "90"), "none") == 0) result = NO_DEVICE;
  if (!result) started = 1;
  return record("cuInit", result, "");
}

int cuGetErrorName(int code, const char **name) {
  static const struct {
    int code;
    const char *name;
  } NAMES[] = {{1, "CUDA_ERROR_INVALID_VALUE"},
               {2, "CUDA_ERROR_OUT_OF_MEMORY"},
               {3, "CUDA_ERROR_NOT_INITIALIZED"},
               {100, "CUDA_ERROR_NO_DEVICE"},
               {201, "CUDA_ERROR_INVALID_CONTEXT"},
               {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
               {400, "CUDA_ERROR_INVALID_HANDLE"},
               {500, "CUDA_ERROR_NOT_FOUND"},
               {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
               {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
               {999, "CUDA_ERROR_UNKNOWN"}};
  for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++)
    if (NAMES[i].code == code) {
      *name = NAMES[i].name;
      return 0;
    }
  return INVALID_VALUE;
}

int cuDeviceGetCount(int *count) {
  BEGIN("cuDeviceGetCount")
  for (*count = 0; capability(*count); ++*count) continue;
  END
}

int cuDeviceGet(int *device, int ordinal) {
  BEGIN("cuDeviceGet")
  DETAILS("\"ordinal\": %d", ordinal);
  if (!capability(ordinal)) FAIL(INVALID_DEVICE);
  *device = ordinal;
  END
}

int cuDeviceGetName(char *name, int bytes, int device) {
  BEGIN("cuDeviceGetName")
  snprintf(name, (size_t)bytes, "Fake %d.%d", capability(device) / 10, capability(device) % 10);
  END
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  BEGIN("cuDeviceGetAttribute")
  DETAILS("\"attribute\": %d, \"device\": %d", attribute, device);
  switch (attribute) {
    case 16:
      *value = 132;
      break;
    case 75:
      *value = capability(device) / 10;
      break;
    case 76:
      *value = capability(device) % 10;
      break;
    case 97:
      *value = shared_limit(device);
      break;
    default:
      FAIL(INVALID_VALUE);
  }
  END
}

int cuDevicePrimaryCtxRetain(struct context **out, int device) {
  static int made[MAX];
  BEGIN("cuDevicePrimaryCtxRetain")
  DETAILS("\"device\": %d", device);
  if (!made[device] && forbidden()) FAIL(CAPTURE_UNSUPPORTED);
  if (!made[device]) made[device] = number(new_context(device)) + 1;
  *out = &contexts[made[device] - 1];
  (*out)->primary = 1;
  primaries[device].references++;
  END
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  BEGIN("cuDevicePrimaryCtxRelease")
  DETAILS("\"device\": %d, \"left\": %d", device, primaries[device].references - 1);
  if (--primaries[device].references < 0) FAIL(INVALID_CONTEXT);
  END
}

int cuCtxGetCurrent(struct context **out) {
  BEGIN("cuCtxGetCurrent")
  *out = current();
  END
}

int cuCtxSetCurrent(struct context *context) {
  BEGIN("cuCtxSetCurrent")
  DETAILS("\"context\": %d", number(context));
  if (depth) depth--;
  if (context) stack[depth++] = context;
  END
}

int cuCtxGetDevice(int *device) {
  BEGIN("cuCtxGetDevice")
  if (!current()) FAIL(INVALID_CONTEXT);
  *device = current()->device;
  END
}

int cuCtxGetId(struct context *context, unsigned long long *id) {
  BEGIN("cuCtxGetId")
  if (!context && !(context = current())) FAIL(INVALID_CONTEXT);
  *id = context->id;
  END
}

int cuCtxPushCurrent_v2(struct context *context) {
  BEGIN("cuCtxPushCurrent")
  DETAILS("\"context\": %d", number(context));
  stack[depth++] = context;
  END
}

int cuCtxPopCurrent_v2(struct context **out) {
  BEGIN("cuCtxPopCurrent")
  if (!depth) FAIL(INVALID_CONTEXT);
  *out = stack[--depth];
  DETAILS("\"context\": %d", number(*out));
  END
}

int cuStreamGetCtx(struct stream *stream, struct context **out) {
  BEGIN("cuStreamGetCtx")
  if (is_special(stream) || stream < streams || stream >= streams + MAX) FAIL(INVALID_HANDLE);
  *out = stream->context;
  DETAILS("\"context\": %d", number(*out));
  END
}

int cuStreamIsCapturing(struct stream *stream, int *status) {
  BEGIN("cuStreamIsCapturing")
  *status = !is_special(stream) && stream->capture != NOT_CAPTURING;
  for (int i = 0; i < stream_count && stream == NULL; i++)
    if (streams[i].capture == GLOBAL) FAIL(CAPTURE_IMPLICIT);
  END
}

int cuThreadExchangeStreamCaptureMode(int *exchanged) {
  BEGIN("cuThreadExchangeStreamCaptureMode")
  int old = mode;
  mode = *exchanged;
  *exchanged = old;
  DETAILS("\"from\": %d, \"to\": %d", old, mode);
  END
}

int cuModuleGetLoadingMode(int *out) {
  BEGIN("cuModuleGetLoadingMode")
  *out = strcmp(setting("CUDA_MODULE_LOADING", "LAZY"), "EAGER") == 0 ? 1 : 2;
  END
}

int cuLibraryLoadData(struct library **out, const unsigned char *code, int *jit, void **jit_values,
                      unsigned jit_count, int *options, void **values, unsigned count) {
  (void)jit, (void)jit_values;
  *out = (struct library *)8; /* what a failed call leaves behind means nothing */
  BEGIN("cuLibraryLoadData")
  int arch = elf_arch(code);
  DETAILS(
      "\"arch\": %d, \"jit\": %u, \"options\": %u, \"option\": %d, \"value\": %ld, \"aligned\": %d",
      arch, jit_count, count, count ? options[0] : -1, count ? (long)values[0] : 0,
      (uintptr_t)code % 64 == 0);
  if (forbidden()) FAIL(CAPTURE_UNSUPPORTED);
  if (strcmp(setting("CUDA_MODULE_LOADING", "LAZY"), "EAGER") == 0)
    for (int i = 0; i < context_count; i++)
      if (!runs(arch, capability(contexts[i].device))) FAIL(NO_BINARY);
  usleep((unsigned)atoi(setting("FAKE_CUDA_SLOW_LOAD", "0")));
  libraries[library_count] = (struct library){code, arch};
  *out = &libraries[library_count++];
  END
}

int cuLibraryGetKernel(struct kernel **out, struct library *library, const char *name) {
  BEGIN("cuLibraryGetKernel")
  DETAILS("\"name\": \"%s\"", name);
  struct kernel *kernel = &kernels[kernel_count];
  if (elf_params(library->code, name, &kernel->params) < 0) FAIL(NOT_FOUND);
  kernel->library = library;
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  kernel_count++;
  *out = kernel;
  END
}

int cuKernelSetAttribute(int attribute, int value, struct kernel *kernel, int device) {
  BEGIN("cuKernelSetAttribute")
  DETAILS("\"attribute\": %d, \"value\": %d, \"name\": \"%s\", \"device\": %d", attribute, value,
          kernel->name, device);
  if (value > shared_limit(device) || value == atoi(setting("FAKE_CUDA_REFUSED_SHARED", "-1")))
    FAIL(INVALID_VALUE);
  END
}

/* Functions are tagged kernels: the tag tells a launch which of the two it was given. */
int cuKernelGetFunction(char **out, struct kernel *kernel) {
  BEGIN("cuKernelGetFunction")
  DETAILS("\"name\": \"%s\"", kernel->name);
  if (!current()) FAIL(INVALID_CONTEXT);
  if (forbidden()) FAIL(CAPTURE_UNSUPPORTED);
  if (!runs(kernel->library->arch, capability(current()->device))) FAIL(NO_BINARY);
  if (version() < 12040) kernel->loaded[number(current())] = 1; /* before cuFuncLoad */
  *out = (char *)kernel + 1;
  END
}

int cuFuncLoad(char *function) {
  BEGIN("cuFuncLoad")
  struct kernel *kernel = (struct kernel *)(void *)(function - 1);
  DETAILS("\"name\": \"%s\"", kernel->name);
  if (forbidden()) FAIL(CAPTURE_UNSUPPORTED);
  kernel->loaded[number(current())] = 1;
  END
}

struct config {
  unsigned grid[3], block[3], shared;
  struct stream *stream;
  void *attributes;
  unsigned attribute_count;
};

static void hex(char *out, size_t room, const unsigned char *bytes, size_t count) {
  for (size_t i = 0; i < count && 2 * i + 2 < room; i++) snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

int cuLaunchKernelEx(const struct config *c, char *function, void **parameters, void **extra) {
  BEGIN("cuLaunchKernelEx")
  int tagged = (int)((uintptr_t)function & 1);
  struct kernel *kernel = (struct kernel *)(void *)(function - tagged);
  unsigned char buffer[1024] = {0};
  char text[2049] = "";
  size_t bytes = 0;
  const void *packed = NULL;
  for (; extra && *extra; extra += 2) {
    if (extra[0] == (void *)1) packed = extra[1];
    if (extra[0] == (void *)2) bytes = *(size_t *)extra[1];
  }
  if (packed) memcpy(buffer, packed, bytes);
  for (int i = 0; parameters && i < kernel->params.count; i++) {
    memcpy(buffer + kernel->params.offset[i], parameters[i], kernel->params.size[i]);
    bytes = kernel->params.offset[i] + kernel->params.size[i];
  }
  hex(text, sizeof text, buffer, bytes);
  int own = current() ? number(current()) : -1;
  DETAILS(
      "\"name\": \"%s\", \"arch\": %d, \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], "
      "\"shared\": %u, \"stream\": %ld, \"attributes\": %u, \"context_free\": %d, "
      "\"lazy\": %d, \"parameters\": \"%s\"",
      kernel->name, kernel->library->arch, c->grid[0], c->grid[1], c->grid[2], c->block[0],
      c->block[1], c->block[2], c->shared,
      is_special(c->stream) ? (long)c->stream : 1000 + (long)(c->stream - streams),
      c->attribute_count, !tagged, own < 0 || !kernel->loaded[own], text);
  if (own < 0) FAIL(INVALID_CONTEXT);
  if (!is_special(c->stream) && c->stream->context != current()) FAIL(INVALID_HANDLE);
  if (!runs(kernel->library->arch, capability(current()->device))) FAIL(NO_BINARY);
  if ((int)c->grid[0] < 1 || c->grid[1] - 1 > 65534 || c->grid[2] - 1 > 65534) FAIL(INVALID_VALUE);
  if (!kernel->loaded[own] && forbidden()) FAIL(CAPTURE_UNSUPPORTED);
  kernel->loaded[own] = 1;
  END
}

#include "fake_driver_control.h"
