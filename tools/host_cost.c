// SPDX-License-Identifier: Apache-2.0
/* What a call costs the calling CPU thread, from C: cuLaunchKernelEx itself, the driver calls that
 * find a stream's context, and csa_forward or csa_backward. `tools/host_cost` builds and calls
 * this. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_LAUNCHES = 2, MAX_PARAMETERS = 32 };

/* CUlaunchConfig of the driver's stable ABI; declared here so that no CUDA toolkit is needed. */
typedef struct {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
} launch_config;

/* One kernel of a call, as `tools/host_cost` fills it in. */
typedef struct {
  const char *cubin, *symbol;
  uint32_t grid[3], block[3], shared;
  uint32_t count;          /* of the parameters */
  const uint32_t *offsets; /* of each in the buffer; NULL: the packed buffer is passed */
  void *parameters;
  size_t bytes;
} launch;

static int (*load_file)(void **library, const char *path, void *, void *, unsigned, void *, void *,
                        unsigned);
static int (*get_kernel)(void **kernel, void *library, const char *name);
static int (*launch_kernel)(const launch_config *, void *function, void **parameters, void **extra);
static int (*synchronize)(void *stream);
static int (*stream_context)(void *stream, void **context);
static int (*current_context)(void **context);
static int (*context_id)(void *context, unsigned long long *id);

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Median over batches of the time per call. Batches are short and synchronised in between, outside
 * the clock, so that a call never waits for room in the queue. 0, or the first error. */
#define MEASURE(call)                                                   \
  do {                                                                  \
    double *times = calloc((size_t)batches, sizeof *times);             \
    if (times == NULL) return -1;                                       \
    for (int batch = -1; batch < batches; batch++) {                    \
      int64_t begin = now();                                            \
      for (int i = 0; i < per_batch; i++)                               \
        if ((status = (call)) != 0) break;                              \
      int64_t end = now();                                              \
      if (status == 0) status = synchronize(stream);                    \
      if (status != 0) break;                                           \
      if (batch >= 0) times[batch] = (double)(end - begin) / per_batch; \
    }                                                                   \
    qsort(times, (size_t)batches, sizeof *times, ascending);            \
    *nanoseconds = times[batches / 2];                                  \
    free(times);                                                        \
  } while (0)

/* Opens the driver; 0 or -1. */
int host_cost_open(void) {
  static const struct {
    const char *name;
    void *pointer;
  } SYMBOLS[] = {{"cuLibraryLoadFromFile", &load_file},
                 {"cuLibraryGetKernel", &get_kernel},
                 {"cuLaunchKernelEx", &launch_kernel},
                 {"cuStreamSynchronize", &synchronize},
                 {"cuStreamGetCtx", &stream_context},
                 {"cuCtxGetCurrent", &current_context},
                 {"cuCtxGetId", &context_id}};
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == NULL) return -1;
  for (size_t i = 0; i < sizeof SYMBOLS / sizeof SYMBOLS[0]; i++)
    if ((*(void **)SYMBOLS[i].pointer = dlsym(driver, SYMBOLS[i].name)) == NULL) return -1;
  return 0;
}

static int launch_all(const launch_config *configs, void *const *kernels, void **parameters,
                      void *extra[][5], int count) {
  int status = 0;
  for (int i = 0; i < count && status == 0; i++)
    status = launch_kernel(&configs[i], kernels[i], parameters, parameters ? NULL : extra[i]);
  return status;
}

/* The `count` kernels of one call, with packed parameter buffers, as the launcher does it; a single
 * one also with an array of pointers. */
int host_cost_launches(const launch *launches, int count, void *stream, int batches, int per_batch,
                       double *nanoseconds) {
  launch_config configs[MAX_LAUNCHES];
  void *kernels[MAX_LAUNCHES], *extra[MAX_LAUNCHES][5], *pointers[MAX_PARAMETERS];
  int status = count > MAX_LAUNCHES ? -1 : 0;
  for (int i = 0; i < count && status == 0; i++) {
    const launch *l = &launches[i];
    void *library = NULL,
         *packed[] = {(void *)1, l->parameters, (void *)2, (void *)&l->bytes, NULL};
    for (int k = 0; k < 5; k++) extra[i][k] = packed[k];
    configs[i] = (launch_config){l->grid[0],  l->grid[1], l->grid[2], l->block[0], l->block[1],
                                 l->block[2], l->shared,  stream,     NULL,        0};
    for (uint32_t k = 0; l->offsets != NULL && k < l->count && k < MAX_PARAMETERS; k++)
      pointers[k] = (char *)l->parameters + l->offsets[k];
    status = load_file(&library, l->cubin, NULL, NULL, 0, NULL, NULL, 0);
    if (status == 0) status = get_kernel(&kernels[i], library, l->symbol);
  }
  if (status != 0) return status;
  void **parameters = launches[0].offsets != NULL ? pointers : NULL;
  MEASURE(launch_all(configs, kernels, parameters, extra, count));
  return status;
}

static int find_context(void *stream) {
  void *own = NULL, *current = NULL;
  unsigned long long id = 0;
  int status = stream_context(stream, &own);
  if (status == 0) status = current_context(&current);
  return status == 0 ? context_id(own, &id) : status;
}

/* What the launcher asks the driver for before a launch on a stream. */
int host_cost_context(void *stream, int batches, int per_batch, double *nanoseconds) {
  int status = 0;
  MEASURE(find_context(stream));
  return status;
}

/* `function` is csa_forward or csa_backward. */
int host_cost_csa(int (*function)(const void *args, void *stream), const void *args, void *stream,
                  int batches, int per_batch, double *nanoseconds) {
  int status = 0;
  MEASURE(function(args, stream));
  return status;
}
