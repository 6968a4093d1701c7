// SPDX-License-Identifier: Apache-2.0
/* What a launch costs the calling CPU thread, from C: cuLaunchKernelEx itself and csa_forward, with
 * the same kernel, grid and parameter bytes. `tools/host_cost` builds and calls this. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

/* CUlaunchConfig of the driver's stable ABI; declared here so that no CUDA toolkit is needed. */
typedef struct {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
} launch_config;

static int (*load_file)(void **library, const char *path, void *, void *, unsigned, void *, void *,
                        unsigned);
static int (*get_kernel)(void **kernel, void *library, const char *name);
static int (*launch)(const launch_config *, void *function, void **parameters, void **extra);
static int (*synchronize)(void *stream);

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
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == NULL) return -1;
  *(void **)&load_file = dlsym(driver, "cuLibraryLoadFromFile");
  *(void **)&get_kernel = dlsym(driver, "cuLibraryGetKernel");
  *(void **)&launch = dlsym(driver, "cuLaunchKernelEx");
  *(void **)&synchronize = dlsym(driver, "cuStreamSynchronize");
  return load_file != NULL && get_kernel != NULL && launch != NULL && synchronize != NULL ? 0 : -1;
}

/* cuLaunchKernelEx with one packed parameter buffer (offsets == NULL), as the launcher does it, or
 * with an array of `count` pointers into it. */
int host_cost_driver(const char *cubin, const char *symbol, const uint32_t grid[3],
                     const uint32_t block[3], unsigned shared, void *parameters, size_t bytes,
                     const uint32_t *offsets, int count, void *stream, int batches, int per_batch,
                     double *nanoseconds) {
  void *library, *kernel, *pointers[32];
  int status = load_file(&library, cubin, NULL, NULL, 0, NULL, NULL, 0);
  if (status == 0) status = get_kernel(&kernel, library, symbol);
  if (status != 0) return status;
  for (int i = 0; offsets != NULL && i < count && i < 32; i++)
    pointers[i] = (char *)parameters + offsets[i];
  void *extra[] = {(void *)1, parameters, (void *)2, &bytes, (void *)0};
  launch_config config = {grid[0],  grid[1], grid[2], block[0], block[1],
                          block[2], shared,  stream,  NULL,     0};
  if (offsets != NULL)
    MEASURE(launch(&config, kernel, pointers, NULL));
  else
    MEASURE(launch(&config, kernel, NULL, extra));
  return status;
}

/* `function` is csa_forward, or csa_backward. */
int host_cost_csa(int (*function)(const void *args, void *stream), const void *args, void *stream,
                  int batches, int per_batch, double *nanoseconds) {
  int status = 0;
  MEASURE(function(args, stream));
  return status;
}
