// SPDX-License-Identifier: Apache-2.0
/* libcuda.so.1: opened on first use, never linked, never closed. */
#ifndef CSA_DRIVER_H
#define CSA_DRIVER_H

#include <stdatomic.h>
#include <stdint.h>

#include "cuda_abi.h"

struct csa_driver {
  int version; /* 1000 * major + 10 * minor */
  cu_result (*init)(unsigned int);
  cu_result (*driver_version)(int *);
  cu_result (*error_name)(cu_result, const char **);
  cu_result (*device_count)(int *);
  cu_result (*device_get)(cu_device *, int);
  cu_result (*device_name)(char *, int, cu_device);
  cu_result (*device_attribute)(int *, int, cu_device);
  cu_result (*primary_retain)(cu_context *, cu_device);
  cu_result (*primary_release)(cu_device);
  cu_result (*context_current)(cu_context *);
  cu_result (*context_device)(cu_device *);
  cu_result (*context_id)(cu_context, unsigned long long *); /* NULL: the current one */
  cu_result (*context_push)(cu_context);
  cu_result (*context_pop)(cu_context *);
  cu_result (*stream_context)(cu_stream, cu_context *);
  cu_result (*stream_capturing)(cu_stream, int *);
  cu_result (*exchange_capture_mode)(int *);
  cu_result (*loading_mode)(int *);
  cu_result (*library_load)(cu_library *, const void *, int *, void **, unsigned int, int *,
                            void **, unsigned int);
  cu_result (*library_kernel)(cu_kernel *, cu_library, const char *);
  cu_result (*kernel_set_attribute)(int, int, cu_kernel, cu_device);
  cu_result (*kernel_function)(cu_function *, cu_kernel);
  cu_result (*function_load)(cu_function); /* NULL before CUDA 12.4 */
  cu_result (*launch)(const cu_launch_config *, cu_function, void **, void **);
};

extern struct csa_driver csa_cuda;

/* Start the driver, once per process; CSA_ERROR_DRIVER without one, with one older than CUDA 12.0,
 * and in a child forked after it was started. Costs one load once started. */
int csa_driver_start(void);

/* CSA_OK, or the failure of `call` recorded with its name and number and `what` was being done. */
int csa_driver_check(cu_result result, const char *call, const char *what);

/* Register, once, what must happen in forked children. */
void csa_watch_forks(void);

#endif
