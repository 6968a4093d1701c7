// SPDX-License-Identifier: Apache-2.0
/* Forward and backward from C11, with nothing but the driver beside the library. How to build it is
 * in docs/raw_pointers.md.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "csa_runtime.h"

enum { RATIO = 4, COFF = 2, HEAD_DIM = 128, WIDTH = COFF * HEAD_DIM };
enum { SEGMENTS = 3, TOKENS = 64, ROWS = 14 };

/* The few driver functions that a caller's own framework would call. Memory is never freed: the
 * process ends. */
static struct {
  int (*init)(unsigned flags);
  int (*device)(int *device, int ordinal);
  int (*primary)(void **context, int device);
  int (*make_current)(void *context);
  int (*new_stream)(void **stream, unsigned flags);
  int (*allocate)(uint64_t *address, size_t bytes);
  int (*upload)(uint64_t to, const void *from, size_t bytes);
  int (*download)(void *to, uint64_t from, size_t bytes);
} cuda;

static void fail(const char *what, const char *why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(1);
}

static void driver(int result, const char *what) {
  char why[32];
  snprintf(why, sizeof why, "CUDA error %d", result);
  if (result != 0) fail(what, why);
}

static void library(int status, const char *what) {
  if (status != CSA_OK) fail(what, csa_last_error());
}

static void open_driver(void) {
  const struct {
    const char *name;
    void *place;
  } functions[] = {{"cuInit", &cuda.init},
                   {"cuDeviceGet", &cuda.device},
                   {"cuDevicePrimaryCtxRetain", &cuda.primary},
                   {"cuCtxSetCurrent", &cuda.make_current},
                   {"cuStreamCreate", &cuda.new_stream},
                   {"cuMemAlloc_v2", &cuda.allocate},
                   {"cuMemcpyHtoD_v2", &cuda.upload},
                   {"cuMemcpyDtoH_v2", &cuda.download}};
  void *handle = dlopen("libcuda.so.1", RTLD_NOW);
  if (handle == NULL) fail("this example needs an NVIDIA GPU's driver", dlerror());
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    void *symbol = dlsym(handle, functions[i].name);
    if (symbol == NULL) fail(functions[i].name, dlerror());
    memcpy(functions[i].place, &symbol, sizeof symbol);
  }
}

static void *memory(size_t bytes) {
  uint64_t address = 0;
  driver(cuda.allocate(&address, bytes), "cuMemAlloc");
  return (void *)(uintptr_t)address;
}

static void *upload(const void *values, size_t bytes) {
  void *address = memory(bytes);
  driver(cuda.upload((uint64_t)(uintptr_t)address, values, bytes), "cuMemcpyHtoD");
  return address;
}

/* bf16 is the upper half of an fp32. Eighths from -2 to 2 are exact in it. */
static uint16_t value(int i, int step) {
  float eighths = (float)(i * step % 33 - 16) / 8;
  uint32_t bits;
  memcpy(&bits, &eighths, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static void *upload_values(int count, int step) {
  uint16_t *values = malloc((size_t)count * sizeof *values);
  if (values == NULL) fail("malloc", "no memory");
  for (int i = 0; i < count; i++) values[i] = value(i, step);
  void *address = upload(values, (size_t)count * sizeof *values);
  free(values);
  return address;
}

/* The sum of `count` elements of 2 (bf16) or 4 bytes (fp32). Copies wait for the stream's work. */
static double checksum(const void *address, int count, size_t element) {
  unsigned char *bytes = malloc((size_t)count * element);
  if (bytes == NULL) fail("malloc", "no memory");
  driver(cuda.download(bytes, (uint64_t)(uintptr_t)address, (size_t)count * element),
         "cuMemcpyDtoH");
  double sum = 0;
  for (int i = 0; i < count; i++) {
    uint32_t bits = 0;
    float number;
    memcpy((char *)&bits + (4 - element), bytes + (size_t)i * element, element);
    memcpy(&number, &bits, sizeof number);
    sum += number;
  }
  free(bytes);
  return sum;
}

int main(void) {
  /* 40 + 7 + 17 tokens give 10 + 1 + 4 rows; here the last segment makes 3 of its 4. */
  const int32_t cu_seqlens[SEGMENTS + 1] = {0, 40, 47, 64};
  const int32_t cu_seqlens_comp[SEGMENTS + 1] = {0, 10, 11, ROWS};
  static const float ape[RATIO * WIDTH] = {0.5F, -0.5F}; /* the rest is 0 */
  int device;
  void *context, *stream;

  open_driver();
  driver(cuda.init(0), "cuInit");
  driver(cuda.device(&device, 0), "cuDeviceGet");
  driver(cuda.primary(&context, device), "cuDevicePrimaryCtxRetain");
  driver(cuda.make_current(context), "cuCtxSetCurrent");
  /* Flags 0: ordered with the default stream, on which cuMemcpy works. */
  driver(cuda.new_stream(&stream, 0), "cuStreamCreate");

  csa_args args;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  args.ratio = RATIO, args.coff = COFF, args.dtype = CSA_DTYPE_BF16;
  args.tokens = TOKENS, args.segments = SEGMENTS, args.rows = ROWS, args.head_dim = HEAD_DIM;
  args.kv = upload_values(TOKENS * WIDTH, 7), args.kv_stride = WIDTH;
  args.score = upload_values(TOKENS * WIDTH, 5), args.score_stride = WIDTH;
  args.ape = upload(ape, sizeof ape);
  args.cu_seqlens = upload(cu_seqlens, sizeof cu_seqlens);
  args.cu_seqlens_comp = upload(cu_seqlens_comp, sizeof cu_seqlens_comp);
  args.out = memory(ROWS * HEAD_DIM * 2), args.out_stride = HEAD_DIM;
  library(csa_forward(&args, stream), "csa_forward");

  args.grad_out = upload_values(ROWS * HEAD_DIM, 3), args.grad_out_stride = HEAD_DIM;
  args.grad_kv = memory(TOKENS * WIDTH * 2), args.grad_kv_stride = WIDTH;
  args.grad_score = memory(TOKENS * WIDTH * 2), args.grad_score_stride = WIDTH;
  args.grad_ape = memory(RATIO * WIDTH * 4);
  library(csa_backward_workspace_bytes(&args, &args.workspace_bytes), "workspace");
  args.workspace = memory((size_t)args.workspace_bytes);
  library(csa_backward(&args, stream), "csa_backward");

  printf("out %.6f\n", checksum(args.out, ROWS * HEAD_DIM, 2));
  printf("grad_kv %.6f\n", checksum(args.grad_kv, TOKENS * WIDTH, 2));
  printf("grad_score %.6f\n", checksum(args.grad_score, TOKENS * WIDTH, 2));
  printf("grad_ape %.6f\n", checksum(args.grad_ape, RATIO * WIDTH, 4));
  return 0;
}
